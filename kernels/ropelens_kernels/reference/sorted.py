"""Exact band activation in O(T log^2 T), by sorting keys by angle.

With the keys of a set sorted by angle mod pi, `sum |q.k| = |q . (2 V(split) - V(all))|`, V being prefix
sums and the split one binary search. Divide and conquer over time makes causal sums of such sets; the
sort and the search are done once, and each half's order and ranks follow from counts, as in a wavelet tree.
Prefix sums stay in float64 until they meet a query: many queries share one sum, so its rounding would not
average out, and near 90 degrees it is large beside `|q . V|`.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float64
from torch import Tensor

from ropelens_kernels.checks import Inputs
from ropelens_kernels.reference.planes import Planes, blocked, causal_pieces, near

LEAF = 32  # leaves hold 32 to 64 positions; their pairs are taken one by one


def by_sorting(inputs: Inputs) -> Float64[Tensor, "batch head band"]:
    """Returns the activation of each band."""
    batch, heads = inputs.q.shape[:2]
    total = inputs.q.new_zeros(batch, heads, len(inputs.pairs), dtype=torch.float64)
    for row in range(batch):
        for kv in range(inputs.k.shape[1]):
            for planes in causal_pieces(inputs, row, kv):
                total[row, kv * inputs.group : (kv + 1) * inputs.group] += _causal(planes)
    return total * abs(inputs.scale)


def _causal(planes: Planes) -> Float64[Tensor, "group band"]:
    levels = max(0, int(math.log2(max(1, planes.k.shape[-1] / LEAF))))
    leaf = -(-planes.k.shape[-1] // 2**levels)
    planes = Planes(*(x.contiguous() for x in planes.padded(leaf * 2**levels)))
    total = near(blocked(planes.q, leaf), blocked(planes.k, leaf)).sum((0, 3), dtype=torch.float64)
    if levels == 0:
        return total
    q = planes.q.transpose(2, 3)  # [2, piece, band, group, time]
    (_, pieces, bands, group, time), k = q.shape, planes.k
    unit = torch.complex(k[0], k[1])
    unit = torch.where((k[1] < 0) | ((k[1] == 0) & (k[0] < 0)), -unit, unit)
    angle, order = torch.atan2(unit.imag, unit.real).sort(dim=-1)
    split = (torch.atan2(q[1], q[0]) + torch.pi / 2) % torch.pi
    rank = torch.searchsorted(angle, split.flatten(-2))  # [piece, band, group * time]
    for level in range(levels):
        nodes, half = 2**level, time >> (level + 1)
        left = (order // half) % 2 == 0
        count = torch.nn.functional.pad(left.cumsum(-1), (1, 0))  # of keys of left halves before a place
        node = torch.arange(time, device=k.device) // (2 * half)
        place = torch.arange(time, device=k.device)
        before = count[..., :-1] - node * half
        target = torch.where(left, node * 2 * half + before, (node + 1) * half + place - count[..., :-1])
        order = torch.empty_like(order).scatter_(-1, target, order)
        keys = unit.gather(-1, order).unflatten(-1, (nodes, 2, half))[..., 0, :]
        sums = torch.nn.functional.pad(keys.cumsum(-1, dtype=torch.complex128), (1, 0))
        sums = (2 * sums - sums[..., -1:]).flatten(-2)  # [piece, band, nodes * (half + 1)]
        start = node.repeat(group)
        within = count.gather(-1, rank + start * (2 * half)) - start * half  # rank in the left half
        halves = (pieces, bands, group, nodes, 2, half)
        right = within.view(halves)[..., 1, :]
        index = right + torch.arange(nodes, device=k.device)[:, None] * (half + 1)
        vector = sums.gather(-1, index.flatten(2)).view(right.shape)
        x = q.unflatten(-1, (nodes, 2, half))[..., 1, :]
        value = x[0] * vector.real + x[1] * vector.imag
        total += torch.linalg.vector_norm(value, 1, dim=(-1, -2)).sum(0).T
        rank = rank.view(halves)
        rank = torch.stack([within.view(halves)[..., 0, :], rank[..., 1, :] - right], -2).flatten(2)
    return total
