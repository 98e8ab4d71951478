"""BandScores and BandAttribution against tables worked out by hand, and every error they raise."""

import dataclasses
import json
import math
import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropelens.bands import Bands, pair_dims
from ropelens.scores import BandAttribution, BandScores, random_scores, same_model, saving

NAN = math.nan
MODEL = {"embedding": "ab12", "signature": [1.0, 2.0], "shape": [2, 2, 1, 8]}


def ladder(*counts: int) -> Bands:
    """Bands for layers with the given numbers of bands: inv_freq 1, 1/2, 1/4, ..."""
    layers = [(0.5 ** torch.arange(n).double(), pair_dims(2 * n, False), 8 - 2 * n, 1.0) for n in counts]
    return Bands.stack(layers)


def scores_of(values: list, bands: Bands | None = None, **changes) -> BandScores:
    table = torch.tensor(values, dtype=torch.float64)
    given = {
        "metric": "entropy",
        "bands": bands or ladder(*[table.shape[2]] * table.shape[0]),
        "values": table,
        "rest": torch.zeros(table.shape[:2], dtype=torch.float64),
        "squares": table**2,
        "n_queries": 4,
        "n_pairs": torch.tensor([10, 5])[: table.shape[0]],
        "n_tokens": 4,
        "n_documents": 1,
        "model": MODEL,
        "data": "0f",
        "settings": {"tol": 1e-3},
    }
    return BandScores(**{**given, **changes})


@pytest.fixture
def two_layers() -> BandScores:
    """2 layers x 2 heads x 3 bands; layer 1 lacks the last band."""
    values = [[[-4.0, 2.0, 0.0], [1.0, 1.0, -8.0]], [[0.0, 0.0, NAN], [3.0, -6.0, NAN]]]
    return scores_of(values, ladder(3, 2))


def attribution(**changes) -> BandAttribution:
    given = {
        "layer": 1,
        "head": 0,
        "query": 2,
        "inv_freq": torch.tensor([1.0, 0.5]).double(),
        "pairs": pair_dims(4, False),
        "values": torch.tensor([[0.3, 0.1], [0.0, 0.0], [0.2, 0.15]]).double(),
        "rest": torch.tensor([0.05, 0.0, 0.2]).double(),
        "visible": torch.tensor([True, False, True]),
        "sink": None,
        "tokens": ("<s>", " a", " b"),
        "residual": 1e-7,
        "model": MODEL,
        "settings": {"tol": 1e-3},
    }
    return BandAttribution(**{**given, **changes})


# --- what scores say -------------------------------------------------------------------------------


def test_means_divide_by_queries_pairs_or_documents(two_layers: BandScores) -> None:
    assert two_layers.mean()[0, 0].tolist() == [-1.0, 0.5, 0.0]
    assert two_layers.mean(per="pair")[0, 0].tolist() == [-0.4, 0.2, 0.0]
    assert two_layers.mean(per="pair")[1, 1, :2].tolist() == [0.6, -1.2]  # layer 1 has its own 5 pairs
    assert torch.equal(two_layers.mean(per="document").nan_to_num(9), two_layers.values.nan_to_num(9))


def test_standard_errors_match_the_textbook_formula() -> None:
    documents = torch.tensor([1.0, 4.0, 7.0, 2.0]).double()
    scores = scores_of(
        [[[documents.sum().item()]]],
        squares=(documents**2).sum().reshape(1, 1, 1),
        sampling_variance=torch.tensor([[[9.0]]]).double(),
        n_documents=4,
    )
    assert scores.stderr().item() == pytest.approx(documents.std().item() / 2, rel=1e-12)
    assert scores.sampling_stderr().item() == 3.0 / 4


def test_standard_error_of_equal_documents_is_zero() -> None:
    value = 0.1
    scores = scores_of([[[3 * value]]], squares=torch.tensor([[[3 * value**2]]]).double(), n_documents=3)
    assert scores.stderr().item() == pytest.approx(0, abs=1e-9)


