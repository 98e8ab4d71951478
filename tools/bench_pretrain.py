"""`make bench`, last part: what per-layer frequencies cost in a training step, beside the plain Llama's.

Steps of both (forward, backward, AdamW) alternate on the same tokens; each pair gives a ratio of process
times (on a GPU, of times), and the median of the ratios is what it costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from types import SimpleNamespace

import torch

from ropelens.interventions import set_frequencies
from ropelens.pretrain.configs import config_of
from ropelens.pretrain.training import adamw


def main() -> None:
    """Prints the median ratio, its quartiles, and the speed of a plain step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print an object")
    parser.add_argument("--config", default="tiny-1m")
    parser.add_argument("--rows", type=int, default=8, help="sequences a step")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    config = config_of(args.config)
    settings = SimpleNamespace(
        weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, learning_rate=config.lr, device=device
    )
    generator = torch.Generator().manual_seed(0)
    shape = (config.layers, config.d_head // 2)
    other = torch.rand(shape, generator=generator).double()
    models = [config.build(0), config.build(0)]
    set_frequencies(models[1], other)
    models = [model.to(device).train() for model in models]
    optimizers = [adamw(model, settings) for model in models]
    ids = torch.randint(config.vocab_size, (args.rows, config.context), generator=generator).to(device)
    clock = time.perf_counter if cuda else time.process_time

    def step(which: int) -> float:
        start = clock()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=cuda):
            models[which](ids, labels=ids).loss.backward()
        optimizers[which].step()
        optimizers[which].zero_grad()
        if cuda:
            torch.cuda.synchronize()
        return clock() - start

    for which in (0, 1, 0, 1):
        step(which)
    pairs = []
    for number in range(args.steps):
        first = number % 2  # whichever comes first may find the caches otherwise
        times = {first: step(first), 1 - first: step(1 - first)}
        pairs.append((times[0], times[1]))
    ratios = sorted(after / before for before, after in pairs)
    low, middle, high = statistics.quantiles(ratios, n=4)
    plain = statistics.median(before for before, _ in pairs)
    facts = {
        "config": config.name,
        "tokens": ids.numel(),
        "plain_seconds": plain,
        "tokens_per_second": ids.numel() / plain,
        "ratio": middle,
        "quartiles": [low, high],
        "steps": args.steps,
        "peak_gpu_mb": torch.cuda.max_memory_allocated() / 2**20 if cuda else None,
    }
    if args.json:
        print(json.dumps(facts))
        return
    print(
        f"\nTraining step, {config.name}, {ids.numel():,} tokens: {plain:.3f} s plain "
        f"({facts['tokens_per_second']:,.0f} tokens/s); with frequencies of its own for each layer "
        f"{middle:.3f} times that (quartiles {low:.3f} to {high:.3f}, {args.steps} pairs)"
    )


if __name__ == "__main__":
    main()
