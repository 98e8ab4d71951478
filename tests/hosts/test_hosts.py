"""What a host reads of a model is what the model does, whichever host it is."""

from __future__ import annotations

import pytest
import tiny
import torch
from jaxtyping import TypeCheckError

import ropelens as rl
from ropelens.hosts import host_of
from ropelens.hosts.certify import rebuild_scores
from ropelens.hosts.layer import LayerClaim


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_bands_and_rest_add_up_to_the_models_scores(family: str):
    model = tiny.bridge(tiny.plain(family))
    host = host_of(model)
    seen = {}
    names = host.points(1)
    model.run_with_hooks(
        tiny.ids(), fwd_hooks=[(n, lambda t, hook: seen.update({hook.name: t})) for n in names]
    )
    q, k, scores = (seen[name].detach() for name in names)
    spec = host.certificate.layers[1]
    rotated = spec.rotation.pairs.flatten().tolist()
    rest = [d for d in range(spec.d_head) if d not in rotated]
    parts = [
        rebuild_scores(q[..., dims], k[..., dims], LayerClaim(spec.scale)) for dims in spec.rotation.pairs
    ]
    parts.append(rebuild_scores(q[..., rest], k[..., rest], LayerClaim(spec.scale)))
    logits = torch.stack(parts).sum(0)
    if spec.softcap:
        logits = spec.softcap * (logits / spec.softcap).tanh()
    shown = scores > torch.finfo(scores.dtype).min / 2
    torch.testing.assert_close(logits[shown], scores[shown], rtol=0, atol=1e-12)


def test_rotation_keeps_the_norm_of_each_pair():
    """Half-split and interleaved layouts confused would not."""
    for family in ("llama", "glm"):
        model = tiny.bridge(tiny.plain(family))
        host = host_of(model)
        seen = {}
        same = torch.full((1, 20), 5)
        name = host.points(0)[0]
        model.run_with_hooks(same, fwd_hooks=[(name, lambda t, hook, out=seen: out.update(q=t.detach()))])
        for pair in host.certificate.layers[0].rotation.pairs:
            norm = seen["q"][0][..., pair].norm(dim=-1)
            # cos and sin are float32 tables: their squares add up to 1 within 2 units in the last place.
            torch.testing.assert_close(norm, norm[:1].expand_as(norm), rtol=2**-22, atol=0)


@tiny.needs_hooked
@pytest.mark.parametrize("adjacent", [False, True])
def test_hooked_transformer_with_partial_rotary(adjacent: bool):
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    cfg = HookedTransformerConfig(
        n_layers=2,
        d_model=32,
        n_ctx=64,
        d_head=16,
        n_heads=2,
        d_vocab=tiny.VOCAB,
        act_fn="gelu",
        positional_embedding_type="rotary",
        rotary_dim=4,
        rotary_adjacent_pairs=adjacent,
        seed=0,
        dtype=torch.float64,
    )
    host = host_of(HookedTransformer(cfg))
    spec = host.certificate.layers[1]
    torch.testing.assert_close(
        spec.rotation.inv_freq, torch.tensor([1.0, 0.01]).double(), rtol=2**-23, atol=0
    )
    assert spec.rotation.pairs.tolist() == ([[0, 1], [2, 3]] if adjacent else [[0, 2], [1, 3]])
    assert host.bands.n_rest.tolist() == [12, 12]
    scores = rl.band_entropy(host.model, tiny.ids(), tol=1e-10)
    assert scores.residual is not None
    assert scores.residual.max() < 1e-10


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "glm"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("n_pad", [0, 1, 5])
def test_pads_change_nothing(family: str, side: str, n_pad: int):
    model, ids = tiny.bridge(tiny.plain(family)), tiny.ids(batch=1, pos=14)
    pads = torch.zeros(1, n_pad, dtype=torch.int64)
    row = [pads, ids] if side == "left" else [ids, pads]
    padded = torch.cat(row, 1)
    mask = torch.cat([torch.zeros_like(t) if t is pads else torch.ones_like(t) for t in row], 1)
    for measure in (rl.band_entropy, rl.band_activation):
        alone = measure(model, ids, tol=1e-11)
        both = measure(model, padded, attention_mask=mask, tol=1e-11)
        torch.testing.assert_close(both.values, alone.values, rtol=1e-9, atol=1e-9)
        assert (both.n_queries, both.n_tokens, both.data) == (14, 14, alone.data)
        assert torch.equal(both.n_pairs, alone.n_pairs)


