"""A layer's weights are all that it does: queries, keys, outputs and logits follow from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import tiny
import torch
from double import Double
from families import FAMILIES

from ropelens.hosts import LensHost, host_of
from ropelens.hosts.load import has_hooked_transformer, hooked_from
from ropelens.hosts.weights import Ends, LayerWeights, ends, layer_weights, reading, require_qk

# One of each way to lay out projections and norms; all families are checked when their weights are read.
CASES = [
    (family, host)
    for family, hosts in {
        "llama": "transformers bridge hooked",
        "gpt_neox": "transformers bridge hooked",
        "qwen2": "transformers",
        "phi3": "transformers bridge",
        "phi": "bridge",
        "gptj": "transformers hooked",
        "gemma2": "transformers bridge",
        "olmo2": "transformers bridge",
        "olmo3": "hooked",
        "exaone4": "transformers",
        "glm": "transformers",
        "cohere": "transformers",
        "gpt_oss": "bridge hooked",
    }.items()
    for host in hosts.split()
    if host != "hooked" or has_hooked_transformer()
]
NORMED = {"olmo2", "olmo3", "exaone4"}  # queries and keys


def make(family: str, host: str) -> Any:
    model = tiny.varied(family)
    return (
        model
        if host == "transformers"
        else tiny.bridge(model)
        if host == "bridge"
        else hooked_from(model, None)
    )


def stream(host: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """The residual stream before each layer and after the last."""
    model = host.model
    if not isinstance(host, LensHost):
        blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 2)
    else:
        blocks = model.blocks
    seen: list[torch.Tensor] = []
    handles = [
        b.register_forward_pre_hook(
            lambda m, args, kw: seen.append(args[0] if args else kw["hidden_states"]), with_kwargs=True
        )
        for b in blocks
    ]
    handles.append(
        blocks[1].register_forward_hook(
            lambda m, args, out: seen.append(out[0] if isinstance(out, tuple) else out)
        )
    )
    host.run(ids, None)
    for handle in handles:
        handle.remove()
    return seen


def turned(x: torch.Tensor, spec: Any) -> torch.Tensor:
    """Rotated by the definition, as complex numbers."""
    out = x.clone()
    for inv_freq, (a, b) in zip(spec.rotation.inv_freq, spec.rotation.pairs, strict=True):
        angle = torch.arange(x.shape[1], dtype=torch.float64)[None, :, None] * inv_freq
        z = torch.complex(x[..., a], x[..., b]) * torch.polar(torch.ones_like(angle), angle)
        out[..., a], out[..., b] = spec.rotation.amplitude * z.real, spec.rotation.amplitude * z.imag
    return out


@pytest.mark.parametrize(("family", "name"), CASES)
def test_queries_keys_and_logits_follow_from_the_weights(family: str, name: str):
    seen = {}
    with Double(), torch.no_grad():
        host, ids = host_of(make(family, name)), tiny.ids(1)
        with host.observing([0, 1], lambda layer, q, k, mask, sound: seen.update({layer: (q, k)})):
            x = stream(host, ids)
        logits = host.run(ids, None)
        found, last = [layer_weights(host, layer) for layer in (0, 1)], ends(host)
    # The rotation's buffers are float32: 24 positions times 2**-24, of entries of up to about 10.
    close = {"rtol": 0, "atol": 1e-4}
    for layer, w in enumerate(found):
        assert w.qk_norm == (family in NORMED)
        assert w.k.shape[0] == FAMILIES[family].kv_heads
        read = x[layer] if w.norm is None else w.norm(x[layer])
        for weight, bias, shown in ((w.q, w.q_bias, seen[layer][0]), (w.k, w.k_bias, seen[layer][1])):
            rebuilt = torch.einsum("bpm,hmd->bphd", read, weight) + (0 if bias is None else bias)
            if not w.qk_norm:
                torch.testing.assert_close(turned(rebuilt, host.certificate.layers[layer]), shown, **close)
    torch.testing.assert_close(x[0], last.embedding[ids], rtol=0, atol=1e-10)
    rebuilt = (last.norm(x[2]) @ last.unembedding + (0 if last.bias is None else last.bias)) * last.scale
    if last.softcap:
        rebuilt = last.softcap * (rebuilt / last.softcap).tanh()
    torch.testing.assert_close(rebuilt, logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", ["gemma2", "olmo2"])
def test_what_attention_adds_to_the_stream(family: str):
    """With a norm after it, by a model whose MLPs add nothing."""
    model = tiny.varied(family)
    with Double(), torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.zero_()
        host, ids = host_of(model), tiny.ids(1)
        taken = []
        handle = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
            lambda m, args: taken.append(args[0])
        )
        x = stream(host, ids)
        handle.remove()
        w = layer_weights(host, 0)
        assert w.after is not None
        out = torch.einsum("bphd,hdm->bpm", taken[0].unflatten(-1, (6, 8)), w.o)
        torch.testing.assert_close(w.after(out), x[1] - x[0], rtol=0, atol=1e-10)
        folded = w.folded()
        again = torch.einsum("bphd,hdm->bpm", taken[0].unflatten(-1, (6, 8)), folded.o) / w.after.divisor(out)
        torch.testing.assert_close(again, x[1] - x[0], rtol=0, atol=1e-10)


def tensors(found: LayerWeights | Ends) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(found).items() if isinstance(value, torch.Tensor)}


def assert_equal(found: list[dict[str, torch.Tensor]], names: Iterable[str]) -> None:
    """Plain model and bridge exactly; HookedTransformer up to the float32 in which it keeps norms."""
    first, *others = found
    for name in names:
        for other, atol in zip(others, (1e-12, 2**-22, 2**-22), strict=True):
            torch.testing.assert_close(other[name], first[name], rtol=0, atol=atol)


@tiny.needs_hooked
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_folded_weights_are_equal_on_all_hosts(family: str):
    """HookedTransformer's own folding and centring included: RMS norms and layer norms."""
    folding = make(family, "hooked")
    folding.process_weights_()
    models = [make(family, "transformers"), make(family, "bridge"), make(family, "hooked"), folding]
    with Double(), torch.no_grad():
        hosts = [host_of(model) for model in models]
        assert layer_weights(hosts[0], 0).norm.gain is not None
        assert layer_weights(hosts[3], 0).norm.gain is None
        for layer in (0, 1):
            assert_equal([tensors(layer_weights(host, layer).folded()) for host in hosts], "qkvo")
        assert_equal([tensors(ends(host).folded()) for host in hosts], ("embedding", "unembedding"))


