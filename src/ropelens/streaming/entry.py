"""collect: metrics over as much text as there is, stopped and resumed at any time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from jaxtyping import Int
from torch import Tensor

from ropelens.data import Windows
from ropelens.hooks import ACCUMULATORS
from ropelens.hosts import host_of
from ropelens.metrics import EntropyAccumulator, FisherAccumulator, TaylorAccumulator
from ropelens.scores import BandScores
from ropelens.streaming.checkpoints import RunFolder
from ropelens.streaming.processes import processes
from ropelens.streaming.run import Run
from ropelens.streaming.source import source_of


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
    compile: bool = False,
    progress: bool = True,
) -> dict[str, BandScores]:
    """Band scores over many windows of text; interrupted, the same call goes on where it stopped.

    Several metrics share one forward pass; "fisher" and "taylor" take a forward and a backward pass each.
    With `out`, a checkpoint is written every so often and when the run is stopped (Ctrl-C, SIGTERM) or
    fails, and the scores lie in `out/<metric>.safetensors` in the end. A run that is complete returns
    its scores at once. The sums are the same, bit by bit, however often a run was stopped.

    Under `torchrun` every process takes its share of the windows, and all return the scores of all.

    Args:
        model: A model that ropelens reads; see `load`.
        windows: What `windows` returns, or token ids with a document a row. Documents that share a
            packed window are measured as if each were alone.
        metrics: Any of "entropy", "activation", "norm_product", "fisher" and "taylor".
        out: The folder of this run. Another run's is refused.
        tokens: Stop after the window in which this many tokens are reached, over all shards and
            processes; all windows by default. A later call may ask for more.
        tol: Tolerance: nats a row for entropy, relative for activation.
        n_samples: Label samples a document, for "fisher".
        seed: Of the labels, for "fisher"; each document's derive from it and the window's number.
        batch: Windows a forward pass.
        checkpoint_every: Seconds between checkpoints.
        compile: Whether torch.compile makes the entropy's passes over the logits on a CPU: twice as fast,
            after half a minute for the first window; needs a C++ compiler.
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
    if compile and shutil.which("c++") is None:
        raise ValueError("expected a C++ compiler named c++ for compile=True, found none: install g++")
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
        settings |= {"compile": True} if compile else {}
        gradients = {
            FisherAccumulator.metric: FisherAccumulator(n_samples=n_samples, seed=seed),
            TaylorAccumulator.metric: TaylorAccumulator(),
        }
        accumulators = {
            m: gradients[m]
            if m in gradients
            else ACCUMULATORS[m](tol=tol, split_first=True, edges=_edges(source.context))
            for m in metrics
        }
        if isinstance(acc := accumulators.get("entropy"), EntropyAccumulator):
            acc.compiled = compile
        run = Run(
            host=host,
            source=source,
            group=group,
            folder=folder,
            settings=settings,
            limit=_limit(source, tokens),
            accumulators=accumulators,
            every=checkpoint_every,
            batch=batch,
        )
        run.resume()
        run.read(progress and group.rank == 0)
        return run.finish(tokens)


def _check(metrics: Sequence[str], tokens: int | None, batch: int, every: float | int) -> None:
    known = (*ACCUMULATORS, FisherAccumulator.metric, TaylorAccumulator.metric)
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
