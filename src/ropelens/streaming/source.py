"""From windows to what the model runs: documents that share a window, each alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ropelens.data import Window, Windows
from ropelens.data import windows as windows_of


def source_of(windows: Any, shard: tuple[int, int]) -> Windows:
    """Returns the part of the windows that is this process's.

    Args:
        windows: Token ids, or `Windows`.
        shard: (rank, world) of this process.

    Raises:
        ValueError: If `windows` is neither, or holds a shard while there are several processes.
    """
    if isinstance(windows, Tensor):
        windows = windows_of(windows)
    if not isinstance(windows, Windows):
        raise ValueError(
            "expected windows from ropelens.windows or token ids of shape [batch, pos], got "
            f"{type(windows).__name__}"
        )
    if shard[1] == 1:
        return windows
    if tuple(windows.shard) != (0, 1):
        raise ValueError(
            f"expected all windows, got shard {windows.shard[0]}/{windows.shard[1]}: torchrun's processes "
            "share the windows out by themselves"
        )
    return replace(windows, shard=shard)


def pieces_of(window: Window) -> Sequence[Int64[Tensor, " _"]]:
    """Returns the documents in a window, each alone."""
    return window.ids.split(list(window.lengths))


def digest_of(window: Window) -> int:
    """Returns a number for the tokens of a window; those of many windows add up, in any order."""
    digests = (hashlib.sha256(piece.numpy().tobytes() + b"|").hexdigest()[:32] for piece in pieces_of(window))
    return sum(int(digest, 16) for digest in digests)


def padded(
    pieces: Sequence[Int64[Tensor, " _"]],
) -> Iterator[tuple[Int64[Tensor, "batch pos"], Bool[Tensor, "batch pos"] | None]]:
    """Yields the pieces as rows of right-padded batches, with a mask where there are pads.

    A piece is a row of its own, so that it sees no other. Lengths in a batch differ by less than a
    factor of 2: less than half of what the model runs on is padding.
    """
    groups: dict[int, list[Tensor]] = {}
    for piece in pieces:
        groups.setdefault(len(piece).bit_length(), []).append(piece)
    for _, rows in sorted(groups.items(), reverse=True):
        lengths = torch.tensor([len(row) for row in rows])
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        yield ids, None if bool(mask.all()) else mask
