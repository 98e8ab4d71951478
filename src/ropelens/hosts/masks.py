"""Which keys a query sees: what is certified, and how a mask that was seen compares with it."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor


def visible_keys(
    n_keys: int, window: int | None, device: torch.device, n_queries: int | None = None
) -> Bool[Tensor, "query key"]:
    """Whether the key is the query or before it, and within the window; for the last `n_queries`."""
    first = n_keys - (n_keys if n_queries is None else n_queries)
    distance = torch.arange(first, n_keys, device=device)[:, None] - torch.arange(n_keys, device=device)
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def is_certified(
    shown: Bool[Tensor, "batch heads row key"],
    mask: Bool[Tensor, "batch key"],
    own: Bool[Tensor, "batch row"],
    allowed: Bool[Tensor, "row key"],
) -> Bool[Tensor, ""]:
    """Whether the real queries see the real keys that `allowed` names, and no others.

    Args:
        mask: Which keys are real.
        own: Which queries are.
    """
    expected = (allowed & mask[:, None, :])[:, None]
    return ((shown == expected) | ~own[:, None, :, None]).all()


def pads_at_ends(mask: Bool[Tensor, "batch pos"]) -> Bool[Tensor, ""]:
    """Whether the real tokens of every row are one unbroken run."""
    starts = mask[:, 0].long() + (mask[:, 1:] & ~mask[:, :-1]).sum(-1)
    return (starts <= 1).all()
