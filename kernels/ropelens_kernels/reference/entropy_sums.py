"""Rows of entropy, and their float64 sums by head and band."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from ropelens_kernels.checks import Inputs
from ropelens_kernels.results import EntropyResult


@dataclass(frozen=True, eq=False)
class Rows:
    """Entropy of some rows (a query of a head each), before the sum over dims of a band.

    Attributes:
        drop: `q * (w @ K)`: summed over a band's dims, the entropy drop of the band, in nats.
        first: The same for the entropy of "first visible key or not", or None.
        residual: `|sum of drop - (H(1) - H(0))|`, in nats.
    """

    drop: Float[Tensor, "*row d_head"]
    first: Float[Tensor, "*row d_head"] | None
    residual: Float[Tensor, "*row"]

    def at(self, row: int, heads: Int64[Tensor, " row"], queries: Int64[Tensor, " row"]) -> Rows:
        """Returns a float64 copy of some rows of [batch, head, query]."""
        first = None if self.first is None else self.first[row, heads, queries].double()
        return Rows(
            self.drop[row, heads, queries].double(), first, self.residual[row, heads, queries].double()
        )

    def put(self, row: int, heads: Int64[Tensor, " row"], queries: Int64[Tensor, " row"], new: Rows) -> None:
        """Overwrites some rows of [batch, head, query]."""
        self.drop[row, heads, queries] = new.drop.to(self.drop.dtype)
        self.residual[row, heads, queries] = new.residual.to(self.residual.dtype)
        if self.first is not None and new.first is not None:
            self.first[row, heads, queries] = new.first.to(self.first.dtype)


def sums(
    inputs: Inputs,
    found: Rows,
    refined: Bool[Tensor, "batch head query"],
    estimate: Float64[Tensor, "batch head"],
    edges: tuple[int, ...] | None,
    method: str,
) -> EntropyResult:
    """Returns the sums of all counted rows by band."""
    counted = inputs.counted[:, None]
    spans = list(pairwise((0, *(edges or ()), inputs.q.shape[2])))

    def by_span(x: Tensor) -> Float64[Tensor, "batch span head d_head"]:
        parts = [
            x[:, :, a:b].masked_fill(~counted[:, :, a:b, None], 0).sum(2, dtype=torch.float64)
            for a, b in spans
        ]
        return torch.stack(parts, 1)

    drop = by_span(found.drop)
    values, rest = inputs.split(drop.sum(1))
    first = None if found.first is None else inputs.split(by_span(found.first).sum(1))
    residual = found.residual.double().masked_fill(~counted, 0)
    n_queries = inputs.counted.sum(1)
    return EntropyResult(
        values=values,
        rest=rest,
        by_position=None if edges is None else inputs.split(drop)[0],
        residual=residual.amax(-1),
        residual_mean=residual.sum(-1) / n_queries.clamp(min=1)[:, None],
        estimate=estimate,
        n_queries=n_queries,
        n_pairs=inputs.n_visible.sum(1),
        n_refined=refined.sum(-1),
        first_values=None if first is None else first[0],
        first_rest=None if first is None else first[1],
        method=method,
    )
