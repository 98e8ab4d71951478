"""The statistics of the experiment against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from ropelens.pretrain.analysis import Paired, evenness, tokens_to_reach
from test_resample import scores_of

DIFFERENCES = [-0.01, -0.03, 0.005, -0.02, -0.015, -0.04]


def test_the_interval_is_that_of_a_paired_t_test():
    found = Paired.of(DIFFERENCES)
    expected = stats.ttest_1samp(DIFFERENCES, 0).confidence_interval(0.95)
    assert found.interval == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert found.mean == pytest.approx(np.mean(DIFFERENCES))


@pytest.mark.parametrize("n", [2, 4, 6])
def test_the_detectable_difference_is_found_four_times_in_five(n: int):
    """By simulation: differences that spread with standard deviation 1, 40,000 experiments.

    Three standard errors of the share found: 3 * sqrt(0.8 * 0.2 / 40000) = 0.006.
    """
    draws = np.random.default_rng(0).normal(size=(40_000, n))
    standard = np.linspace(-1, 1, n)
    found = Paired.of(standard / standard.std(ddof=1))
    shifted = stats.ttest_1samp(draws + found.detectable, 0, axis=1).pvalue < 0.05
    assert shifted.mean() == pytest.approx(0.8, abs=0.006)


def test_a_single_seed_shows_nothing():
    found = Paired.of([-1.0])
    assert found.interval == (-math.inf, math.inf)
    assert found.verdict() == (
        "not resolvable at this size: differences below inf are within the spread over seeds"
    )


def test_what_differences_show_in_words():
    assert Paired.of([-0.02, -0.021, -0.019]).verdict() == "seen: lower, by 0.0200"
    assert Paired.of([0.02, 0.021, 0.019]).verdict() == "seen: higher, by 0.0200"
    tight = Paired.of([0.0001, -0.0001, 0.0002, -0.0001])
    assert tight.verdict(0.0089) == "not seen: a difference of 0.0089 would have been found"
    assert Paired.of([0.1, -0.1, 0.05]).verdict(0.0089).startswith("not resolvable at this size")


def test_tokens_to_reach_by_hand():
    curve = [[100.0, 5.0], [200.0, 4.0], [300.0, 4.2], [400.0, 3.0]]
    assert tokens_to_reach(curve, 4.5) == 150
    assert tokens_to_reach(curve, 5.0) == 100
    assert tokens_to_reach(curve, 3.6) == 350
    assert math.isnan(tokens_to_reach(curve, 2.9))


def test_evenness_is_one_where_all_bands_are_alike_and_zero_where_one_has_all():
    values = torch.zeros(3, 2, 4)
    values[0] = 2
    values[1, :, 2] = 5
    values[2, 0, 0] = values[2, 1, 3] = 1  # two bands, half each: log 2 / log 4
    torch.testing.assert_close(evenness(scores_of(values)), torch.tensor([1, 0, 0.5]).double())
