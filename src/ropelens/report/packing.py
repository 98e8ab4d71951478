"""Numbers small enough for a page: whole steps of one byte, and text that a browser turns back."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float32, Float64, Int8
from torch import Tensor

STEPS = 126


@dataclass(frozen=True, eq=False)
class Packed:
    """Rows of numbers in steps of a byte each.

    Attributes:
        scale: What one step of each row is worth.
        steps: The numbers, in steps.
    """

    scale: Float32[Tensor, " row"]
    steps: Int8[Tensor, "row entry"]

    @property
    def values(self) -> Float64[Tensor, "row entry"]:
        """The numbers that a page shows."""
        return self.scale.double()[:, None] * self.steps

    @property
    def bound(self) -> float:
        """What no number, and no sum of neighbouring numbers of a row, is off by more than."""
        return self.scale.max().item() if len(self.scale) else 0.0

    def data(self, first: int = 0, last: int | None = None) -> dict[str, str]:
        """Returns the rows from `first` to before `last` as a page holds them."""
        return {"scale": as_base64(self.scale[first:last]), "steps": as_base64(self.steps[first:last])}


def packed(values: Float64[Tensor, "row entry"]) -> Packed:
    """Rounds each row to steps of 1/126 of its largest number.

    What is rounded is the running sum, so that sums over neighbouring entries, and over all of them, are as
    exact as single ones: off by at most one step.

    Example:
        >>> found = packed(torch.tensor([[0.3, 0.3, 0.3, 1.0]]).double())
        >>> float((found.values.sum() - 1.9).abs()) <= found.bound / 2
        True
    """
    scale = (values.abs().amax(1) / STEPS).float()
    running = (values.cumsum(1) / scale.double().where(scale > 0, 1.0)[:, None]).round()
    steps = running.diff(dim=1, prepend=running.new_zeros(len(values), 1))
    return Packed(scale, steps.to(torch.int8))


def as_base64(numbers: Tensor) -> str:
    """Returns the bytes of a tensor, the lowest first, as text."""
    return base64.b64encode(numbers.contiguous().numpy().tobytes()).decode("ascii")


def floats(values: Tensor) -> dict[str, Any]:
    """Returns numbers as a page holds them: float32, with their shape; NaN stays NaN."""
    return {"shape": list(values.shape), "floats": as_base64(values.float())}
