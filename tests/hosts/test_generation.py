"""Generation with a key-value cache: each pass shows few queries; sums are those of the whole text."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import tiny
import torch
from double import Double
from test_families import make
from torch import Tensor

import ropelens as rl
from ropelens.hosts import host_of

METRICS = ("entropy", "activation", "norm_product")
TOL = 1e-7
RENAMED = "ignore:`past_key_values` is deprecated:FutureWarning"  # by the bridge itself
# Causal; windows, whose caches drop keys, with sinks or a softcap; a cache by its old name.
CASES = [
    (family, host)
    for host, families in (
        ("transformers", ("llama", "gpt_oss", "gemma2", "gpt_neox")),
        ("bridge", ("llama", "gpt_oss", "gemma3", "gpt_neox")),
        ("hooked", ("llama", "gpt_oss")),
    )
    for family in families
    if host in tiny.HOSTS
]
pytestmark = pytest.mark.filterwarnings(RENAMED)


def empty_cache(model: Any, host: str, batch: int) -> Any:
    if host == "hooked":
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        return TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", batch)
    from transformers import DynamicCache

    return DynamicCache(config=getattr(model, "original_model", model).config)


def put_in(model: Any, host: str, cache: Any, ids: Tensor, mask: Tensor, start: int, stop: int) -> None:
    """Runs the tokens from `start` to `stop` of texts whose earlier ones are in the cache."""
    new = ids[:, start:stop]
    if host == "hooked":
        model(new, past_kv_cache=cache, attention_mask=mask[:, start:stop])
        return
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:stop]
    settings = {"position_ids": positions, "past_key_values": cache, "use_cache": True}
    model(new, attention_mask=mask[:, :stop], **settings)


def stepped(model: Any, host: str, ids: Tensor, mask: Tensor, steps: tuple[int, ...]) -> None:
    """Runs texts in passes of so many tokens each, with the host's own cache."""
    cache = empty_cache(model, host, len(ids))
    assert sum(steps) == ids.shape[1]
    for start, stop in pairwise(accumulate((0, *steps))):
        put_in(model, host, cache, ids, mask, start, stop)


def whole(model: Any, ids: Tensor, mask: Tensor) -> dict[str, rl.BandScores]:
    with rl.observe(model, METRICS, tol=TOL) as seen:
        host_of(model).run(ids, mask > 0)
    return seen.scores


def assert_same(found: dict[str, rl.BandScores], expected: dict[str, rl.BandScores]) -> None:
    for metric in METRICS:
        a, b = found[metric], expected[metric]
        for name in ("values", "rest", "squares", "rest_squares"):
            x, y = (getattr(scores, name).nan_to_num() for scores in (a, b))
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6 * float(y.abs().max()))
        assert (a.n_queries, a.n_documents, a.n_tokens) == (b.n_queries, b.n_documents, b.n_tokens)
        assert torch.equal(a.n_pairs, b.n_pairs)


@pytest.mark.parametrize(("family", "host"), CASES)
def test_a_text_in_passes_measures_as_in_one(family: str, host: str):
    """A prompt, single tokens, and several at once; then a second text, which begins anew."""
    model = make(family, host)
    ids, other = tiny.ids(1, 12), tiny.ids(1, 5, seed=5)
    with Double(), torch.no_grad():
        with rl.observe(model, METRICS, tol=TOL) as seen:
            stepped(model, host, ids, torch.ones_like(ids), (7, 1, 1, 2, 1))
            stepped(model, host, other, torch.ones_like(other), (4, 1))
        parts = [whole(model, text, torch.ones_like(text)) for text in (ids, other)]
    expected = {metric: parts[0][metric].merge(parts[1][metric]) for metric in METRICS}
    assert_same(seen.scores, expected)


@pytest.mark.parametrize(("family", "host"), [c for c in CASES if c[0] in ("llama", "gpt_oss")])
def test_a_padded_batch_in_passes_measures_as_in_one(family: str, host: str):
    """Pads on the left, as for generation, of which the first pass of one row has nothing but."""
    model, ids = make(family, host), tiny.ids(3, 11)
    mask = torch.ones_like(ids)
    mask[1, :3], mask[2, :8] = 0, 0
    with Double(), torch.no_grad():
        with rl.observe(model, METRICS, tol=TOL) as seen:
            stepped(model, host, ids, mask, (7, 1, 2, 1))
        expected = whole(model, ids, mask)
    assert_same(seen.scores, expected)
    assert expected["entropy"].n_documents == 3


@pytest.mark.parametrize("host", tiny.HOSTS)
def test_pads_on_the_right_in_passes_measure_as_in_one(host: str):
    model, ids = make("llama", host), tiny.ids(3, 12)
    mask = torch.ones_like(ids)
    mask[1, 9:], mask[2, 4:] = 0, 0
    with Double(), torch.no_grad():
        with rl.observe(model, METRICS, tol=TOL) as seen:
            stepped(model, host, ids, mask, (6, 4, 2))
        assert_same(seen.scores, whole(model, ids, mask))


