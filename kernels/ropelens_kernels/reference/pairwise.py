"""Band activation by its definition, in tiles of pairs."""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from ropelens_kernels.checks import Inputs

BLOCK = 64  # queries, and a quarter of the keys, in a tile: [band, 64, 256] floats stay in a core's cache


def pairwise(inputs: Inputs) -> Float64[Tensor, "batch head band"]:
    """Returns `sum over visible pairs of |scale * (q_0 k_0 + q_1 k_1)|` for each band."""
    return _sum_abs(inputs, inputs.q[..., inputs.pairs], inputs.k[..., inputs.pairs])


def pairwise_rest(inputs: Inputs) -> Float64[Tensor, "batch head"]:
    """Returns `sum over visible pairs of |scale * q_rest . k_rest|` for the unrotated dims together."""
    q, k = inputs.q[..., inputs.rest], inputs.k[..., inputs.rest]
    return _sum_abs(inputs, q[..., None, :], k[..., None, :])[..., 0]


def first_key(
    inputs: Inputs,
) -> tuple[Float64[Tensor, "batch head band"], Float64[Tensor, "batch head"]]:
    """Returns the part that is due to each query's first visible key, of the bands and of the rest."""
    if inputs.all_real and inputs.window is None:
        k = inputs.k[:, :, :1]
    else:
        at = inputs.first_visible[:, None, :, None].expand(-1, inputs.k.shape[1], -1, inputs.k.shape[3])
        k = inputs.k.gather(2, at)
    bands, rest = inputs.split(inputs.q * (inputs.scale * k).repeat_interleave(inputs.group, 1))
    return bands.abs().sum(2, dtype=torch.float64), rest.abs().sum(2, dtype=torch.float64)


def _sum_abs(inputs: Inputs, q: Tensor, k: Tensor) -> Tensor:
    """Sums |scale * q.k| over visible pairs, for q [batch, head, query, band, dim] and k likewise."""
    batch, heads, queries, bands, dims = q.shape
    total = torch.zeros(batch, heads, bands, dtype=torch.float64, device=q.device)
    if not (bands and dims):
        return total
    q = (q * inputs.scale).transpose(2, 3).contiguous()
    k = k.permute(0, 1, 3, 4, 2).contiguous()
    for start in range(0, queries, BLOCK):
        stop = min(start + BLOCK, queries)
        first, last = inputs.key_span(start, stop)
        for left in range(first, last, 4 * BLOCK):
            right = min(left + 4 * BLOCK, last)
            p, i = (torch.arange(n, m, device=q.device) for n, m in ((start, stop), (left, right)))
            distance = p[:, None] + inputs.offset - i
            hidden = (distance < 0) | (distance >= (inputs.window or last))
            for row in range(batch):
                for head in range(heads):
                    x = q[row, head, :, start:stop] @ k[row, head // inputs.group, :, :, left:right]
                    total[row, head] += x.abs_().masked_fill_(hidden, 0).sum((1, 2), dtype=torch.float64)
    return total
