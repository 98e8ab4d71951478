"""The pages as text, what they choose to show, and how a folder is written."""

import base64
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

import lesion_example
from report_example import (
    HOSTILE,
    MODEL,
    N_BANDS,
    N_HEADS,
    N_LAYERS,
    TOKENS,
    example_attribution,
    example_curve,
    example_grid,
    example_heads,
    example_rows,
    example_scores,
    write_example,
)
from ropelens.bands import Bands
from ropelens.circuits import PositionalKernel
from ropelens.plots import provenance
from ropelens.report import (
    Repeat,
    Results,
    attention_grid,
    choose_head,
    choose_heads,
    choose_repeat,
    complete,
    find_results,
    lowest_heads,
    write_report,
)
from ropelens.report.attention import N_HEADS as ATTENTION_HEADS
from ropelens.report.attention import N_TOKENS
from ropelens.report.measuring import kernel_distances
from ropelens.report.packing import packed
from ropelens.report.site import MARK, replacing
from ropelens.scores import BandScores

MB = 10**6


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    return write_example(tmp_path_factory.mktemp("report") / "new" / "folder").parent


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in site.glob("*.html")}


def data_of(site: Path, name: str) -> dict:
    text = (site / "data" / f"{name}.js").read_text(encoding="utf-8")
    found = re.fullmatch(rf'ropelens\.put\("{name}",(.*)\);\n', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def floats(packed_: dict) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed_["floats"]), "<f4").reshape(packed_["shape"])


def entropy_of(values: torch.Tensor, base: float = 10_000.0) -> BandScores:
    n_layers, n_heads, n_bands = values.shape
    return BandScores(
        metric="entropy",
        bands=Bands.uniform(n_layers, 2 * n_bands, base),
        values=values,
        rest=torch.zeros(n_layers, n_heads).double(),
        squares=values**2,
        n_queries=10,
        n_pairs=torch.full((n_layers,), 55),
        n_tokens=10,
        n_documents=1,
    )


# The pages ----------------------------------------------------------------------------------------------


def test_the_pages_need_nothing_but_what_lies_beside_them(site: Path, pages: dict[str, str]) -> None:
    assert set(pages) == {
        "index.html",
        "head.html",
        "attention.html",
        "profiles.html",
        "ablation.html",
        "circuits.html",
        "lesions.html",
    }
    for name, page in pages.items():
        assert not re.findall(r"(?:src|href)=\"(?:https?:)?//", page), name
        targets = re.findall(r"(?:src|href)=\"([^\"#]+)", page)
        assert all((site / target).is_file() for target in targets if target != "data:,"), name
        assert page.count("assets/plotly.min.js") == 1
        for other in pages:
            assert f'<a href="{other}"' in page, (name, other)
    assert len(list(site.rglob("plotly*.js"))) == 1


def test_the_overview_says_what_one_looks_at(pages: dict[str, str]) -> None:
    page = pages["index.html"]
    assert "each head of tiny &lt;model&gt; use?" in page
    assert "The 4 layers of tiny &lt;model&gt; have 3 heads of 8 bands each, from\n6.3 to 20k tokens" in page
    assert "<dd>tiny &amp; &lt;b&gt;random&lt;/b&gt;</dd>" in page
    assert "bands miss log N - H by 2.0e-04 nats" in page
    assert "1.0e-03 of a head&#x27;s sum" in page
    assert "bands miss the attention by 3.0e-06" in page
    assert "<dd>ropelens report runs/tiny -o site</dd>" in page
    assert '<a href="head.html#3.2">layer 3, head 2</a>' in page  # the sharpest


def test_text_of_documents_and_models_never_becomes_markup(site: Path, pages: dict[str, str]) -> None:
    for page in pages.values():
        assert HOSTILE not in page
        assert "<model>" not in page
        assert page.count("</script>") == page.count("<script")
    assert HOSTILE in data_of(site, "attention")["texts"][0]  # as data, which scripts set as text


