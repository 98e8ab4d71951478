"""What a training will take, from a few steps of it."""

from __future__ import annotations

import os
import time

import torch
from jaxtyping import Float
from torch import Tensor

from ropelens.interventions import set_frequencies
from ropelens.pretrain.configs import PretrainConfig

MOST = 4096  # tokens a timed step on a CPU


def tokens_per_second(
    config: PretrainConfig, n_steps: int = 3, inv_freq: Float[Tensor, "layer band"] | None = None
) -> float:
    """Times forward and backward passes of one process on random tokens, the optimizer left out.

    On a CPU a step is cut to at most 4,096 tokens, or one sequence.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    rows = config.micro_batch if cuda else max(1, min(config.micro_batch, MOST // config.context))
    model = config.build(0)
    if inv_freq is not None:
        set_frequencies(model, inv_freq)
    model = model.to(device).train()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (rows, config.context), generator=generator).to(device)
    half = torch.bfloat16 if cuda and torch.cuda.is_bf16_supported() else None

    def step() -> None:
        with torch.autocast(device.type, dtype=half, enabled=half is not None):
            model(ids, labels=ids).loss.backward()
        model.zero_grad()
        if cuda:
            torch.cuda.synchronize()

    step()
    start = time.perf_counter()
    for _ in range(n_steps):
        step()
    return n_steps * ids.numel() / (time.perf_counter() - start)


def projected(config: PretrainConfig, runs: int) -> str:
    """Returns a line for people: parameters, tokens, speed here, and the time that the runs will take."""
    speed = tokens_per_second(config, n_steps=2)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    tokens = config.steps * config.batch * config.context
    seconds = runs * tokens / (speed * world)
    idle = torch.cuda.device_count() - world if world == 1 else 0
    return (
        f"{config.name}: {config.n_parameters() / 1e6:.1f}M parameters; {tokens / 1e6:,.1f}M tokens in "
        f"{config.steps:,} steps a run; {speed:,.0f} tokens/s in each of {world} process(es): about "
        f"{_duration(seconds)} for {runs} run(s)"
        + (f"; {idle} more GPU(s) would share the work under torchrun" if idle > 0 else "")
    )


def _duration(seconds: float) -> str:
    for size, name in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} seconds"
