"""From documents to windows of one length, numbered, with a cursor after each."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int64
from torch import Tensor

from ropelens.data.encoding import Encoder
from ropelens.data.sources import Document, Source, source_of

Fit = Literal["clip", "split", "pack"]


@dataclass(frozen=True)
class Cursor:
    """Where the next window starts; `dataclasses.asdict` makes JSON of it.

    Attributes:
        shard: Number of the file, or of the hub dataset's own shard.
        row: Number of the document in it.
        offset: Tokens of that document that earlier windows have used (0 unless split or packed).
        index: Number of the next window.
    """

    shard: int = 0
    row: int = 0
    offset: int = 0
    index: int = 0


@dataclass(frozen=True, eq=False)
class Window:
    """A run of token ids that a model sees in one piece.

    Attributes:
        ids: Token ids, on the CPU.
        lengths: Tokens of each document in it, in order; one entry unless packed.
        documents: A hash of the whole text (of the row, for ready ids) of each of these documents.
        index: Its number in the unsharded stream, the same whatever the sharding.
        after: Where the window after it in the unsharded stream starts.
    """

    ids: Int64[Tensor, " pos"]
    lengths: tuple[int, ...]
    documents: tuple[str, ...]
    index: int
    after: Cursor


@dataclass
class Counts:
    """What the last reading met, from where it started: numbers of documents, but for `longest`.

    Attributes:
        documents: Read, the following included.
        empty: Without a token.
        short: Dropped for having too few tokens for a window.
        replaced: With bytes that are no UTF-8, read as U+FFFD.
        longest: Tokens of the longest one that was dropped.
    """

    documents: int = 0
    empty: int = 0
    short: int = 0
    replaced: int = 0
    longest: int = 0


@dataclass(frozen=True, eq=False)
class Windows:
    """A stream of token windows that can be read again from any of its cursors; made by `windows`.

    Attributes:
        source: Documents, or ready rows of token ids.
        encoder: None for ready ids.
        context: Tokens in each window.
        fit: "clip", "split" or "pack".
        shard: (i, n): of the windows' numbers, those with index % n == i.
        n_windows: How many the whole stream is limited to, all shards together; None without a limit.
        counts: What the last reading met.
    """

    source: Source | Int64[Tensor, "batch pos"]
    encoder: Encoder | None
    context: int
    fit: Fit
    shard: tuple[int, int]
    n_windows: int | None
    counts: Counts = field(default_factory=Counts)

    def __iter__(self) -> Iterator[Window]:
        return self.read()

    def read(self, start: Cursor | None = None) -> Iterator[Window]:
        """Yields this shard's windows, from a cursor on.

        Args:
            start: `Window.after` of the last window used; the beginning by default.

        Raises:
            ValueError: If the whole source, read from its beginning, gives no window; if its contents
                cannot be used.
        """
        start = start or Cursor()
        vars(self.counts).update(vars(Counts()))
        i, n = self.shard
        done = start.index
        if self.n_windows is not None and done >= self.n_windows:
            return
        for window in self._all(start):
            done = window.index + 1
            if window.index % n == i:
                yield window
            if done == self.n_windows:
                return
        if done == 0:
            raise ValueError(self._nothing())

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What decides the windows and their order, for JSON; neither limit nor sharding is part of it."""
        if isinstance(self.source, Tensor):
            source = {"ids": list(self.source.shape), "sha256": _hash(self.source.numpy().tobytes())}
        else:
            source = self.source.identity()
        tokenizer = None if self.encoder is None else self.encoder.identity()
        return {"source": source, "tokenizer": tokenizer, "context": self.context, "fit": self.fit}

    def describe(self) -> str:
        """One line for people: the source, and how it becomes windows."""
        if self.encoder is None or isinstance(self.source, Tensor):
            return f"{len(self.source):,} ready windows of {self.context:,} tokens"  # pyright: ignore[reportArgumentType]
        how = {"clip": "clipped to", "split": "split into", "pack": "packed into"}[self.fit]
        before = f", each {'window' if self.fit == 'split' else 'document'} after {list(self.encoder.before)}"
        return f"{self.source.name}, {how} {self.context:,} tokens{before if self.encoder.before else ''}"

    def _all(self, start: Cursor) -> Iterator[Window]:
        """The unsharded stream."""
        if isinstance(self.source, Tensor):
            for row in range(start.row, len(self.source)):
                after = Cursor(0, row + 1, 0, row + 1)
                document = _hash(self.source[row].numpy().tobytes())
                yield Window(self.source[row], (self.context,), (document,), row, after)
        elif self.fit == "pack":
            yield from self._packed(start)
        else:
            yield from self._cut(start)

    def _documents(self, start: Cursor) -> Iterator[tuple[Cursor, Document]]:
        """Every document from a cursor on that holds any text, with where it stands."""
        assert not isinstance(self.source, Tensor)
        for shard in range(start.shard, self.source.n_shards):
            first = start.row if shard == start.shard else 0
            for row, document in enumerate(self.source.rows(shard, first), first):
                self.counts.documents += 1
                if document.replaced:
                    if not self.counts.replaced:
                        warnings.warn(
                            f"{self.source.name}: document {row} of shard {shard} holds bytes that are no "
                            "UTF-8, read as U+FFFD; more such documents are counted, not named",
                            stacklevel=2,
                        )
                    self.counts.replaced += 1
                if document.text:
                    offset = start.offset if (shard, row) == (start.shard, start.row) else 0
                    yield Cursor(shard, row, offset), document
                else:
                    self.counts.empty += 1

    def _cut(self, start: Cursor) -> Iterator[Window]:
        """Windows of one document each: its first (clip), or one after the other (split)."""
        assert self.encoder is not None
        before, after = list(self.encoder.before), list(self.encoder.after)
        size = self.context - len(before)  # every window starts with what goes before a document
        index = start.index
        for place, document in self._documents(start):
            if self.fit == "clip":
                ids = self.encoder.start(document.text, size)
            else:
                ids = self.encoder.body(document.text)
            if len(ids) < size or self.fit == "split":
                ids = ids + after
            if len(ids) < size:
                self._drop(len(before) + len(ids))
                continue
            stop = size if self.fit == "clip" else len(ids)
            name = _hash(document.text.encode())
            for offset in range(place.offset, stop - size + 1, size):
                piece = torch.tensor(before + ids[offset : offset + size], dtype=torch.int64)
                index += 1
                if offset + 2 * size <= stop:
                    then = replace(place, offset=offset + size, index=index)
                else:
                    then = Cursor(place.shard, place.row + 1, 0, index)
                yield Window(piece, (self.context,), (name,), index - 1, then)

    def _packed(self, start: Cursor) -> Iterator[Window]:
        """Documents one after the other, cut wherever a window is full."""
        assert self.encoder is not None
        index, ids, lengths, names = start.index, [], [], []
        for place, document in self._documents(start):
            whole = [*self.encoder.before, *self.encoder.body(document.text), *self.encoder.after]
            name = _hash(document.text.encode())
            at = place.offset
            while at < len(whole):
                piece = whole[at : at + self.context - len(ids)]
                at += len(piece)
                ids, lengths, names = [*ids, *piece], [*lengths, len(piece)], [*names, name]
                if len(ids) == self.context:
                    index += 1
                    if at < len(whole):
                        then = replace(place, offset=at, index=index)
                    else:
                        then = Cursor(place.shard, place.row + 1, 0, index)
                    window = torch.tensor(ids, dtype=torch.int64)
                    yield Window(window, tuple(lengths), tuple(names), index - 1, then)
                    ids, lengths, names = [], [], []
        if ids and index == 0:
            self._drop(len(ids))

    def _drop(self, n_tokens: int) -> None:
        self.counts.short += 1
        self.counts.longest = max(self.counts.longest, n_tokens)

    def _nothing(self) -> str:
        assert not isinstance(self.source, Tensor)
        counts = self.counts
        found = (
            f"{self.source.name} gave no window of {self.context:,} tokens: {counts.documents:,} documents"
        )
        if counts.empty == counts.documents:
            return f"{found} were read, none with any text"
        if self.fit == "pack":
            return f"{found} were read, {counts.longest:,} tokens in all: choose a shorter context"
        return (
            f"{found} were read and dropped, {counts.empty:,} of them empty, the longest of "
            f'{counts.longest:,} tokens: choose a shorter context, or fit="pack"'
        )


