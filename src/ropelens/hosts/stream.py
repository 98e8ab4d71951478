"""The residual stream, on every host."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ropelens.hosts.base import Host
from ropelens.hosts.weights import _block, _looking


def residual_stream(host: Host, ids: Int64[Tensor, "batch pos"]) -> list[Float[Tensor, "batch pos d_model"]]:
    """Runs a model and returns what goes into each layer, and at the end what the last one puts out."""
    states: list[list[Tensor]] = [[] for _ in range(host.n_layers)]
    last: list[Tensor] = []
    with torch.no_grad(), ExitStack() as stack:
        for layer, kept in enumerate(states):
            stack.enter_context(_looking(_block(host, layer), before=kept))
        stack.enter_context(_looking(_block(host, host.n_layers - 1), after=last))
        host.run(ids.to(host.device), None, logits=False)
    return [kept[0] for kept in [*states, last]]
