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
