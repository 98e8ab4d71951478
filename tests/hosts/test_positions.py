"""Edits know where each row stands: turned back from there, it is what it was before the rotation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tiny
import torch
from double import Double

from ropelens.hosts import Host, LayerSpec, host_of
from ropelens.hosts.load import hooked_from

HOSTS = ["transformers", "bridge", pytest.param("hooked", marks=tiny.needs_hooked)]
LENGTH = 12
# GPT-J and HookedTransformer keep tables of cos and sin in single precision: half an eps of each of two
# dims below 10 in size.
SINGLE = 10 * torch.finfo(torch.float32).eps
Row = tuple[int, str, int, int]  # layer, q or k, row of the batch, position


def make(family: str, host: str) -> Any:
    model = tiny.plain(family)
    if host == "transformers":
        return model
    return tiny.bridge(model) if host == "bridge" else hooked_from(model, None)


def turned_back(x: torch.Tensor, position: int, spec: LayerSpec) -> torch.Tensor:
    """One row [head, d_head] before the rotation, band by band."""
    x = x.clone()
    for inv_freq, (first, second) in zip(spec.rotation.inv_freq, spec.rotation.pairs.tolist(), strict=True):
        angle = position * inv_freq
        a, b = x[:, first].clone(), x[:, second].clone()
        x[:, first] = (a * angle.cos() + b * angle.sin()) / spec.rotation.amplitude
        x[:, second] = (b * angle.cos() - a * angle.sin()) / spec.rotation.amplitude
    return x


@contextmanager
def recorded(host: Host) -> Iterator[dict[Row, torch.Tensor]]:
    """Keeps every row of queries and keys that edits are shown, turned back; a row must never change."""
    found: dict[Row, torch.Tensor] = {}

    def edit_of(layer: int, name: str) -> Any:
        def look(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            assert at.shape == x.shape[:2]
            assert at.dtype == torch.int64
            for batch, row in enumerate(at.tolist()):
                pads = PADS[batch] if len(row) >= LENGTH else 0
                for index, position in list(enumerate(row))[pads:]:
                    back = turned_back(x[batch, index].detach(), position, host.certificate.layers[layer])
                    known = found.setdefault((layer, name, batch, position), back)
                    torch.testing.assert_close(back, known, rtol=0, atol=1e-9)
            return x

        return look

    layers = range(host.n_layers)
    with host.editing({n: edit_of(n, "q") for n in layers}, {n: edit_of(n, "k") for n in layers}):
        yield found


PADS = [0, 4]


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = tiny.ids(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.int64)
    ids[1, : PADS[1]] = 0
    mask[1, : PADS[1]] = 0
    return ids, mask


def before_the_rotation(host: str, texts: list[torch.Tensor]) -> dict[Row, torch.Tensor]:
    """The same from TransformerLens's own hook_q and hook_k, each text alone and without pads."""
    model = make("llama", "bridge" if host == "transformers" else host)
    found: dict[Row, torch.Tensor] = {}
    for batch, text in enumerate(texts):
        cache = model.run_with_cache(text)[1]
        for layer, name in ((layer, name) for layer in range(2) for name in "qk"):
            rows = cache[f"blocks.{layer}.attn.hook_{name}"][0].detach()
            for position, row in enumerate(rows.unflatten(-1, (-1, 8)) if rows.ndim == 2 else rows):
                found[layer, name, batch, position] = row
    return found


def check(found: dict[Row, torch.Tensor], expected: dict[Row, torch.Tensor], host: str) -> None:
    assert found.keys() == expected.keys()
    for row, value in expected.items():
        torch.testing.assert_close(found[row], value, rtol=0, atol=SINGLE if host == "hooked" else 1e-9)


