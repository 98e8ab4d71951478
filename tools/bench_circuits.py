"""`make bench`, third part: scores of all heads, beside an eager forward pass of the same tokens.

SmolLM2-135M on 4 x 512 random tokens that repeat. The ratio is the time over the forward's, logits
included.
"""

from __future__ import annotations

import argparse

import torch

import ropelens as rl
from ropelens_kernels.bench import Line, show, timed


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one list of objects")
    parser.add_argument("--length", type=int, default=512, help="tokens a sequence")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = rl.load("smollm2-135m", host="transformers")
    ids = rl.circuits.repeated_tokens(model, length=args.length).ids
    model.set_attn_implementation("eager")
    nan, name = float("nan"), "eager forward"

    def forward() -> None:
        with torch.no_grad():
            model(ids, use_cache=False)

    calls = {
        "head scores, no copying": lambda: rl.circuits.head_scores(model, length=args.length, copying=False),
        "head scores": lambda: rl.circuits.head_scores(model, length=args.length),
        "OV eigenvalues": lambda: rl.circuits.ov_eigenvalues(model),
        "QK eigenvalues": lambda: rl.circuits.qk_eigenvalues(model),
    }
    rl.circuits.ov_eigenvalues(model)  # not timed: the weights are checked
    base, peak = timed(forward, 2)
    lines = [Line("circuits", name, args.length, base, name, 1.0, nan, peak)]
    for title, call in calls.items():
        seconds, peak = timed(call, 2)
        lines.append(Line("circuits", title, args.length, seconds, name, seconds / base, nan, peak))
    show(lines, "SmolLM2-135M, all 270 heads; ratio: time over the eager forward's", args.json)


if __name__ == "__main__":
    main()
