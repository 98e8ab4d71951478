"""Which way the activation is computed, and by what."""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from ropelens_kernels.checks import Inputs
from ropelens_kernels.reference.harmonic import harmonic
from ropelens_kernels.reference.pairwise import pairwise, pairwise_rest
from ropelens_kernels.reference.sorted import by_sorting
from ropelens_kernels.results import ActivationResult

SHORT = 64  # up to so many visible keys the tiles of pairs are as fast as anything
LONG = 512  # from so many visible keys on the harmonics pay
ROUGH = 1e-4  # the smallest tolerance that the harmonics reach with few terms


def activation(inputs: Inputs, tol: float, method: str, fused: bool) -> ActivationResult:
    """Returns the activation by `method`; "auto" chooses by length and tolerance."""
    wanted = method
    if method == "auto":
        method = _choice(inputs, tol)
    bound: Float64[Tensor, "batch head band"] | None = None
    estimate: Float64[Tensor, "batch head band"] | None = None
    if fused and method in ("pairwise", "harmonic"):
        from ropelens_kernels.fused.methods import harmonic_fused, pairwise_fused  # imports triton

        if method == "harmonic":
            values, bound, estimate = harmonic_fused(inputs)
        else:
            values = pairwise_fused(inputs)
        method += ", fused"
    elif method == "harmonic":
        values, bound, estimate, size, _ = harmonic(inputs, tol)
        if wanted == "auto" and not (estimate <= tol * size).all():
            method = "sorted"
            values, bound, estimate = by_sorting(inputs), None, None
    elif method == "sorted":
        values = by_sorting(inputs)
    else:
        values = pairwise(inputs)
    return ActivationResult(
        values=values,
        rest=pairwise_rest(inputs),
        bound=torch.zeros_like(values) if bound is None else bound,
        estimate=torch.zeros_like(values) if estimate is None else estimate,
        n_queries=inputs.counted.sum(1),
        n_pairs=inputs.n_visible.sum(1),
        method=method,
    )


def _choice(inputs: Inputs, tol: float) -> str:
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    visible = min(keys, inputs.window or keys)
    if visible <= SHORT or keys >= 16 * queries:  # the fast methods do the work of as many queries as keys
        return "pairwise"
    return "harmonic" if visible >= LONG and tol >= ROUGH else "sorted"