def windows(
    source: str | Path | Iterable[Any] | Tensor | Source,
    tokenizer: Any = None,
    *,
    context: int | None = None,
    fit: Fit = "clip",
    bos: bool | None = None,
    shard: tuple[int, int] = (0, 1),
    limit: int | None = None,
    text_column: str = "text",
    split: str = "train",
) -> Windows:
    """Returns documents as token windows of one length, a stream that can be read again from any point.

    Every window has exactly `context` tokens. "clip" takes the first ones of each document and drops
    documents that are shorter; "split" cuts each document into as many whole windows as it has and drops
    the remainder; "pack" puts all documents one after the other, cuts the result wherever a window is
    full, and says in `Window.lengths` where documents end, so that attention can stay within each.

    Args:
        source: A file, folder or glob of .txt (one file is one document), .json, .jsonl (each also .gz)
            or .parquet; a dataset on the hub, "name", "name:config" or "name:config@revision", streamed;
            strings, each a document; paths; or Int[Tensor, "batch pos"] of ready windows.
        tokenizer: A transformers tokenizer, such as `model.tokenizer`; not needed for token ids.
        context: Tokens in a window; for token ids their own length.
        fit: How documents become windows.
        bos: Whether BOS stands before each document (with "split": each window): None = as the
            tokenizer does by itself, True = one, False = none.
        shard: (i, n) for part i of n: the windows whose number in the whole stream is i modulo n.
        limit: Tokens to stop after, all shards together, rounded up to whole windows.
        text_column: The column that holds the text, in all but .txt files.
        split: The split of a hub dataset.

    Returns:
        Windows: iterate, or `read(cursor)` to go on after a window. Nothing is read before that, but
        the list of files or the hub's description of the dataset.

    Raises:
        ValueError: If the source is not found or an argument cannot be used; while reading, if the
            source gives no window at all, or holds no text where it should.

    Example:
        ```python
        text = "The cat sat on the mat. The dog sat on the log. " * 20
        stream = rl.windows([text], model.tokenizer, context=64, fit="split")
        for window in stream:
            model(window.ids[None])
        rest = stream.read(window.after)  # what comes after that window: nothing, here
        ```
    """
    i, n = shard
    if not 0 <= i < n:
        raise ValueError(f"expected shard=(i, n) with 0 <= i < n, got {shard}")
    if limit is not None and limit < 1:
        raise ValueError(f"expected a limit of at least 1 token, got {limit}")
    if fit not in ("clip", "split", "pack"):
        raise ValueError(f'expected fit="clip", "split" or "pack", got {fit!r}')
    if isinstance(source, Tensor):
        ids = _ready(source, context)
        return Windows(ids, None, ids.shape[1], fit, shard, _n_windows(limit, ids.shape[1]))
    if context is None or context < 2:
        raise ValueError(f"expected context=, at least 2 tokens a window, got {context}")
    if tokenizer is None:
        raise ValueError("expected a tokenizer for text: pass model.tokenizer, or token ids")
    encoder = Encoder.of(tokenizer, bos)
    if context <= len(encoder.before):
        raise ValueError(
            f"expected a context longer than the {len(encoder.before)} special tokens before a document, "
            f"got {context}"
        )
    documents = source_of(source, split=split, text_column=text_column)
    return Windows(documents, encoder, context, fit, shard, _n_windows(limit, context))


def document_numbers(documents: Iterable[str]) -> Int64[Tensor, " document"]:
    """Returns a number for each of the documents of `Window.documents`, sorted, each once.

    Example:
        >>> document_numbers(["0" * 31 + "1", "0" * 14 + "2" + "0" * 17]).tolist()
        [0, 2]
    """
    return torch.tensor(sorted({int(name[:15], 16) for name in documents if name}), dtype=torch.int64)


def _ready(ids: Tensor, context: int | None) -> Int64[Tensor, "batch pos"]:
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise ValueError(f"expected integer token ids, got a tensor of {ids.dtype}")
    if ids.ndim != 2 or not len(ids) or ids.shape[1] < 2:
        raise ValueError(f"expected token ids of shape [batch, pos], at least 2 a row, got {list(ids.shape)}")
    if context not in (None, ids.shape[1]):
        raise ValueError(f"expected rows of {context} token ids, the context asked for, got {ids.shape[1]}")
    return ids.to("cpu", torch.int64).contiguous()


def _n_windows(limit: int | None, context: int) -> int | None:
    return None if limit is None else -(-limit // context)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
