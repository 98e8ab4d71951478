"""What the benchmark compares with: the same quantities as a good engineer writes them without the tricks."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ropelens_kernels.reference.quadrature import gauss


def direct_entropy(
    q: Float[Tensor, "query head d_head"],
    k: Float[Tensor, "key kv_head d_head"],
    scale: float,
    starts: list[int],
    block: int = 128,
    nodes: int = 32,
) -> Float64[Tensor, "head d_head"]:
    """`-integral t Cov_a(t)(x, l) dt` by dim, summed over the blocks of queries at `starts`.

    Gauss-Legendre with two attention-like matmuls a node: `a K` and `(a l) K`.
    """
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    out = torch.zeros(heads, q.shape[2], dtype=torch.float64)
    for start in starts:
        stop = min(start + block, len(q))
        hidden = torch.ones(stop - start, stop, dtype=torch.bool).triu(start + 1)
        for head in range(heads):
            queries, keys = scale * q[start:stop, head], k[:stop, head // group]
            logits = queries @ keys.T
            cov = torch.zeros_like(queries)
            for t, w in zip(*gauss(nodes), strict=True):
                a = torch.softmax((t * logits).masked_fill_(hidden, -torch.inf), -1)
                weighted = a * logits
                cov += (w * t) * (weighted @ keys - weighted.sum(-1, keepdim=True) * (a @ keys))
            out[head] -= (queries * cov).sum(0, dtype=torch.float64)
    return out


def attribution_by_nodes(
    q: Float[Tensor, " d_head"], k: Float[Tensor, "key d_head"], scale: float, nodes: int = 400
) -> Float64[Tensor, "key d_head"]:
    """`1 / (N d) + integral a_i(t) (x_i - E_a x) dt` by dim, for a query that sees all keys."""
    products = scale * q.double() * k.double()
    logits = products.sum(-1)
    total = torch.full_like(products, 1 / products.numel())
    for t, w in zip(*gauss(nodes), strict=True):
        a = torch.softmax(t * logits, 0)[:, None]
        total += w * a * (products - (a * products).sum(0))
    return total
