"""What the fast activation methods share: planes of bands, windows cut into causal pieces, near pairs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ropelens_kernels.checks import Inputs


class Planes(NamedTuple):
    """One causal problem: query t sees keys 0..t. Zero vectors stand where there is no query or key.

    Attributes:
        q: The two coordinates in each band's plane, by piece of time and query head of a key head.
        k: The same for keys.
    """

    q: Float[Tensor, "2 piece group band time"]
    k: Float[Tensor, "2 piece band time"]

    def padded(self, time: int) -> Planes:
        """The same problem with zero vectors up to `time`."""
        extra = time - self.k.shape[-1]
        return Planes(*(torch.nn.functional.pad(x, (0, extra)) for x in self)) if extra else self


def causal_pieces(inputs: Inputs, row: int, kv: int) -> Iterator[Planes]:
    """Yields causal problems that together hold each visible pair of a key head once.

    With a window of W time is cut into blocks of W: a query sees its own block's past, and those keys
    of the block before that come after its own place there, which is the past in reversed time.
    """
    heads = slice(kv * inputs.group, (kv + 1) * inputs.group)
    q = inputs.q[row, heads][..., inputs.pairs].permute(3, 0, 2, 1)
    k = inputs.k[row, kv][..., inputs.pairs].permute(2, 1, 0)
    q = torch.nn.functional.pad(q, (inputs.offset, 0))
    time, window = k.shape[-1], inputs.window
    if window is None or window >= time:
        yield Planes(q[:, None].contiguous(), k[:, None].contiguous())
        return
    extra = -time % window
    q = torch.nn.functional.pad(q, (0, extra)).unflatten(-1, (-1, window)).movedim(-2, 1)
    k = torch.nn.functional.pad(k, (0, extra)).unflatten(-1, (-1, window)).movedim(-2, 1)
    yield Planes(q.contiguous(), k.contiguous())
    if window > 1:
        yield Planes(q[:, 1:].flip(-1)[..., 1:].contiguous(), k[:, :-1].flip(-1)[..., :-1].contiguous())


def blocked(x: Float[Tensor, "*axes time"], width: int) -> Float[Tensor, "*axes place block"]:
    """Splits time into blocks, the place in the block first: sums over places then run along memory."""
    return x.unflatten(-1, (-1, width)).transpose(-1, -2).contiguous()


def near(
    q: Float[Tensor, "2 piece group band place block"], k: Float[Tensor, "2 piece band place block"]
) -> Float64[Tensor, "group band"]:
    """Returns `sum |q.k|` over the pairs of a block with the key not after the query, by distance."""
    width = q.shape[-2]
    total = torch.zeros(q.shape[2], q.shape[3], dtype=torch.float64, device=q.device)
    k = k[:, :, None]
    for distance in range(width):
        late, early = q[..., distance:, :], k[..., : width - distance, :]
        x = torch.addcmul(late[0] * early[0], late[1], early[1])
        total += torch.linalg.vector_norm(x, 1, dim=(-1, -2)).sum(0, dtype=torch.float64)
    return total
