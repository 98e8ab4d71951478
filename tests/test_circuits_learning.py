"""Losses by position, and in-context learning."""

import math

import numpy as np
import pytest
import tiny
import torch
from double import Double

import ropelens as rl
from attention_only import attention_only
from ropelens.circuits import PositionLosses, in_context_learning_score, loss_by_position


@pytest.fixture(autouse=True)
def double():
    with Double():
        yield


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_losses_are_those_of_prefixes_run_one_by_one(batch):
    model = tiny.plain("llama").requires_grad_(False)
    ids = tiny.ids(batch=3, pos=9)
    found = loss_by_position(model, ids, batch=batch)
    assert found.values[:, 0].isnan().all()
    for row in range(3):
        for p in range(1, 9):
            logits = model(ids[row : row + 1, :p]).logits[0, -1]
            expected = -logits.log_softmax(-1)[ids[row, p]]
            assert float(found.values[row, p]) == pytest.approx(float(expected), abs=1e-10)


def test_every_host_gives_the_same_losses():
    ids = tiny.ids(batch=2, pos=9)
    expected = loss_by_position(attention_only(2), ids).values
    found = loss_by_position(tiny.bridge(attention_only(2)), ids).values
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9, equal_nan=True)


def losses(values, documents=None):
    values = torch.tensor(values, dtype=torch.float64)
    return PositionLosses(values, documents or tuple(map(str, range(len(values)))))


def test_errors_are_over_documents():
    values = [[math.nan, 1.0], [math.nan, 3.0], [math.nan, 2.0], [math.nan, 6.0]]
    alone = losses(values)
    assert float(alone.stderr[1]) == pytest.approx(np.std([1, 3, 2, 6], ddof=1) / 2)
    # windows twice over, of the same documents, say no more than once
    twice = losses(values * 2, tuple("abcd") * 2)
    assert float(twice.stderr[1]) == pytest.approx(float(alone.stderr[1]))
    assert losses(values, tuple("aaaa")).stderr.isnan().all()


def test_the_score_is_late_minus_early():
    values = [[math.nan, 5.0, 4.0, 3.0, 2.0], [math.nan, 6.0, 4.0, 2.0, 1.0]]
    score = in_context_learning_score(losses(values), early=1, late=4)
    assert score == (-4.0, pytest.approx(1.0))
    wide = in_context_learning_score(losses(values), early=2, late=3, width=1).score
    assert wide == pytest.approx((3 + 7 / 3) / 2 - (4 + 4) / 2)


@pytest.mark.parametrize(("early", "late", "width"), [(0, 3, 0), (3, 3, 0), (1, 5, 0), (1, 3, 1)])
def test_positions_that_windows_lack_are_named(early, late, width):
    with pytest.raises(ValueError, match="expected 1 <= early < late < 5"):
        in_context_learning_score(losses([[math.nan, 1, 2, 3, 4]]), early, late, width=width)


def test_windows_of_several_documents_are_refused():
    class Letters:
        bos_token_id = None

        def encode(self, text, **options):
            return [ord(c) % 50 for c in text]

        def get_vocab(self):
            return {}

    packed = rl.windows(["abc", "defgh"], Letters(), context=8, fit="pack")
    with pytest.raises(ValueError, match="expected one document a window, got 2"):
        loss_by_position(tiny.plain("llama"), packed)


def test_windows_beyond_the_context_are_refused():
    with pytest.raises(ValueError, match="expected windows of at most 64 tokens"):
        loss_by_position(attention_only(1), torch.zeros(1, 65, dtype=torch.int64))
