"""Band activation in time linear in the number of positions, by harmonics of |cos|.

`|q.k| = |q||k| |cos(phi_q - phi_k)|` and `|cos x| ~ sum_m c_m cos 2mx`, so that the sum over pairs
becomes sums of `|k| exp(2im phi)` over keys. Only the total is wanted: positions are summed by block
first. Pairs inside a block are exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ropelens_kernels.checks import Inputs
from ropelens_kernels.reference.planes import Planes, blocked, causal_pieces, near

BLOCK = 32  # positions in a block; pairs inside it are exact
LADDER = (16, 32, 64)  # harmonics tried, until the estimate meets the tolerance

Rule = tuple[tuple[float, ...], float]  # coefficients c_0..c_m, and the largest error of the sum


class Harmonic(NamedTuple):
    """Values, certified bound, a-posteriori estimate, what tolerances are relative to, harmonics used.

    `by_position` holds the values apart for the spans of queries between the edges.
    """

    values: Float64[Tensor, "batch head band"]
    bound: Float64[Tensor, "batch head band"]
    estimate: Float64[Tensor, "batch head band"]
    size: Float64[Tensor, "batch head band"]
    m: int
    by_position: Float64[Tensor, "batch span head band"] | None = None

    def meets(self, tol: float) -> bool:
        """Whether every estimate is within the tolerance."""
        return bool((self.estimate <= tol * self.size).all())


@cache
def series(m: int) -> Rule:
    """Fourier: `2/pi + (4/pi) sum (-1)^(j+1) / (4j^2 - 1) cos 2jx`; its error is `(2/pi) / (2m + 1)`."""
    tail = [4 / math.pi * (-1) ** (j + 1) / (4 * j * j - 1) for j in range(1, m + 1)]
    return (2 / math.pi, *tail), 2 / math.pi / (2 * m + 1)


@cache
def minimax(m: int) -> Rule:
    """The best uniform approximation of |cos x| by `sum_{j <= m} c_j cos 2jx`, and its largest error.

    By Remez's exchange in `y = cos 2x`, where `|cos x| = sqrt((1 + y) / 2)` and `cos 2jx = T_j(y)`.
    """
    # extrema in s = |cos x| cluster like a Chebyshev grid of degree 2m
    s = np.cos(np.pi * np.arange(m + 2) / (2 * m + 2))[::-1].copy()
    s[0] = 0.0
    grid = np.unique(np.concatenate([np.cos(np.linspace(0, np.pi / 2, 200 * m + 1)), [0.0, 1.0]]))
    basis = np.cos(2 * np.arange(m + 1) * np.arccos(grid)[:, None])
    error = np.zeros(0)
    c = np.zeros(m + 1)
    for _ in range(50):
        matrix = np.cos(2 * np.arange(m + 1) * np.arccos(s)[:, None])
        signs = (-1.0) ** np.arange(m + 2)
        solution = np.linalg.solve(np.column_stack([matrix, signs]), s)
        c, level = solution[:-1], abs(solution[-1])
        error = grid - basis @ c
        cuts = np.flatnonzero(np.diff(np.sign(error))) + 1
        peaks = [part[np.argmax(np.abs(error[part]))] for part in np.split(np.arange(len(grid)), cuts)]
        if len(peaks) != m + 2:
            break
        s = grid[peaks]
        if np.abs(error).max() <= level * (1 + 1e-9):
            break
    # between grid points s the error's slope is at most 1 + (2m)^2, and the grid is dense enough for 1 %
    return tuple(c), float(np.abs(error).max()) * 1.01


def harmonic(
    inputs: Inputs,
    tol: float,
    ladder: tuple[int, ...] = LADDER,
    rule: Callable[[int], Rule] = series,
    block: int = BLOCK,
    edges: tuple[int, ...] | None = None,
) -> Harmonic:
    """Returns the activation with as few harmonics as keep the estimate below `tol` of the m = 0 term.

    Args:
        ladder: Numbers of harmonics to try, in this order; the last one is kept in any case.
        rule: Where the coefficients come from.
        block: Positions in a block.
        edges: As for `activation`, if `cuts_blocks` says that they lie between blocks.
    """
    for m in ladder[:-1]:
        found = _attempt(inputs, m, rule, block, edges)
        if found.meets(tol):
            return found
    return _attempt(inputs, ladder[-1], rule, block, edges)


def cuts_blocks(inputs: Inputs, edges: tuple[int, ...], block: int = BLOCK) -> bool:
    """Whether edges between queries fall inside blocks, or blocks are not in the order of time."""
    whole = inputs.window is None or inputs.window >= inputs.k.shape[2]
    return not whole or any((edge + inputs.offset) % block for edge in edges)


def _attempt(
    inputs: Inputs, m: int, rule: Callable[[int], Rule], block: int, edges: tuple[int, ...] | None
) -> Harmonic:
    """Returns the result with `m` harmonics."""
    c, _ = rule(m)
    batch, heads = inputs.q.shape[:2]
    exact = inputs.q.new_zeros(batch, heads, len(inputs.pairs), dtype=torch.float64)
    terms = exact.new_zeros(m + 1, *exact.shape)
    starts = [0, *((edge + inputs.offset) // block for edge in edges or ())]
    spans = list(itertools.pairwise((*starts, None)))
    by_position = exact.new_zeros(batch, len(spans), *exact.shape[1:])
    for row, kv in itertools.product(range(batch), range(inputs.k.shape[1])):
        part = slice(kv * inputs.group, (kv + 1) * inputs.group)
        for planes in causal_pieces(inputs, row, kv):
            q, k = _blocks(planes, block)
            by_block, terms_by_block = near(q, k), _far(q, k, m)
            exact[row, part] += by_block.sum((0, 3), dtype=torch.float64)
            terms[:, row, part] += terms_by_block.sum((1, 4), dtype=torch.float64)
            if edges is None:
                continue
            by_block = by_block.sum(0) + torch.tensordot(by_block.new_tensor(c), terms_by_block.sum(1), 1)
            for span, (a, b) in enumerate(spans):
                by_position[row, span, part] += by_block[..., a:b].sum(-1, dtype=torch.float64)
    found = assembled(exact, terms, m, rule, torch.finfo(inputs.q.dtype).eps, inputs.scale)
    return found if edges is None else found._replace(by_position=abs(inputs.scale) * by_position)


def assembled(
    exact: Float64[Tensor, "batch head band"],
    terms: Float64[Tensor, "term batch head band"],
    m: int,
    rule: Callable[[int], Rule],
    eps: float,
    scale: float,
) -> Harmonic:
    """Returns the result of pairs inside blocks and harmonics between them, both without the scale.

    Args:
        eps: The machine epsilon of what they were computed in.
    """
    (c, worst), (fewer, _) = rule(m), rule(max(1, m * 3 // 4))
    change = terms.new_tensor(c)
    change[: len(fewer)] -= change.new_tensor(fewer)
    # the recurrence of cos 2jx amplifies rounding by j^2 at most, of terms that add up to |c|_1 = 1.6
    bound = (worst + 2 * eps * m * m) * terms[0] + 64 * eps * (exact + terms[0])
    scale = abs(scale)
    return Harmonic(
        values=scale * (exact + torch.tensordot(terms.new_tensor(c), terms, 1)),
        bound=scale * bound,
        estimate=scale * torch.tensordot(change.abs(), terms.abs(), 1),
        size=scale * (torch.mul(terms[0], 2 / math.pi) + exact),
        m=m,
    )


def _blocks(planes: Planes, block: int) -> tuple[Tensor, Tensor]:
    """Returns q and k padded to whole blocks, as [2, piece, (group,) band, place, block]."""
    time = planes.k.shape[-1]
    planes = planes.padded(time + -time % block)
    return blocked(planes.q, block), blocked(planes.k, block)


def _far(
    q: Float[Tensor, "2 piece group band place block"], k: Float[Tensor, "2 piece band place block"], m: int
) -> Float[Tensor, "term piece group band block"]:
    """Returns `sum |q||k| cos 2j(phi_q - phi_k)` over each block's queries and all earlier blocks' keys."""
    f, g = _features(q, m), _features(k, m)  # [term, 2, piece, (group,) band, block]
    past = g.double().cumsum(-1).roll(1, -1)
    past[..., 0] = 0
    past = past.to(f.dtype)[:, :, :, None]
    return torch.linalg.vecdot(f, past, dim=1)


def _features(x: Float[Tensor, "2 *axes place block"], m: int) -> Float[Tensor, "term 2 *axes block"]:
    """Returns the block sums of `|x| cos 2j phi` and `|x| sin 2j phi`, by Chebyshev's recurrence."""
    square = (x * x).sum(0)
    size = square.sqrt()
    inverse = torch.where(size > 0, 1 / size.clamp(min=torch.finfo(x.dtype).tiny), 0)
    cosine = (x[0] * x[0] - x[1] * x[1]) * inverse  # |x| cos 2 phi
    twice = 2 * cosine * inverse
    before = torch.stack([size, torch.zeros_like(size)])
    now = torch.stack([cosine, 2 * x[0] * x[1] * inverse])
    sums = [before.sum(-2), now.sum(-2)]
    sign = 1.0, 1.0  # each array holds its harmonic up to a sign, so that one in-place pass is enough
    for _ in range(m - 1):
        # next = twice * now - before, kept in the memory of before
        flip = sign[0] * sign[1]
        before.addcmul_(twice, now, value=-flip)
        before, now, sign = now, before, (sign[1], -sign[0])
        sums.append(now.sum(-2) * sign[1])
    return torch.stack(sums[: m + 1])
