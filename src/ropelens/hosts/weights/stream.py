"""The residual stream, and what attention adds to it, as forward passes go by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ropelens.hosts.base import Host
from ropelens.hosts.weights.modules import attention_of, block_of, here


@contextmanager
def watching(host: Host, look: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Hands over the residual stream: what each layer takes, and as one more layer what the last makes.

    Args:
        look: Called with (layer, `[batch, pos, d_model]`), detached and on the embedding's device, in every
            forward pass.
    """
    last = host.n_layers - 1
    with ExitStack() as stack:
        for layer in range(host.n_layers):
            stack.enter_context(_before(host, block_of(host, layer), partial(look, layer)))
        stack.enter_context(_after(host, block_of(host, last), partial(look, host.n_layers)))
        yield


@contextmanager
def watching_attention(host: Host, layer: int, look: Callable[[Tensor], None]) -> Iterator[None]:
    """Hands over what a layer's attention makes, `o_bias` included, before any norm of it."""
    with _after(host, attention_of(host, layer), look):
        yield


def _before(host: Host, module: torch.nn.Module, look: Callable[[Tensor], None]) -> RemovableHandle:
    """Hands over what a module takes, until the handle is removed."""

    def take(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        look(here(host, args[0] if args else options["hidden_states"]))

    return module.register_forward_pre_hook(take, with_kwargs=True)


def _after(host: Host, module: torch.nn.Module, look: Callable[[Tensor], None]) -> RemovableHandle:
    """Hands over what a module makes, until the handle is removed."""

    def make(_: Any, args: Any, made: Any) -> None:
        look(here(host, made[0] if isinstance(made, tuple) else made))

    return module.register_forward_hook(make)