def test_repeated_heads():
    w = layer_weights(host_of(tiny.varied("llama")), 1)
    assert (w.n_heads, w.group) == (6, 3)
    repeated = w.repeated()
    for head in range(6):
        assert torch.equal(repeated.k[head], w.k[head // 3])
        assert torch.equal(repeated.v[head], w.v[head // 3])


def test_norms_of_queries_and_keys_leave_the_ov_circuit():
    w = layer_weights(host_of(tiny.varied("qwen3")), 0)
    assert w.o.shape == (6, 8, 48)
    with pytest.raises(ValueError, match="layer 0: its queries and keys pass norms of their own"):
        require_qk(w)


def test_a_layer_that_does_more_than_its_weights_is_refused():
    model = tiny.varied("llama")
    q_proj = model.model.layers[1].self_attn.q_proj
    q_proj.forward = lambda x: 2 * torch.nn.functional.linear(x, q_proj.weight)
    host = host_of(model)
    layer_weights(host, 0)
    with pytest.raises(
        ValueError, match=r"layer 1: the queries rebuilt from the weights differ .* by \d\.\d"
    ):
        layer_weights(host, 1)


def test_projections_without_a_known_name_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "OUTPUTS", ("another_name",))
    with pytest.raises(ValueError, match="layer 0: LlamaAttention has no projections that ropelens knows by"):
        layer_weights(host_of(tiny.varied("llama")), 0)


def test_an_input_that_is_more_than_embeddings_is_refused():
    model = tiny.varied("llama")
    model.model.embed_tokens.register_forward_hook(lambda m, args, out: out + 1)
    # A user's hook is not the model: it is laid aside.
    ends(host_of(model))
    inner = model.model.embed_tokens.forward
    model.model.embed_tokens.forward = lambda ids: inner(ids) + 1
    with pytest.raises(ValueError, match="the input of layer 0 differs from the tokens' embeddings"):
        ends(host_of(varied_again(model)))


def varied_again(model: Any) -> Any:
    with torch.no_grad():
        model.lm_head.weight += 0  # another certificate
    return model
