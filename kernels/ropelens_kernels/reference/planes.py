"""What the fast activation methods share: planes of bands, windows cut into causal pieces, near pairs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
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
    q, k = _planes(inputs.q[row, heads], inputs.pairs), _planes(inputs.k[row, kv, None], inputs.pairs)[:, 0]
    if inputs.offset:
        q = torch.nn.functional.pad(q, (inputs.offset, 0))
    time, window = k.shape[-1], inputs.window
    if window is None or window >= time:
        yield Planes(q[:, None], k[:, None])
        return
    extra = -time % window
    q = torch.nn.functional.pad(q, (0, extra)).unflatten(-1, (-1, window)).movedim(-2, 1)
    k = torch.nn.functional.pad(k, (0, extra)).unflatten(-1, (-1, window)).movedim(-2, 1)
    yield Planes(q, k)
    if window > 1:
        yield Planes(q[:, 1:].flip(-1)[..., 1:], k[:, :-1].flip(-1)[..., :-1])


def _planes(
    x: Float[Tensor, "head time d_head"], pairs: Int64[Tensor, "band 2"]
) -> Float[Tensor, "2 head band time"]:
    """Returns the two coordinates of each band, each along time in memory."""
    by_dim = x.permute(2, 0, 1).contiguous()
    return by_dim[pairs.T].transpose(1, 2)


def blocked(x: Float[Tensor, "*axes time"], width: int) -> Float[Tensor, "*axes place block"]:
    """Splits time into blocks, the place in the block first: sums over places then run along memory."""
    return x.unflatten(-1, (-1, width)).transpose(-1, -2).contiguous()


def near(
    q: Float[Tensor, "2 piece group band place block"], k: Float[Tensor, "2 piece band place block"]
) -> Float[Tensor, "piece group band block"]:
    """Returns each block's `sum |q.k|` over its pairs with the key not after the query, by distance."""
    width = q.shape[-2]
    total = torch.zeros_like(q[0, :, :, :, 0])
    k = k[:, :, None]
    for distance in range(width):
        late, early = q[..., distance:, :], k[..., : width - distance, :]
        x = torch.addcmul(late[0] * early[0], late[1], early[1])
        total += x.abs_().sum(-2)
    return total
