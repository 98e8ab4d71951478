"""Attention along the path from "all scores zero" (t = 0) to the real scores (t = 1)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

HIDDEN = -1e30  # the logit of a key that is not seen: exp(t * HIDDEN) = 0 and 0 * HIDDEN = 0 for every node t


class Point(NamedTuple):
    """The path at one t, for rows of keys.

    Attributes:
        attention: `a(t) = softmax(f(t l))` over the keys, and the sink if there is one.
        slope: `f'(t l)`, or None without a softcap, where it is 1.
        potential: `f(t l) - shift`.
        log_z: `log sum exp(potential)`, the sink included.
        sink: The sink's attention, or None.
        shift: What was subtracted from every outcome's potential.
    """

    attention: Float[Tensor, "*row key"]
    slope: Float[Tensor, "*row key"] | None
    potential: Float[Tensor, "*row key"]
    log_z: Float[Tensor, "*row 1"]
    sink: Float[Tensor, "*row 1"] | None
    shift: Float[Tensor, "*row 1"]


def point(
    logits: Float[Tensor, "*row key"],
    t: float,
    softcap: float | None = None,
    sink: Float[Tensor, "*row 1"] | None = None,
) -> Point:
    """Returns the path at `t`; hidden keys have the logit HIDDEN and get no attention."""
    if softcap is None:
        slope, potential = None, logits * t
    else:
        tanh = torch.tanh(logits * (t / softcap))
        slope = 1 - tanh * tanh
        potential = (softcap * tanh).masked_fill(logits <= HIDDEN / 2, HIDDEN)
    shift = potential.amax(-1, keepdim=True)
    if sink is not None:
        shift = torch.maximum(shift, sink)
    potential = potential - shift
    weight = potential.exp()
    z = weight.sum(-1, keepdim=True)
    if sink is None:
        return Point(weight / z, slope, potential, z.log(), None, shift)
    sink_weight = (sink - shift).exp()
    z = z + sink_weight
    return Point(weight / z, slope, potential, z.log(), sink_weight / z, shift)