def test_importance_divides_by_the_largest_of_each_scope(two_layers: BandScores) -> None:
    def table(normalize: str) -> list:
        return two_layers.importance(normalize).nan_to_num(9.0).tolist()

    assert table("head") == [[[1.0, 0.5, 0.0], [0.125, 0.125, 1.0]], [[0.0, 0.0, 9.0], [0.5, 1.0, 9.0]]]
    assert table("layer") == [[[0.5, 0.25, 0.0], [0.125, 0.125, 1.0]], [[0.0, 0.0, 9.0], [0.5, 1.0, 9.0]]]
    assert table("model") == [[[0.5, 0.25, 0.0], [0.125, 0.125, 1]], [[0.0, 0.0, 9.0], [0.375, 0.75, 9.0]]]


def test_lowest_breaks_ties_in_the_order_layer_head_band(two_layers: BandScores) -> None:
    # importances by head: 1, .5, 0 | .125, .125, 1 || 0, 0, - | .5, 1, -; 10 bands exist
    def marked(*args, **kwargs) -> list:
        return two_layers.lowest(*args, **kwargs).nonzero().tolist()

    assert marked(0.2) == [[0, 0, 2], [1, 0, 0]]  # three zeros, the first two go
    assert marked(0.4) == [[0, 0, 2], [0, 1, 0], [1, 0, 0], [1, 0, 1]]
    assert marked(0.0) == []
    assert two_layers.lowest(1.0).sum() == 10
    assert not two_layers.lowest(1.0)[1, :, 2].any()  # a band that is not there is never removed


def test_lowest_within_layers_and_heads(two_layers: BandScores) -> None:
    def marked(fraction: float, scope: str) -> list:
        return two_layers.lowest(fraction, scope=scope).nonzero().tolist()

    assert marked(1 / 3, "layer") == [[0, 0, 2], [0, 1, 0], [1, 0, 0]]  # round(2), round(1.33)
    assert marked(1 / 3, "head") == [[0, 0, 2], [0, 1, 0], [1, 0, 0], [1, 1, 0]]  # round(1), round(.67)


@given(
    values=st.lists(st.floats(-100, 100), min_size=12, max_size=12),
    fraction=st.floats(0, 1),
    scope=st.sampled_from(["model", "layer", "head"]),
    normalize=st.sampled_from(["model", "layer", "head"]),
)
@settings(deadline=None, max_examples=50)
def test_lowest_removes_the_right_number_and_never_a_more_important_band(
    values: list[float], fraction: float, scope: str, normalize: str
) -> None:
    scores = scores_of(torch.tensor(values).reshape(2, 2, 3).tolist())
    mask = scores.lowest(fraction, scope=scope, normalize=normalize)
    rows = {"model": 1, "layer": 2, "head": 4}[scope]
    importance = scores.importance(normalize).reshape(rows, -1)
    for row, chosen in zip(importance, mask.reshape(rows, -1), strict=True):
        assert chosen.sum() == round(fraction * len(row))
        if chosen.any() and not chosen.all():
            assert row[chosen].max() <= row[~chosen].min()


def test_frame_has_a_row_for_each_band_that_exists(two_layers: BandScores) -> None:
    frame = two_layers.to_frame()
    assert list(frame.columns) == ["layer", "head", "band", "wavelength", "value"]
    assert len(frame) == 10
    last = frame.iloc[-1]
    assert (last.layer, last["head"], last.band, last.value) == (1, 1, 1, -6.0)
    assert last.wavelength == pytest.approx(4 * math.pi)


def test_random_scores_are_reproducible_and_keep_the_shape(two_layers: BandScores) -> None:
    one, again, other = (random_scores(two_layers, seed=s) for s in (1, 1, 2))
    assert one.metric == "random"
    assert one.settings == {"seed": 1}
    assert torch.equal(one.values.isnan(), two_layers.values.isnan())
    assert torch.equal(one.values.nan_to_num(), again.values.nan_to_num())
    assert not torch.equal(one.values.nan_to_num(), other.values.nan_to_num())
    drawn = one.values[one.exists]
    assert ((drawn >= 0) & (drawn < 1)).all()
    with pytest.raises(ValueError, match="needs at least 2 documents, and these scores have 1"):
        one.stderr()


