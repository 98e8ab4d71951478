"""Which keys a query sees: what is certified, and how a mask that was seen compares with it."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor


def visible_keys(n_keys: int, window: int | None, device: torch.device) -> Bool[Tensor, "query key"]:
    """Whether the key is the query or before it, and within the window."""
    distance = torch.arange(n_keys, device=device)[:, None] - torch.arange(n_keys, device=device)
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def is_certified(
    shown: Bool[Tensor, "batch heads row key"],
    mask: Bool[Tensor, "batch key"],
    allowed: Bool[Tensor, "row key"],
    rows: slice = slice(None),
) -> Bool[Tensor, ""]:
    """Whether the real queries among `rows` see the real keys that `allowed` names, and no others."""
    expected = (allowed & mask[:, None, :])[:, None]
    return ((shown == expected) | ~mask[:, None, rows, None]).all()


def pads_at_ends(mask: Bool[Tensor, "batch pos"]) -> Bool[Tensor, ""]:
    """Whether the real tokens of every row are one unbroken run."""
    starts = mask[:, 0].long() + (mask[:, 1:] & ~mask[:, :-1]).sum(-1)
    return (starts <= 1).all()