def test_the_pages_hold_every_heads_numbers(site: Path) -> None:
    entropy, activation = (data_of(site, f"scores-{i}") for i in range(2))
    assert floats(entropy["values"])[3, 2, 7] == pytest.approx(-3.27)  # -(300 + 20 + 7) over 100 queries
    assert floats(activation["values"])[1, 0, 0] == pytest.approx(100 / 5050)
    assert floats(entropy["values"]).shape == (N_LAYERS, N_HEADS, N_BANDS)
    profile = example_scores("entropy").profile()
    heads = entropy["order"]["heads"]
    assert floats(heads["centroid"]) == pytest.approx(profile["centroid"].to_numpy(), rel=1e-6)
    assert floats(heads["effective"]) == pytest.approx(profile["effective_bands"].to_numpy(), rel=1e-6)


def test_every_figure_can_say_what_it_was_made_from(site: Path) -> None:
    seen = []
    for path in (site / "data").glob("*.js"):
        content = data_of(site, path.stem)
        figures = content if path.stem.endswith("-figures") else content.get("figures", {})
        for name, figure in figures.items():
            about = provenance(figure)
            assert about["command"] == "ropelens report runs/tiny -o site", name
            assert about["version"]
            seen.append((about["figure"], [fact["kind"] for fact in about["made_from"]]))
            for fact in about["made_from"]:
                if fact["kind"] not in ("numbers", "LesionResults"):
                    assert fact["model"] == MODEL, name
                    assert fact["data"], name
    kinds = dict(seen)
    assert kinds["band_heatmap"] == kinds["band_spectrum"] == ["BandScores"]
    assert kinds["attribution_heatmap"] == ["BandAttribution"]
    assert kinds["ablation_curves"] == ["AblationCurve"]
    assert kinds["survival_map"] == ["LesionResults"]
    assert kinds["layer_profiles"] == ["BandScores", "BandScores"]
    assert kinds["head_score_map"] == ["numbers"]  # a table from a file


def test_figures_are_small(site: Path) -> None:
    for path in (site / "data").glob("*.js"):
        assert path.stat().st_size < 0.5 * MB, path.name


