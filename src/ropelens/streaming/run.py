"""A run: windows read and measured one after the other, kept in checkpoints, added up in the end."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ropelens.data import Cursor, Window, Windows, document_numbers
from ropelens.hosts import Host
from ropelens.metrics import BandAccumulator, FisherAccumulator
from ropelens.scores import BandScores, saving
from ropelens.streaming.checkpoints import Checkpoint, RunFolder
from ropelens.streaming.interrupt import interruptible
from ropelens.streaming.processes import Processes
from ropelens.streaming.source import digest_of, padded, pieces_of
from ropelens.streaming.summary import NAME as SUMMARY
from ropelens.streaming.summary import differs, write_summary

DOCUMENTS = "documents"  # in a checkpoint, beside the metrics
MOST_DOCUMENTS = 2**18  # beyond these they are not kept


@dataclass(frozen=True)
class Done:
    """How far a run is."""

    cursor: Cursor | None = None
    windows: int = 0
    tokens: int = 0
    digest: int = 0
    seconds: float = 0.0
    ended: bool = False  # there are no further windows

    def after(self, batch: Sequence[Window]) -> Done:
        return replace(
            self,
            cursor=batch[-1].after,
            windows=self.windows + len(batch),
            tokens=self.tokens + sum(len(window.ids) for window in batch),
            digest=(self.digest + sum(digest_of(window) for window in batch)) % 16**32,
        )


@dataclass
class Run:
    """One process's part of a run: resumed, read to its end, and added up with the others'."""

    host: Host
    source: Windows
    group: Processes
    folder: RunFolder | None
    settings: dict[str, Any]
    limit: int | None
    accumulators: dict[str, BandAccumulator | FisherAccumulator]
    every: float | int
    batch: int
    done: Done = Done()
    documents: frozenset[int] | None = frozenset()  # by their hashes; None: not known, or too many

    def __post_init__(self) -> None:
        for acc in self.accumulators.values():
            acc.bind(self.host.certificate)
        self.identity = saving.as_json(
            {
                "metrics": list(self.accumulators),
                "model": self.host.fingerprint,
                "data": self.source.fingerprint,
                "settings": self.settings,
            },
            "settings",
        )

    def resume(self) -> None:
        """Goes on from the folder's checkpoint, or writes a first one, which shows that it can be done."""
        if self.folder is None:
            return
        found = self.folder.latest()
        if found is None:
            if (self.folder.out / SUMMARY).exists():
                raise ValueError(
                    f"{self.folder.out} holds scores, but no checkpoint to go on from: choose another folder"
                )
            self._save()
            return
        if why := differs(found.facts["identity"], self.identity):
            raise ValueError(
                f"{self.folder.out} holds another run: {why}; choose another folder, or delete that one"
            )
        facts = found.facts["done"]
        cursor = None if facts["cursor"] is None else Cursor(**facts["cursor"])
        self.done = Done(**{**facts, "cursor": cursor, "digest": int(facts["digest"], 16)})
        if self.limit is not None and self.done.windows > self.limit:
            raise ValueError(
                f"{self.folder.out} holds {self.done.tokens:,} tokens already, more than were asked for: "
                "ask for at least as many, or choose another folder"
            )
        known = found.states.get(DOCUMENTS, {}).get("numbers")
        self.documents = None if known is None else frozenset(known.tolist())
        for metric, acc in self.accumulators.items():
            acc.restore(found.states[metric], self.host.certificate)

    @property
    def complete(self) -> bool:
        return self.done.ended or self.done.windows == self.limit

    def read(self, progress: bool) -> None:
        """Measures window after window until there are no more; leaves a checkpoint, whatever happens."""
        if self.complete:
            return
        if self.folder is not None and self.group.rank == 0:
            (self.folder.out / SUMMARY).unlink(missing_ok=True)  # its scores are not the last word any more
        total = None if self.limit is None else self.limit * self.source.context
        started, earlier = time.monotonic(), self.done.seconds
        last = started
        bar = tqdm(
            total=total,
            initial=self.done.tokens,
            desc="collect",
            unit="tok",
            unit_scale=True,
            disable=not progress,
        )
        kept = (self.done, self._snapshot(), self.documents)
        try:
            with bar, self.host.fast(), interruptible() as interruption:
                for windows in self._batches():
                    self._measure(windows)
                    now = time.monotonic()
                    self.done = replace(self.done.after(windows), seconds=earlier + now - started)
                    self.documents = self._documents_with(windows)
                    kept = (
                        self.done,
                        self._snapshot(),
                        self.documents,
                    )  # at once: a signal comes before it or after it
                    bar.update(self.done.tokens - bar.n)
                    if interruption.asked:
                        raise KeyboardInterrupt
                    if self.folder is not None and now - last >= self.every:
                        self._save()
                        last = time.monotonic()
                self.done = replace(self.done, ended=self.done.windows != self.limit)
        except BaseException as error:
            self.done, self.accumulators, self.documents = (
                kept  # without what some of the layers saw of a window
            )
            self._save()
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(self._goes_on()) from error
            raise
        self._save()

    def finish(self, tokens: int | None) -> dict[str, BandScores]:
        """Returns the scores of all processes together, and writes them."""
        alls = self.group.gather(self.done)
        n_windows, n_tokens = sum(d.windows for d in alls), sum(d.tokens for d in alls)
        if n_windows == 0:
            first, step = self.source.shard
            part = f"shard {first}/{step} of the data" if step > self.group.world else "the data"
            raise ValueError(
                f"expected at least one window of {self.source.context} tokens, but {part} gave none: lower "
                "the context, pack short documents, or use fewer shards"
            )
        ended = tokens is not None and any(d.ended for d in alls)
        if ended and self.group.rank == 0:
            warnings.warn(
                f"the data ended after {n_tokens:,} tokens, before the {tokens:,} that were asked for",
                stacklevel=3,
            )
        digest = f"{sum(d.digest for d in alls) % 16**32:032x}"
        seen = self.group.gather(self.documents)
        documents = (
            None if None in seen else torch.tensor(sorted(frozenset().union(*seen)), dtype=torch.int64)
        )
        scores = {}
        for metric, acc in self.accumulators.items():
            if self.group.world > 1:
                acc.restore(self.group.reduce(acc.state(), acc.reduction), self.host.certificate)
            scores[metric] = replace(acc.result(digest), documents=documents)
        if self.folder is not None and self.group.rank == 0:
            for metric, result in scores.items():
                result.save(self.folder.out / f"{metric}.safetensors")
            facts = {
                **self.identity,
                "tokens_asked": tokens,
                "tokens": n_tokens,
                "windows": n_windows,
                "documents": next(iter(scores.values())).n_documents,
                "ended_early": ended,
                "seconds": round(max(d.seconds for d in alls), 3),
                "digest": digest,
            }
            write_summary(self.folder.out, facts)
        return scores

    def _batches(self) -> Iterator[list[Window]]:
        batch: list[Window] = []
        read = self.done.windows
        for window in self.source.read(self.done.cursor):
            if read == self.limit:
                break
            read += 1
            batch.append(window)
            if len(batch) == self.batch:
                yield batch
                batch = []
        if batch:
            yield batch

    def _measure(self, windows: Sequence[Window]) -> None:
        host = self.host
        gradients = [acc for acc in self.accumulators.values() if isinstance(acc, FisherAccumulator)]
        observed = {m: acc for m, acc in self.accumulators.items() if isinstance(acc, BandAccumulator)}
        pieces = [(w.index, n, piece) for w in windows for n, piece in enumerate(pieces_of(w))]
        try:
            for window in windows:
                low, high = int(window.ids.min()), int(window.ids.max())
                if low < 0 or high >= host.vocab_size:
                    raise ValueError(
                        f"expected token ids from 0 to {host.vocab_size - 1}, got "
                        f"{low if low < 0 else high}: were they made by another model's tokenizer?"
                    )

            def update(layer: int, q: Tensor, k: Tensor, mask: Tensor, sound: Tensor) -> None:
                for acc in observed.values():
                    acc.update(layer, q, k, mask, sound)

            if observed:
                with torch.no_grad(), host.observing(range(host.n_layers), update):
                    for ids, mask in padded([piece for *_, piece in pieces]):
                        host.run(
                            ids.to(host.device), None if mask is None else mask.to(host.device), logits=False
                        )
            for acc in gradients:
                for index, n, piece in pieces:
                    number = (index, n) if n else (index,)
                    acc.update(host, piece[None].to(host.device), number)
        except ValueError as error:
            first, last = windows[0].index, windows[-1].index
            where = f"window {first}" if first == last else f"windows {first} to {last}"
            kept = "" if self.folder is None else f"; what came before is kept in {self.folder.out}"
            raise ValueError(f"{where}: {error}{kept}") from error

    def _documents_with(self, windows: Sequence[Window]) -> frozenset[int] | None:
        if self.documents is None:
            return None
        new = document_numbers(name for window in windows for name in window.documents).tolist()
        both = self.documents if self.documents.issuperset(new) else self.documents.union(new)
        return both if len(both) <= MOST_DOCUMENTS else None

    def _snapshot(self) -> dict[str, BandAccumulator | FisherAccumulator]:
        return {metric: acc.copy() for metric, acc in self.accumulators.items()}

    def _save(self) -> None:
        if self.folder is None:
            return
        for acc in self.accumulators.values():
            if isinstance(acc, BandAccumulator):
                acc.check()
        facts = {"identity": self.identity, "done": {**asdict(self.done), "digest": f"{self.done.digest:x}"}}
        states = {metric: acc.state() for metric, acc in self.accumulators.items()}
        if self.documents is not None:
            states[DOCUMENTS] = {"numbers": torch.tensor(sorted(self.documents), dtype=torch.int64)}
        self.folder.save(self.done.windows, Checkpoint(facts, states))

    def _goes_on(self) -> str:
        of = "" if self.limit is None else f" of {self.limit:,}"
        done = f"interrupted after {self.done.windows:,}{of} windows ({self.done.tokens:,} tokens)"
        if self.folder is None:
            return f"{done}: nothing was kept, since no folder was given"
        return f"{done}: run the same again, it goes on from the checkpoint in {self.folder.out}"
