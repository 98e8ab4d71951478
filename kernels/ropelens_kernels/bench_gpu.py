"""The benchmark on a CUDA device: Triton kernels against the pairwise kernel, a copy and SDPA."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ropelens_kernels import activation, entropy
from ropelens_kernels.bench import Line, worst
from ropelens_kernels.bench_inputs import PAIRS, SCALE, queries_and_keys
from ropelens_kernels.checks import prepare
from ropelens_kernels.reference.sorted import by_sorting

REPEATS = 5


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Returns the best of some runs in seconds, and the peak device memory above the start in MB."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    best = float("inf")
    for _ in range(REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(stop) / 1e3)
    return best, (torch.cuda.max_memory_allocated() - before) / 2**20


def gpu(lengths: list[int]) -> tuple[list[Line], str]:
    """Runs the fused kernels at each length.

    Raises:
        ValueError: If there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "expected a CUDA device for --gpu, found none: run without --gpu for the CPU's table"
        )
    lines: list[Line] = []
    *whole, source = queries_and_keys(max(lengths))
    for length in lengths:
        q, k = (x[:, :length].cuda() for x in whole)
        case = {"pairs": PAIRS, "scale": SCALE}
        exact = by_sorting(prepare(q.double(), k.double(), **case))
        copy, peak = timed(lambda q=q, k=k: (q.clone(), k.clone()))
        lines.append(Line("copy of q and k", "clone", length, copy, "copy", 1.0, 0.0, peak))
        heads = [x.transpose(1, 2) for x in (q, k, k)]
        call = lambda heads=heads: torch.nn.functional.scaled_dot_product_attention(  # noqa: E731
            *heads, is_causal=True, enable_gqa=True
        )
        sdpa, peak = timed(call)
        lines.append(Line("attention", "SDPA", length, sdpa, "sdpa", 1.0, float("nan"), peak))
        base = float("nan")
        for method in ("pairwise", "harmonic"):
            run = lambda q=q, k=k, m=method, c=case: activation(q, k, method=m, backend="fused", **c)  # noqa: E731
            seconds, peak = timed(run)
            base = seconds if method == "pairwise" else base
            error = worst(run().values, exact)
            lines.append(Line("activation", method, length, seconds, "pairwise", base / seconds, error, peak))
        run = lambda q=q, k=k, c=case: entropy(q, k, backend="fused", **c)  # noqa: E731
        seconds, peak = timed(run)
        values, truth = run().values, entropy(q.double(), k.double(), tol=1e-9, **case).values
        lines.append(
            Line("entropy", "adaptive", length, seconds, "sdpa", sdpa / seconds, worst(values, truth), peak)
        )
    return lines, source