def generated(model: Any, host: str, ids: Tensor, mask: Tensor) -> Tensor:
    if host == "transformers":
        return model.generate(ids, attention_mask=mask, use_cache=True, max_new_tokens=5, do_sample=False)
    extra = {"attention_mask": mask} if host == "bridge" and not bool(mask.all()) else {}
    settings = {"max_new_tokens": 5, "do_sample": False, "stop_at_eos": False, "verbose": False}
    return model.generate(ids, use_past_kv_cache=True, return_type="tokens", **settings, **extra)


@pytest.mark.parametrize("host", tiny.HOSTS)
def test_generation_is_measured_as_its_final_text(host: str):
    """But for the last token, which is never put in."""
    model, ids = make("mistral", host), tiny.ids(2, 6)
    with Double(), torch.no_grad():
        with rl.observe(model, METRICS, tol=TOL) as seen:
            text = generated(model, host, ids, torch.ones_like(ids))[:, :-1]
        assert text.shape[1] > ids.shape[1] + 2
        for metric, measure in (("entropy", rl.band_entropy), ("activation", rl.band_activation)):
            expected = measure(model, text, tol=TOL)
            largest = expected.values.abs().max()
            assert (seen.scores[metric].values - expected.values).abs().max() < 1e-6 * largest
            assert seen.scores[metric].n_queries == expected.n_queries == text.numel()


def test_generation_from_a_padded_batch_is_measured_as_its_final_texts():
    model, ids = make("gemma3", "transformers"), tiny.ids(2, 10)
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    with Double(), torch.no_grad():
        with rl.observe(model, METRICS, tol=TOL) as seen:
            text = generated(model, "transformers", ids, mask)[:, :-1]
        mask = torch.nn.functional.pad(mask, (0, text.shape[1] - 10), value=1)
        assert_same(seen.scores, whole(model, text, mask))


@pytest.mark.parametrize("host", tiny.HOSTS)
def test_a_cache_from_before_the_block_is_refused(host: str):
    model, ids = make("llama", host), tiny.ids(1, 8)
    host_of(model)  # a bridge's cache works from here on
    cache, mask = empty_cache(model, host, 1), torch.ones_like(ids)
    with torch.no_grad():
        put_in(model, host, cache, ids, mask, 0, 6)
        with (
            rl.observe(model),
            pytest.raises(ValueError, match=r"^layer 0: expected .* from its first pass on"),
        ):
            put_in(model, host, cache, ids, mask, 6, 8)


def test_a_cache_of_fixed_size_is_refused():
    """Its keys are those of all places, filled or not."""
    from transformers import StaticCache

    model, ids = make("llama", "transformers"), tiny.ids(1, 8)
    cache = StaticCache(config=model.config, max_cache_len=16)
    message = r"^layer 0: expected the keys of 0 tokens seen before and 8 new, got 16 keys"
    with torch.no_grad(), rl.observe(model), pytest.raises(ValueError, match=message):
        model(ids, past_key_values=cache, use_cache=True)


def test_rows_that_change_places_are_refused():
    """As the beams of a beam search do: what is one document then?"""
    model, ids = make("llama", "transformers"), tiny.ids(2, 8)
    with torch.no_grad(), rl.observe(model) as seen:
        cache = model(ids, use_cache=True).past_key_values
        cache.reorder_cache(torch.tensor([1, 0]))
        model(ids[:, :1], past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="or a beam search mixes texts"):
        _ = seen.scores


def test_a_mask_that_hides_earlier_tokens_is_refused():
    """It may hide those that were pads in the pass before, and no others."""
    model, ids = make("llama", "transformers"), tiny.ids(1, 8)
    mask = torch.ones(1, 9, dtype=torch.int64)
    mask[0, :3] = 0
    with torch.no_grad(), rl.observe(model) as seen:
        cache = model(ids, use_cache=True).past_key_values
        model(ids[:, :1], attention_mask=mask, past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="not those of its queries and keys under the certified mask"):
        _ = seen.scores


def test_the_first_keys_part_is_kept_apart_in_passes_too():
    model, ids = make("mistral", "bridge"), tiny.ids(1, 14)
    found = []
    with Double(), torch.no_grad():
        for steps in ((14,), (9, 1, 4)):
            acc = rl.EntropyAccumulator(tol=TOL, split_first=True)
            with model.hooks(fwd_hooks=rl.entropy_hooks(model, into=acc)):
                stepped(model, "bridge", ids, torch.ones_like(ids), steps)
            found.append(acc.result())
    for name in ("first", "first_rest", "later_squares", "later_rest_squares"):
        one, many = (getattr(scores, name) for scores in found)
        torch.testing.assert_close(many, one, rtol=1e-6, atol=1e-7)


def test_sums_by_position_need_whole_texts():
    model, ids = make("llama", "bridge"), tiny.ids(1, 14)
    acc = rl.EntropyAccumulator(edges=(4,))
    hooks = rl.entropy_hooks(model, into=acc)
    message = "^layer 0: expected whole texts, to count positions in, got 4 queries for 14 keys"
    with torch.no_grad(), model.hooks(fwd_hooks=hooks), pytest.raises(ValueError, match=message):
        stepped(model, "bridge", ids, torch.ones_like(ids), (10, 4))