def test_each_query_head_reads_its_own_key_head():
    """Against the model's own attention: grouped heads tiled instead of repeated would differ."""
    plain = tiny.plain("llama")
    model = tiny.bridge(plain)
    patterns = {}
    model.run_with_hooks(
        tiny.ids(1), fwd_hooks=[("blocks.0.attn.hook_pattern", lambda t, hook: patterns.update(p=t.detach()))]
    )
    for head in range(6):
        found = rl.band_attribution(model, tiny.ids(1), layer=0, head=head, query=-1, tol=1e-11)
        # The model's own softmax is float32, whatever its weights are.
        torch.testing.assert_close(found.pattern, patterns["p"][0, head, -1], rtol=0, atol=2**-23)


# Certification ------------------------------------------------------------------------------------


def test_a_model_without_rope_is_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    plain = GPT2LMHeadModel(
        GPT2Config(
            n_embd=24, n_layer=1, n_head=2, vocab_size=tiny.VOCAB, n_positions=64, attn_implementation="eager"
        )
    )
    with pytest.raises(ValueError, match=r"hook_rot_q|no rotary position embedding"):
        rl.Bands.of(tiny.bridge(plain.eval()))


def test_scores_that_cannot_be_rebuilt_are_refused_by_layer():
    model = tiny.bridge(tiny.plain("llama"))
    # What happens between the keys' hook and the scores is not seen, a norm after the rotation for instance.
    model.hook_dict["blocks.1.attn.hook_attn_scores"].forward = lambda scores: scores * 1.01
    with pytest.raises(
        ValueError, match=r"layer 1: the scores rebuilt .* differ from the model's own by .*e-0"
    ):
        rl.Bands.of(model)


def test_other_position_schemes_are_refused():
    model = tiny.bridge(tiny.plain("llama"))
    point = model.hook_dict["blocks.0.attn.hook_rot_q"]
    point.forward = lambda x: x * (1 + torch.arange(x.shape[-2])[:, None] / 10)
    with pytest.raises(ValueError, match="layer 0: its queries do not turn with position as RoPE would"):
        rl.Bands.of(model)


@pytest.mark.parametrize("first_row", [0, 4])
def test_another_mask_than_the_certified_one_is_refused(first_row: int):
    """Key 3 hidden from everyone is no pad, being in the middle; hidden from later queries still less."""
    model = tiny.bridge(tiny.plain("llama"))

    def hide(scores: torch.Tensor, hook: object) -> torch.Tensor:
        scores = scores.clone()
        scores[..., first_row:, 3] = torch.finfo(scores.dtype).min
        return scores

    model.add_hook("blocks.0.attn.hook_attn_scores", hide)
    with rl.observe(model) as seen:
        model(tiny.ids())
    with pytest.raises(ValueError, match="layer 0: the model's scores are not those of its queries and keys"):
        _ = seen.scores


def test_the_certificate_is_made_once_and_anew_when_weights_change():
    model = tiny.bridge(tiny.plain("llama"))
    first = host_of(model).certificate
    assert host_of(model).certificate is first
    with torch.no_grad():
        next(model.original_model.parameters()).mul_(2)
    assert host_of(model).certificate is not first


def test_users_hooks_sleep_during_certification():
    model, calls = tiny.bridge(tiny.plain("llama")), []
    model.add_hook("blocks.0.attn.hook_rot_q", lambda q, hook: calls.append(hook.name))
    rl.Bands.of(model)
    assert calls == []
    model(tiny.ids())
    assert calls == ["blocks.0.attn.hook_rot_q"]


def test_other_objects_are_refused():
    with pytest.raises(
        ValueError,
        match="expected a HookedTransformer, a TransformerBridge or a transformers model, got Linear",
    ):
        rl.Bands.of(torch.nn.Linear(2, 2))


def test_fingerprints_tell_models_apart_and_know_a_model_in_another_precision():
    from ropelens.scores import same_model

    one = host_of(tiny.bridge(tiny.plain("llama"))).fingerprint
    again = host_of(tiny.bridge(tiny.plain("llama", dtype=torch.float32))).fingerprint
    other = host_of(tiny.bridge(tiny.plain("llama", seed=1))).fingerprint
    assert same_model(one, again) is None
    assert same_model(one, other) is not None


def test_shapes_are_checked_in_the_tests():
    with pytest.raises(TypeCheckError):
        rebuild_scores(torch.zeros(2, 3, 1, 4), torch.zeros(2, 3, 1, 5), LayerClaim(1.0))
