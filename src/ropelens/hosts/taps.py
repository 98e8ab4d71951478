"""Reaching queries and keys inside transformers' own attention, through its AttentionInterface.

An attention function of ours is registered under a name of its own and set on the model. It lets taps
observe and edit the queries and keys in the order in which they were added, and then calls the function
that was set before, so the output is the model's own.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ropelens.hosts.base import Edit
from ropelens.hosts.positions import Positions

OURS = "ropelens-"


@dataclass(frozen=True, eq=False)
class Call:
    """One call of the attention function, by transformers' axes.

    Attributes:
        q: Post-rotary queries [batch, head, query, d_head], as far as edited at this tap.
        k: Post-rotary keys [batch, kv_head, key, d_head], likewise.
        used: Whether the model attended with just these; False if a later tap edits them.
        implementation: The name of the attention function that was called.
        mask: What the model's own mask function made: None, or a tensor.
        options: scaling, softcap, sliding_window and all else that came by name.
    """

    layer: int
    module: nn.Module
    implementation: str
    q: Tensor
    k: Tensor
    v: Tensor
    used: bool
    mask: Any
    output: Tensor
    options: dict[str, Any]


@dataclass(eq=False)
class Tap:
    """One user of the attention function: edits of queries and keys by layer, or an observer."""

    queries: Mapping[int, Edit] = field(default_factory=dict)
    keys: Mapping[int, Edit] = field(default_factory=dict)
    positions: Positions | None = None  # of what is edited
    observe: Callable[[Call], None] | None = None

    def edited(self, layer: int, q: Tensor, k: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
        """Returns queries and keys, by transformers' axes, as this tap would have them."""
        if self.positions is None:
            return q, k
        if layer in self.queries:
            rows = q.transpose(1, 2)
            q = self.queries[layer](rows, self.positions.queries(layer, rows)).transpose(1, 2)
        if layer in self.keys:
            rows = k.transpose(1, 2)
            _require_no_room(layer, mask, q, k)
            k = self.keys[layer](rows, self.positions.keys(layer, rows)).transpose(1, 2)
        return q, k


class TappedAttention:
    """An attention function that passes through taps to the one that was set before."""

    def __init__(self, implementation: str) -> None:
        self.implementation = implementation
        self.name = f"{OURS}{id(self)}"
        self.taps: list[Tap] = []

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        layer = getattr(module, "layer_idx", None)
        if layer is None:
            raise ValueError(
                f"expected attention modules that know their layer_idx, got a {type(module).__name__} "
                "without: its layer cannot be told"
            )
        q, k, seen = query, key, []
        for tap in list(self.taps):
            q, k = tap.edited(layer, q, k, attention_mask)
            if tap.observe is not None:
                seen.append((tap.observe, q, k))
        found = self._attend(module)(module, q, k, value, attention_mask, **options)
        for observe, its_q, its_k in seen:
            observe(
                Call(
                    layer=layer,
                    module=module,
                    implementation=self.implementation,
                    q=its_q,
                    k=its_k,
                    v=value,
                    used=its_q is q and its_k is k,
                    mask=attention_mask,
                    output=found[0],
                    options=options,
                )
            )
        return found

    def _attend(self, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if self.implementation != "eager":
            return ALL_ATTENTION_FUNCTIONS[self.implementation]
        # Eager attention is a function of each model's own file, not of the interface.
        for base in type(module).__mro__:
            eager = getattr(sys.modules.get(base.__module__), "eager_attention_forward", None)
            if eager is not None:
                return eager
        raise ValueError(
            f"{type(module).__name__} has no eager_attention_forward beside it: load the model with "
            'attn_implementation="sdpa"'
        )


def _require_no_room(layer: int, mask: Any, q: Tensor, k: Tensor) -> None:
    """Refuses a cache with room for keys to come: the new keys do not end it, so none can be placed."""
    if k.shape[2] == q.shape[2] or not isinstance(mask, Tensor) or mask.ndim != 4:
        return
    last = mask[:, 0, -1, k.shape[2] - 1]
    if not bool((last if mask.dtype == torch.bool else last > torch.finfo(mask.dtype).min / 2).any()):
        raise ValueError(
            f"layer {layer}: expected a key-value cache that ends with the newest key, got one with room for "
            'more: keys are edited with cache_implementation="dynamic" only'
        )


@contextmanager
def tapped(owner: Any, tap: Tap) -> Iterator[None]:
    """Adds a tap to a transformers model; removes exactly this one afterwards, also after an error.

    Args:
        owner: The transformers model whose config its attention layers ask.

    Raises:
        ValueError: If the model's attention does not go through transformers' interface.
    """
    from transformers import AttentionInterface

    attention = AttentionInterface._global_mapping.get(owner.config._attn_implementation)
    if not isinstance(attention, TappedAttention):
        attention = _install(owner)
    attention.taps.append(tap)
    try:
        yield
    finally:
        attention.taps.remove(tap)
        if owner.config._attn_implementation != attention.name:
            warnings.warn(
                "the attention implementation was changed before ropelens's block ended: what ran after "
                "that was not seen",
                stacklevel=4,
            )
        elif not attention.taps:
            owner.set_attn_implementation(attention.implementation)
        if not attention.taps:
            _forget(attention.name)


def implementation_of(owner: Any) -> str:
    """Returns the attention implementation that is set, the user's where ours is in front of it."""
    from transformers import AttentionInterface

    attention = AttentionInterface._global_mapping.get(owner.config._attn_implementation)
    if isinstance(attention, TappedAttention):
        return attention.implementation
    return owner.config._attn_implementation


@contextmanager
def switched(owner: Any, implementation: str) -> Iterator[None]:
    """Sets another attention implementation for the duration, taps or none in front of it."""
    before = owner.config._attn_implementation
    owner.set_attn_implementation(implementation)
    try:
        yield
    finally:
        owner.set_attn_implementation(before)


def _install(owner: Any) -> TappedAttention:
    from transformers import AttentionInterface, AttentionMaskInterface

    attention = TappedAttention(owner.config._attn_implementation)
    AttentionInterface.register(attention.name, attention)
    make_mask = AttentionMaskInterface._global_mapping.get(attention.implementation)
    if make_mask is not None:
        AttentionMaskInterface.register(attention.name, make_mask)
    owner.set_attn_implementation(attention.name)
    if owner.config._attn_implementation != attention.name:
        _forget(attention.name)
        raise ValueError(
            f"{type(owner).__name__} runs its attention outside transformers' AttentionInterface, so its "
            "queries and keys cannot be seen: wrap it with TransformerBridge.boot_transformers"
        )
    return attention


def _forget(name: str) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface._global_mapping.pop(name, None)
    AttentionMaskInterface._global_mapping.pop(name, None)
