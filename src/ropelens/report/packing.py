"""Numbers small enough for a page: whole steps of one byte, and text that a browser turns back."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float32, Float64, Int8, Int32
from torch import Tensor

STEPS = 126
FINE = 5e-4


@dataclass(frozen=True, eq=False)
class Packed:
    """Rows of numbers in steps of a byte each, of two where the steps would be coarse.

    Attributes:
        scale: What one step of each row is worth.
        steps: The numbers, in steps.
        fine: Which rows have a second byte: those with steps above 5e-4.
        more: What these rows have beyond their steps, in steps of 1/126 of a step.
    """

    scale: Float32[Tensor, " row"]
    steps: Int8[Tensor, "row entry"]
    fine: Int32[Tensor, " fine"]
    more: Int8[Tensor, "fine entry"]

    @property
    def values(self) -> Float64[Tensor, "row entry"]:
        """The numbers that a page shows."""
        steps = self.steps.double()
        steps[self.fine.long()] += self.more.double() / STEPS
        return self.scale.double()[:, None] * steps

    @property
    def bound(self) -> float:
        """What no number, and no sum of neighbouring numbers of a row, is off by more than."""
        worth = self.scale.double()
        worth[self.fine.long()] /= STEPS
        return worth.max().item() if len(worth) else 0.0

    def data(self, first: int = 0, last: int | None = None) -> dict[str, str]:
        """Returns the rows from `first` to before `last` as a page holds them."""
        last = len(self.scale) if last is None else last
        mine = (self.fine >= first) & (self.fine < last)
        found = {"scale": self.scale[first:last], "steps": self.steps[first:last]}
        found |= {"fine": self.fine[mine] - first, "more": self.more[mine]}
        return {name: as_base64(numbers) for name, numbers in found.items()}


def packed(values: Float64[Tensor, "row entry"]) -> Packed:
    """Rounds each row to steps of 1/126 of its largest number, or finer.

    What is rounded is the running sum, so that sums over neighbouring entries, and over all of them, are as
    exact as single ones: off by at most one step.

    Example:
        >>> found = packed(torch.tensor([[0.3, 0.3, 0.3, 1.0]]).double())
        >>> float((found.values.sum() - 1.9).abs()) <= found.bound / 2
        True
    """
    scale = (values.abs().amax(1) / STEPS).float()
    running = values.cumsum(1) / scale.double().where(scale > 0, 1.0)[:, None]
    whole = running.round()
    fine = (scale > FINE).nonzero().flatten().to(torch.int32)
    parts = ((running - whole)[fine.long()] * STEPS).round()
    return Packed(scale, _apart(whole), fine, _apart(parts))


def _apart(running: Float64[Tensor, "row entry"]) -> Int8[Tensor, "row entry"]:
    return running.diff(dim=1, prepend=running.new_zeros(len(running), 1)).to(torch.int8)


def as_base64(numbers: Tensor) -> str:
    """Returns the bytes of a tensor, the lowest first, as text."""
    return base64.b64encode(numbers.contiguous().numpy().tobytes()).decode("ascii")


def floats(values: Tensor) -> dict[str, Any]:
    """Returns numbers as a page holds them: float32, with their shape; NaN stays NaN."""
    return {"shape": list(values.shape), "floats": as_base64(values.float())}
