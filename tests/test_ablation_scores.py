"""Scores and bands under ablation: Taylor, agreement, single bands, patching, areas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import tiny
import torch
from double import Double
from scipy.stats import linregress, spearmanr

import ropelens as rl
from ropelens.hosts import host_of


def loss(model: Any, ids: torch.Tensor) -> float:
    log_probs = model(ids).logits[0].detach().double().log_softmax(-1)
    return -float(log_probs[:-1].gather(-1, ids[0, 1:, None]).sum())


# Taylor --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "phi"])
def test_taylor_is_the_slope_of_the_loss(family: str):
    """Against central differences: a band of the queries scaled by 1 + h and 1 - h."""
    model, ids, h = tiny.plain(family), tiny.ids(2, 14), 1e-5
    host = host_of(model)
    with Double():
        scores = rl.band_taylor(model, ids)
        for layer, head, band in ((0, 1, 0), (1, 4, 1), (1, 5, 0)):
            where = torch.zeros(6, 8, dtype=torch.bool)
            where[head, host.certificate.layers[layer].rotation.pairs[band]] = True
            losses = []
            for gain in (1 + h, 1 - h):

                def scale(q: torch.Tensor, at: torch.Tensor, gain: float = gain) -> torch.Tensor:
                    return torch.where(where, gain * q, q)  # noqa: B023

                with torch.no_grad(), host.editing({layer: scale}):
                    losses.append([loss(model, row[None]) for row in ids])
            slopes = [(a - b) / (2 * h) for a, b in zip(*losses, strict=True)]
            assert scores.values[layer, head, band].item() == pytest.approx(-sum(slopes), abs=1e-6)
            assert scores.squares[layer, head, band].item() == pytest.approx(
                sum(s * s for s in slopes), abs=1e-6
            )
    assert (scores.metric, scores.n_documents) == ("taylor", 2)
    assert scores.sampling_variance is None


def test_taylor_in_collect_is_the_same(tmp_path: Any):
    model, ids = tiny.plain("llama"), tiny.ids(3, 12)
    found = rl.collect(model, ids, ("taylor", "entropy"), out=tmp_path, progress=False)["taylor"]
    # There, attention is SDPA's.
    torch.testing.assert_close(found.values, rl.band_taylor(model, ids).values, rtol=0, atol=1e-5)
    assert torch.equal(rl.BandScores.load(tmp_path / "taylor.safetensors").values, found.values)


# Agreement -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.plain("llama", attention="sdpa")


@pytest.fixture(scope="module")
def scores(model: Any) -> dict[str, rl.BandScores]:
    return rl.collect(model, tiny.ids(4, 24), ("activation", "entropy", "norm_product"), progress=False)


def test_agreement_is_scipys(scores: dict[str, rl.BandScores]):
    found = rl.agreement(scores)
    assert len(found) == 3 * 3
    assert found["layer"].isna().sum() == 3
    for row in found.itertuples():
        x, y = (scores[name].importance() for name in (row.a, row.b))
        if not pd.isna(row.layer):
            x, y = x[row.layer], y[row.layer]
        x, y = x.flatten(), y.flatten()
        line: Any = linregress(x, y)
        assert row.r2 == pytest.approx(line.rvalue**2)
        assert (row.slope, row.intercept) == (pytest.approx(line.slope), pytest.approx(line.intercept))
        assert row.spearman == pytest.approx(spearmanr(x, y).statistic)
        assert row.n == len(x)
    whole = found[found["layer"].isna()]
    assert (whole["r2_low"] < whole["r2"]).all()
    assert (whole["r2"] < whole["r2_high"]).all()


def test_agreement_where_layers_have_no_bands_or_do_not_vary():
    partial = tiny.plain("smollm3")
    found = rl.collect(partial, tiny.ids(), ("activation", "norm_product"), progress=False)
    frame = rl.agreement(found, n_bootstrap=10)
    assert frame["n"].tolist() == [24, *(24 if e else 0 for e in rl.Bands.of(partial).exists.any(1))]
    assert frame["r2"].isna().sum() == 1
    with pytest.raises(ValueError, match="expected at least two scores to compare, got 1"):
        rl.agreement({"a": found["activation"]})


def test_scores_of_two_models_do_not_agree(scores: dict[str, rl.BandScores]):
    other = rl.band_activation(tiny.plain("llama", seed=1, attention="sdpa"), tiny.ids(4, 24))
    with pytest.raises(ValueError, match="expected scores of one model, but those of 'other' are of another"):
        rl.agreement({"entropy": scores["entropy"], "other": other})


def test_single_bands_against_scores(model: Any, scores: dict[str, rl.BandScores]):
    ids = tiny.ids(2, 12, seed=3)
    effects = rl.band_effects(model, ids, [(0, 2), (1, 5)], progress=False)
    assert effects[["layer", "head", "band"]].to_numpy().tolist() == [
        [layer, head, band] for layer, head in ((0, 2), (1, 5)) for band in range(4)
    ]
    bare = sum(loss(model, row[None]) for row in ids)
    with rl.ablate(model, rl.bands_where(model, [3], heads=[(1, 5)])):
        without = sum(loss(model, row[None]) for row in ids)
    assert effects["rise"].iloc[7] == pytest.approx((without - bare) / 22, abs=1e-9)
    ranks = rl.effect_ranks(effects, {"taylor": rl.band_taylor(model, ids), **scores})
    assert len(ranks) == 2 * 4
    expected = spearmanr(scores["entropy"].values[0, 2].abs(), effects["rise"][:4]).statistic
    row = ranks[(ranks["head"] == 2) & (ranks["score"] == "entropy")]
    assert row["spearman"].item() == pytest.approx(expected)


def test_a_scatter_of_importances(scores: dict[str, rl.BandScores]):
    from ropelens.plots import importance_scatter

    figure = importance_scatter(scores["activation"], scores["entropy"])
    assert len(figure.data[0].x) == 48
    assert "R² 0." in figure.layout.title.text


# Patching ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "phi", "smollm3"])
def test_all_bands_and_rest_give_the_clean_pattern(family: str):
    bridge = tiny.bridge(tiny.plain(family))
    clean, corrupt = tiny.ids(2, 16, seed=1), tiny.ids(2, 16, seed=2)
    everything = rl.bands_where(bridge)
    patterns = [f"blocks.{layer}.attn.hook_pattern" for layer in range(2)]
    with torch.no_grad():
        expected = bridge.run_with_cache(clean)[1]
        bare = bridge.run_with_cache(corrupt)[1]
        with rl.patch_bands(bridge, clean, everything, rest=True):
            found = bridge.run_with_cache(corrupt)[1]
        with rl.patch_bands(bridge, clean, everything, rest=True, queries=False):
            keys = bridge.run_with_cache(corrupt)[1]
    for name in patterns:
        assert torch.equal(found[name], expected[name])
        assert not torch.equal(bare[name], expected[name])
        assert not torch.equal(keys[name], expected[name])
    assert torch.equal(found["blocks.0.attn.hook_v"], bare["blocks.0.attn.hook_v"])


def test_one_band_is_patched_alone():
    bridge = tiny.bridge(tiny.plain("llama"))
    clean, corrupt = tiny.ids(1, 16, seed=1), tiny.ids(1, 16, seed=2)
    mask = rl.bands_where(bridge, [2], layers=[0])
    q = "blocks.0.attn.hook_rot_q"
    with torch.no_grad():
        theirs, mine = (bridge.run_with_cache(text)[1][q] for text in (clean, corrupt))
        with rl.patch_bands(bridge, clean, mask, keys=False):
            found = bridge.run_with_cache(corrupt)[1][q]
    dims = [2, 6]
    others = [0, 1, 3, 4, 5, 7]
    assert torch.equal(found[..., dims], theirs[..., dims])
    assert torch.equal(found[..., others], mine[..., others])


def test_layers_without_bands_keep_what_is_theirs_unless_all_is_patched():
    bridge = tiny.bridge(tiny.plain("smollm3"))  # layer 1 does not rotate
    clean, corrupt = tiny.ids(1, 16, seed=1), tiny.ids(1, 16, seed=2)
    mask = rl.bands_where(bridge, heads=[(0, 0)])
    with torch.no_grad():
        theirs = bridge.run_with_cache(clean)[1]
        with rl.patch_bands(bridge, clean, mask, rest=True, keys=False):
            found = bridge.run_with_cache(corrupt)[1]
    queries = [f"blocks.{layer}.attn.hook_rot_q" for layer in range(2)]
    assert torch.equal(found[queries[0]][:, :, 0], theirs[queries[0]][:, :, 0])
    assert not torch.allclose(found[queries[1]], theirs[queries[1]])


def test_what_cannot_be_patched(model: Any):
    mask = rl.bands_where(model, [0], heads=[(0, 1)])
    with pytest.raises(ValueError, match="which query heads share"), rl.patch_bands(model, tiny.ids(), mask):
        pass
    patched = rl.patch_bands(model, tiny.ids(2, 10), mask, keys=False)
    with patched, pytest.raises(ValueError, match="the two texts must have as many tokens"):
        model(tiny.ids(2, 11))
    with pytest.raises(ValueError, match="expected queries or keys to patch, got neither"):  # noqa: SIM117
        with rl.patch_bands(model, tiny.ids(), mask, keys=False, queries=False):
            pass


# Areas ---------------------------------------------------------------------------------------------------


def test_heads_that_use_the_same_bands_are_one_area(model: Any, scores: dict[str, rl.BandScores]):
    values = torch.full((2, 6, 4), 0.01).double()
    slow = torch.tensor([[1, 0, 1, 0, 1, 1], [0, 0, 0, 1, 1, 0]]).bool()
    values[~slow, 0] = -5
    values[slow, 3] = 7
    made = rl.BandScores(**vars(scores["entropy"]) | {"values": values})
    found = rl.areas(made, 2)
    assert torch.equal(found.heads(1), slow)
    torch.testing.assert_close(found.profiles.sum(1), torch.ones(2).double())
    mixed = found.shuffled(0)
    assert mixed.labels.unique(return_counts=True)[1].tolist() == [6, 6]
    assert not torch.equal(mixed.labels, found.labels)
    assert len(found.to_frame()) == 12
    ids = tiny.ids(3, 12, seed=5)
    curve = rl.area_losses(model, found, ids, seeds=range(2), progress=False)
    assert {p.score for p in curve.points if p.fraction} == {
        f"area {area}{of}" for area in range(2) for of in ("", ", random 0", ", random 1")
    }
    paired = curve.paired("area 1", ["area 1, random 0", "area 1, random 1"])
    assert paired["fraction"].tolist() == [0, 0.5]
    with rl.ablate(model, rl.bands_where(model, heads=[tuple(h) for h in slow.nonzero().tolist()])):
        losses = [loss(model, row[None]) for row in ids]
    row = next(n for n, p in enumerate(curve.points) if p.score == "area 1" and p.fraction)
    assert curve.sums[row].sum(1).tolist() == pytest.approx(losses, abs=1e-9)
    once = rl.area_losses(model, found, ids, seeds=iter([0]), progress=False)
    assert {p.score for p in once.points} == {f"area {a}{of}" for a in range(2) for of in ("", ", random 0")}


def test_areas_that_there_are_not(scores: dict[str, rl.BandScores], model: Any):
    with pytest.raises(ValueError, match="expected from 2 to 12 areas, one a head, got 13"):
        rl.areas(scores["entropy"], 13)
    with pytest.raises(ValueError, match="expected an area from 0 to 1, got 2"):
        rl.areas(scores["entropy"], 2).heads(2)
    bands = scores["entropy"].bands
    slower = replace(bands, inv_freq=bands.inv_freq * torch.tensor([[1.0], [0.25]]).double())
    with pytest.raises(ValueError, match="share one ladder of frequencies, but band 0 of layer 1 has"):
        rl.areas(replace(scores["entropy"], bands=slower), 2)
