"""Activation from checked inputs by the Triton kernels."""

from __future__ import annotations

import torch

from ropelens_kernels.fused.activation import WIDTH, far_terms, pairwise_planes
from ropelens_kernels.reference.harmonic import LADDER, assembled, series
from ropelens_kernels.reference.planes import causal_pieces


def _planes(x, inputs):
    """[batch, head, time, d_head] -> [batch, head, band, 2, time]."""
    return x[..., inputs.pairs].permute(0, 1, 3, 4, 2).float().contiguous()


def pairwise_fused(inputs):
    """Returns the activation [batch, head, band] from tiles of pairs."""
    q, k = _planes(inputs.q, inputs), _planes(inputs.k, inputs)
    return abs(inputs.scale) * pairwise_planes(q, k, inputs.group, inputs.window)


def harmonic_fused(inputs, tol, ladder=LADDER):
    """Returns a `Harmonic` with as few terms as keep the estimate below `tol` of the m = 0 term."""
    batch, heads = inputs.q.shape[:2]
    exact = inputs.q.new_zeros(batch, heads, len(inputs.pairs), dtype=torch.float64)
    problems = []
    for row in range(batch):
        for kv in range(inputs.k.shape[1]):
            for piece in causal_pieces(inputs, row, kv):
                q = piece.q.permute(1, 2, 3, 0, 4).float().contiguous()  # [piece, group, band, 2, time]
                k = piece.k.permute(1, 2, 0, 3)[:, None].float().contiguous()
                part = slice(kv * inputs.group, (kv + 1) * inputs.group)
                exact[row, part] += pairwise_planes(q, k, inputs.group, near=True).sum(0)
                if q.shape[-1] > WIDTH:
                    problems.append((row, part, q, k))
    for m in ladder:
        terms = exact.new_zeros(m + 1, *exact.shape)
        for row, part, q, k in problems:
            terms[:, row, part] += far_terms(q, k, m, inputs.group).sum(1)
        found = assembled(exact, terms, m, series, torch.finfo(torch.float32).eps, inputs.scale)
        if found.meets(tol):
            break
    return found
