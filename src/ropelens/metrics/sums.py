"""The sums that an accumulator keeps of one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

import ropelens_kernels as kernels


@dataclass
class LayerSums:
    """What one layer has added up so far, on the layer's own device.

    Updates replace these tensors and never change one, so that a copy of the references is a snapshot.
    Two processes' sums add up, unless a field's `reduce` says otherwise.
    """

    values: Float64[Tensor, "head band"]
    rest: Float64[Tensor, " head"]
    squares: Float64[Tensor, "head band"]
    rest_squares: Float64[Tensor, " head"]
    residual: Float64[Tensor, " head"] = field(metadata={"reduce": "max"})
    bound: Float64[Tensor, "head band"]
    n_queries: Int64[Tensor, ""]
    n_pairs: Int64[Tensor, ""]
    n_documents: Int64[Tensor, ""]
    sound: Bool[Tensor, ""] = field(metadata={"reduce": "min"})
    first: Float64[Tensor, "head band"] | None = None
    first_rest: Float64[Tensor, " head"] | None = None
    later_squares: Float64[Tensor, "head band"] | None = None
    later_rest_squares: Float64[Tensor, " head"] | None = None
    by_position: Float64[Tensor, "span head band"] | None = None
    span_queries: Int64[Tensor, " span"] | None = None

    @classmethod
    def zero(
        cls, n_heads: int, n_bands: int, device: torch.device, split_first: bool, n_spans: int
    ) -> LayerSums:
        by_band = torch.zeros(n_heads, n_bands, dtype=torch.float64, device=device)
        by_head, count = by_band.new_zeros(n_heads), torch.zeros((), dtype=torch.int64, device=device)
        return cls(
            values=by_band,
            rest=by_head,
            squares=by_band,
            rest_squares=by_head,
            residual=by_head,
            bound=by_band,
            n_queries=count,
            n_pairs=count,
            n_documents=count,
            sound=torch.ones((), dtype=torch.bool, device=device),
            first=by_band if split_first else None,
            first_rest=by_head if split_first else None,
            later_squares=by_band if split_first else None,
            later_rest_squares=by_head if split_first else None,
            by_position=by_band.new_zeros(n_spans, n_heads, n_bands) if n_spans else None,
            span_queries=count.new_zeros(n_spans) if n_spans else None,
        )


@dataclass(frozen=True)
class OpenDocuments:
    """What each document of the latest batch has come to, in case the next pass goes on with them."""

    values: Float64[Tensor, "batch head band"]
    rest: Float64[Tensor, "batch head"]
    later: Float64[Tensor, "batch head band"] | None
    later_rest: Float64[Tensor, "batch head"] | None
    n_queries: Int64[Tensor, " batch"]

    @classmethod
    def of(cls, found: kernels.EntropyResult | kernels.ActivationResult) -> OpenDocuments:
        first, first_rest = found.first_values, found.first_rest
        return cls(
            values=found.values,
            rest=found.rest,
            later=None if first is None else found.values - first,
            later_rest=None if first_rest is None else found.rest - first_rest,
            n_queries=found.n_queries,
        )

    def __add__(self, other: OpenDocuments) -> OpenDocuments:
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        return OpenDocuments(**{name: None if b is None else a + b for name, (a, b) in pairs.items()})  # pyright: ignore[reportArgumentType]

    def begun(self, before: OpenDocuments | None) -> Int64[Tensor, ""]:
        """How many of them had no query before; a row of pads is no document."""
        new = self.n_queries > 0
        return (new if before is None else new & (before.n_queries == 0)).sum()


def more_squared(new: Tensor, before: Tensor | None) -> Tensor:
    """By how much the sum of documents' squares grows when `new` is added to what they had before."""
    return (new.square() if before is None else new * (2 * before + new)).sum(0)


Reduction = Literal["sum", "max", "min"]
REDUCTIONS: dict[str, Reduction] = {f.name: f.metadata.get("reduce", "sum") for f in fields(LayerSums)}


def mapped(sums: LayerSums, change: Callable[[Tensor], Tensor]) -> LayerSums:
    """Returns the sums with every tensor changed."""
    tensors = {f.name: getattr(sums, f.name) for f in fields(sums)}
    return LayerSums(**{name: None if t is None else change(t) for name, t in tensors.items()})  # pyright: ignore[reportArgumentType]
