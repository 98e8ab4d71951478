"""`make bench`, third part: what generation costs with a lesion, beside the healthy model's, in pairs.

SmolLM2-135M, greedy, with a key-value cache, one text; the two take turns, and the ratio is the median of
the pairs'. Entering and leaving the lesion count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

import ropelens as rl
from ropelens.hosts import host_of
from ropelens.lesions.generating import generate

PROMPT = "The lighthouse at Carrow Point had been dark for eleven years when a light was seen in it again."


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one list of objects")
    parser.add_argument("--host", default="transformers", choices=["transformers", "bridge", "hooked"])
    parser.add_argument("--tokens", type=int, default=64, help="tokens a text")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = rl.load("smollm2-135m", host=args.host)
    host, prompt = host_of(model), model.tokenizer.encode(PROMPT)

    def timed(target: str | None) -> float:
        start = time.perf_counter()
        if target is None:
            generate(host, [prompt], args.tokens)
        else:
            with rl.lesion(model, 15, std=0.5, target=target):
                generate(host, [prompt], args.tokens)
        return time.perf_counter() - start

    lines = []
    for target in ("weights", "queries", "both"):
        timed(None), timed(target)  # warm: what is measured once for a model is
        pairs = [(timed(None), timed(target)) for _ in range(args.pairs)]
        healthy = statistics.median(pair[0] for pair in pairs)
        ratio = statistics.median(b / a for a, b in pairs)
        lines.append({"host": args.host, "target": target, "tokens_a_second": args.tokens / healthy})
        lines[-1]["ratio"] = ratio
    if args.json:
        print(json.dumps(lines))
        return
    print("\nSmolLM2-135M, greedy with a cache; ratio: lesioned over healthy, median of pairs")
    for line in lines:
        print(
            f"{line['host']:14}{line['target']:10}{line['tokens_a_second']:8.1f} tokens/s healthy"
            f"{line['ratio']:8.3f}"
        )


if __name__ == "__main__":
    main()
