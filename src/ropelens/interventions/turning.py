"""Turning bands of queries and keys by the model's own rotation, and back."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ropelens.hosts.layer import Rotation


class Turn:
    """The rotation of some bands of a layer's heads.

    Args:
        rotation: The layer's certified rotation.
        mask: Which bands of which heads; others are left as they are.
    """

    def __init__(self, rotation: Rotation, mask: Bool[Tensor, "head band"]) -> None:
        which = mask.any(0)
        self.first, self.second = rotation.pairs[which].unbind(-1)
        self.inv_freq, self.amplitude = rotation.inv_freq[which], rotation.amplitude
        self.mask = mask[:, which]

    def back(
        self, x: Float[Tensor, "batch pos head d_head"], positions: Int64[Tensor, "batch pos"]
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Returns x with these bands as they were before the rotation, its amplitude undone too."""
        cos, sin = self._table(positions, x)
        a, b = x[..., self.first], x[..., self.second]
        return self._with(x, (a * cos + b * sin) / self.amplitude, (b * cos - a * sin) / self.amplitude)

    def of(
        self,
        x: Float[Tensor, "batch pos head d_head"],
        positions: Int64[Tensor, "batch pos"],
        content: Float[Tensor, "head band 2"],
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Returns x with these bands holding the content, turned as the model turns each position."""
        cos, sin = self._table(positions, x)
        a, b = (self.amplitude * content.to(x.device, x.dtype)).unbind(-1)
        return self._with(x, a * cos - b * sin, a * sin + b * cos)

    def _table(self, positions: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        # Angles as models make them, in float32 unless they work in more: at long positions a float64
        # angle is another one.
        dtype = torch.promote_types(x.dtype, torch.float32)
        angle = positions[..., None, None].to(dtype) * self.inv_freq.to(x.device, dtype)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)

    def _with(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        mask = self.mask.to(x.device)
        if len(mask) != x.shape[2]:  # HookedTransformer may repeat key heads before it turns them
            mask = mask.repeat_interleave(x.shape[2] // len(mask), 0)
        out = x.clone()
        out[..., self.first] = torch.where(mask, first, x[..., self.first])
        out[..., self.second] = torch.where(mask, second, x[..., self.second])
        return out