# --- merging ---------------------------------------------------------------------------------------


def test_merge_adds_sums_and_keeps_the_worst_residual(two_layers: BandScores) -> None:
    first = dataclasses.replace(
        two_layers,
        residual=torch.tensor([[1.0, 5.0], [0.0, 2.0]]).double(),
        bound=torch.ones(2, 2, 3).double(),
        rest=torch.full((2, 2), 0.5).double(),
    )
    second = dataclasses.replace(
        first, residual=torch.tensor([[3.0, 4.0], [0.0, 2.5]]).double(), n_documents=2, data="f1"
    )
    both = first.merge(second)
    assert both.values[0].tolist() == [[-8.0, 4.0, 0.0], [2.0, 2.0, -16.0]]
    assert both.squares[0, 0].tolist() == [32.0, 8.0, 0.0]
    assert both.rest.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert both.residual is not None
    assert both.residual.tolist() == [[3.0, 5.0], [0.0, 2.5]]
    assert both.bound is not None
    assert both.bound.unique().tolist() == [2.0]
    assert (both.n_queries, both.n_tokens, both.n_documents) == (8, 8, 3)
    assert both.n_pairs.tolist() == [20, 10]
    assert both.data == "00"  # 0f + f1 modulo 100
    assert first.values[0, 0, 0] == second.values[0, 0, 0] == -4.0
    assert (first.n_documents, first.n_pairs.tolist(), first.data) == (1, [10, 5], "0f")


def test_merging_in_any_order_gives_the_same_digest(two_layers: BandScores) -> None:
    a, b, c = (dataclasses.replace(two_layers, data=digest) for digest in ("a7", "e4", "9b"))
    assert a.merge(b).merge(c).data == c.merge(a.merge(b)).data == b.merge(c).merge(a).data
    assert dataclasses.replace(a, data="").merge(dataclasses.replace(b, data="")).data == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metric": "activation"}, "one holds entropy, the other activation"),
        ({"bands": ladder(3, 3)}, "their bands differ (the pairs of dims differ)"),
        ({"model": {**MODEL, "embedding": "ff"}}, "they measure different models (the embeddings differ)"),
        ({"settings": {"tol": 1e-9}}, "the setting tol is 0.001 in one and 1e-09 in the other"),
        ({"settings": {"tol": 1e-3, "bos": True}}, "the setting bos is None in one and True in the other"),
        ({"residual": torch.zeros(2, 2).double()}, "only one of them has residual"),
    ],
)
def test_merge_refuses_what_does_not_belong_together(changes: dict, message: str) -> None:
    values = [[[1.0, 2.0, 3.0]] * 2] * 2
    if "bands" in changes:
        mine, theirs = scores_of(values, ladder(3, 3)), scores_of(values, Bands.uniform(2, 8, 16.0, 6, True))
    else:
        mine, theirs = scores_of(values), scores_of(values, **changes)
    with pytest.raises(ValueError, match=r"^these scores cannot be merged") as error:
        mine.merge(theirs)
    assert str(error.value) == f"these scores cannot be merged: {message}"


def test_merge_refuses_another_number_of_heads() -> None:
    with pytest.raises(ValueError, match="one has 1 heads a layer, the other 2"):
        scores_of([[[1.0]]]).merge(scores_of([[[1.0], [1.0]]]))


