"""Faults of TransformerLens that are mended, and that what has no fault is left as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from double import Double

import ropelens as rl
from ropelens.hosts import host_of
from ropelens.hosts.bridge import repair as repair_bridge

GREEDY = {"max_new_tokens": 12, "do_sample": False, "stop_at_eos": False, "verbose": False}
RENAMED = "ignore:`past_key_values` is deprecated:FutureWarning"  # by the bridge itself


def generated(model: Any, cached: bool) -> torch.Tensor:
    return model.generate(tiny.ids(1, 10), use_past_kv_cache=cached, return_type="tokens", **GREEDY)


def fired(model: Any, names: list[str]) -> list[str]:
    seen: list[str] = []
    model.run_with_hooks(tiny.ids(), fwd_hooks=[(n, lambda t, hook: seen.append(hook.name)) for n in names])
    return seen


# Hooks that never fire ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt_neox", "phi3", "falcon"])
def test_rotary_hooks_of_a_joint_qkv_fire_once_after_the_rotation(family: str):
    model, untouched = tiny.bridge(tiny.plain(family)), tiny.bridge(tiny.plain(family))
    names = ["blocks.0.attn.hook_rot_q", "blocks.1.attn.hook_rot_k"]
    assert fired(untouched, names) == []  # else the repair is needed no more
    repair_bridge(model)
    repair_bridge(model)  # once only
    assert fired(model, names) == names
    assert torch.equal(model(tiny.ids()), untouched(tiny.ids()))


def test_their_edits_reach_the_logits():
    model = tiny.bridge(tiny.plain("gpt_neox"))
    host, plain = host_of(model), host_of(tiny.plain("gpt_neox"))
    turn = torch.linspace(0.5, 1.5, 8).double()
    with Double(), torch.no_grad():
        logits = []
        for seen_by in (host, plain):
            with seen_by.editing(queries={1: lambda q, at: q * turn}, keys={0: lambda k, at: k * turn}):
                logits.append(seen_by.run(tiny.ids(1), None))
        bare = plain.run(tiny.ids(1), None)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-11)
    assert (logits[0] - bare).abs().max() > 0.01


def test_attention_without_a_fault_is_left_as_it_is():
    model, untouched = tiny.bridge(tiny.plain("llama")), tiny.bridge(tiny.plain("llama"))
    host_of(model)
    assert "_apply_rotary_pos_emb" not in vars(model.blocks[0].attn)
    assert torch.equal(model(tiny.ids()), untouched(tiny.ids()))
    for patched in ("_apply_rotary_pos_emb", "_update_kv_cache"):  # nor is another object of its class
        assert patched not in vars(untouched.blocks[0].attn)


def test_versions_without_a_fault_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ropelens.hosts.bridge._faults", lambda: (False, False))
    for family in ("gpt_neox", "llama"):
        model = tiny.bridge(tiny.plain(family))
        before = dict(vars(model.blocks[0].attn))
        repair_bridge(model)
        assert vars(model.blocks[0].attn).keys() == before.keys()


@pytest.mark.parametrize("family", ["olmo2", "olmo3"])
def test_a_bridge_that_cannot_run_in_bfloat16_is_refused(family: str):
    """TransformerLens's own fault; where it is gone, this is needed no more."""
    model = tiny.bridge(tiny.plain(family, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="dtype"):
        model(tiny.ids())
    message = r"^expected a TransformerBridge that runs in torch.bfloat16, got its own error .* in float32"
    with pytest.raises(ValueError, match=message):
        rl.Bands.of(model)
    assert rl.inspect(model)["refused"].notna().all()


# Cached generation --------------------------------------------------------------------------------


@pytest.mark.filterwarnings(RENAMED)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_cached_generation_is_uncached_generation(family: str):
    model, untouched = tiny.bridge(tiny.plain(family)), tiny.bridge(tiny.plain(family))
    expected = generated(untouched, cached=False)
    assert not torch.equal(generated(untouched, cached=True), expected)  # else it is needed no more
    repair_bridge(model)
    assert torch.equal(generated(model, cached=True), expected)


@pytest.mark.filterwarnings(RENAMED)
def test_cached_generation_that_was_right_stays_so():
    """GPT-NeoX still hands its cache over under the old name."""
    model = tiny.bridge(tiny.plain("gpt_neox"))
    expected = generated(model, cached=True)
    repair_bridge(model)
    assert torch.equal(generated(model, cached=True), expected)
    assert torch.equal(generated(model, cached=False), expected)


@pytest.mark.filterwarnings(RENAMED)
def test_edits_hold_in_cached_generation():
    model, turn = tiny.bridge(tiny.plain("llama")), torch.linspace(0.2, 3, 8).double()
    edits = {0: lambda x, at: x * turn}
    bare = generated(model, cached=False)
    with host_of(model).editing(queries=edits, keys=edits):
        cached = generated(model, cached=True)
        assert torch.equal(generated(model, cached=False), cached)
    assert not torch.equal(cached, bare)


# Buffers beyond 2,048 positions -------------------------------------------------------------------


def long_hooked(seed: int = 0) -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    return HookedTransformer(
        HookedTransformerConfig(
            n_layers=1,
            d_model=8,
            n_ctx=4096,
            d_head=8,
            n_heads=1,
            d_vocab=tiny.VOCAB,
            act_fn="gelu",
            positional_embedding_type="rotary",
            rotary_dim=8,
            rotary_adjacent_pairs=False,
            attn_only=True,
            seed=seed,
            dtype=torch.float64,
        )
    )


@tiny.needs_hooked
def test_frequencies_that_were_set_hold_beyond_2048_positions():
    model = long_hooked()
    host_of(model)
    attn = model.blocks[0].attn
    turn = torch.tensor([0.5, 0.05, 0.0, 0.0005]).double().repeat(2)
    angle = torch.arange(2048)[:, None] * turn
    attn.rotary_cos, attn.rotary_sin = 1.1 * angle.cos(), 1.1 * angle.sin()
    with torch.no_grad():
        model(tiny.ids(1, 2100), return_type=None)
    assert len(attn.rotary_cos) == 4096
    angle = torch.arange(4096)[:, None] * turn
    torch.testing.assert_close(attn.rotary_cos, 1.1 * angle.cos(), rtol=0, atol=1e-11)
    torch.testing.assert_close(attn.rotary_sin, 1.1 * angle.sin(), rtol=0, atol=1e-11)
    found = rl.Bands.of(model)
    torch.testing.assert_close(found.inv_freq[0], turn[:4], rtol=1e-12, atol=0)
    assert float(found.amplitude[0]) == pytest.approx(1.1)


@tiny.needs_hooked
def test_frequencies_of_the_cfg_grow_as_ever():
    model, untouched = long_hooked(), long_hooked()
    host_of(model)
    with torch.no_grad():
        for each in (model, untouched):
            each(tiny.ids(1, 2100), return_type=None)
    for name in ("rotary_cos", "rotary_sin"):
        assert torch.equal(getattr(model.blocks[0].attn, name), getattr(untouched.blocks[0].attn, name))


# HookedTransformer against the model that it was made from ------------------------------------------


@tiny.needs_hooked
@pytest.mark.parametrize("family", ["linear", "yarn", "longrope", "llama3", "llama"])
def test_a_scaling_that_is_left_out_is_warned_of(family: str, tmp_path: Path):
    """As for a HookedTransformer of the user's own, whose config lies in the hub's cache."""
    import warnings

    from ropelens.hosts.load import hooked_from

    model = hooked_from(tiny.plain("llama3" if family == "llama3" else "llama"), None)
    tiny.plain(family).config.save_pretrained(tmp_path)
    model.cfg.tokenizer_name = str(tmp_path)
    with torch.no_grad():
        model.W_E.add_(0.01)  # so that it is certified anew
    if family in ("llama", "llama3"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rl.Bands.of(model)
    else:
        with pytest.warns(UserWarning, match=f"does not turn as .* whose {family} scaling it leaves"):
            rl.Bands.of(model)


# Frequencies that depend on the length ----------------------------------------------------------------


@pytest.mark.parametrize("host", ["transformers", "bridge"])
@pytest.mark.parametrize("family", ["longrope", "dynamic"])
def test_texts_that_are_turned_with_other_frequencies_are_refused(family: str, host: str):
    plain = tiny.plain(family)
    model = plain if host == "transformers" else tiny.bridge(plain)
    longest = 32 if family == "longrope" else 128
    rl.band_entropy(model, tiny.ids(1, longest))
    if family == "longrope":  # beyond its context a model is refused anyway
        with pytest.raises(ValueError, match=r"^expected at most 32 tokens, got 33: this model's scal"):
            rl.band_entropy(model, tiny.ids(1, 33))
    with rl.observe(model), pytest.raises(ValueError, match=f"expected at most {longest} tokens, got"):
        model(tiny.ids(1, longest + 1))
    assert rl.band_entropy(model, tiny.ids()).residual.max() < 1e-3
