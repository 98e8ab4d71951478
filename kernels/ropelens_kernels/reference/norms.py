"""The product of the norms of queries and keys, over visible pairs: linear in the number of positions."""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor

from ropelens_kernels.checks import Inputs


def norm_products(inputs: Inputs) -> Float64[Tensor, "batch head query entry"]:
    """Returns each query's `sum over its visible keys of |scale| |q_b| |k_b|`, the rest after the bands."""
    q, k = _norms(inputs, inputs.q), _norms(inputs, inputs.k)
    past = torch.nn.functional.pad(k.cumsum(2), (0, 0, 1, 0))  # what lies before each place
    stop = torch.arange(inputs.offset, k.shape[2], device=k.device) + 1
    seen = past[:, :, stop]
    if inputs.window is not None:
        seen = seen - past[:, :, (stop - inputs.window).clamp(min=0)]
    return abs(inputs.scale) * q * seen.repeat_interleave(inputs.group, 1)


def first_products(inputs: Inputs) -> Float64[Tensor, "batch head query entry"]:
    """Returns the part of each query's first visible key."""
    q, k = _norms(inputs, inputs.q), _norms(inputs, inputs.k)
    at = inputs.first_visible[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3])
    return abs(inputs.scale) * q * k.gather(2, at).repeat_interleave(inputs.group, 1)


def _norms(inputs: Inputs, x: Tensor) -> Float64[Tensor, "batch head time entry"]:
    """The norm of each band and of the rest together; 0 for pads."""
    bands = x[..., inputs.pairs].double().norm(dim=-1)
    rest = x[..., inputs.rest].double().norm(dim=-1)
    return torch.cat([bands, rest[..., None]], -1)