def test_fingerprints_tell_models_apart_but_not_dtypes() -> None:
    assert same_model(MODEL, {**MODEL, "signature": [1.009, 2.0]}) is None
    assert same_model(MODEL, {**MODEL, "signature": [1.0, 2.03]}) == "the weights of layer 1 differ"
    assert same_model(MODEL, {**MODEL, "signature": [1.0, NAN]}) == "the weights of layer 1 differ"
    assert same_model(MODEL, {**MODEL, "embedding": "00"}) == "the embeddings differ"
    assert same_model(MODEL, {**MODEL, "shape": [2, 2, 2, 8]}) == (
        "[2, 2, 1, 8] against [2, 2, 2, 8] [layers, heads, key-value heads, dims of a head]"
    )


# --- what scores refuse ----------------------------------------------------------------------------


def test_scores_refuse_numbers_that_are_not_finite_and_bands_that_are_not_there() -> None:
    with pytest.raises(ValueError, match=r"^the entropy of layer 0, head 1, band 0 is not finite, but the"):
        scores_of([[[1.0, 2.0], [NAN, 1.0]]])
    with pytest.raises(ValueError, match=r"^the entropy of layer 0, head 0, band 1 is not finite, but the"):
        scores_of([[[1.0, math.inf]]])
    with pytest.raises(ValueError, match=r"layer 1, head 0, band 1 is a number, but the layer has no such"):
        scores_of([[[1.0, 2.0]], [[1.0, 0.0]]], ladder(2, 1))
    with pytest.raises(ValueError, match=r"^the entropy of the rest of layer 0, head 0 is not finite$"):
        scores_of([[[1.0]]], rest=torch.tensor([[NAN]]).double())
    with pytest.raises(ValueError, match=r"^values have 1 layers of 2 bands, but bands has 2 of 3$"):
        scores_of([[[1.0, 2.0]]], ladder(3, 3))
    with pytest.raises(
        ValueError, match="expected data to be a hexadecimal digest or empty, got 'moby dick'"
    ):
        scores_of([[[1.0]]], data="moby dick")
    with pytest.raises(ValueError, match="expected settings that JSON can hold: Object of type"):
        scores_of([[[1.0]]], settings={"dtype": torch.float32})


def test_arguments_outside_of_their_range(two_layers: BandScores) -> None:
    with pytest.raises(ValueError, match=r"^expected per to be one of query, pair, document, got 'token'$"):
        two_layers.mean(per="token")
    with pytest.raises(ValueError, match=r"^expected normalize to be one of head, layer, model, got 'all'$"):
        two_layers.importance("all")
    with pytest.raises(ValueError, match=r"^expected scope to be one of head, layer, model, got 'all'$"):
        two_layers.lowest(0.5, scope="all")
    for fraction in (-0.1, 1.5, NAN):
        with pytest.raises(ValueError, match=r"^expected a fraction from 0 to 1, got"):
            two_layers.lowest(fraction)
    with pytest.raises(ValueError, match=r"^there is no mean per query: no query was counted$"):
        dataclasses.replace(two_layers, n_queries=0).mean()
    with pytest.raises(ValueError, match="measure with band_fisher and n_samples >= 2"):
        two_layers.sampling_stderr()


# --- files -----------------------------------------------------------------------------------------


def equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    if isinstance(a, Bands) and isinstance(b, Bands):
        return all(equal(vars(a)[name], vars(b)[name]) for name in vars(a))
    return a == b


def test_saved_scores_come_back_whole(two_layers: BandScores, tmp_path) -> None:
    full = dataclasses.replace(
        two_layers,
        residual=torch.rand(2, 2).double(),
        sampling_variance=two_layers.squares.transpose(0, 1),  # not contiguous
        settings={"tol": 1e-3, "window": (1, 2)},
    )
    for scores in (two_layers, full):
        scores.save(tmp_path / "new" / "scores.safetensors")
        loaded = BandScores.load(tmp_path / "new" / "scores.safetensors")
        for name in (f.name for f in dataclasses.fields(BandScores)):
            assert equal(getattr(loaded, name), getattr(scores, name)), name
        assert loaded.merge(scores).n_documents == 2


