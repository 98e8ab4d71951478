"""Rules for integrals over the path parameter t in [0, 1]."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import numpy as np

Rule = tuple[tuple[float, ...], tuple[float, ...]]


@cache
def gauss(n: int) -> Rule:
    """The n-node Gauss-Legendre rule on [0, 1]: nodes and weights."""
    x, w = np.polynomial.legendre.leggauss(n)
    return tuple((x + 1) / 2), tuple(w / 2)


@cache
def graded(n: int, depth: int) -> Rule:
    """`n` nodes on each of the panels [0, 2^-depth], ..., [1/4, 1/2], [1/2, 1].

    Attention along the path changes where `t * (logit gap)` is of order one to log N, so panels that
    halve towards 0 resolve every gap up to about 2^depth.
    """
    x, w = gauss(n)
    edges = [0.0] + [2.0**-j for j in range(depth, -1, -1)]
    spans = list(pairwise(edges))
    return (
        tuple(a + (b - a) * node for a, b in spans for node in x),
        tuple((b - a) * weight for a, b in spans for weight in w),
    )


def ladder(gap: float) -> Iterator[Rule]:
    """Ever finer rules for rows whose logits spread over `gap`, the last one far beyond float64."""
    yield gauss(32)
    depth = max(1, int(np.ceil(np.log2(max(gap, 1.0)))))
    for n in (16, 32, 64, 128):
        yield graded(n, depth)
    for n in (32, 64, 128):  # a sharp step away from 0, as a large fixed sink logit makes
        yield uniform(n, 32)


@cache
def uniform(n: int, panels: int) -> Rule:
    """`n` nodes on each of `panels` equal panels."""
    x, w = gauss(n)
    return (
        tuple((j + node) / panels for j in range(panels) for node in x),
        tuple(weight / panels for _ in range(panels) for weight in w),
    )


@cache
def powers() -> tuple[tuple[int, ...], tuple[tuple[int, int], ...], tuple[float, ...]]:
    """A rule whose nodes are whole steps of 1/40, so that every `exp(t l)` is a power of `exp(l / 40)`.

    The nodes are 0 and those steps that come nearest to Chebyshev's points, so the interpolating weights
    are positive; exact for polynomials of degree 13.

    Returns:
        The steps, each after the first one the sum of two before it; the places of those two; the weights
        of t = 0 and of the steps (0 for those that serve the chain only).
    """
    nodes = (0, 1, 3, 6, 10, 15, 20, 25, 30, 34, 37, 39, 40)
    steps = (1, 2, 3, 6, 9, 10, 15, 20, 25, 30, 34, 37, 39, 40)
    sums = (
        (1, 1),
        (2, 1),
        (3, 3),
        (6, 3),
        (9, 1),
        (9, 6),
        (10, 10),
        (15, 10),
        (15, 15),
        (25, 9),
        (34, 3),
        (30, 9),
        (30, 10),
    )
    basis = np.polynomial.legendre.legvander(np.array(nodes) / 20 - 1, len(nodes) - 1).T
    weights: dict[int, float] = dict(
        zip(nodes, np.linalg.solve(basis, np.eye(len(nodes))[0]).tolist(), strict=True)
    )
    chain = tuple((steps.index(a), steps.index(b)) for a, b in sums)
    return steps, chain, tuple(weights.get(step, 0.0) for step in (0, *steps))
