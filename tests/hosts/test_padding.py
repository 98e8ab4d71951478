"""Several texts in one batch, padded on either side: the same as each alone, measured and edited."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from double import Double
from test_families import make
from torch import Tensor

import ropelens as rl
from ropelens.hosts import host_of

LENGTHS = (14, 9, 3)
CASES = [
    (family, host)
    for host in tiny.HOSTS
    for family in ("llama", "gpt_neox", "gpt_oss", "gemma3")
    if not (host == "hooked" and family == "gemma3")
]


def padded(side: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """Returns texts of different lengths, and the same as one batch with its mask."""
    texts = [tiny.ids(1, n, seed=n) for n in LENGTHS]
    ids = torch.zeros(len(texts), max(LENGTHS), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        n = text.shape[1]
        place = slice(0, n) if side == "right" else slice(ids.shape[1] - n, None)
        ids[row, place], mask[row, place] = text[0], 1
    return texts, ids, mask


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("family", "host"), CASES)
def test_a_padded_batch_measures_as_each_text_alone(family: str, host: str, side: str):
    model = make(family, host)
    texts, ids, mask = padded(side)
    with Double():
        for measure in (rl.band_entropy, rl.band_activation):
            alone = [measure(model, text, tol=1e-7) for text in texts]
            whole = measure(model, ids, attention_mask=mask, tol=1e-7)
            total = torch.stack([scores.values for scores in alone]).sum(0)
            torch.testing.assert_close(whole.values, total, rtol=0, atol=1e-6)
            assert (whole.n_documents, whole.n_queries) == (3, sum(LENGTHS))
            assert torch.equal(whole.n_pairs, torch.stack([scores.n_pairs for scores in alone]).sum(0))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("family", "host"), CASES)
def test_a_padded_batch_is_edited_as_each_text_alone(family: str, host: str, side: str):
    seen_by = host_of(make(family, host))
    texts, ids, mask = padded(side)
    turn = torch.linspace(0.2, 2, 8).double()
    edits = {0: lambda x, at: x * turn, 1: lambda x, at: x * turn.flip(0)}
    with Double(), torch.no_grad(), seen_by.editing(queries=edits, keys=edits):
        whole = seen_by.run(ids, mask > 0)
        assert whole is not None
        for row, text in enumerate(texts):
            alone = seen_by.run(text, None)
            assert alone is not None
            torch.testing.assert_close(whole[row, mask[row] > 0], alone[0], rtol=0, atol=1e-9)


@tiny.needs_hooked
def test_edits_hold_in_cached_generation_of_a_hooked_transformer():
    """It rotates all keys again at every step, and each is edited once."""
    model: Any = make("llama", "hooked")
    ids, turn = tiny.ids(1, 10), torch.linspace(0.2, 3, 8).double()
    edits = {0: lambda x, at: x * turn}
    settings = {"max_new_tokens": 12, "do_sample": False, "stop_at_eos": False, "verbose": False}
    with host_of(model).editing(queries=edits, keys=edits):
        cached = model.generate(ids, use_past_kv_cache=True, **settings)
        assert torch.equal(model.generate(ids, use_past_kv_cache=False, **settings), cached)
    assert not torch.equal(model.generate(ids, **settings), cached)
