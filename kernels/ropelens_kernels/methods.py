"""Which way the activation is computed, and by what."""

from __future__ import annotations

from itertools import pairwise as spans_between
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from ropelens_kernels.checks import Inputs
from ropelens_kernels.reference.harmonic import cuts_blocks, harmonic
from ropelens_kernels.reference.norms import norm_products
from ropelens_kernels.reference.pairwise import first_key, pairwise, pairwise_rest
from ropelens_kernels.reference.sorted import by_sorting
from ropelens_kernels.results import ActivationResult

SHORT = 64  # up to so many visible keys the tiles of pairs are as fast as anything
LONG = 512  # from so many visible keys on the harmonics pay
ERRORS = ("bound", "estimate")
ROUGH = 1e-4  # the smallest tolerance that the harmonics reach with few terms


class _Found(NamedTuple):
    """What a method gives; `bound` and `estimate` are 0 where it is exact, `met` where that is enough."""

    method: str
    values: Float64[Tensor, "batch head band"]
    bound: Float64[Tensor, "batch head band"]
    estimate: Float64[Tensor, "batch head band"]
    by_position: Float64[Tensor, "batch span head band"] | None = None
    met: bool = True


def activation(
    inputs: Inputs,
    tol: float,
    method: str,
    fused: bool,
    split_first: bool = False,
    edges: tuple[int, ...] | None = None,
) -> ActivationResult:
    """Returns the activation by `method`; "auto" chooses by length and tolerance.

    Args:
        split_first: Whether to return the part of each query's first visible key too.
        edges: Where along the queries a new sum by position begins.
    """
    found = _run(inputs, tol, _choice(inputs, tol) if method == "auto" else method, fused, edges)
    if method == "auto" and not found.met:
        found = _run(inputs, tol, "sorted", fused, edges)
    first, first_rest = first_key(inputs) if split_first else (None, None)
    return ActivationResult(
        values=found.values,
        rest=pairwise_rest(inputs),
        by_position=found.by_position,
        first_values=first,
        first_rest=first_rest,
        bound=found.bound,
        estimate=found.estimate,
        n_queries=inputs.counted.sum(1),
        n_pairs=inputs.n_visible.sum(1),
        method=found.method,
    )


def norm_product(inputs: Inputs, split_first: bool, edges: tuple[int, ...] | None) -> ActivationResult:
    """Returns the norm product, exact: its absolute value is one of a product, so prefix sums do."""
    by_query, first_by_query = norm_products(inputs)
    spans = [by_query[:, :, a:b].sum(2) for a, b in spans_between((0, *(edges or ()), inputs.q.shape[2]))]
    by_position = torch.stack(spans, 1)
    total = by_position.sum(1)
    first = first_by_query.sum(2) if split_first else None
    zero = torch.zeros_like(total[..., :-1])
    return ActivationResult(
        values=total[..., :-1],
        rest=total[..., -1],
        by_position=None if edges is None else by_position[..., :-1],
        first_values=None if first is None else first[..., :-1],
        first_rest=None if first is None else first[..., -1],
        bound=zero,
        estimate=zero,
        n_queries=inputs.counted.sum(1),
        n_pairs=inputs.n_visible.sum(1),
        method="prefix sums",
    )


def _run(inputs: Inputs, tol: float, method: str, fused: bool, edges: tuple[int, ...] | None) -> _Found:
    """Returns what `method` finds, apart for the spans between the edges if there are any."""
    if edges is not None and (method != "harmonic" or fused or cuts_blocks(inputs, edges)):
        spans = spans_between((0, *edges, inputs.q.shape[2]))
        parts = [_run(inputs.between(a, b), tol, method, fused, None) for a, b in spans]
        by_position = torch.stack([part.values for part in parts], 1)
        bound, estimate = (torch.stack([getattr(part, name) for part in parts]).sum(0) for name in ERRORS)
        met = all(part.met for part in parts)
        return _Found(parts[0].method, by_position.sum(1), bound, estimate, by_position, met)
    if fused and method in ("pairwise", "harmonic"):
        from ropelens_kernels.fused.methods import harmonic_fused, pairwise_fused  # imports triton

        if method == "pairwise":
            return _exact("pairwise, fused", pairwise_fused(inputs))
        found = harmonic_fused(inputs, tol)
    elif method == "harmonic":
        found = harmonic(inputs, tol, edges=edges)
    else:
        return _exact(method, by_sorting(inputs) if method == "sorted" else pairwise(inputs))
    name = "harmonic, fused" if fused else "harmonic"
    return _Found(name, found.values, found.bound, found.estimate, found.by_position, found.meets(tol))


def _exact(method: str, values: Float64[Tensor, "batch head band"]) -> _Found:
    return _Found(method, values, torch.zeros_like(values), torch.zeros_like(values))


def _choice(inputs: Inputs, tol: float) -> str:
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    visible = min(keys, inputs.window or keys)
    if visible <= SHORT or keys >= 16 * queries:  # the fast methods do the work of as many queries as keys
        return "pairwise"
    return "harmonic" if visible >= LONG and tol >= ROUGH else "sorted"
