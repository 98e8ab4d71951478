"""Weights that were checked: what each layer does to a few tokens must be all that its weights do."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from ropelens.hosts.base import Host
from ropelens.hosts.certify import rebuild_output, rebuild_scores, score_tolerance
from ropelens.hosts.layer import LayerSpec
from ropelens.hosts.masks import visible_keys
from ropelens.hosts.once import once
from ropelens.hosts.weights.modules import here
from ropelens.hosts.weights.reading import read_ends, read_layer, read_norms
from ropelens.hosts.weights.stream import watching, watching_attention
from ropelens.hosts.weights.tensors import Ends, LayerWeights, Norm

PROBE = 12  # tokens of the text that weights are checked on


def layer_weights(host: Host, layer: int) -> LayerWeights:
    """Returns the weights of one layer's attention, checked against what the layer does.

    On first use the model runs a few tokens: queries, keys and attention outputs must be those that the
    weights make of the residual stream. Of queries and keys with norms of their own (`qk_norm`) only the
    outputs are checked.

    Raises:
        ValueError: If the projections cannot be named, or are not all that the layer does.
    """
    found = _checked(host)
    if layer in found.errors:
        raise ValueError(found.errors[layer])
    norm, after = found.norms[layer]
    return replace(read_layer(host, layer), norm=norm, after=after)


def ends(host: Host) -> Ends:
    """Returns the embedding and the unembedding, checked against the first layer's input and the logits.

    Raises:
        ValueError: If they are not all that the model does before its first and after its last layer.
    """
    found = _checked(host)
    if found.ends is None:
        raise ValueError(found.errors[-1])
    return found.ends


@dataclass(frozen=True)
class _Found:
    """What was read of a model, and a sentence for each layer (-1: the ends) that does more than that."""

    norms: list[tuple[Norm | None, Norm | None]]
    ends: Ends | None
    errors: dict[int, str]


@once
def _checked(host: Host) -> _Found:
    """Runs a few tokens and compares what each layer did with what its weights make of its input."""
    generator = torch.Generator().manual_seed(1)
    length = min(PROBE, host.context or PROBE)
    ids = torch.randint(host.vocab_size, (1, length), generator=generator).to(host.device)
    layers = range(host.n_layers)
    states: dict[int, Tensor] = {}
    made: dict[int, Tensor] = {}
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(layer: int, q: Tensor, k: Tensor, mask: Tensor, sound: Tensor) -> None:
        seen[layer] = here(host, q).double(), here(host, k).double()

    def keep_state(layer: int, x: Tensor) -> None:
        states[layer] = x.double()

    def keep_made(layer: int, x: Tensor) -> None:
        made[layer] = x.double()

    with torch.no_grad(), host.alone():
        with ExitStack() as stack:
            stack.enter_context(watching(host, keep_state))
            for layer in layers:
                stack.enter_context(watching_attention(host, layer, partial(keep_made, layer)))
            stack.enter_context(host.observing(list(layers), keep))
            logits = host.run(ids, None)
        assert logits is not None
        norms: list[tuple[Norm | None, Norm | None]] = []
        errors: dict[int, str] = {}
        for layer in layers:
            try:
                norms.append(read_norms(host, layer))
                _check_layer(host, layer, norms[layer], states[layer], made[layer], *seen[layer])
            except ValueError as error:
                norms[layer:] = [(None, None)]
                errors[layer] = str(error)
        found = None
        try:
            last, logits = states[host.n_layers], here(host, logits)
            found = _check_ends(host, ids, states[0], last, logits.double())
        except ValueError as error:
            errors[-1] = str(error)
    return _Found(norms, found, errors)


def _check_layer(
    host: Host,
    layer: int,
    norms: tuple[Norm | None, Norm | None],
    x: Tensor,
    made: Tensor,
    q: Tensor,
    k: Tensor,
) -> None:
    w = read_layer(host, layer)
    spec, dtype = host.certificate.layers[layer], host.embedding.dtype
    read = x if norms[0] is None else norms[0](x)

    def project(weight: Tensor, bias: Tensor | None) -> Tensor:
        out = einsum(read, weight.double(), "batch pos m, head m d -> batch pos head d")
        return out if bias is None else out + bias.double()

    visible = visible_keys(x.shape[1], spec.window, x.device)[None, None]
    z = rebuild_output(rebuild_scores(q, k, spec), project(w.v, w.v_bias), visible, spec)
    out = einsum(z, w.o.double(), "batch pos head d, head d m -> batch pos m")
    compared = [("attention outputs", out if w.o_bias is None else out + w.o_bias.double(), made)]
    if not w.qk_norm:
        keys = _turned(project(w.k, w.k_bias), spec)
        keys = keys.repeat_interleave(k.shape[2] // keys.shape[2], 2)  # a bridge may show them repeated
        compared = [("queries", _turned(project(w.q, w.q_bias), spec), q), ("keys", keys, k), *compared]
    for what, rebuilt, shown in compared:
        if problem := _differ(rebuilt, shown, dtype):
            raise ValueError(
                f"layer {layer}: the {what} rebuilt from the weights differ from the model's own by "
                f"{problem:.1e} of their range, so that this {host.kind}'s circuits cannot be read from its "
                "weights"
            )


def _check_ends(host: Host, ids: Tensor, first: Tensor, last: Tensor, logits: Tensor) -> Ends:
    rows = host.embedding.detach()[ids].double()
    factor = float((first * rows).sum() / rows.square().sum())
    if abs(factor - 1) < 1e-6:
        factor = 1.0
    found, dtype = read_ends(host, factor), host.embedding.dtype
    if problem := _differ(found.embedding[ids].double(), first, dtype):
        raise ValueError(
            f"the input of layer 0 differs from the tokens' embeddings by {problem:.1e} of its range: what "
            "else goes into it is not in the weights that ropelens reads"
        )
    x = last if found.norm is None else found.norm(last)
    rebuilt = x @ found.unembedding.double()
    rebuilt = (rebuilt if found.bias is None else rebuilt + found.bias.double()) * found.scale
    if found.softcap is not None:
        rebuilt = found.softcap * torch.tanh(rebuilt / found.softcap)
    if problem := _differ(rebuilt, logits, dtype):
        raise ValueError(
            f"the logits rebuilt from the last layer's output differ from the model's own by {problem:.1e} "
            "of their range: what else happens to them is not in the weights that ropelens reads"
        )
    return found


def _differ(rebuilt: Tensor, shown: Tensor, dtype: torch.dtype) -> float | None:
    """Returns by how much of its range a tensor is missed, None if by no more than is accepted."""
    spread = max(float(shown.max() - shown.min()), torch.finfo(torch.float32).tiny)
    error = float((rebuilt - shown).abs().max()) / spread
    return None if error <= score_tolerance(dtype) else error


def _turned(
    x: Float[Tensor, "batch pos head d_head"], spec: LayerSpec
) -> Float[Tensor, "batch pos head d_head"]:
    """Returns queries or keys as the layer rotates them, the first at position 0."""
    rotation, out = spec.rotation, x.clone()
    first, second = rotation.pairs.to(x.device).unbind(-1)
    pos = torch.arange(x.shape[1], dtype=torch.float64, device=x.device)
    angle = (pos[:, None] * rotation.inv_freq.to(x.device))[:, None, :]
    cos, sin = (rotation.amplitude * f(angle) for f in (torch.cos, torch.sin))
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = (a * cos - b * sin).to(x.dtype), (a * sin + b * cos).to(x.dtype)
    return out
