"""Rows of entropy, and their float64 sums by head and band."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
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


class Sums:
    """Float64 running sums over rows, by head and dim."""

    def __init__(self, inputs: Inputs, split_first: bool) -> None:
        batch, heads, _, d_head = inputs.q.shape
        self.inputs = inputs
        new = lambda *shape: torch.zeros(batch, heads, *shape, dtype=torch.float64, device=inputs.q.device)  # noqa: E731
        self.drop, self.first = new(d_head), new(d_head) if split_first else None
        self.worst, self.total, self.refined, self.estimate = new(), new(), new(), new()

    def add(self, row: int, head: int, found: Rows, counted: Tensor, missed: Tensor) -> None:
        """Adds rows laid out [head of the group, query]."""
        group = self.inputs.group
        heads = slice(head, head + group)
        keep = counted.view(group, -1)
        self.drop[row, heads] += (
            (found.drop.double() * counted[:, None]).view(group, -1, found.drop.shape[-1]).sum(1)
        )
        if self.first is not None and found.first is not None:
            part = (found.first.double() * counted[:, None]).view(group, -1, found.first.shape[-1])
            self.first[row, heads] += part.sum(1)
        residual = found.residual.double().view(group, -1).masked_fill(~keep, 0)
        self.worst[row, heads] = torch.maximum(self.worst[row, heads], residual.amax(1))
        self.total[row, heads] += residual.sum(1)
        self.refined[row, heads] += missed.view(group, -1).sum(1)

    def compare(self, row: int, head: int, which: Tensor, first: Tensor, second: Tensor) -> None:
        """Keeps the worst relative distance of two rules over rows, `which` being their head of the group."""
        a, b = (torch.cat([(x := self.inputs.split(drop))[0], x[1][:, None]], 1) for drop in (first, second))
        distance = (a - b).double().norm(dim=1) / b.double().norm(dim=1).clamp(min=1e-12)
        self.estimate[row, head : head + self.inputs.group].scatter_reduce_(0, which, distance, "amax")

    def result(self, method: str) -> EntropyResult:
        """Returns the sums by band."""
        inputs = self.inputs
        values, rest = inputs.split(self.drop)
        first, first_rest = (None, None) if self.first is None else inputs.split(self.first)
        n_queries = inputs.counted.sum(1)
        return EntropyResult(
            values=values,
            rest=rest,
            residual=self.worst,
            residual_mean=self.total / n_queries.clamp(min=1)[:, None],
            estimate=self.estimate,
            n_queries=n_queries,
            n_pairs=inputs.n_visible.sum(1),
            n_refined=self.refined.long(),
            first_values=first,
            first_rest=first_rest,
            method=method,
        )