@pytest.mark.parametrize("host", HOSTS)
def test_turned_back_from_its_position_a_row_is_hook_q_or_hook_k(host: str):
    seen_by = host_of(make("llama", host))
    ids, mask = padded()
    with Double(), torch.no_grad():
        expected = before_the_rotation(host, [ids[:1], ids[1:, PADS[1] :]])
        with recorded(seen_by) as found:
            seen_by.run(ids, mask > 0)
    check(found, expected, host)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("host", HOSTS)
def test_so_it_is_in_generation(host: str, cached: bool):
    model = make("llama", host)
    seen_by = host_of(model)
    ids, mask = padded()
    with Double(), torch.no_grad():
        with recorded(seen_by) as found:
            if host == "hooked":
                whole = generated_by_hooked(model, ids, mask, cached)
            elif host == "bridge":
                whole = generated_by_bridge(model, ids, mask, cached)
            else:
                whole = model.generate(
                    ids, attention_mask=mask, max_new_tokens=5, min_new_tokens=5, use_cache=cached
                )
        last = whole.shape[1] - 1  # the last token was never read
        expected = before_the_rotation(host, [whole[:1, :last], whole[1:, PADS[1] : last]])
    assert last == LENGTH + 4
    check(found, expected, host)


def generated_by_hooked(model: Any, ids: torch.Tensor, mask: torch.Tensor, cached: bool) -> torch.Tensor:
    """Its own generate knows no mask."""
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

    cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 2) if cached else None
    new = ids
    for _ in range(5):
        logits = model(new if cached else ids, attention_mask=mask, past_kv_cache=cache)
        new = logits[:, -1:].argmax(-1)
        ids, mask = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
        if cache is not None:
            mask = torch.ones_like(new)  # the cache remembers the rest
    return ids


def generated_by_bridge(model: Any, ids: torch.Tensor, mask: torch.Tensor, cached: bool) -> torch.Tensor:
    settings = {"max_new_tokens": 5, "do_sample": False, "stop_at_eos": False, "verbose": False}
    return model.generate(ids, attention_mask=mask, use_past_kv_cache=cached, **settings)


@pytest.mark.parametrize("family", ["phi", "yarn", "glm", "gemma3", "smollm3", "gptj", "gpt_neox"])
def test_in_the_first_layer_a_token_is_the_same_wherever_it_stands(family: str):
    model = tiny.plain(family)
    host = host_of(model)
    ids, mask = padded()
    alone: dict[int, dict[str, torch.Tensor]] = {}

    def keep(name: str) -> Any:
        def look(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            assert not at.any()
            for row, token in enumerate(ids.unique().tolist()):
                alone.setdefault(token, {})[name] = turned_back(
                    x[row, 0].detach(), 0, host.certificate.layers[0]
                )
            return x

        return look

    with Double(), torch.no_grad():
        with host.editing({0: keep("q")}, {0: keep("k")}):
            host.run(ids.unique()[:, None], None)
        with recorded(host) as found:
            host.run(ids, mask > 0)
    for batch in range(2):
        for position, token in enumerate(ids[batch, PADS[batch] :].tolist()):
            for name in "qk":
                atol = SINGLE if family == "gptj" else 1e-9
                torch.testing.assert_close(
                    found[0, name, batch, position], alone[token][name], rtol=0, atol=atol
                )


def test_a_cache_with_room_for_keys_to_come_is_refused():
    model = tiny.plain("llama", attention="sdpa")
    same = {0: lambda k, at: k}
    settings: dict[str, Any] = {"max_new_tokens": 3, "cache_implementation": "static"}
    with (
        host_of(model).editing(keys=same),
        pytest.raises(ValueError, match="a key-value cache that ends"),
    ):
        model.generate(tiny.ids(1), disable_compile=True, **settings)


def test_a_model_without_a_rotary_module_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ropelens.hosts.positions._is_rotary", lambda module: False)
    model = tiny.plain("llama")
    host = host_of(model)
    with pytest.raises(ValueError, match="a rotary module that takes"), host.editing({0: lambda q, at: q}):
        pass
    with host.editing():
        pass
    assert model.config._attn_implementation == "eager"
