"""Collection: the same numbers as the one-call metrics, in one process or many, whole or in pieces."""

import pytest
import tiny
import torch

import ropelens as rl
from ropelens.scores import BandScores


@pytest.fixture(scope="module")
def model():
    return tiny.bridge(tiny.plain("gemma2"))


def close(a: BandScores, b: BandScores, rtol: float = 1e-10) -> None:
    """Everything that two scores hold is the same, the data they name too."""
    assert (a.metric, a.n_queries, a.n_tokens, a.n_documents, a.data, a.settings) == (
        b.metric,
        b.n_queries,
        b.n_tokens,
        b.n_documents,
        b.data,
        b.settings,
    )
    for name in ("values", "rest", "squares", "rest_squares", "n_pairs", "residual", "bound"):
        mine, theirs = getattr(a, name), getattr(b, name)
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=1e-12, equal_nan=True)


def test_collect_is_the_sum_of_the_one_call_metrics(model) -> None:
    ids = tiny.ids(batch=5, pos=24)
    scores = rl.collect(model, ids, ("entropy", "activation", "fisher"), seed=3, progress=False)
    assert list(scores) == ["entropy", "activation", "fisher"]
    one = {
        "entropy": rl.band_entropy(model, ids),
        "activation": rl.band_activation(model, ids),
        "fisher": rl.band_fisher(model, ids, seed=3),
    }
    for metric, expected in one.items():
        found = scores[metric]
        torch.testing.assert_close(found.values, expected.values, rtol=1e-10, atol=1e-12, equal_nan=True)
        torch.testing.assert_close(found.stderr(), expected.stderr(), rtol=1e-8, atol=1e-12, equal_nan=True)
        assert (found.n_tokens, found.n_documents) == (expected.n_tokens, expected.n_documents) == (120, 5)
