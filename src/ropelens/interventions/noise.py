"""Gaussian noise as a function of what it is for, whatever order it is asked for in."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

BLOCK = 64  # positions that are drawn at a time


def draw(
    seed: int, stream: int, layer: int, counter: int, shape: tuple[int, ...]
) -> Float64[Tensor, "*shape"]:
    """Returns standard normal numbers that depend on the arguments alone.

    A counter-based generator (Philox), run on the CPU: the same numbers for every host and device.

    Args:
        seed: From 0 up.
        stream: What the noise is for, from 0 to 255.
        counter: The band of a projection, or the position of a query or key.
    """
    import numpy as np

    bits = np.random.Philox(key=[seed, stream << 32 | layer], counter=[0, 0, 0, counter])
    return torch.from_numpy(np.random.Generator(bits).standard_normal(shape))


class PositionNoise:
    """Noise on the queries or keys of a layer, for each position, drawn as positions come up.

    Args:
        scale: What the noise of each head's dims is multiplied with; where it is 0, none is added.
        dims: The dims of a head that are drawn, in the order of drawing: each dim's noise stays the same
            however few of them have a scale.
        seeds: One for each row of a batch; a single one is for all rows.
    """

    def __init__(
        self,
        scale: Float64[Tensor, "head d_head"],
        dims: Int64[Tensor, " dim"],
        seeds: tuple[int, ...],
        stream: int,
        layer: int,
    ) -> None:
        self.scale, self.dims, self.seeds, self.stream, self.layer = scale, dims, seeds, stream, layer
        self._tables: Float32[Tensor, "seed pos head d_head"] = torch.zeros(len(seeds), 0, *scale.shape)

    def __call__(self, x: Tensor, positions: Int64[Tensor, "batch pos"]) -> Tensor:
        if len(self.seeds) > 1 and len(x) != len(self.seeds):
            raise ValueError(
                f"expected a batch of {len(self.seeds)} rows, one for each seed of the lesion, got {len(x)}"
            )
        at = positions.clamp(min=0)
        tables = self._up_to(int(at.max()) + 1, x.device)
        rows = torch.arange(len(x), device=x.device) % len(self.seeds)
        noise = tables[rows[:, None], at]
        if noise.shape[2] != x.shape[2]:  # HookedTransformer may repeat key heads before it turns them
            noise = noise.repeat_interleave(x.shape[2] // noise.shape[2], 2)
        return x + noise.to(x.dtype)

    def _up_to(self, n: int, device: torch.device) -> Float32[Tensor, "seed pos head d_head"]:
        have = self._tables.shape[1]
        if n > have:
            more = range(have, -(-n // BLOCK) * BLOCK)
            new = torch.stack([torch.stack([self._at(seed, p) for p in more]) for seed in self.seeds])
            self._tables = torch.cat([self._tables, new.to(self._tables.device)], 1)
        self._tables = self._tables.to(device)
        return self._tables

    def _at(self, seed: int, position: int) -> Float32[Tensor, "head d_head"]:
        out = torch.zeros_like(self.scale)
        shape = len(self.scale), len(self.dims)
        out[:, self.dims] = draw(seed, self.stream, self.layer, position, shape)
        return (out * self.scale).float()


def noisy_rows(
    weight: Float64[Tensor, "head d_head d_model"],
    pairs: Int64[Tensor, "band 2"],
    mask: Bool[Tensor, "head band"],
    std: float,
    seed: int,
    stream: int,
    layer: int,
) -> Float64[Tensor, "head d_head d_model"]:
    """Returns a projection's rows with noise on those of the masked bands.

    `row + std * rms * N(0, 1)`, rms = the root mean square of the band's two rows in that head.
    """
    out = weight.clone()
    for band in mask.any(0).nonzero()[:, 0].tolist():
        rows = weight[:, pairs[band]]
        rms = rows.square().mean((1, 2), keepdim=True).sqrt()
        noise = draw(seed, stream, layer, band, tuple(rows.shape))
        out[:, pairs[band]] = torch.where(mask[:, band, None, None], rows + std * rms * noise, rows)
    return out
