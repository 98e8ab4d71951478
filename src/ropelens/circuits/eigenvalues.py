"""Eigenvalues of the full OV and QK circuits, which no vocabulary-by-vocabulary matrix is made for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Complex128, Float64
from torch import Tensor

from ropelens.hosts import Host, LayerSpec, host_of
from ropelens.hosts.weights import ends, layer_weights, require_qk

BLOCK = 8192  # tokens of the vocabulary at a time

Heads = Iterable[tuple[int, int]]
"""(layer, head) of several heads."""


def ov_eigenvalues(model: Any) -> Complex128[Tensor, "layer head value"]:
    """Eigenvalues of every head's full OV circuit, `E W_V W_O U`: what attending to a token does to logits.

    The matrix is vocabulary by vocabulary, but its eigenvalues other than 0 are those of the small
    `W_O (U E) W_V`, by the cyclic property. Norms are folded: gains (and, of layer norms, means)
    are in, divisors are left out, and biases with them. Of U the mean over tokens is taken off, which no
    probability depends on. Positive: attending to a token raises that token. Source: Elhage et al. 2021,
    "A mathematical framework for transformer circuits".

    It is the direct path from embedding to logits only. Where MLPs come before or after the head, as in
    all but attention-only models, tokens reach it in another basis and eigenvalues say less.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.

    Returns:
        As many eigenvalues a head as it has dims, in no particular order, without a unit; NaN beyond the
        dims that a layer has.

    Raises:
        ValueError: If the weights cannot be named, or are not all that a layer does.

    Example:
        ```python
        values = rl.circuits.ov_eigenvalues(model)
        rl.circuits.eigenvalue_score(values)[layer, head]  # 1: copies, -1: suppresses what it sees
        ```
    """
    host = host_of(model)
    middle = unembedded_embedding(host)
    found = []
    for layer in range(host.n_layers):
        w = layer_weights(host, layer).folded().repeated()
        found.append(torch.linalg.eigvals(w.o @ middle @ w.v).cpu())
    return _stacked(found)


def copying_score(model: Any) -> Float64[Tensor, "layer head"]:
    """How far a head's OV circuit copies: `sum of eigenvalues / sum of their absolute values`.

    Of `ov_eigenvalues`, with all that is said there. Source: Elhage et al. 2021.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.

    Returns:
        From 1 (whatever the head attends to becomes likelier) to -1 (less likely).

    Raises:
        ValueError: If the weights cannot be named, or are not all that a layer does.

    Example:
        ```python
        rl.circuits.copying_score(model)[layer, head]
        ```
    """
    return eigenvalue_score(ov_eigenvalues(model))


def eigenvalue_score(values: Complex128[Tensor, "*heads value"]) -> Float64[Tensor, "*heads"]:
    """Positive against negative eigenvalues: `sum(lambda) / sum(|lambda|)`, of each head.

    Args:
        values: Of `ov_eigenvalues` or `qk_eigenvalues`; NaN is left out.

    Returns:
        From -1 to 1; NaN where there is no eigenvalue other than 0.

    Example:
        >>> eigenvalue_score(torch.tensor([2.0 + 1j, 2.0 - 1j, 0.0], dtype=torch.complex128)).item()
        0.894...
    """
    missing = values.real.isnan()
    total = values.real.masked_fill(missing, 0).sum(-1)
    return total / values.abs().masked_fill(missing, 0).sum(-1)


def qk_eigenvalues(
    model: Any,
    *,
    distance: int | Sequence[int] = 1,
    by_band: bool = False,
    through: Heads = (),
) -> Complex128[Tensor, ...]:
    """Eigenvalues of every head's full QK circuit, `E W_Q R(distance)^T W_K^T E^T`, in logit units.

    The matrix says how far each token attends to each that lies `distance` before it; positive
    eigenvalues: to tokens like itself. Scale included, norms folded, biases left out, eigenvalues from
    the small `R^T W_K^T (E^T E) W_Q`. With `through`, keys are what those heads wrote of the token that
    they attended to, `E W_V W_O W_K`: through previous-token heads, that is how far a head looks for the
    token after an earlier occurrence. Eigenvalues of bands do not add up to those of the head; their
    sums, which are traces, do.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        distance: Tokens from key to query; of several, the rotations are averaged.
        by_band: Whether to give each band's own two eigenvalues.
        through: The (layer, head) of heads whose output the keys are made of, taken together; only those
            of earlier layers count, and a layer without any is NaN.

    Returns:
        [layer, head, d_head], or [layer, head, band, 2] by band; NaN where a layer has no such dim.

    Raises:
        ValueError: If the weights cannot be named, or queries and keys pass norms of their own.

    Example:
        ```python
        rl.circuits.qk_eigenvalues(model, distance=range(1, 64), by_band=True)[layer, head]
        ```
    """
    host = host_of(model)
    distances = checked_distances(distance)
    senders = list(through)
    gram = embedding_gram(host)
    earlier, written = 0, torch.zeros_like(gram)  # W_V W_O of the heads in `through` so far
    found = []
    for layer in range(host.n_layers):
        w, spec = layer_weights(host, layer).folded().repeated(), host.certificate.layers[layer]
        require_qk(w)
        turn = turned_by(spec, distances).to(w.q)
        keys = w.k
        if senders:
            keys = written @ w.k if earlier else torch.full_like(w.k, math.nan)
            mine = [head for at, head in senders if at == layer]
            earlier += len(mine)
            for head in mine:
                written = written + w.v[head] @ w.o[head]
        core = keys.transpose(-1, -2) @ (gram @ w.q)  # [head, key dim, query dim]
        if not by_band:
            found.append(_eigenvalues(turn @ core))
            continue
        dims = spec.rotation.pairs.to(w.q.device)
        blocks = core[:, dims[:, :, None], dims[:, None, :]]  # [head, band, 2, 2]
        turns = turn[dims[:, :, None], dims[:, None, :]]
        empty = blocks.new_full((w.n_heads, host.bands.n_bands - len(dims), 2), math.nan)
        found.append(torch.cat([_eigenvalues(turns @ blocks), empty.to(torch.complex128).cpu()], 1))
    return _stacked(found)


def k_composition(
    model: Any, *, distance: int | Sequence[int] = 0, senders: Heads | None = None
) -> Float64[Tensor, "sender_layer sender layer head"]:
    """How far each head's keys read what an earlier head writes: its K-composition with that head.

    `|W_OV W_K R W_Q^T| / (|W_OV| |W_K R W_Q^T|)`, Frobenius norms, R the rotation at a distance. At
    distance 0 this is TransformerLens's `all_composition_scores("K")`, which leaves the rotation out.
    Source: Elhage et al. 2021. Random matrices give about `1 / sqrt(d_model)`.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        distance: Tokens from key to query; of several, the rotations are averaged.
        senders: The (layer, head) of the heads that write; all by default.

    Returns:
        From 0 to 1; NaN where the reading head is not in a later layer, or no sender was asked for.

    Raises:
        ValueError: If the weights cannot be named, or queries and keys pass norms of their own.

    Example:
        ```python
        rl.circuits.k_composition(model, senders=[(layer, head)])[layer, head, layer + 1]
        ```
    """
    host = host_of(model)
    distances = checked_distances(distance)
    asked = None if senders is None else set(senders)
    n_heads = host.certificate.layers[0].n_heads
    shape = (host.n_layers, n_heads, host.n_layers, n_heads)
    scores = torch.full(shape, math.nan, dtype=torch.float64)
    written: list[tuple[int, int, Tensor, Tensor, Tensor]] = []
    for layer in range(host.n_layers):
        w = layer_weights(host, layer).folded().repeated()
        require_qk(w)
        turn = turned_by(host.certificate.layers[layer], distances).to(w.q)
        keys, query_gram = w.k @ turn.T, w.q.transpose(-1, -2) @ w.q  # of K R^T Q^T
        read = _factored_norm(keys.transpose(-1, -2) @ keys, query_gram)
        for at, head, o, value_gram, size in written:
            x = o @ keys  # [head, value dim, query dim]
            norm = (value_gram @ x @ query_gram * x).sum((-1, -2)).clamp(min=0).sqrt()
            scores[at, head, layer] = (norm / (size * read)).cpu()
        for head in range(w.n_heads):
            if asked is None or (layer, head) in asked:
                gram = w.v[head].T @ w.v[head]
                written.append((layer, head, w.o[head], gram, _factored_norm(gram, w.o[head] @ w.o[head].T)))
    return scores


def turned_by(spec: LayerSpec, distances: Sequence[int]) -> Float64[Tensor, "d_head d_head"]:
    """The matrix T of `score = q T k^T` for pre-rotary rows q and k: scale, amplitude and mean rotation."""
    rotation = spec.rotation
    first, second = rotation.pairs.unbind(-1)
    angle = torch.tensor(distances, dtype=torch.float64)[:, None] * rotation.inv_freq
    cos, sin = (rotation.amplitude**2 * f(angle).mean(0) for f in (torch.cos, torch.sin))
    turn = torch.eye(spec.d_head, dtype=torch.float64)
    turn[first, first], turn[second, second] = cos, cos
    turn[first, second], turn[second, first] = sin, -sin
    return spec.scale * turn


def checked_distances(distance: int | Sequence[int]) -> list[int]:
    """Returns the distances as a list.

    Raises:
        ValueError: If there is none, or one is negative.
    """
    distances = [distance] if isinstance(distance, int) else [int(d) for d in distance]
    if not distances or min(distances) < 0:
        raise ValueError(
            f"expected distances of 0 tokens or more, got {distances}: keys are not after queries"
        )
    return distances


def unembedded_embedding(host: Host) -> Float64[Tensor, "d_model d_model"]:
    """`U E` with the final norm folded and U's mean over tokens taken off, summed over the vocabulary."""
    found = ends(host)
    u, e = found.unembedding, found.embedding
    d_model, n = u.shape
    total = torch.zeros(d_model, d_model, dtype=torch.float64, device=u.device)
    u_sum, e_sum = total[0].clone(), total[0].clone()
    for tokens in (slice(start, start + BLOCK) for start in range(0, n, BLOCK)):
        block, rows = u[:, tokens].double(), e[tokens].double().to(u.device)
        total += block @ rows
        u_sum += block.sum(1)
        e_sum += rows.sum(0)
    total = (total - u_sum[:, None] / n * e_sum) * found.scale
    if found.norm is None:
        return total
    total = found.norm.into(total)
    return total - total.mean(1, keepdim=True) if found.norm.kind == "layer" else total


