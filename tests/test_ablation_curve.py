"""ablation_curve: losses by hand, points kept and gone on from, and what is read off a curve."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from scipy.stats import t

import ropelens as rl
from ropelens.data import document_numbers
from ropelens.hosts import host_of
from ropelens.interventions import curve as curve_module
from ropelens.interventions.results import AblationCurve, Point

PACKED = ["a b c d e", "f g h i j k l m", "n o p q r s t u v w x y", "z a c e g"]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.plain("llama", attention="sdpa")


@pytest.fixture(scope="module")
def scores(model: Any) -> dict[str, rl.BandScores]:
    found = rl.collect(model, tiny.ids(4, 24, seed=7), ("activation", "entropy"), progress=False)
    return {**found, "random 0": rl.random_scores(found["activation"], 0)}


def by_hand(model: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> list[float]:
    """The loss of every document, summed over its tokens."""
    sums = []
    with torch.no_grad():
        for row in ids:
            if mask is None:
                logits = model(row[None]).logits
            else:
                with rl.ablate(model, mask):
                    logits = model(row[None]).logits
            log_probs = logits[0].double().log_softmax(-1)
            sums.append(sum(-float(log_probs[p - 1, row[p]]) for p in range(1, len(row))))
    return sums


def curve_of(model: Any, scores: Any, ids: torch.Tensor, fractions: Any = (0.25, 0.75), **more: Any) -> Any:
    return rl.ablation_curve(model, scores, ids, fractions, progress=False, **more)


# The losses ----------------------------------------------------------------------------------------------


def test_losses_are_those_of_the_ablated_model(model: Any, scores: dict[str, rl.BandScores]):
    ids = tiny.ids(3, 20, seed=9)
    curve = curve_of(model, scores, ids, scope=("model", "head"))
    frame = curve.to_frame()
    assert list(frame.columns) == ["score", "scope", "fraction", "loss", "stderr"]
    assert len(frame) == 3 * 2 * 3
    for row in frame.itertuples():
        mask = scores[row.score].lowest(row.fraction, row.scope)
        sums = by_hand(model, ids, mask if row.fraction else None)
        loss = sum(sums) / (3 * 19)
        spread = sum((s / 19 - loss) ** 2 for s in sums) / 2
        assert row.loss == pytest.approx(loss, abs=1e-9)
        assert row.stderr == pytest.approx(math.sqrt(spread / 3), abs=1e-9)
    assert curve.baseline == (pytest.approx(frame["loss"][0]), pytest.approx(frame["stderr"][0]))


def test_positions_add_up(model: Any, scores: dict[str, rl.BandScores]):
    curve = curve_of(model, {"a": scores["activation"]}, tiny.ids(2, 70, seed=9), [0.5])
    frame = curve.by_position()
    assert frame["first"].unique().tolist() == [1, 32, 64]
    assert frame["last"].dropna().unique().tolist() == [31, 63]
    half = frame[frame["fraction"] == 0.5]
    whole = curve.to_frame().iloc[1]
    assert (half["loss"] * [31, 32, 6]).sum() / 69 == pytest.approx(whole["loss"])
    assert (half["rise"] * [31, 32, 6]).sum() / 69 == pytest.approx(curve.rises()["rise"][0])


def test_documents_that_end_before_a_position_are_no_draws_there():
    """Three documents, of which two reach position 32 and one position 64."""
    counts = torch.tensor([[31, 32, 5], [31, 9, 0], [20, 0, 0]])
    draw = torch.Generator().manual_seed(0)
    sums = counts * (2 + torch.rand(2, *counts.shape, generator=draw).double())
    points = (Point("a", "model", 0.0), Point("a", "model", 0.5))
    frame = AblationCurve(points, sums, counts, (1, 32, 64), ("0a", "0b", "0c"), "zero", {}).by_position()
    for at, point in enumerate(points):
        rows = frame[frame["fraction"] == point.fraction].set_index("first")
        two, n = sums[at, :2, 1], counts[:2, 1]
        loss = two.sum() / 41
        expected = math.sqrt(2 * float(((two - loss * n) ** 2).sum())) / 41
        assert rows["loss"][32] == pytest.approx(float(loss))
        assert rows["stderr"][32] == pytest.approx(expected)
        assert math.isnan(rows["stderr"][64])  # one document has no spread
        assert math.isnan(rows["rise_stderr"][64])


def test_documents_in_a_packed_window_are_read_alone(model: Any, scores: dict[str, rl.BandScores]):
    class Letters:
        """A tokenizer of one token a letter."""

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [3 + ord(c) - ord("a") for c in text if c != " "]}

    ids = [torch.tensor(Letters()(text)["input_ids"]) for text in PACKED]
    window = rl.data.Window(
        torch.cat(ids), tuple(map(len, ids)), ("0a", "0b", "0a", "0c"), 0, rl.data.Cursor(index=1)
    )
    host = host_of(model)
    windows = rl.windows(torch.cat(ids)[None])
    object.__setattr__(windows, "_all", lambda start: iter([window]))
    curve = curve_of(model, {"a": scores["activation"]}, windows, [0.5])
    assert curve.documents == ("0a", "0b", "0c")
    assert curve.counts.sum(1).tolist() == [4 + 11, 7, 4]
    losses = [by_hand(model, row[None], None)[0] for row in ids]
    expected = [losses[0] + losses[2], losses[1], losses[3]]
    assert curve.sums[0].sum(1).tolist() == pytest.approx(expected, abs=1e-6)
    assert host.kind == "transformers"


def test_the_attention_that_was_set_is_set_again(scores: dict[str, rl.BandScores]):
    model = tiny.plain("llama")
    curve_of(model, {"a": scores["activation"]}, tiny.ids(2, 8))
    assert model.config._attn_implementation == "eager"


# Kept, and gone on from ----------------------------------------------------------------------------------


def test_a_stopped_curve_goes_on(
    model: Any, scores: dict[str, rl.BandScores], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ids, calls = tiny.ids(2, 12, seed=4), []
    real = curve_module.token_losses

    def stops(host: Any, row: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 6:  # in the middle of the third point
            raise KeyboardInterrupt
        return real(host, row)

    whole = curve_of(model, scores, ids)
    monkeypatch.setattr(curve_module, "token_losses", stops)
    with pytest.raises(KeyboardInterrupt):
        curve_of(model, scores, ids, out=tmp_path)
    assert len(list((tmp_path / "points").glob("*.safetensors"))) == 2
    calls.clear()
    calls.extend([1] * 10)
    again = curve_of(model, scores, ids, out=tmp_path)
    assert len(calls) - 10 == 2 * (7 - 2)  # nothing removed, and 3 scores x 2 fractions, less what was there
    assert torch.equal(again.sums, whole.sums)
    assert again.points == whole.points
    calls.clear()
    calls.extend([1] * 10)
    more = curve_of(model, scores, ids, [0.25, 0.5, 0.75], out=tmp_path)
    assert len(calls) - 10 == 2 * 3  # the new fraction alone
    assert torch.equal(more.sums[1], whole.sums[1])
    kept = AblationCurve.load(tmp_path / "zero.safetensors")
    assert torch.equal(kept.sums, more.sums)
    assert (kept.points, kept.documents, kept.edges) == (more.points, more.documents, more.edges)
    assert (tmp_path / "zero.csv").read_text().startswith("score,scope,fraction,loss,stderr\n")


def test_a_folder_of_other_losses_is_refused(model: Any, scores: dict[str, rl.BandScores], tmp_path: Path):
    some = {"a": scores["activation"]}
    curve_of(model, some, tiny.ids(2, 12), out=tmp_path)
    with pytest.raises(ValueError, match="holds other losses: its data is"):
        curve_of(model, some, tiny.ids(2, 12, seed=2), out=tmp_path)
    other = tiny.plain("llama", seed=1)
    theirs = {"a": rl.band_activation(other, tiny.ids())}
    with pytest.raises(ValueError, match="holds losses of another model"):
        curve_of(other, theirs, tiny.ids(2, 12), out=tmp_path)


def test_the_same_bands_are_run_once(
    model: Any, scores: dict[str, rl.BandScores], monkeypatch: pytest.MonkeyPatch
):
    calls, real = [], curve_module.token_losses
    monkeypatch.setattr(curve_module, "token_losses", lambda *a: calls.append(1) or real(*a))
    curve = curve_of(model, scores, tiny.ids(1, 12), [0.0, 1.0], scope=("model", "layer", "head"))
    assert len(curve.points) == 18
    assert len(calls) == 2  # all and none
    assert math.isnan(curve.to_frame()["stderr"][0])  # one document has no spread


# Masks, and modes that change keys -----------------------------------------------------------------------


def test_masks_by_name(model: Any):
    masks = {"fast": rl.bands_where(model, "fastest:50%"), "late": rl.bands_where(model, layers=[1])}
    curve = rl.ablation_losses(model, masks, tiny.ids(2, 12), progress=False)
    assert [vars(p) for p in curve.points if p.fraction] == [
        {"score": "fast", "scope": "mask", "fraction": 0.5},
        {"score": "late", "scope": "mask", "fraction": 0.5},
    ]
    assert curve.rises()["rise"].abs().min() > 1e-3


@pytest.mark.parametrize("mode", ["derotate", "keys"])
def test_heads_of_a_group_are_ranked_together(model: Any, scores: dict[str, rl.BandScores], mode: Any):
    curve = curve_of(model, scores, tiny.ids(2, 12), [0.5], mode=mode)
    importance = scores["entropy"].importance().unflatten(1, (2, 3)).mean(2)
    order = importance.flatten().argsort(stable=True)[: importance.numel() // 2]
    mask = torch.zeros(importance.numel(), dtype=torch.bool)
    mask[order] = True
    mask = mask.reshape(importance.shape).repeat_interleave(3, 1)
    expected = rl.ablation_losses(model, {"m": mask}, tiny.ids(2, 12), mode=mode, progress=False)
    row = next(n for n, p in enumerate(curve.points) if p == Point("entropy", "model", 0.5))
    torch.testing.assert_close(curve.sums[row], expected.sums[1], rtol=0, atol=1e-12)


def test_derotation_beyond_a_cut_off(model: Any):
    curve = rl.derotation_curve(model, tiny.ids(2, 12), [10, 1000], progress=False)
    assert [p.score for p in curve.points if p.fraction] == ["slower than 10", "slower than 1000"]
    assert [p.fraction for p in curve.points if p.fraction] == [0.75, 0.25]
    fast = rl.derotation_curve(model, tiny.ids(2, 12), [10], side="fast", progress=False)
    assert [p.fraction for p in fast.points] == [0.0, 0.25]


# What is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fractions", [[0.5, 0.2], [0.2, 0.2], [-0.1, 0.5], [0.5, 1.1], [], [math.nan]])
def test_fractions_are_ascending_from_0_to_1(model: Any, scores: Any, fractions: list[float]):
    with pytest.raises(ValueError, match="expected ascending fractions from 0 to 1, each once, got"):
        curve_of(model, scores, tiny.ids(2, 12), fractions)


def test_scores_must_be_this_models(model: Any, scores: dict[str, rl.BandScores]):
    other = rl.band_activation(tiny.plain("llama", seed=1), tiny.ids())
    with pytest.raises(ValueError, match="expected score 'x' of this model, got another's"):
        curve_of(model, {"x": other}, tiny.ids(2, 12))
    small = rl.band_activation(tiny.plain("phi"), tiny.ids())
    with pytest.raises(ValueError, match=r"expected score 'x' of \[2, 6, 4\] \[layer, head, band\], got"):
        curve_of(model, {"x": small}, tiny.ids(2, 12))
    broken = scores["activation"]
    broken = rl.BandScores(**vars(broken) | {"values": broken.values.clone()})
    broken.values[1, 2, 3] = math.nan
    with pytest.raises(ValueError, match="expected score 'x' without NaN: measure it again"):
        curve_of(model, {"x": broken}, tiny.ids(2, 12))
    with pytest.raises(ValueError, match="expected a scope from model, layer, head, got 'heads'"):
        curve_of(model, scores, tiny.ids(2, 12), scope="heads")


def test_documents_that_were_scored_on_are_counted(model: Any, scores: dict[str, rl.BandScores]):
    ids = torch.cat([tiny.ids(4, 24, seed=7)[:3], tiny.ids(2, 24, seed=8)])
    with pytest.warns(UserWarning, match="3 of 5 documents were also measured for the scores activation"):
        curve_of(model, scores, ids, [0.5])


def test_a_text_too_short_for_the_error_asked_for_is_refused(model: Any, scores: Any):
    ids = tiny.ids(4, 12)
    error = curve_of(model, scores, ids, [0.5]).baseline[1]
    curve_of(model, scores, ids, [0.5], stderr=1.01 * error)
    message = r"expected a loss with a standard error of at most .* from 4 documents: it takes about 16 "
    with pytest.raises(ValueError, match=message):
        curve_of(model, scores, ids, [0.5], stderr=0.5 * error)
    with pytest.raises(ValueError, match="it takes at least 2 of them"):
        curve_of(model, scores, ids[:1], [0.5], stderr=1.0)


def test_scores_know_their_documents(model: Any, scores: dict[str, rl.BandScores], tmp_path: Path):
    ids = tiny.ids(4, 24, seed=7)
    names = [name for window in rl.windows(ids) for name in window.documents]
    expected = document_numbers(names)
    assert torch.equal(scores["entropy"].documents, expected)
    scores["entropy"].save(tmp_path / "e")
    assert torch.equal(rl.BandScores.load(tmp_path / "e").documents, expected)
    parts = [rl.collect(model, rows, ("entropy",), progress=False)["entropy"] for rows in (ids[:3], ids[2:])]
    assert torch.equal(parts[0].merge(parts[1]).documents, expected)


# Read off a curve ----------------------------------------------------------------------------------------


def drawn(rises: dict[str, list[list[float]]], fractions: list[float]) -> AblationCurve:
    """A curve of 3 documents of 1, 2 and 3 tokens, whose losses per document are 2 plus the rises."""
    counts = torch.tensor([[1], [2], [3]])
    points, sums = [], []
    for score, rows in rises.items():
        for fraction, row in zip(fractions, rows, strict=True):
            points.append(Point(score, "model", fraction))
            sums.append(counts * (2 + torch.tensor(row).double()[:, None]))
    return AblationCurve(tuple(points), torch.stack(sums), counts, (1,), ("a", "b", "c"), "zero", {})


def test_what_is_read_off_a_curve():
    curve = drawn(
        {"a": [[0, 0, 0], [0.1, 0.1, 0.1], [0.4, 0.4, 0.4]], "b": [[0, 0, 0], [0.6, 0, 0.6], [1, 1, 1]]},
        [0.0, 0.5, 1.0],
    )
    area = curve.area().set_index("score")
    assert area["area"].tolist() == pytest.approx([0.5 * 0.05 + 0.5 * 0.25, 0.5 * 0.2 + 0.5 * 0.7])
    assert area["upto"].tolist() == [1, 1]
    assert area["stderr"]["a"] == pytest.approx(0, abs=1e-12)
    found = curve.removable([0.05, 0.1, 0.25, 0.5])
    of_a = found[found["score"] == "a"]
    assert of_a["fraction"].tolist() == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert of_a["ends"].tolist() == [False, False, False, True]
    paired = curve.paired("a", "b").set_index("fraction")
    # Differences of documents: -0.5, 0.1, -0.5; of their sums: -0.5, 0.2, -1.5 of 1, 2, 3 tokens.
    mean = (-0.5 + 0.2 - 1.5) / 6
    spread = [(-0.5 - mean * 1) ** 2, (0.2 - mean * 2) ** 2, (-1.5 - mean * 3) ** 2]
    error = math.sqrt(sum(spread) * 3 / 2) / 6
    row = paired.loc[0.5]
    assert row["difference"] == pytest.approx(mean)
    assert row["stderr"] == pytest.approx(error)
    assert row["high"] - row["low"] == pytest.approx(2 * t.ppf(0.975, 2) * error)
    both = curve.paired("a", ["a", "b"]).set_index("fraction")
    assert both["difference"][0.5] == pytest.approx(mean / 2)
    with pytest.raises(ValueError, match="expected scores with points in common, got 'a' and 'c'"):
        curve.paired("a", "c")


def test_a_curve_is_drawn(model: Any, scores: dict[str, rl.BandScores]):
    scores = {**scores, "random 1": rl.random_scores(scores["activation"], 1)}
    figure = curve_of(model, scores, tiny.ids(2, 12)).plot()
    assert [trace.name for trace in figure.data if trace.showlegend] == ["activation", "entropy", "random"]
    assert len(figure.data) == 4
    assert figure.data[2].line.color == figure.data[3].line.color


# The command, and the real model -------------------------------------------------------------------------


def test_the_command_says_what_is_wrong(tmp_path: Path):
    from typer.testing import CliRunner

    from ropelens.cli import app

    arguments = ["ablate", str(tmp_path), "--data", "x.txt", "--out", str(tmp_path / "out")]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 1
    assert "found no .safetensors file: run ropelens collect" in found.output
    found = CliRunner().invoke(app, [*arguments, "--fractions", "a,b"])
    assert found.exit_code == 2
    assert "expected --fractions as 0.1,0.5,0.9, got 'a,b'" in found.output


@pytest.mark.real
def test_activation_beats_random_on_smollm2(tmp_path: Path):
    """Four tenths of the bands removed, by a score of one part of Python's documentation, in another."""
    import pydoc_data.topics

    from typer.testing import CliRunner

    from ropelens.cli import app

    texts = [text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) > 1500]
    model = rl.load("smollm2-135m", host="transformers")
    scored = rl.windows(texts[0::2], model.tokenizer, context=128, limit=3 * 128)
    rl.collect(model, scored, ("activation",), tmp_path / "scores", progress=False)
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts[1::2][:16]):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    command = ["ablate", str(tmp_path / "scores"), "--data", str(tmp_path / "texts"), "--context", "48"]
    command += ["--fractions", "0.4", "--seeds", "1", "--out", str(tmp_path / "curve")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    curve = AblationCurve.load(tmp_path / "curve" / "zero.safetensors")
    paired = curve.paired("activation", "random 0").set_index("fraction").loc[0.4]
    assert paired["difference"] < -3 * paired["stderr"]
    assert len(curve.documents) > 10
