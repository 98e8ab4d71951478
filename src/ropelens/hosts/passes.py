"""Texts that go on from one forward pass to the next, as they do with a key-value cache."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class Passes:
    """What one layer has seen of a batch of texts so far.

    A pass with as many keys as queries begins new texts; one with more keys than queries goes on with
    those of the pass before, and its queries are the last of their positions.

    Args:
        layer: Which layer, for messages.
        window: Its window: a cache may drop the keys that no later query sees.
    """

    def __init__(self, layer: int, window: int | None) -> None:
        self.layer, self.window = layer, window
        self._real: Bool[Tensor, "batch pos"] | None = None
        self._last: Float[Tensor, "batch kv_head d_head"] | None = None
        self._keys: Float[Tensor, "batch pos kv_head d_head"] | None = None

    @property
    def n_tokens(self) -> int:
        """Positions of the texts until now."""
        return 0 if self._real is None else self._real.shape[1]

    def whole(self, k: Float[Tensor, "batch pos kv_head d_head"], n_keys: int) -> Tensor:
        """Returns all keys that are attended to, for a host that shows each key once, when it is new."""
        if k.shape[1] < n_keys and self._keys is not None and len(self._keys) == len(k):
            k = torch.cat([self._keys, k], 1)[:, -n_keys:]
        self._keys = k
        return k

    def add(
        self,
        own: Bool[Tensor, "batch query"],
        k: Float[Tensor, "batch key kv_head d_head"],
    ) -> tuple[Bool[Tensor, "batch key"], Bool[Tensor, ""]]:
        """Adds a pass; returns which of its keys are real, and whether its rows go on with their texts.

        Args:
            own: Which of its queries are real tokens.
            k: All keys that they may attend to.

        Raises:
            ValueError: If the keys are not those of the passes before and of these queries.
        """
        n_before = k.shape[1] - own.shape[1]
        if n_before == 0:
            real, same = own, torch.ones((), dtype=torch.bool, device=own.device)
        else:
            before, last = self._real, self._last
            if before is None or last is None or len(before) != len(own):
                raise ValueError(self._unlike(own, k, 0))
            kept = range(before.shape[1], before.shape[1] + 1)
            if self.window is not None:
                kept = range(min(self.window - 1, kept.start), kept.stop)
            if n_before not in kept:
                raise ValueError(self._unlike(own, k, before.shape[1]))
            real = torch.cat([before, own], 1)
            # a beam search lets a row go on with another row's keys
            same = ((k[:, n_before - 1] == last) | ~before[:, -1, None, None]).all()
        self._real, self._last = real, k[:, -1].clone()
        return real[:, -k.shape[1] :], same

    def _unlike(self, own: Tensor, k: Tensor, n_before: int) -> str:
        return (
            f"layer {self.layer}: expected the keys of {n_before} tokens seen before and {own.shape[1]} new, "
            f"got {k.shape[1]} keys: observe generation with a key-value cache from its first pass on, one "
            "batch after the other, with a cache that grows as it is filled"
        )
