"""Activation from checked inputs by the Triton kernels."""

from __future__ import annotations

import torch

from ropelens_kernels.fused.activation import WIDTH, far_terms, pairwise_planes
from ropelens_kernels.reference.harmonic import series
from ropelens_kernels.reference.planes import causal_pieces

TERMS = 32  # harmonics: more than the torch path starts with, since they are cheap here


def _planes(x, inputs):
    """[batch, head, time, d_head] -> [batch, head, band, 2, time]."""
    return x[..., inputs.pairs].permute(0, 1, 3, 4, 2).float().contiguous()


def pairwise_fused(inputs):
    """Returns the activation [batch, head, band] from tiles of pairs."""
    q, k = _planes(inputs.q, inputs), _planes(inputs.k, inputs)
    return abs(inputs.scale) * pairwise_planes(q, k, inputs.group, inputs.window)


def harmonic_fused(inputs, m=TERMS):
    """Returns the activation, its certified bound and its estimate, all [batch, head, band]."""
    batch, heads = inputs.q.shape[:2]
    exact = inputs.q.new_zeros(batch, heads, len(inputs.pairs), dtype=torch.float64)
    terms = exact.new_zeros(m + 1, *exact.shape)
    for row in range(batch):
        for kv in range(inputs.k.shape[1]):
            for piece in causal_pieces(inputs, row, kv):
                q = piece.q.permute(1, 2, 3, 0, 4).float().contiguous()  # [piece, group, band, 2, time]
                k = piece.k.permute(1, 2, 0, 3)[:, None].float().contiguous()
                part = slice(kv * inputs.group, (kv + 1) * inputs.group)
                exact[row, part] += pairwise_planes(q, k, inputs.group, near=True).sum(0)
                if q.shape[-1] > WIDTH:
                    terms[:, row, part] += far_terms(q, k, m, inputs.group).sum(1)
    c, worst = series(m)
    weights = terms.new_tensor(c)
    far = torch.tensordot(weights, terms, 1)
    tail = weights.clone()
    tail[: m * 3 // 4 + 1] = 0
    estimate = torch.tensordot(tail.abs(), terms.abs(), 1)
    eps = torch.finfo(torch.float32).eps
    bound = (worst + 2 * eps * m * m) * terms[0] + 64 * eps * (exact + terms[0])
    scale = abs(inputs.scale)
    return scale * (exact + far), scale * bound, scale * estimate
