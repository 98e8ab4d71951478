"""The host protocol: all that the rest of ropelens knows of a model."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ropelens.bands import Bands
from ropelens.hosts.layer import Certificate, LayerClaim, Rotation

Hook = Callable[[Tensor, Any], Tensor | None]
"""TransformerLens's hook contract: `(activation, hook_point)` to None, or to the new activation."""


class Host(ABC):
    """A TransformerLens model seen through the points that ropelens reads.

    Subclasses say what differs between HookedTransformer and TransformerBridge: how to run the
    model and what it claims about a layer. `certificate` is set once the claims have been checked.
    """

    kind: str
    model: Any
    certificate: Certificate

    def __init__(self, model: Any) -> None:
        self.model = model

    # What a subclass provides -------------------------------------------------------------------

    @property
    @abstractmethod
    def n_layers(self) -> int: ...

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def context(self) -> int | None:
        """The longest sequence that the model takes, in tokens."""
        ...

    @property
    @abstractmethod
    def embedding(self) -> Float[Tensor, "token d_model"]: ...

    @abstractmethod
    def claim(self, layer: int) -> LayerClaim:
        """Returns what the host says of the layer's scores."""
        ...

    @abstractmethod
    def rotations(self, layer: int, d_head: int, seen: dict[str, Tensor]) -> list[Rotation]:
        """Returns the rotations the layer may use, given what its hooks showed in a forward pass."""
        ...

    def rotary_points(self, layer: int) -> tuple[str, ...]:
        """Names of hook points that show the layer's cos and sin, where there are any."""
        return ()

    @abstractmethod
    def run(
        self, ids: Int64[Tensor, "batch pos"], mask: Bool[Tensor, "batch pos"] | None, logits: bool = True
    ) -> Float[Tensor, "batch pos token"] | None:
        """Runs the model; pads are where `mask` is False."""
        ...

    # What all TransformerLens models share --------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def bands(self) -> Bands:
        return self.certificate.bands

    @property
    def fingerprint(self) -> dict[str, object]:
        return self.certificate.fingerprint

    def points(self, layer: int) -> tuple[str, str, str]:
        """Names of the hook points of the post-rotary queries, the keys and the masked scores."""
        stem = f"blocks.{layer}.attn."
        return stem + "hook_rot_q", stem + "hook_rot_k", stem + "hook_attn_scores"

    def require_points(self, layer: int) -> None:
        missing = [name for name in self.points(layer) if name not in self.model.hook_dict]
        if missing:
            raise ValueError(
                f"layer {layer} has no hook point {missing[0]!r}: its attention is not one that "
                f"{self.kind} takes apart, so its bands cannot be read"
            )

    @contextmanager
    def attached(self, hooks: Sequence[tuple[str, Hook]]) -> Iterator[None]:
        """Adds hooks for the duration; removes exactly these afterwards, also after an error.

        Warns if they were gone by then, since what ran without them was not seen.
        """
        added = []
        try:
            for name, hook in hooks:
                point = self.model.hook_dict[name]
                point.add_hook(hook)
                added.append((point, point.fwd_hooks[-1]))
            yield
        finally:
            kept = [(point, handle) for point, handle in added if handle in point.fwd_hooks]
            for point, handle in kept:
                handle.hook.remove()
                point.fwd_hooks.remove(handle)
            if len(kept) < len(added):
                warnings.warn(
                    "ropelens's hooks were reset before their block ended: what ran after that was not seen",
                    stacklevel=4,
                )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lays the user's own hooks aside for the duration, so that the bare model can be measured."""
        saved = []
        try:
            for point in set(self.model.hook_dict.values()):
                before = OrderedDict(point._forward_hooks)
                saved.append((point, before))
                for handle in point.fwd_hooks:
                    if not handle.is_permanent:
                        point._forward_hooks.pop(handle.hook.id, None)
            yield
        finally:
            for point, before in saved:
                point._forward_hooks.clear()
                point._forward_hooks.update(before)
