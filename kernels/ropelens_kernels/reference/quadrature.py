"""Rules for integrals over the path parameter t in [0, 1]."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

NARROW = 32.0  # logits: how far those of a row may spread for the cheaper of the rules of `powers`

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


class Powers(NamedTuple):
    """A rule whose nodes are whole steps of 1/whole, so that every `exp(t l)` is a power of `exp(l / whole)`.

    Attributes:
        whole: The number of steps from 0 to 1.
        n_helpers: How many powers only help to make others; they have the first places.
        unit: The place of `exp(l / whole)`.
        chain: How to make every other power, in an order that works: its place and the places of the two
            whose product it is.
        nodes: The places after the helpers, as steps; the last is `whole`.
        weights: Of t = 0 and of the nodes; they are positive.
    """

    whole: int
    n_helpers: int
    unit: int
    chain: tuple[tuple[int, int, int], ...]
    nodes: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def n_places(self) -> int:
        return self.n_helpers + len(self.nodes)


@cache
def powers(wide: bool) -> Powers:
    """Rules with 13 nodes near those of the Gauss-Lobatto rule, t = 0 included.

    With interpolating weights they are exact for polynomials of degree 12, and the wide one, whose steps
    of 1/76 come nearest, nearly so up to 23. The other takes fewer helpers, and is as good as needed
    while the logits of a row spread over less than NARROW.
    """
    if wide:
        helpers, nodes = (1, 4, 8, 9), (2, 6, 12, 20, 29, 38, 47, 56, 64, 70, 74, 76)
        parts = {2: 1, 4: 2, 6: 4, 8: 4, 9: 8, 12: 6, 20: 12, 29: 20, 38: 29, 47: 38, 56: 47, 64: 56, 70: 64}
        parts |= {74: 70, 76: 38}  # each is this one and the difference
    else:
        helpers, nodes = (3,), (1, 2, 4, 7, 10, 13, 16, 19, 22, 24, 25, 26)
        parts = {2: 1, 3: 2, 4: 2, 7: 4, 10: 7, 13: 10, 16: 13, 19: 16, 22: 19, 24: 22, 25: 24, 26: 13}
    place = {step: at for at, step in enumerate((*helpers, *nodes))}
    x = np.array((0, *nodes)) / nodes[-1] * 2 - 1
    basis = np.polynomial.legendre.legvander(x, len(nodes)).T
    return Powers(
        whole=nodes[-1],
        n_helpers=len(helpers),
        unit=place[1],
        chain=tuple((place[step], place[part], place[step - part]) for step, part in sorted(parts.items())),
        nodes=nodes,
        weights=tuple(np.linalg.solve(basis, np.eye(len(nodes) + 1)[0]).tolist()),
    )
