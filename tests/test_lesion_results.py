"""Doses, responses and claims against numbers worked out by hand; files that are whole, broken or others'."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from scipy.stats import t

from lesion_example import FAST, SLOW, example, results, run
from ropelens.lesions.results import NAME, LesionResults, interval, layers_label, parse, survives
from ropelens.plots import dose_responses, survival_map


def test_a_frame_has_a_row_a_run():
    frame = example().to_frame()
    assert len(frame) == 25
    row = frame[(frame["layers"] == "8") & (frame["bands"] == SLOW) & (frame["std"] == 2)].iloc[0]
    assert (row["seed"], row["loss"], row["excess"]) == (0, pytest.approx(4.6), pytest.approx(3.6))
    assert (row["introspection_verdict"], row["correction_score"]) == ("yes", 0.5)


def test_doses_have_intervals_over_seeds():
    frame = example().dose_response()
    curve = frame[(frame["layers"] == "1") & (frame["bands"] == SLOW)]
    assert curve["std"].tolist() == [0, 1, 2]
    assert curve["mean"].tolist() == pytest.approx([1, 2, 3])
    # The seeds' losses at std 2 are 2.8, 3 and 3.2: a standard error of 0.2 / sqrt(3).
    reach = float(t.ppf(0.975, 2)) * 0.2 / math.sqrt(3)
    last = curve.iloc[-1]
    assert (last["low"], last["high"], last["n"]) == (pytest.approx(3 - reach), pytest.approx(3 + reach), 3)
    assert math.isnan(curve.iloc[0]["low"])


def test_what_is_survived_is_the_largest_dose_within_the_limit():
    frame = example().survived().set_index(["layers", "bands"])
    assert frame.loc[("1", SLOW), "std"] == 2
    assert frame.loc[("8", SLOW), "std"] == 1  # at 2 the mean is 5 nats, above the limit of 4
    assert frame["open"].to_dict() == {
        ("0", SLOW): True,
        ("1", SLOW): True,
        ("8", SLOW): False,
        ("8", FAST): True,
    }


def test_a_dose_beyond_one_that_is_not_survived_does_not_count():
    runs = [run([], "", 0.0, 0, 1.0)]
    runs += [run([0], SLOW, std, 0, loss) for std, loss in ((1.0, 2.0), (2.0, 9.0), (4.0, 2.0))]
    assert results(runs).survived()["std"].tolist() == [1]


def test_texts_that_loop_or_are_empty_are_not_survived():
    assert survives([1, 1], [0.7, 0.8], 0.1, 4, 0.8)
    assert not survives([1, 1], [0.9, 0.8], 0.1, 4, 0.8)
    assert survives([1, 1], [0.9, 0.8], 0.9, 4, 0.8)  # as the healthy model's own text does
    assert not survives([1, None], [0, 0], 0, 4, 0.8)
    assert not survives([3, 6], [0, 0], 0, 4, 0.8)


def test_claims_are_tested_over_seeds():
    found = example().claims(early=[1]).set_index("claim")
    robust = found.loc["layer 0 is more robust than early layers"]
    # Excess of layer 0 less that of layer 1, by seed: -0.5 * (0.9, 1, 1.1) * (1 + 2) / 2.
    values = [-0.75 * factor for factor in (0.9, 1.0, 1.1)]
    assert (robust["estimate"], robust["low"], robust["high"]) == pytest.approx(interval(values, 0.95))
    assert (robust["n"], bool(robust["shown"])) == (3, True)
    fast = found.loc["fast bands are harmless in late layers"]
    assert (fast["estimate"], bool(fast["shown"])) == (pytest.approx(0.015), True)
    slow = found.loc["slow bands matter in late layers"]
    assert (slow["estimate"], bool(slow["shown"])) == (pytest.approx(3.0), True)
    middle = found.loc["middle errors are consistent"]
    assert middle["n"] == 0
    assert middle[["shown"]].isna().all()  # nothing to compare


def test_consistent_names_are_compared_by_seed():
    runs = [run([], "", 0.0, 0, 1.0)]
    for layer, shares in ((4, (1.0, 0.9, 1.0)), (8, (0.5, 0.6, 0.4))):
        for seed, share in enumerate(shares):
            runs.append(run([layer], SLOW, 1.0, seed, 2.0, readings={"names_consistency": share}))
    row = results(runs).claims().set_index("claim").loc["middle errors are consistent"]
    assert row["estimate"] == pytest.approx((0.5 + 0.3 + 0.6) / 3)
    assert bool(row["shown"])


def test_figures_show_every_curve_and_cell():
    found = example()
    figure = dose_responses(found.dose_response(), limit=found.limit)
    assert [(t.name, t.yaxis, t.showlegend) for t in figure.data] == [
        ("layer 0", "y", True),
        ("layer 1", "y", True),
        ("layer 8", "y", True),
        ("layer 8", "y2", False),
    ]
    assert list(figure.data[1].y) == pytest.approx([2, 3])
    assert [list(trace.marker.symbol) for trace in figure.data[2:]] == [["circle", "x"], ["circle", "circle"]]
    assert [shape.y0 for shape in figure.layout.shapes] == [1, 4, 1, 4]
    mute = found.dose_response().assign(mean=float("nan"), survived=False)
    mute.loc[mute["std"] == 0, "mean"] = 1.0
    assert list(dose_responses(mute, limit=4.0).data[0].y) == [4, 4]  # no text is left
    cells = survival_map(found.survived()).data[0]
    assert list(cells.y) == ["layer 0", "layer 1", "layer 8"]
    assert [list(row) for row in cells.text] == [["≥ 2", ""], ["≥ 2", ""], ["1", "≥ 2"]]
    empty = found.survived().iloc[:0]
    with pytest.raises(ValueError, match="got none"):
        survival_map(empty)


def test_results_are_saved_and_read_compressed_too(tmp_path: Path):
    found = example()
    for name in ("a.jsonl", "a.jsonl.gz"):
        found.save(tmp_path / name)
        again = LesionResults.load(tmp_path / name)
        assert (again.header, again.runs) == (found.header, found.runs)
    assert (tmp_path / "a.jsonl.gz").stat().st_size < (tmp_path / "a.jsonl").stat().st_size / 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.gz"]


def test_a_last_line_that_was_broken_off_is_left_out(tmp_path: Path):
    found = example()
    found.save(tmp_path / NAME)
    data = (tmp_path / NAME).read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    for cut in (1, 7, len(data) - ends[-2] - 1):
        header, runs, whole = parse(data[:-cut], tmp_path)
        assert (header, tuple(runs), whole) == (found.header, found.runs[:-1], ends[-2])
    assert len(parse(data, tmp_path)[1]) == 25
    assert parse(b"", tmp_path) == (None, [], 0)
    assert parse(data[:5], tmp_path) == (None, [], 0)


def test_files_that_are_no_sweeps_are_refused(tmp_path: Path):
    path = tmp_path / NAME
    for text, message in (
        ("", "holds no sweep of lesions"),
        ('{"a": 1}\n', "holds no sweep of lesions"),
        ("[1]\n", "holds no sweep of lesions"),
        (json.dumps(example().header) + "\nbroken\n{}\n", "line 2 is broken, and not the last"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            LesionResults.load(path)
    with pytest.raises(OSError, match="no-such"):
        LesionResults.load(tmp_path / "no-such")


def test_layers_have_names():
    assert [layers_label(x) for x in ([], [3], [0, 1, 2], [1, 5])] == ["", "3", "0-2", "1, 5"]
