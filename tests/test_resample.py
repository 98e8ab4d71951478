"""Frequencies drawn where the scores are: the density, the clamping, and the controls."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from scipy import stats

import ropelens as rl
from ropelens.interventions.resample import clamped
from ropelens.scores import BandScores


def scores_of(values: torch.Tensor, bands: rl.Bands | None = None) -> BandScores:
    layers, _, n = values.shape
    bands = rl.Bands.uniform(layers, 2 * n, base=100.0) if bands is None else bands
    return BandScores(
        metric="activation",
        bands=bands,
        values=values.double(),
        rest=torch.zeros(values.shape[:2]).double(),
        squares=values.double() ** 2,
        n_queries=1,
        n_pairs=torch.ones(layers, dtype=torch.int64),
        n_tokens=1,
        n_documents=1,
    )


def random_scores(layers: int = 2, heads: int = 3, bands: int = 6, seed: int = 0) -> BandScores:
    generator = torch.Generator().manual_seed(seed)
    return scores_of(torch.rand(layers, heads, bands, generator=generator) ** 3)


def counts_of(new: torch.Tensor, old: torch.Tensor) -> np.ndarray:
    """How often each old frequency was drawn, over all but the last axis."""
    return (new.reshape(-1, 1) == old).sum(0).numpy()


def test_clamping_by_hand():
    """0, 1, ..., 10: the 10th percentile is 1 and the 80th is 8; 5% is half way from 0 to 1."""
    scores = scores_of(torch.arange(11.0).reshape(1, 1, 11))
    assert clamped(scores, (10, 80))[0, 0].tolist() == [1, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8]
    assert clamped(scores, (5, 100))[0, 0].tolist() == [0.5, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def test_percentiles_are_of_all_layers_heads_and_bands_and_of_sizes():
    values = torch.tensor([[[-1.0, 2.0]], [[100.0, 3.0]]])
    low, high = np.percentile([1, 2, 100, 3], [25, 75])
    expected = torch.tensor([[[low, 2.0]], [[high, 3.0]]]).double()
    torch.testing.assert_close(clamped(scores_of(values), (25, 75)), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("per", ["layer", "head", "model"])
def test_the_empirical_density_is_the_stated_probability(per: str):
    """Chi-square over 2,000 seeds, whose draws are independent; a false alarm in a thousand."""
    scores = random_scores()
    weight, old = clamped(scores, (5, 95)), scores.bands.inv_freq[0]
    drawn = torch.stack([rl.resample_frequencies(scores, per=per, seed=s) for s in range(2000)])
    if per == "model":
        assert torch.equal(drawn[:, 0], drawn[:, 1])
        cases = [(drawn[:, 0], weight.sum((0, 1)))]
    elif per == "layer":
        cases = [(drawn[:, layer], weight[layer].sum(0)) for layer in range(2)]
    else:
        cases = [(drawn[:, layer, head], weight[layer, head]) for layer in range(2) for head in range(3)]
    for new, weights in cases:
        expected = (weights / weights.sum()).numpy() * new.numel()
        assert stats.chisquare(counts_of(new, old), expected).pvalue > 1e-3 / len(cases)


def test_draws_of_layers_are_independent():
    """A seed that drew the same numbers for every layer would make equal layers equal."""
    same = scores_of(torch.rand(1, 3, 16, generator=torch.Generator().manual_seed(1)).expand(2, 3, 16))
    new = rl.resample_frequencies(same, seed=0)
    assert not torch.equal(new[0], new[1])


def test_quantiles_hold_each_frequency_as_often_as_expected_to_within_one():
    scores = random_scores(bands=32)
    new, old = rl.resample_frequencies(scores, method="quantile"), scores.bands.inv_freq[0]
    for layer in range(2):
        weights = clamped(scores, (5, 95))[layer].sum(0)
        expected = (weights / weights.sum()).numpy() * 32
        assert np.abs(counts_of(new[layer], old) - expected).max() < 1
    assert torch.equal(new, rl.resample_frequencies(scores, method="quantile", seed=7))


def test_equal_scores_give_quantiles_that_are_the_ladder():
    scores = scores_of(torch.ones(1, 2, 8))
    assert torch.equal(rl.resample_frequencies(scores, method="quantile"), scores.bands.inv_freq)


def test_shuffled_probabilities_are_the_same_ones_elsewhere():
    """Over many seeds each band is as likely as any other; within one, one is as likely as before."""
    peaked = torch.full((1, 1, 8), 0.01)
    peaked[..., 2] = 1
    scores = scores_of(peaked)
    drawn = torch.stack([rl.resample_frequencies(scores, shuffle=True, seed=s) for s in range(400)])
    counts = torch.stack([(row[..., None] == scores.bands.inv_freq[0]).sum(1)[0] for row in drawn])
    strongest = counts.argmax(-1)
    assert stats.chisquare(np.bincount(strongest, minlength=8)).pvalue > 1e-3
    chance = clamped(scores, (5, 95)).flatten().sort(descending=True).values
    expected = 8 * float(chance[0] / chance.sum())
    assert counts.max(-1).values.double().mean() == pytest.approx(expected, rel=0.05)


def test_sorted_from_fast_to_slow_and_the_same_for_a_seed():
    scores = random_scores(bands=16)
    new = rl.resample_frequencies(scores, seed=3)
    assert new.dtype == torch.float64
    assert (new.diff(dim=-1) <= 0).all()
    assert torch.equal(new, rl.resample_frequencies(scores, seed=3))
    assert not torch.equal(new, rl.resample_frequencies(scores, seed=4))


def test_bands_that_a_layer_does_not_have_stay_away():
    ladder = rl.Bands.uniform(1, 8, base=100.0)
    some = (ladder.inv_freq[0], ladder.pairs[0], 0, 1.0)
    few = (ladder.inv_freq[0, :2], ladder.pairs[0, :2], 4, 1.0)
    bands = rl.Bands.stack([some, few, (torch.zeros(0), torch.zeros(0, 2), 8, 1.0)])
    values = torch.rand(3, 2, 4, generator=torch.Generator().manual_seed(0)).double()
    values[~bands.exists[:, None].expand(3, 2, 4)] = math.nan
    new = rl.resample_frequencies(scores_of(values, bands))
    assert torch.equal(new.isnan(), bands.inv_freq.isnan())
    assert set(new[1, :2].tolist()) <= set(ladder.inv_freq[0, :2].tolist())
    with pytest.raises(ValueError, match='expected layers with the same bands for per="model"'):
        rl.resample_frequencies(scores_of(values, bands), per="model")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "random"}, 'expected method="sample" or "quantile", got \'random\''),
        ({"per": "band"}, 'expected per="layer", "head" or "model", got \'band\''),
        ({"clamp": (95, 5)}, "percentiles with 0 <= low < high <= 100, got (95, 5)"),
        ({"clamp": (5, 101)}, "percentiles with 0 <= low < high <= 100, got (5, 101)"),
    ],
)
def test_what_cannot_be_asked(arguments: dict, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        rl.resample_frequencies(random_scores(), **arguments)


def test_a_layer_without_any_score_is_refused():
    values = torch.ones(2, 1, 4)
    values[1] = 0
    with pytest.raises(ValueError, match="expected a band with a score above 0 in every layer"):
        rl.resample_frequencies(scores_of(values), clamp=(0, 100))


def test_scores_of_another_model_are_refused():
    import tiny

    one, other = tiny.plain("llama", seed=0), tiny.plain("llama", seed=1)
    scores = rl.band_activation(one, tiny.ids())
    assert rl.resample_frequencies(scores, model=one).shape == (2, 4)
    with pytest.raises(ValueError, match="another model than the one given"):
        rl.resample_frequencies(scores, model=other)
