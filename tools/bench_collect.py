"""`make bench`, second part: what collecting costs, beside the bare forward pass of the same run.

SmolLM2-135M on Python's documentation, with SDPA and without logits. The ratio is the time over the
bare forward's.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import time

import torch

import ropelens as rl
from ropelens.hosts import host_of
from ropelens.interventions.ablate import edits_of
from ropelens_kernels.bench import Line, show, timed

BOTH = ("activation", "entropy")
SETS = ((("activation",), False), (BOTH, False), (BOTH, True), ((*BOTH, "norm_product"), True))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one list of objects")
    parser.add_argument("--length", type=int, default=2048, help="tokens a window")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = rl.load("smollm2-135m", host="transformers")
    host = host_of(model)
    text = "\n".join(pydoc_data.topics.topics.values())
    ids = torch.tensor([model.tokenizer.encode(text)[: args.length]])
    nan = float("nan")

    def bare() -> None:
        with torch.no_grad(), host.fast():
            host.run(ids, None, logits=False)

    bare()
    base, peak = timed(bare, 2)
    name = "bare forward"
    lines = [Line("collect", name, args.length, base, name, 1.0, nan, peak)]
    for metrics, compile in SETS:
        call = lambda m=metrics, c=compile: rl.collect(model, ids, m, compile=c, progress=False)  # noqa: E731
        if compile:
            rl.collect(model, ids[:, :300], metrics, compile=True, progress=False)  # not timed: it compiles
        seconds, peak = timed(call, 2 if args.length <= 2048 else 1)
        title = " + ".join(metrics) + (", compiled" if compile else "")
        lines.append(Line("collect", title, args.length, seconds, name, seconds / base, nan, peak))
    mask = rl.bands_where(model, "fastest:50%")

    def ablated(mode: str) -> None:
        with torch.no_grad(), host.fast(), host.editing(*edits_of(host, mask, mode)[0]):  # pyright: ignore[reportArgumentType]
            host.run(ids, None, logits=False)

    for mode in ("zero", "derotate"):
        seconds, peak = timed(lambda m=mode: ablated(m), 2)
        lines.append(
            Line(
                "ablate", f"half of all bands, {mode}", args.length, seconds, name, seconds / base, nan, peak
            )
        )
    start = time.perf_counter()
    next(iter(rl.windows([text], model.tokenizer, context=args.length)))
    lines.append(Line("start", "first window", args.length, time.perf_counter() - start, name, nan, nan, nan))
    show(
        lines,
        "SmolLM2-135M, windows of Python's documentation; ratio: time over the bare forward's",
        args.json,
    )


if __name__ == "__main__":
    main()
