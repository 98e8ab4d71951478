"""Reads the weights off a model's modules, as each library lays them out; nothing is checked here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ropelens.hosts.base import Host
from ropelens.hosts.certify import score_tolerance
from ropelens.hosts.layer import LayerSpec
from ropelens.hosts.lens import LensHost
from ropelens.hosts.weights.modules import (
    BEFORE,
    FINAL,
    KEYS,
    OUTPUTS,
    QUERIES,
    VALUES,
    acts,
    attention_of,
    block_of,
    here,
    named,
    trunk_of,
)
from ropelens.hosts.weights.tensors import Ends, LayerWeights, Norm

NORMED_AFTER = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")  # HookedTransformer applies their ln1 last


def read_layer(host: Host, layer: int) -> LayerWeights:
    """Returns the weights of a layer, its norms left out.

    Raises:
        ValueError: If the projections cannot be named.
    """
    attn = attention_of(host, layer)
    if host.kind == "HookedTransformer":
        grouped = "_" if hasattr(attn, "_W_K") else ""
        keys = (getattr(attn, grouped + name) for name in ("W_K", "W_V", "b_K", "b_V"))
        k, v, k_bias, v_bias = (here(host, x) for x in keys)
        q, o, q_bias, o_bias = (here(host, x) for x in (attn.W_Q, attn.W_O, attn.b_Q, attn.b_O))
        normed = getattr(attn, "q_norm", None) is not None
        return LayerWeights(layer, q, k, v, o, q_bias, k_bias, v_bias, o_bias, qk_norm=normed)
    if isinstance(host, LensHost):
        module = attn.original_component
        parts = (attn.W_Q, attn.W_K, attn.W_V, attn.W_O, attn.b_Q, attn.b_K, attn.b_V, attn.b_O)
    else:
        module, parts = attn, _of_module(layer, attn, host.certificate.layers[layer])
    q, k, v, o, *biases = (None if x is None else here(host, x) for x in parts)
    assert q is not None and k is not None and v is not None and o is not None  # noqa: PT018
    q_bias, k_bias, v_bias, o_bias = biases
    return LayerWeights(
        layer,
        q,
        k,
        v,
        o,
        q_bias,
        k_bias,
        v_bias,
        o_bias,
        factor=float(getattr(host.text_config, "residual_multiplier", None) or 1.0),
        qk_norm=any(acts(getattr(module, name, None)) for name in ("q_norm", "q_layernorm", "query_norm")),
    )


def _of_module(layer: int, module: Any, spec: LayerSpec) -> tuple[Tensor | None, ...]:
    """Returns q, k, v, o and their biases of a transformers attention module."""
    heads, kv_heads, d_head = spec.n_heads, spec.n_kv_heads, spec.d_head
    out = named(module, OUTPUTS)
    apart = [named(module, names) for names in (QUERIES, KEYS, VALUES)]
    joint, by_head = named(module, ("qkv_proj",)), named(module, ("query_key_value",))
    if out is None or (None in apart and joint is None and by_head is None):
        raise ValueError(
            f"layer {layer}: {type(module).__name__} has no projections that ropelens knows by name, so its "
            "circuits cannot be read from the weights: use a TransformerBridge"
        )
    if by_head is not None:  # GPT-NeoX: query, key and value of a head side by side
        ws = rearrange(by_head.weight, "(head three d) m -> three (head d) m", three=3, d=d_head)
        bs = by_head.bias
        bs = (
            [None] * 3 if bs is None else rearrange(bs, "(head three d) -> three (head d)", three=3, d=d_head)
        )
    elif joint is not None:
        widths = [heads * d_head, kv_heads * d_head, kv_heads * d_head]
        ws = joint.weight.split(widths)
        bs = [None] * 3 if joint.bias is None else joint.bias.split(widths)
    else:
        ws, bs = [m.weight for m in apart], [m.bias for m in apart]
    q, k, v = (rearrange(w, "(head d) m -> head m d", d=d_head) for w in ws)
    biases = (None if b is None else rearrange(b, "(head d) -> head d", d=d_head) for b in bs)
    o = rearrange(out.weight, "m (head d) -> head d m", d=d_head)
    return (q, k, v, o, *biases, out.bias)


def read_norms(host: Host, layer: int) -> tuple[Norm | None, Norm | None]:
    """Returns the norms before a layer's attention and of its output."""
    block = block_of(host, layer)
    if host.kind == "HookedTransformer":
        ln1 = _norm(host, block.ln1)
        if host.model.cfg.original_architecture in NORMED_AFTER:
            return None, ln1
        return ln1, _norm(host, getattr(block, "ln1_post", None))
    own = block.original_component if isinstance(host, LensHost) else block
    # Where there are norms on both sides of the MLP, the one named after the attention is its output's.
    both = hasattr(own, "post_feedforward_layernorm")
    after = getattr(own, "post_attention_layernorm" if both else "post_self_attn_layernorm", None)
    return _norm(host, named(own, BEFORE)), _norm(host, after)


