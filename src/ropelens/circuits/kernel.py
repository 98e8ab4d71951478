"""The static positional kernel of a head: what its score owes to the distance alone, by band."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from einops import einsum
from jaxtyping import Float64, Int
from torch import Tensor

from ropelens.bands import Bands
from ropelens.circuits.eigenvalues import BLOCK, checked_distances
from ropelens.circuits.patterns import each_layer
from ropelens.hosts import Host, LayerSpec, host_of
from ropelens.hosts.tokens import tokens_of
from ropelens.hosts.weights import ends, layer_weights, require_qk
from ropelens.scores.provenance import facts, tagged

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class PositionalKernel:
    """`scale * qbar_b^T R_b(distance)^T kbar_b`: the score between a mean query and a mean key.

    Attributes:
        content: What queries and keys are the mean of: "embeddings" or "text".
        distances: Tokens from key to query.
        values: In logit units; NaN where a layer has no such band.
        rest: The part of the dims that no band rotates, the same at every distance.
        measured: The mean of each band's part of the scores over all pairs at that distance, None
            without a text. What it has beyond `values` is content: how queries and keys vary together.
        made_from: What it was measured on and how, for `ropelens.plots.provenance`.
    """

    content: str
    bands: Bands
    distances: tuple[int, ...]
    values: Float64[Tensor, "layer head distance band"]
    rest: Float64[Tensor, "layer head"]
    measured: Float64[Tensor, "layer head distance band"] | None
    made_from: dict[str, Any] = field(default_factory=dict)

    def to_frame(self, layer: int, head: int) -> pd.DataFrame:
        """Returns one head's kernel: columns distance, band, wavelength, kernel, and measured with a text."""
        import pandas as pd

        rows = [
            {
                "distance": distance,
                "band": band,
                "wavelength": float(self.bands.wavelength[layer, band]),
                "kernel": float(self.values[layer, head, i, band]),
            }
            | ({} if self.measured is None else {"measured": float(self.measured[layer, head, i, band])})
            for i, distance in enumerate(self.distances)
            for band in range(self.bands.n_bands)
            if self.bands.exists[layer, band]
        ]
        return tagged(pd.DataFrame(rows), self.made_from)