def test_a_report_of_smollm2s_size_has_at_most_25_mb_and_half_a_mb_a_file(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).double()  # random numbers do not compress

    n_layers, n_heads, n_bands, n = 30, 9, 32, N_TOKENS
    scores = replace(entropy_of(drawn(n_layers, n_heads, n_bands)), n_tokens=2048)
    # twice as many keys with large bands, which take a second byte, as the real model has
    rows = 0.05 * drawn(n * (n + 1) // 2, n_bands + 1) * (drawn(n * (n + 1) // 2, 1) > 1)
    row = packed(rows)
    assert 0.13 < len(row.fine) / len(row.scale) < 0.17
    heads = [(layer, 0) for layer in range(n_layers)] + [(0, 1), (0, 2)]
    assert len(heads) == ATTENTION_HEADS >= 30
    grid = replace(
        example_grid(),
        tokens=("word",) * n,
        heads=tuple(heads),
        bands=scores.bands,
        packed=dict.fromkeys(heads, row),
        examples=[[[(99, 33, 0.5)] * 6] * n_heads] * n_layers,
    )
    distances = tuple(kernel_distances(1024))
    kernel = drawn(n_layers, n_heads, len(distances), n_bands)
    kernels = PositionalKernel("text", scores.bands, distances, kernel, kernel[..., 0, 0], -kernel)
    metrics = ("entropy", "activation", "norm_product", "fisher")
    results = Results(
        scores={metric: replace(scores, metric=metric) for metric in metrics}, grid=grid, kernel=kernels
    )
    write_report(tmp_path / "site", results)
    files = {path: path.stat().st_size for path in (tmp_path / "site").rglob("*") if path.is_file()}
    assert sum(files.values()) <= 25 * MB
    assert all(size <= 0.5 * MB for path, size in files.items() if path.name != "plotly.min.js")


def test_a_page_of_a_model_that_lacks_bands_in_a_layer(tmp_path: Path) -> None:
    scores = {m: example_scores(m) for m in ("entropy", "activation")}
    for metric, full in scores.items():
        inv_freq = full.bands.inv_freq.clone()
        inv_freq[0, -1] = torch.nan
        bands = Bands(inv_freq, full.bands.pairs, full.bands.n_rest, full.bands.amplitude)
        values = full.values.where(~inv_freq.isnan()[:, None], torch.nan)
        bound = None if full.bound is None else full.bound.where(~values.isnan(), torch.nan)
        scores[metric] = replace(full, bands=bands, values=values, bound=bound)
    write_example(tmp_path / "site", scores=scores)
    assert math.isnan(floats(data_of(tmp_path / "site", "scores-0")["values"])[0, 0, -1])


def test_what_is_missing_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    write_example(
        tmp_path / "site", **dict.fromkeys(("grid", "kernel", "heads", "lesions")), curves={}, attributions=[]
    )
    page = (tmp_path / "site" / "index.html").read_text()
    assert "<li>entropy on 100 tokens</li>" in page
    assert "<li>lesions: <code>ropelens lesion --layers 0..3 --out RUN/lesions</code></li>" in page
    assert not (tmp_path / "site" / "attention.html").exists()
    head = (tmp_path / "site" / "head.html").read_text()
    assert "<code>ropelens report RUN --model NAME -o SITE</code> makes it" in head


# Numbers of a byte --------------------------------------------------------------------------------------


def test_packed_numbers_and_their_sums_are_as_exact_as_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(-7, 1, 40).double()[:, None]
    values = size * torch.randn(40, 33, generator=generator).double()
    found = packed(values)
    assert 5 < len(found.fine) < 25
    # a sum of neighbours is a difference of running sums, each rounded to half a step at most
    running = torch.nn.functional.pad((found.values - values).cumsum(1), (1, 0))
    worst = running.amax(1) - running.amin(1)
    step = found.scale.double()
    step[found.fine.long()] /= 126
    assert (worst <= step * (1 + 1e-5)).all()  # float32 of the scale: 6e-8 of up to 126 steps
    assert (worst > 0.3 * step).all()  # it is no finer than it says: the bound is not idle
    assert found.bound == step.max()
    assert packed(torch.zeros(2, 3).double()).values.tolist() == torch.zeros(2, 3).tolist()


def test_a_page_reads_back_any_part_of_the_rows() -> None:
    values = example_rows(0.5)
    found = packed(values)
    part = found.data(3, 6)
    scale, steps, fine, more = (
        np.frombuffer(base64.b64decode(part[name]), kind)
        for name, kind in (("scale", "<f4"), ("steps", "i1"), ("fine", "<i4"), ("more", "i1"))
    )
    rows = steps.reshape(3, -1).astype(float)
    rows[fine] += more.reshape(len(fine), -1) / 126
    assert len(fine)
    assert scale[:, None] * rows == pytest.approx(values[3:6].numpy(), abs=found.bound)


# Finding results ----------------------------------------------------------------------------------------


def save_all(folder: Path) -> None:
    example_scores("entropy").save(folder / "entropy.safetensors")
    example_scores("entropy", n_tokens=50).save(folder / "again" / "short.safetensors")
    example_scores("activation").save(folder / "activation.safetensors")
    example_attribution().save(folder / "attribution.safetensors")
    example_curve().save(folder / "ablation" / "zero.safetensors")
    example_heads().to_csv(folder / "heads.csv", index=False)
    example_scores("fisher").save(folder / "checkpoints" / "fisher.safetensors")
    (folder / "other.safetensors").write_bytes(b"nonsense")
    (folder / "notes.csv").write_text("a,b\n1,2\n")
    facts = {"command": "ropelens collect ...", "model_name": "smollm2-135m"}
    (folder / "run.json").write_text(json.dumps(facts))


def test_results_are_found_by_what_files_hold(tmp_path: Path) -> None:
    save_all(tmp_path)
    results = find_results(tmp_path)
    assert list(results.scores) == ["entropy", "activation", "entropy, short"]
    assert results.scores["entropy, short"].n_tokens == 50
    assert list(results.curves) == ["zero"]
    assert len(results.attributions) == 1
    assert results.heads is not None
    assert results.shape == (N_LAYERS, N_HEADS)
    assert (results.load_as, results.commands) == ("smollm2-135m", ["ropelens collect ..."])
    assert results.missing()["lesions"].startswith("ropelens lesion")
    assert "--model smollm2-135m" in results.missing()["positional kernels"]
    assert "entropy" not in results.missing()


def test_a_sweep_is_found(tmp_path: Path) -> None:
    lesion_example.example().save(tmp_path / "lesions.jsonl")
    results = find_results(tmp_path)
    assert results.lesions is not None
    page = write_report(tmp_path / "site", results)
    assert 'href="lesions.html"' in page.read_text()
    assert not (tmp_path / "site" / "head.html").exists()


def test_a_folder_without_results_and_one_of_two_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^expected results in .*, found none: make some with ropelens col"):
        find_results(tmp_path)
    example_scores("entropy").save(tmp_path / "a.safetensors")
    other = {**MODEL, "embedding": "cd"}
    example_scores("activation", model=other).save(tmp_path / "b.safetensors")
    with pytest.raises(
        ValueError,
        match=r"^expected results of one model, but a.safetensors and b.safetensors are of different",
    ):
        find_results(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    example_heads().assign(layer=9).to_csv(tmp_path / "heads.csv", index=False)
    with pytest.raises(ValueError, match=r"a table has layer 9, head 2, and the scores 4 layers of 3 heads"):
        find_results(tmp_path)


# Writing ------------------------------------------------------------------------------------------------


def test_a_report_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    out = tmp_path / "site"
    out.mkdir()  # an empty folder is fine
    write_example(out)
    (out / "head.html").write_text("old")
    write_example(out)
    assert (out / "head.html").read_text() != "old"
    (out / MARK).unlink()
    with pytest.raises(
        ValueError, match=r"^expected --out to be a new folder, an empty one or a report, got"
    ):
        write_example(out)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^expected --out to be a folder, but .*file is a file"):
        write_example(tmp_path / "file" / "site")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "site"]


def test_an_interruption_leaves_the_old_report_and_nothing_half_written(tmp_path: Path) -> None:
    out = tmp_path / "site"
    write_example(out)
    before = (out / MARK).read_text()

    def interrupted() -> None:
        with replacing(out) as folder:
            (folder / "index.html").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (out / MARK).read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


# What is shown first ------------------------------------------------------------------------------------


def test_lowest_heads_come_with_the_bands_that_lower_them() -> None:
    values = torch.zeros(2, 2, 4).double()
    values[0, 1] = torch.tensor([-6.0, 1.0, -2.0, 0.0])
    values[1, 0] = torch.tensor([0.0, 0.0, 0.0, -30.0])
    first, second = lowest_heads(entropy_of(values), 2)
    assert (first.layer, first.head, first.drop) == (1, 0, -3.0)
    assert first.carriers == ((pytest.approx(6283.2, rel=1e-4), 1.0),)
    assert (second.layer, second.head, second.drop) == (0, 1, pytest.approx(-0.7))
    assert [share for _, share in second.carriers] == pytest.approx([0.75, 0.25])
    assert [(s.layer, s.head) for s in lowest_heads(entropy_of(values), 1, layer=0)] == [(0, 1)]
    assert [(s.layer, s.head) for s in lowest_heads(entropy_of(values), 8, layer=1)] == [(1, 0), (1, 1)]
    assert lowest_heads(entropy_of(torch.zeros(1, 1, 2).double()), 1)[0].carriers == ()
    with pytest.raises(ValueError, match=r"^expected entropy scores, got activation: measure with band_ent"):
        lowest_heads(example_scores("activation"), 1)


def test_the_query_to_show_ends_the_longest_repeated_phrase() -> None:
    text = [*range(100), 50, 51, 52, 200, 60, 61, 201]
    assert choose_repeat(text, min_distance=10) == Repeat(query=102, earlier=52, length=3)
    assert choose_repeat(text, min_distance=51) == Repeat(query=106, earlier=-1, length=0)  # all too near
    assert choose_repeat([7, 7, 7, 7], min_distance=2) == Repeat(query=3, earlier=1, length=2)


def test_the_head_to_show_looks_there_most() -> None:
    attention = torch.tensor([[0.1, 0.5], [0.7, 0.2], [0.3, 0.4]]).double()
    assert choose_head(attention) == (1, 0)
    assert choose_head(attention, layer=2) == (2, 1)
    assert choose_head(attention, head=1) == (0, 1)
    assert choose_head(attention, layer=1, head=1) == (1, 1)
    with pytest.raises(ValueError, match=r"^expected a layer from 0 to 2, got 3$"):
        choose_head(attention, layer=3)
    with pytest.raises(ValueError, match=r"^expected a head from 0 to 1, got -1$"):
        choose_head(attention, head=-1)


def test_heads_to_split_are_the_strongest_of_each_kind_and_the_sharpest_of_each_layer() -> None:
    values = torch.zeros(4, 3, 2).double()
    for layer, head in enumerate((2, 0, 1, 2)):
        values[layer, head] = -float(layer + 1)
    frame = example_heads()
    strongest = {
        (int(row.layer), int(row.head))
        for kind in ("induction", "previous_token", "duplicate_token")
        for row in frame.nlargest(3, kind).itertuples()
    }
    sharpest = {(0, 2), (1, 0), (2, 1), (3, 2)}
    assert set(choose_heads(entropy_of(values), frame, 12)) == {(a, b) for a in range(4) for b in range(3)}
    assert strongest <= set(choose_heads(entropy_of(values), frame, len(strongest)))
    assert set(choose_heads(entropy_of(values), None, 4)) == sharpest
    assert set(choose_heads(replace(entropy_of(-values), metric="activation"), None, 4)) == sharpest


# Measuring ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "phi"])  # all dims rotate; some do not
def test_what_a_model_shows_is_its_attribution(family: str) -> None:
    import ropelens as rl

    model = tiny.plain(family)
    ids = tiny.ids(1, 24)
    grid = attention_grid(model, ids, heads=[(0, 1), (1, 0)])
    assert grid.heads == ((0, 1), (1, 0))
    assert grid.tokens == tuple(str(i) for i in ids[0].tolist())
    assert grid.off <= 5e-4
    for layer, head in grid.heads:
        for query in (0, 5, 23):
            mine, true = (
                grid.attribution(layer, head, query),
                rl.band_attribution(model, ids, layer=layer, head=head, query=query),
            )
            assert (mine.values - true.values).abs().max() <= grid.off + 1e-6  # 1e-6: the grid's tol
            assert (mine.pattern - true.pattern).abs().max() <= grid.off + 1e-6
    looks = [(rl.band_attribution(model, ids, layer=1, head=0, query=q).pattern, q) for q in range(2, 24)]
    best = max((float(p[1:-1].max()), q, 1 + int(p[1:-1].argmax())) for p, q in looks)
    query, key, value = grid.examples[1][0][0]
    assert (value, query, key) == (pytest.approx(best[0], rel=1e-3), best[1], best[2])
    with pytest.raises(ValueError, match=r"^expected heads of this model, got layer 0, head 99$"):
        attention_grid(model, ids, heads=[(0, 99)])


def test_a_model_fills_what_results_lack_and_is_the_right_one() -> None:
    model = tiny.plain("llama")
    said: list[str] = []
    results = complete(Results(), model, tiny.ids(1, 40), text=tiny.ids(1, 12), say=said.append)
    assert len(said) == 4
    assert not {"entropy", "activation", "attention by token", "positional kernels", "scores of heads"} & set(
        results.missing()
    )
    assert results.grid is not None
    assert len(results.grid.tokens) == 12
    again: list[str] = []
    assert complete(results, model, tiny.ids(1, 40), say=again.append).scores == results.scores
    assert again == []
    with pytest.raises(ValueError, match=r"^expected the model that the results are of, got another"):
        complete(results, tiny.plain("llama", seed=1), tiny.ids(1, 40))


def test_the_example_is_whole() -> None:
    grid = example_grid()
    assert len(grid.packed[2, 1].scale) == len(TOKENS) * (len(TOKENS) + 1) // 2
    assert grid.attribution(2, 1, 4).pattern.tolist() == pytest.approx(
        [0.05, 0.1, 0.15, 0.2, 0.25], abs=grid.off
    )
