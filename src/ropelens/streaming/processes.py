"""One run in several processes: which of them this is, and their sums added up."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ropelens.metrics.accumulate import Reduction


@dataclass(frozen=True)
class Processes:
    """The processes of this run.

    Attributes:
        rank: Which of them this is.
        world: How many there are.
    """

    rank: int = 0
    world: int = 1

    def gather(self, value: Any) -> list[Any]:
        """Returns every process's `value`, by rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        with _others():
            dist.all_gather_object(values, value)
        return values

    def reduce(self, state: Mapping[str, Tensor], reduction: Callable[[str], Reduction]) -> dict[str, Tensor]:
        """Returns the state of all processes together; every one gets it."""
        if self.world == 1:
            return dict(state)
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        reduced: dict[str, Tensor] = {}
        kinds = sorted({(reduction(name), t.dtype == torch.float64) for name, t in state.items()})
        for kind, is_float in kinds:  # a few long messages rather than one an entry
            names = [n for n in state if (reduction(n), state[n].dtype == torch.float64) == (kind, is_float)]
            dtype = torch.float64 if is_float else torch.int64
            flat = torch.cat([state[n].to(dtype).flatten() for n in names]).to(device)
            with _others():
                dist.all_reduce(
                    flat, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}.get(kind, dist.ReduceOp.MIN)
                )
            parts = flat.cpu().split([state[n].numel() for n in names])
            reduced |= {
                n: part.reshape(state[n].shape).to(state[n].dtype)
                for n, part in zip(names, parts, strict=True)
            }
        return reduced


@contextmanager
def processes() -> Iterator[Processes]:
    """Joins the processes that torchrun started, or a group that is there already; else one alone."""
    if dist.is_available() and dist.is_initialized():
        yield Processes(dist.get_rank(), dist.get_world_size())
    elif "MASTER_ADDR" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Sums are small and reduced on the CPU, so that gloo serves GPUs too; a rank may wait for days.
        dist.init_process_group("gloo", timeout=timedelta(days=30))
        try:
            yield Processes(dist.get_rank(), dist.get_world_size())
        finally:
            dist.destroy_process_group()
    else:
        yield Processes()


@contextmanager
def _others() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ValueError(
            "another process of this run ended before the sums were added up: see what it said, then run "
            "the same command again, it goes on from the checkpoints"
        ) from error
