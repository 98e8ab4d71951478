"""What a run reads: windows of tokens, numbered, from a place that can be found again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int64
from torch import Tensor


@runtime_checkable
class WindowLike(Protocol):
    """A window: `ropelens.data.Window`, or a row of a tensor."""

    @property
    def ids(self) -> Int64[Tensor, " pos"]: ...
    @property
    def lengths(self) -> tuple[int, ...]: ...
    @property
    def index(self) -> int: ...
    @property
    def after(self) -> Any: ...


@runtime_checkable
class Source(Protocol):
    """Windows that can be read from any place on: `ropelens.data.Windows`, or rows of a tensor."""

    @property
    def context(self) -> int: ...
    @property
    def shard(self) -> tuple[int, int]: ...
    @property
    def fingerprint(self) -> Mapping[str, Any]: ...
    def read(self, start: Any = None) -> Iterator[WindowLike]: ...


@dataclass(frozen=True)
class Row:
    """One row of a tensor; `after` is the number of the next row of the shard."""

    ids: Int64[Tensor, " pos"]
    index: int
    after: int

    @property
    def lengths(self) -> tuple[int, ...]:
        return (len(self.ids),)


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a tensor of token ids as windows, each a document."""

    ids: Int64[Tensor, "batch pos"]
    shard: tuple[int, int] = (0, 1)

    @property
    def context(self) -> int:
        return self.ids.shape[1]

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {"rows": len(self.ids), "tokens": hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()[:32]}

    def read(self, start: int | None = None) -> Iterator[Row]:
        first, step = self.shard
        for index in range(first if start is None else start, len(self.ids), step):
            yield Row(self.ids[index], index, index + step)


def source_of(windows: Any, shard: tuple[int, int]) -> Source:
    """Returns the part of the windows that is this process's.

    Args:
        windows: Token ids, or `Windows`.
        shard: (rank, world) of this process.

    Raises:
        ValueError: If `windows` is neither, or holds a shard while there are several processes.
    """
    if isinstance(windows, Tensor):
        if windows.ndim != 2 or windows.numel() == 0 or windows.is_floating_point():
            raise ValueError(
                f"expected token ids of shape [batch, pos], got {windows.dtype} {list(windows.shape)}"
            )
        return Rows(windows.detach().to("cpu", torch.int64).contiguous(), shard)
    if not hasattr(windows, "read") or not hasattr(windows, "shard"):
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


def pieces_of(window: WindowLike) -> Sequence[Int64[Tensor, " pos"]]:
    """Returns the documents in a window, each alone."""
    return window.ids.split(list(window.lengths))


def digest_of(window: WindowLike) -> int:
    """Returns a number for the tokens of a window; those of many windows add up, in any order."""
    digests = (
        hashlib.sha256(piece.cpu().numpy().tobytes() + b"|").hexdigest()[:32] for piece in pieces_of(window)
    )
    return sum(int(digest, 16) for digest in digests)


def padded(
    pieces: Sequence[Int64[Tensor, " pos"]],
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