def embedding_gram(host: Host) -> Float64[Tensor, "d_model d_model"]:
    """`E^T E`, summed over the vocabulary; before layer norms, of centred rows."""
    found = ends(host)
    total = torch.zeros(2 * found.embedding.shape[1:], dtype=torch.float64, device=found.embedding.device)
    for rows in found.embedding.split(BLOCK):
        rows = rows.double()
        if found.norm is not None and found.norm.kind == "layer":
            rows = rows - rows.mean(-1, keepdim=True)
        total += rows.T @ rows
    return total


def _factored_norm(a: Tensor, b: Tensor) -> Tensor:
    """The Frobenius norm of `X Y^T` from the Gram matrices `X^T X` and `Y^T Y`."""
    return (a * b).sum((-1, -2)).clamp(min=0).sqrt()


def _eigenvalues(x: Float64[Tensor, "*heads dim dim"]) -> Complex128[Tensor, "*heads dim"]:
    if x.isnan().any():
        return torch.full(x.shape[:-1], complex(math.nan, math.nan), dtype=torch.complex128)
    return torch.linalg.eigvals(x).cpu()


def _stacked(layers: list[Tensor]) -> Complex128[Tensor, ...]:
    width = max(x.shape[-1] for x in layers)
    pads = (x.new_full((*x.shape[:-1], width - x.shape[-1]), complex(math.nan, math.nan)) for x in layers)
    return torch.stack([torch.cat([x, pad], -1) for x, pad in zip(layers, pads, strict=True)])