def test_saved_attributions_come_back_whole(tmp_path) -> None:
    saved = attribution(sink=0.25, tokens=("<s>", "<b>\n", "é"))
    saved.save(tmp_path / "a.safetensors")
    loaded = BandAttribution.load(tmp_path / "a.safetensors")
    for name in (f.name for f in dataclasses.fields(BandAttribution)):
        assert equal(getattr(loaded, name), getattr(saved, name)), name


def test_a_failed_save_leaves_the_old_file_and_nothing_else(two_layers, tmp_path, monkeypatch) -> None:
    path = tmp_path / "scores.safetensors"
    two_layers.save(path)
    before = path.read_bytes()

    def full_disk(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        random_scores(two_layers).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["scores.safetensors"]


def test_loading_refuses_what_is_not_a_scores_file(two_layers: BandScores, tmp_path, monkeypatch) -> None:
    path = tmp_path / "x.safetensors"
    two_layers.save(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"x\.safetensors is truncated or not a safetensors file \("):
        BandScores.load(path)
    path.write_text("hello")
    with pytest.raises(ValueError, match=r"x\.safetensors is truncated or not a safetensors file \("):
        BandScores.load(path)
    path.write_bytes(saving.safetensors.torch.save({"w": torch.zeros(1)}))
    with pytest.raises(ValueError, match=r"is a safetensors file, but ropelens did not save it$"):
        BandScores.load(path)
    attribution().save(path)
    with pytest.raises(ValueError, match=r"holds a BandAttribution, not a BandScores: load it with BandAttr"):
        BandScores.load(path)
    two_layers.save(path)
    with pytest.raises(ValueError, match=r"holds a BandScores, not a BandAttribution: load it with BandSco"):
        BandAttribution.load(path)
    monkeypatch.setattr(saving, "FORMAT", 2)
    with pytest.raises(ValueError, match=r"has format version 1, but this ropelens reads version 2: measure"):
        BandScores.load(path)
    with pytest.raises(FileNotFoundError):
        BandScores.load(tmp_path / "nowhere")


def test_loading_for_another_model_is_refused(two_layers: BandScores, tmp_path, monkeypatch) -> None:
    hosts = SimpleNamespace(host_of=lambda model: SimpleNamespace(fingerprint=model))
    monkeypatch.setitem(__import__("sys").modules, "ropelens.hosts", hosts)
    other = {**MODEL, "embedding": "ffff"}
    two_layers.save(tmp_path / "s")
    attribution().save(tmp_path / "a")
    assert BandScores.load(tmp_path / "s", model=MODEL).model == MODEL
    assert BandAttribution.load(tmp_path / "a", model=MODEL).model == MODEL
    why = r"was measured on another model than the one given \(the embeddings differ\)$"
    with pytest.raises(ValueError, match=why):
        BandScores.load(tmp_path / "s", model=other)
    with pytest.raises(ValueError, match=why):
        BandAttribution.load(tmp_path / "a", model=other)


def test_the_header_is_plain_json(two_layers: BandScores, tmp_path) -> None:
    two_layers.save(tmp_path / "s")
    with saving.safetensors.safe_open(tmp_path / "s", "pt") as file:
        facts = json.loads(file.metadata()["ropelens"])
    assert (facts["format"], facts["metric"], facts["settings"]) == (1, "entropy", {"tol": 1e-3})


# --- attribution -----------------------------------------------------------------------------------


def test_attribution_adds_up_by_key_and_by_band() -> None:
    result = attribution()
    assert result.pattern.tolist() == pytest.approx([0.45, 0.0, 0.55])
    assert result.band_totals.tolist() == pytest.approx([0.5, 0.25])
    assert result.wavelength.tolist() == pytest.approx([2 * math.pi, 4 * math.pi])


def test_attribution_frame_is_keys_times_bands() -> None:
    frame = attribution().to_frame()
    assert list(frame.columns) == ["key", "token", "band", "wavelength", "value"]
    assert frame.values.tolist()[4][:3] == [2, " b", 0]
    assert frame.value.tolist() == pytest.approx([0.3, 0.1, 0.0, 0.0, 0.2, 0.15])


def test_attribution_refuses_lengths_that_do_not_fit_and_nan() -> None:
    with pytest.raises(ValueError, match=r"^query 2 has 3 keys, but there are values for 3 and tokens for 1"):
        attribution(tokens=("a",))
    with pytest.raises(ValueError, match=r"^the attribution of layer 1, head 0 is not finite$"):
        attribution(rest=torch.tensor([NAN, 0, 0]).double())


def test_without_the_first_key_and_by_position(two_layers):
    first = torch.tensor([[[-1.0, 2.0, 0.0]] * 2, [[1.0, 1.0, NAN]] * 2]).double()
    parts = {
        "first": first,
        "first_rest": torch.ones(2, 2).double(),
        "later_squares": (two_layers.values - first) ** 2,
        "later_rest_squares": torch.ones(2, 2).double(),
        "by_position": torch.stack([two_layers.values * 0.25, two_layers.values * 0.75]),
        "span_queries": torch.tensor([1, 3]),
    }
    scores = dataclasses.replace(two_layers, **parts)
    later = scores.without_first()
    assert torch.equal(later.values.nan_to_num(7), (two_layers.values - first).nan_to_num(7))
    assert later.values[0, 0].tolist() == [-3.0, 0.0, 0.0]
    assert later.rest.tolist() == [[-1.0, -1.0], [-1.0, -1.0]]
    assert later.settings["first_key"] == "left out"
    assert scores.mean_by_position()[:, 0, 0, 0].tolist() == [-1.0, -1.0]
    twice = scores.merge(scores)
    assert torch.equal(twice.first.nan_to_num(7), (2 * first).nan_to_num(7))
    assert twice.span_queries.tolist() == [2, 6]
    with pytest.raises(ValueError, match="only one of them has first"):
        scores.merge(two_layers)
    with pytest.raises(ValueError, match="first key's part was not kept apart"):
        two_layers.without_first()
    with pytest.raises(ValueError, match="not kept apart by position"):
        two_layers.mean_by_position()


def test_profile_worked_out_by_hand() -> None:
    bands = Bands.uniform(1, 8, base=10_000.0)  # wavelengths 2 pi times 1, 10, 100, 1000
    values = [[[-1.0, -1.0, -1.0, 1.0], [0, -3.0, 0, -1.0], [0, 0, 0, 0]]]
    frame = scores_of(values, bands).profile()
    assert frame["total"].tolist() == [-2, -4, 0]
    expected = [2 * math.pi * 10**1.5, 2 * math.pi * 10 ** (0.75 * 1 + 0.25 * 3), math.nan]
    assert frame["centroid"].tolist() == pytest.approx(expected, rel=1e-12, nan_ok=True)
    two = math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert frame["effective_bands"].tolist() == pytest.approx([4, two, math.nan], rel=1e-12, nan_ok=True)
    assert frame["top_band"].tolist()[1] == 1
    assert frame["top_share"].tolist() == [0.25, 0.75, 0]
    assert frame["top_wavelength"].tolist()[1] == pytest.approx(20 * math.pi)


def test_profile_leaves_out_bands_that_do_not_exist_or_turn() -> None:
    wide = Bands.stack(
        [
            (torch.tensor([1.0, 0.1], dtype=torch.float64), pair_dims(4, False), 0, 1.0),
            (torch.tensor([0.1, 0.0, 1e-3], dtype=torch.float64), pair_dims(6, False), 0, 1.0),
        ]
    )
    values = [[[2.0, 2.0, NAN]], [[1.0, 5.0, 1.0]]]
    frame = scores_of(values, wide).profile()
    assert frame["total"].tolist() == [4, 7]
    expected = [2 * math.pi * 10**0.5, 2 * math.pi * 100]
    assert frame["centroid"].tolist() == pytest.approx(expected, rel=1e-12)
    assert math.isinf(frame["top_wavelength"].tolist()[1])
