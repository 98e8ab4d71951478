"""collect: metrics over as much text as there is, stopped and resumed at any time."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from ropelens.data import Cursor, Window, Windows
from ropelens.hooks import ACCUMULATORS
from ropelens.hosts import Host, host_of
from ropelens.metrics import BandAccumulator, FisherAccumulator
from ropelens.scores import BandScores, saving
from ropelens.streaming.checkpoints import Checkpoint, RunFolder
from ropelens.streaming.interrupt import interruptible
from ropelens.streaming.processes import Processes, processes
from ropelens.streaming.source import digest_of, padded, pieces_of, source_of
from ropelens.streaming.summary import NAME as SUMMARY
from ropelens.streaming.summary import differs, write_summary


def collect(
    model: Any,
    windows: Any | Int[Tensor, "batch pos"],
    metrics: Sequence[str] = ("entropy", "activation"),
    out: str | os.PathLike[str] | None = None,
    *,
    tokens: int | None = None,
    tol: float = 1e-3,
    n_samples: int = 1,
    seed: int = 0,
    batch: int = 1,
    checkpoint_every: float | int = 300.0,
    progress: bool = True,
) -> dict[str, BandScores]:
    """Band scores over many windows of text; interrupted, the same call goes on where it stopped.

    Several metrics share one forward pass; "fisher" takes a forward and a backward pass of its own.
    With `out`, a checkpoint is written every so often and when the run is stopped (Ctrl-C, SIGTERM) or
    fails, and the scores lie in `out/<metric>.safetensors` in the end. A run that is complete returns
    its scores at once. The sums are the same, bit by bit, however often a run was stopped.

    Under `torchrun` every process takes its share of the windows, and all return the scores of all.

    Args:
        model: A model that ropelens reads; see `load`.
        windows: What `windows` returns, or token ids with a document a row. Documents that share a
            packed window are measured as if each were alone.
        metrics: Any of "entropy", "activation", "norm_product" and "fisher".
        out: The folder of this run. Another run's is refused.
        tokens: Stop after the window in which this many tokens are reached, over all shards and
            processes; all windows by default. A later call may ask for more.
        tol: Tolerance: nats a row for entropy, relative for activation.
        n_samples: Label samples a document, for "fisher".
        seed: Of the labels, for "fisher"; each document's derive from it and the window's number.
        batch: Windows a forward pass.
        checkpoint_every: Seconds between checkpoints.
        progress: Whether to show a bar with tokens a second and the time left.

    Returns:
        One `BandScores` a metric.

    Raises:
        ValueError: If an argument is not usable, `out` holds another run or one that is running, there
            is no window, or a layer shows NaN (naming layer and window; checkpoints stay).
        OSError: If `out` cannot be written to.

    Example:
        ```python
        windows = rl.windows(documents, model.tokenizer, context=8, fit="pack")
        scores = rl.collect(model, windows, ("entropy",), tokens=8)  # with out=, it can be resumed
        scores["entropy"].mean(per="query")
        ```
    """
    _check(metrics, tokens, batch, checkpoint_every)
    with ExitStack() as held:
        group = held.enter_context(processes())
        folder = None if out is None else RunFolder(out, group.rank)
        if folder is not None:
            held.enter_context(folder.held())
        source = source_of(windows, (group.rank, group.world))
        host = host_of(model)
        if host.context is not None and source.context > host.context:
            raise ValueError(
                f"expected windows of at most {host.context} tokens, the context of this model, got "
                f"{source.context}: make them with context={host.context}"
            )
        if source.n_windows is not None:
            most = source.n_windows * source.context
            tokens = most if tokens is None else min(tokens, most)
        settings = {"tol": tol, "batch": batch}
        settings |= {"n_samples": n_samples, "seed": seed} if "fisher" in metrics else {}
        settings |= {"shard": list(source.shard), "processes": group.world}
        settings |= {"dtype": str(host.embedding.dtype).removeprefix("torch."), "host": host.kind}
        run = _Run(
            host=host,
            source=source,
            group=group,
            folder=folder,
            settings=settings,
            limit=_limit(source, tokens),
            accumulators={
                m: FisherAccumulator(n_samples=n_samples, seed=seed)
                if m == FisherAccumulator.metric
                else ACCUMULATORS[m](tol=tol, split_first=True, edges=_edges(source.context))
                for m in metrics
            },
            every=checkpoint_every,
            batch=batch,
        )
        run.resume()
        run.read(progress and group.rank == 0)
        return run.finish(tokens)


def _check(metrics: Sequence[str], tokens: int | None, batch: int, every: float | int) -> None:
    known = (*ACCUMULATORS, FisherAccumulator.metric)
    if isinstance(metrics, str) or not metrics or [m for m in metrics if m not in known]:
        raise ValueError(f"expected metrics from {', '.join(known)}, got {metrics!r}")
    for name, value in (("tokens", tokens), ("batch", batch)):
        if value is not None and value < 1:
            raise ValueError(f"expected {name} to be at least 1, got {value}")
    if not every >= 0:
        raise ValueError(f"expected checkpoint_every to be a number of seconds, got {every}")


def _edges(context: int) -> list[int]:
    """Doubling positions below the context: 32, 64, 128, ..."""
    return [32 << n for n in range(max(0, (context - 1).bit_length() - 5)) if 32 << n < context]


def _limit(source: Windows, tokens: int | None) -> int | None:
    """The number of windows of this shard until `tokens` are reached over all shards, None for all."""
    if tokens is None:
        return None
    first, step = source.shard
    return len(range(first, -(-tokens // source.context), step))


@dataclass(frozen=True)
class _Done:
    """How far a run is."""

    cursor: Cursor | None = None
    windows: int = 0
    tokens: int = 0
    digest: int = 0
    seconds: float = 0.0
    ended: bool = False  # there are no further windows

    def after(self, batch: Sequence[Window]) -> _Done:
        return replace(
            self,
            cursor=batch[-1].after,
            windows=self.windows + len(batch),
            tokens=self.tokens + sum(len(window.ids) for window in batch),
            digest=(self.digest + sum(digest_of(window) for window in batch)) % 16**32,
        )


@dataclass
class _Run:
    host: Host
    source: Windows
    group: Processes
    folder: RunFolder | None
    settings: dict[str, Any]
    limit: int | None
    accumulators: dict[str, BandAccumulator | FisherAccumulator]
    every: float | int
    batch: int
    done: _Done = _Done()

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
        self.done = _Done(**{**facts, "cursor": cursor, "digest": int(facts["digest"], 16)})
        if self.limit is not None and self.done.windows > self.limit:
            raise ValueError(
                f"{self.folder.out} holds {self.done.tokens:,} tokens already, more than were asked for: "
                "ask for at least as many, or choose another folder"
            )
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
        kept = (self.done, self._snapshot())
        try:
            with bar, self.host.fast(), interruptible() as interruption:
                for windows in self._batches():
                    self._measure(windows)
                    now = time.monotonic()
                    self.done = replace(self.done.after(windows), seconds=earlier + now - started)
                    kept = (self.done, self._snapshot())  # at once: a signal comes before it or after it
                    bar.update(self.done.tokens - bar.n)
                    if interruption.asked:
                        raise KeyboardInterrupt
                    if self.folder is not None and now - last >= self.every:
                        self._save()
                        last = time.monotonic()
                self.done = replace(self.done, ended=self.done.windows != self.limit)
        except BaseException as error:
            self.done, self.accumulators = kept  # without what some of the layers saw of a window
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
        scores = {}
        for metric, acc in self.accumulators.items():
            if self.group.world > 1:
                acc.restore(self.group.reduce(acc.state(), acc.reduction), self.host.certificate)
            scores[metric] = acc.result(digest)
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
        host, observed = self.host, self.accumulators.copy()
        fisher = observed.pop(FisherAccumulator.metric, None)
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
                    assert isinstance(acc, BandAccumulator)
                    acc.update(layer, q, k, mask, sound)

            if observed:
                with torch.no_grad(), host.observing(range(host.n_layers), update):
                    for ids, mask in padded([piece for *_, piece in pieces]):
                        host.run(
                            ids.to(host.device), None if mask is None else mask.to(host.device), logits=False
                        )
            if isinstance(fisher, FisherAccumulator):
                for index, n, piece in pieces:
                    number = (index, n) if n else (index,)
                    fisher.update(host, piece[None].to(host.device), number)
        except ValueError as error:
            first, last = windows[0].index, windows[-1].index
            where = f"window {first}" if first == last else f"windows {first} to {last}"
            kept = "" if self.folder is None else f"; what came before is kept in {self.folder.out}"
            raise ValueError(f"{where}: {error}{kept}") from error

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
        self.folder.save(self.done.windows, Checkpoint(facts, states))

    def _goes_on(self) -> str:
        of = "" if self.limit is None else f" of {self.limit:,}"
        done = f"interrupted after {self.done.windows:,}{of} windows ({self.done.tokens:,} tokens)"
        if self.folder is None:
            return f"{done}: nothing was kept, since no folder was given"
        return f"{done}: run the same again, it goes on from the checkpoint in {self.folder.out}"