def _norm(host: Host, module: Any) -> Norm | None:
    """Reads a norm off what it does to a few vectors, since classes write their gain as w or as 1 + w."""
    if not acts(module):
        return None
    inner = getattr(module, "original_component", module)
    names = ("variance_epsilon", "eps", "epsilon")
    eps = next(
        (float(e) for m in (inner, module) for n in names if (e := getattr(m, n, None)) is not None), 1e-6
    )
    own = [_parameter((inner, module), names) for names in (("weight", "w"), ("bias", "b"))]
    weight, bias = (None if x is None else here(host, x) for x in own)
    like = host.embedding.detach()
    d_model = like.shape[1]
    place = next((x.device for x in own if x is not None), like.device)
    x = torch.randn(1, 4, d_model, generator=torch.Generator().manual_seed(0)).to(like)
    with torch.no_grad():
        y, shifted = (here(host, module(given.to(place))).double() for given in (x, x + 1))
    x = x.double()
    tolerance = max(score_tolerance(like.dtype), 1e-4) * float(y.abs().max())
    kind = "layer" if bool((y - shifted).abs().max() < tolerance) else "rms"
    gains = [None] if weight is None else [None, weight, 1 + weight.double()]
    tried = [Norm(kind, eps, gain, bias) for gain in gains]
    misses = [float((norm(x) - y).abs().max()) for norm in tried]
    best = min(range(len(tried)), key=misses.__getitem__)
    if misses[best] > tolerance:
        raise ValueError(
            f"{type(inner).__name__} is neither a layer norm nor an RMS norm with its weights as gain, so "
            "the circuits on either side of it cannot be read from the weights"
        )
    found = tried[best]
    return replace(found, bias=None) if bias is not None and not bool(bias.any()) else found


def _parameter(modules: tuple[Any, ...], names: tuple[str, ...]) -> Tensor | None:
    found = (getattr(module, name, None) for module in modules for name in names)
    return next((x.detach() for x in found if isinstance(x, Tensor)), None)


def read_ends(host: Host, factor: float) -> Ends:
    """Returns the embedding and the unembedding.

    Args:
        factor: What embeddings are multiplied with before the first layer reads them.

    Raises:
        ValueError: If the model has no language-model head.
    """
    model = host.model
    if host.kind == "HookedTransformer":
        softcap = model.cfg.output_logits_soft_cap
        final = getattr(model, "ln_final", None)
        return Ends(
            host.embedding.detach(),
            here(host, model.W_U),
            here(host, model.b_U),
            _norm(host, final),
            softcap=softcap if softcap > 0 else None,
        )
    if isinstance(host, LensHost):
        final, unembed = model.ln_final, model.unembed
        u, bias = model.W_U, getattr(unembed, "b_U", None)
    else:
        unembed = model.get_output_embeddings()
        if unembed is None:
            raise ValueError(
                f"expected a model with logits, got {type(model).__name__}, which has no language-model "
                "head: load it with AutoModelForCausalLM"
            )
        final, u, bias = named(trunk_of(host), FINAL), unembed.weight.T, unembed.bias
    config = host.text_config
    division = getattr(config, "logits_scaling", None)  # Granite
    scale = getattr(config, "logit_scale", None)  # Cohere
    return Ends(
        host.embedding.detach() * factor if factor != 1 else host.embedding.detach(),
        here(host, u),
        None if bias is None else here(host, bias),
        _norm(host, final),
        float(scale if scale is not None else 1 / division if division else 1.0),
        getattr(config, "final_logit_softcapping", None),
    )
