"""Frequencies that are trained with the weights."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from ropelens.hosts import uncertified
from ropelens.hosts.turning import Turning, set_turning

NAME = "ropelens_frequencies"  # of the module in the model that is trained


class LearnedFrequencies(nn.Module):
    """Log frequencies as parameters, from the original ladder on: of each layer, or shared by all.

    Logarithms, because a step of the optimizer is as large for a slow band as for a fast one.
    """

    def __init__(self, ladder: Float64[Tensor, " band"], n_layers: int, shared: bool) -> None:
        super().__init__()
        self.n_layers = n_layers
        self.log = nn.Parameter(ladder.log().float().repeat(1 if shared else n_layers, 1))

    def forward(self) -> list[Float[Tensor, " band"]]:
        rows = self.log.exp()
        return list(rows.expand(self.n_layers, -1))


def learn_frequencies(model: Any, ladder: Float64[Tensor, " band"], shared: bool) -> LearnedFrequencies:
    """Makes the frequencies of a new Llama parameters of it."""
    host = uncertified(model)
    learned = LearnedFrequencies(ladder, host.n_layers, shared)
    model.add_module(NAME, learned)
    attention = [layer.self_attn for layer in model.model.layers]
    set_turning(model, attention, Turning([row.detach().double() for row in learned()], learned))
    return learned


def take_learned(model: Any) -> Float64[Tensor, "layer band"] | None:
    """Removes these parameters from a model, and returns what they came to; None if there are none."""
    learned = getattr(model, NAME, None)
    if learned is None:
        return None
    delattr(model, NAME)
    return torch.stack([row.detach().to("cpu", torch.float64) for row in learned()])
