"""The absolute position of each row of queries and keys, as the model turned it."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn


class Positions(ABC):
    """Knows the positions of the forward pass under way, inside `watching`."""

    @abstractmethod
    def watching(self, layers: Sequence[int]) -> AbstractContextManager[None]: ...

    @abstractmethod
    def queries(self, layer: int, q: Tensor) -> Int64[Tensor, "batch pos"]:
        """Returns the positions of queries `[batch, pos, head, d_head]`."""
        ...

    @abstractmethod
    def keys(self, layer: int, k: Tensor) -> Int64[Tensor, "batch pos"]:
        """Returns the positions of keys `[batch, pos, kv_head, d_head]`, cached ones among them."""
        ...


class RotaryPositions(Positions):
    """Positions read from what a transformers model hands to its rotary modules.

    Cached keys were turned in earlier passes. They are taken to precede the new ones without a gap,
    as in generation.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._seen: Tensor | None = None

    @contextmanager
    def watching(self, layers: Sequence[int]) -> Iterator[None]:
        rotary = [m for m in self.module.modules() if _is_rotary(m)]
        if layers and not rotary:
            raise ValueError(
                f"expected a rotary module that takes position_ids in {type(self.module).__name__}, found "
                "none: where its queries and keys stand cannot be told, so they cannot be edited"
            )
        handles = [
            m.register_forward_pre_hook(partial(self._see, inspect.signature(m.forward)), with_kwargs=True)
            for m in rotary
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, signature: inspect.Signature, module: nn.Module, args: Any, options: Any) -> None:
        self._seen = signature.bind(*args, **options).arguments["position_ids"]

    def queries(self, layer: int, q: Tensor) -> Int64[Tensor, "batch pos"]:
        ids = self._seen
        if ids is None:
            raise ValueError(f"layer {layer}: its rotary module did not run before its queries were made")
        if ids.ndim != 2 or ids.shape[1] != q.shape[1]:
            raise ValueError(
                f"layer {layer}: expected position ids of shape [batch, {q.shape[1]}], one a query, got "
                f"{list(ids.shape)}: a rotation by several coordinates is not supported"
            )
        return ids.to(q.device, torch.int64).expand(q.shape[0], -1)

    def keys(self, layer: int, k: Tensor) -> Int64[Tensor, "batch pos"]:
        new = self._seen
        if new is None or new.ndim != 2 or new.shape[1] >= k.shape[1]:
            return self.queries(layer, k)
        new = self.queries(layer, k[:, : new.shape[1]])
        before = torch.arange(new.shape[1] - k.shape[1], 0, device=k.device)
        return torch.cat([new[:, :1] + before, new], 1)


class HookedPositions(Positions):
    """Positions read from the mask and the cache that a HookedTransformer's attention is called with.

    It turns all keys anew in every pass, those that were cached too.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._calls: dict[int, tuple[int, Tensor | None]] = {}

    @contextmanager
    def watching(self, layers: Sequence[int]) -> Iterator[None]:
        attention = {layer: self.model.blocks[layer].attn for layer in layers}
        handles = [
            m.register_forward_pre_hook(
                partial(self._see, layer, inspect.signature(m.forward)), with_kwargs=True
            )
            for layer, m in attention.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see(
        self, layer: int, signature: inspect.Signature, module: nn.Module, args: Any, options: Any
    ) -> None:
        given = signature.bind(*args, **options).arguments
        cache = given.get("past_kv_cache_entry")
        self._calls[layer] = 0 if cache is None else cache.past_keys.shape[1], given.get("attention_mask")

    def queries(self, layer: int, q: Tensor) -> Int64[Tensor, "batch pos"]:
        return self._from(self._calls[layer][0], layer, q)

    def keys(self, layer: int, k: Tensor) -> Int64[Tensor, "batch pos"]:
        return self._from(0, layer, k)

    def _from(self, start: int, layer: int, rows: Tensor) -> Int64[Tensor, "batch pos"]:
        mask = self._calls[layer][1]
        if mask is None:
            return torch.arange(start, start + rows.shape[1], device=rows.device).expand(rows.shape[0], -1)
        return (mask.to(rows.device).long().cumsum(1) - 1).clamp(min=0)[:, start:]


def _is_rotary(module: nn.Module) -> bool:
    if next(module.children(), None) is not None:
        return False
    named = "rotary" in type(module).__name__.lower() or "rope" in type(module).__name__.lower()
    turns = named or any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
    return turns and "position_ids" in inspect.signature(module.forward).parameters
