"""The product of the norms of queries and keys, over visible pairs: linear in the number of positions."""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from ropelens_kernels.checks import Inputs

Entries = Float64[Tensor, "batch head query entry"]


def norm_products(inputs: Inputs) -> tuple[Entries, Entries]:
    """Returns each query's `sum over its visible keys of |scale| |q_b| |k_b|`, and its first key's part.

    The rest comes after the bands.
    """
    q, k = abs(inputs.scale) * _norms(inputs, inputs.q), _norms(inputs, inputs.k)
    past = torch.nn.functional.pad(k.cumsum(2), (0, 0, 1, 0))  # what lies before each place
    stop = torch.arange(inputs.offset, k.shape[2], device=k.device) + 1
    seen = past[:, :, inputs.offset + 1 :]
    if inputs.window is not None:
        seen = seen - past[:, :, (stop - inputs.window).clamp(min=0)]
    at = inputs.first_visible[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
    grouped = q.unflatten(1, (-1, inputs.group))
    total, first = (grouped * x[:, :, None] for x in (seen, k.gather(2, at)))
    return total.flatten(1, 2), first.flatten(1, 2)


def _norms(inputs: Inputs, x: Tensor) -> Float64[Tensor, "batch head time entry"]:
    """The norm of each band and of the rest together; 0 for pads."""
    squares = x.double().square()
    one, other = (squares.index_select(-1, dims) for dims in inputs.pairs.T)
    rest = squares.index_select(-1, inputs.rest).sum(-1, keepdim=True)
    return torch.cat([one + other, rest], -1).sqrt_()