def positional_kernel(
    model: Any,
    text: str | list[str] | Int[Tensor, "batch pos"] | None = None,
    *,
    distances: Sequence[int] = tuple(range(64)),
    attention_mask: Tensor | None = None,
    tokenizer: Any = None,
) -> PositionalKernel:
    """The static positional kernel of every head: its score as a function of distance and band alone.

    `scale * qbar_b^T R_b(distance)^T kbar_b`, with qbar and kbar the means of queries and keys before the
    rotation. With a text, they are means over its tokens but the first of each row, as the model makes
    them. Without, they are means over the vocabulary of what the weights, biases included, make of the
    normalised embeddings: exact for the first layer under uniform tokens, and for later layers what the
    direct path from the embeddings gives.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        text: Strings or token ids to take the means over; None for the embeddings.
        distances: Tokens from key to query.
        attention_mask: For token ids: nonzero where a token is real.
        tokenizer: For strings; `model.tokenizer` by default.

    Returns:
        Logit units, scale included, before any softcap.

    Raises:
        ValueError: If the text is shorter than the distances, the model's attention cannot be rebuilt, or,
            without a text, its queries and keys cannot be read from the weights.

    Example:
        ```python
        kernel = rl.circuits.positional_kernel(model, distances=range(16))
        kernel.values[layer, head].sum(-1)  # by distance
        ```
    """
    host = host_of(model)
    offsets = tuple(checked_distances(list(distances)))
    n_heads = max(spec.n_heads for spec in host.certificate.layers)
    shape = (host.n_layers, n_heads, len(offsets), host.bands.n_bands)
    values = torch.full(shape, math.nan, dtype=torch.float64)
    rest = torch.full(shape[:2], math.nan, dtype=torch.float64)
    measured = None if text is None else values.clone()

    def fill(layer: int, q: Tensor, k: Tensor) -> None:
        spec = host.certificate.layers[layer]
        own, heads = len(spec.rotation.pairs), spec.n_heads
        found, other = _kernel(q, k, spec, offsets)
        values[layer, :heads, :, :own], rest[layer, :heads] = found.cpu(), other.cpu()

    if text is None:
        for layer, (q, k) in enumerate(_expected(host)):
            fill(layer, q, k)
        known = facts("PositionalKernel", host.fingerprint, "", content="embeddings")
        return PositionalKernel("embeddings", host.bands, offsets, values, rest, None, known)
    tokens = tokens_of(host, text, attention_mask, tokenizer)
    documents = tokens.documents()
    if min(ids.shape[1] for ids in documents) < max(offsets) + 2:
        raise ValueError(
            f"expected texts of at least {max(offsets) + 2} tokens for distances up to {max(offsets)}, got "
            f"{min(ids.shape[1] for ids in documents)}: pass longer texts or smaller distances"
        )
    sums: dict[int, tuple[Tensor, Tensor]] = {}
    pairs = torch.tensor([sum(ids.shape[1] - 1 - d for ids in documents) for d in offsets])
    at: dict[int, Tensor] = {}

    def take(layer: int, q: Tensor, k: Tensor) -> None:
        spec = host.certificate.layers[layer]
        # The first token is where attention rests; its query and key are like no others.
        q, k = q[0].double(), k[0].double().repeat_interleave(q.shape[2] // k.shape[2], 1)
        q_sum, k_sum = turned_back(q, spec)[1:].sum(0), turned_back(k, spec)[1:].sum(0)
        known = sums.get(layer, (0, 0))
        sums[layer] = known[0] + q_sum, known[1] + k_sum
        here = _by_distance(q[1:], k[1:], spec, offsets)
        at[layer] = at[layer] + here if layer in at else here

    for ids in documents:
        each_layer(host, ids, take)
    n_tokens = sum(ids.shape[1] - 1 for ids in documents)
    for layer, (q, k) in sums.items():
        fill(layer, q / n_tokens, k / n_tokens)
        assert measured is not None
        own = at[layer].shape[-1]
        measured[layer, : len(q), :, :own] = at[layer].cpu() / pairs[:, None]
    known = facts("PositionalKernel", host.fingerprint, tokens.digest, content="text")
    return PositionalKernel("text", host.bands, offsets, values, rest, measured, known)


def turned_back(x: Float64[Tensor, "pos head d_head"], spec: LayerSpec) -> Float64[Tensor, "pos head d_head"]:
    """Queries or keys before the rotation, the first at position 0; the rotation's amplitude stays in."""
    first, second = spec.rotation.pairs.to(x.device).unbind(-1)
    pos = torch.arange(len(x), dtype=torch.float64, device=x.device)
    angle = (pos[:, None] * spec.rotation.inv_freq.to(x.device))[:, None]
    out, a, b = x.clone(), x[..., first], x[..., second]
    out[..., first], out[..., second] = (
        a * angle.cos() + b * angle.sin(),
        b * angle.cos() - a * angle.sin(),
    )
    return out


def _kernel(
    q: Float64[Tensor, "head d_head"],
    k: Float64[Tensor, "head d_head"],
    spec: LayerSpec,
    distances: Sequence[int],
) -> tuple[Float64[Tensor, "head distance band"], Float64[Tensor, " head"]]:
    first, second = spec.rotation.pairs.to(q.device).unbind(-1)
    angle = torch.tensor(distances, dtype=torch.float64)[:, None] * spec.rotation.inv_freq
    cos, sin = angle.cos().to(q.device), angle.sin().to(q.device)
    (qa, qb), (ka, kb) = ((x[:, None, first], x[:, None, second]) for x in (q, k))
    # q^T R(distance)^T k, in each band's plane
    values = (qa * ka + qb * kb) * cos + (qa * kb - qb * ka) * sin
    other = torch.ones(spec.d_head, dtype=torch.bool, device=q.device)
    other[first], other[second] = False, False
    return spec.scale * values, spec.scale * (q * k)[:, other].sum(-1)


def _by_distance(
    q: Float64[Tensor, "pos head d_head"],
    k: Float64[Tensor, "pos head d_head"],
    spec: LayerSpec,
    distances: Sequence[int],
) -> Float64[Tensor, "head distance band"]:
    """Each band's part of the scores, summed over all pairs at each distance."""
    pairs, n = spec.rotation.pairs.to(q.device), len(q)
    q, k = q[..., pairs], k[..., pairs]
    found = [
        einsum(q[d:], k[: n - d], "pos head band two, pos head band two -> head band") for d in distances
    ]
    return spec.scale * torch.stack(found, 1)


def _expected(host: Host) -> list[tuple[Tensor, Tensor]]:
    """Mean query and key of each layer over the vocabulary, by head, the rotation's amplitude in."""
    first = ends(host).embedding
    means: dict[object, Tensor] = {}  # of what the divisor leaves, the same for all norms of a kind
    found = []
    for layer in range(host.n_layers):
        w = layer_weights(host, layer)
        require_qk(w)
        kind = None if w.norm is None else (w.norm.kind, w.norm.eps)
        if kind not in means:
            total = torch.zeros(first.shape[1], dtype=torch.float64, device=first.device)
            for rows in first.split(BLOCK):
                rows = rows.double()
                total += (rows if w.norm is None else rows / w.norm.divisor(rows)).sum(0)
            means[kind] = total / len(first)
        mean, amplitude = means[kind], _amplitudes(host.certificate.layers[layer]).to(first.device)
        if w.norm is not None:
            mean = w.norm.linear(mean)
            mean = mean if w.norm.bias is None else mean + w.norm.bias.double()
        w = w.repeated()

        def through(weight: Tensor, bias: Tensor | None, x: Tensor = mean, a: Tensor = amplitude) -> Tensor:
            out = einsum(x, weight.double(), "d_model, head d_model d_head -> head d_head")
            return a * (out if bias is None else out + bias.double())

        found.append((through(w.q, w.q_bias), through(w.k, w.k_bias)))
    return found


def _amplitudes(spec: LayerSpec) -> Float64[Tensor, " d_head"]:
    found = torch.ones(spec.d_head, dtype=torch.float64)
    found[spec.rotation.pairs.flatten()] = spec.rotation.amplitude
    return found
