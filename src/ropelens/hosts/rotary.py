"""From the cos and sin that a model makes to the rotations it may perform with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ropelens.bands import pair_dims
from ropelens.hosts.layer import Rotation


def rotations_from(
    cos: Float[Tensor, "pos width"],
    sin: Float[Tensor, "pos width"],
    d_head: int,
    exact: Sequence[Float[Tensor, " _"]],
) -> list[Rotation]:
    """Returns the rotations that a table of cos and sin may stand for.

    How the table repeats each angle does not say how the dims are paired (GLM repeats by halves and
    pairs neighbours), so both pairings are offered, and both widths that a table without repeats may
    mean. Which of them the queries went through is measured.

    Args:
        exact: The frequencies that the table may have been made from; those that agree with it replace
            the ones that it shows, which are rounded.
    """
    # A table in half precision shows its angles to that precision only.
    rtol = max(2e-6, torch.finfo(cos.dtype).eps)
    cos, sin, amplitude = cos[1].double(), sin[1].double(), amplitude_of(cos[1], sin[1])
    angle, width = torch.atan2(sin, cos).cpu(), cos.shape[-1]
    ladders = []
    if width % 2 == 0:
        if torch.equal(angle[: width // 2], angle[width // 2 :]):
            ladders.append(angle[: width // 2])
        if torch.equal(angle[0::2], angle[1::2]) and width > 2:
            ladders.append(angle[0::2])
    if 2 * width <= d_head:
        ladders.append(angle)
    return [
        Rotation(_exact(ladder, exact, rtol), pair_dims(2 * len(ladder), adjacent), amplitude)
        for ladder in ladders
        if 2 * len(ladder) <= d_head
        for adjacent in (False, True)
    ]


def amplitude_of(cos: Float[Tensor, " width"], sin: Float[Tensor, " width"]) -> float:
    """Returns the factor in a row of cos and sin; 1 where it is 1 as far as their precision goes."""
    # In float64 models too, the tables are made in single precision.
    eps = max(torch.finfo(cos.dtype).eps, torch.finfo(torch.float32).eps)
    amplitude = float(torch.hypot(sin.double(), cos.double()).mean())
    return 1.0 if abs(amplitude - 1) <= eps else amplitude


def buffered(module: torch.nn.Module) -> list[Float[Tensor, " _"]]:
    """Returns the frequencies that a transformers model keeps in buffers."""
    return [b.detach() for name, b in module.named_buffers() if name.endswith("inv_freq")]


def _exact(
    ladder: Float[Tensor, " band"], exact: Sequence[Float[Tensor, " _"]], rtol: float
) -> Float[Tensor, " band"]:
    for row in exact:
        if row.shape == ladder.shape:
            row = row.double().cpu()
            miss = row - ladder
            miss = miss.where(miss < math.pi, miss - 2 * math.pi)  # a table shows pi as -pi
            if bool((miss.abs() <= rtol * row.abs()).all()):
                return row
    return ladder


def steady_length(config: Any) -> int | None:
    """Returns the length up to which a transformers model keeps its frequencies; None if it always does."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = parameters.values() if all(isinstance(p, dict) for p in parameters.values()) else [parameters]
    lengths = []
    for kind in kinds:
        if kind.get("rope_type") == "longrope":
            original = kind.get("original_max_position_embeddings")
            lengths.append(original or config.original_max_position_embeddings)
        elif kind.get("rope_type") == "dynamic":
            lengths.append(config.max_position_embeddings)
    return min(lengths, default=None)
