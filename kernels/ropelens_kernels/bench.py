"""`python -m ropelens_kernels.bench [--gpu] [--json]`: time, error and memory of every method."""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ropelens_kernels import activation, attribution, entropy
from ropelens_kernels.baselines import attribution_by_nodes, direct_entropy
from ropelens_kernels.bench_inputs import PAIRS, SCALE, queries_and_keys
from ropelens_kernels.checks import prepare
from ropelens_kernels.reference.harmonic import harmonic, minimax, series
from ropelens_kernels.reference.pairwise import pairwise
from ropelens_kernels.reference.sorted import by_sorting

BLOCK = 128  # queries in a block of a baseline
SAMPLED = 4  # blocks of queries that a baseline is timed on above T = 2,048, evenly spaced
DTYPES = (torch.float32, torch.float64)
ROWS = 29  # query positions at which entropy is held against float64: 29 x 9 heads = 261 rows


@dataclass
class Line:
    """One row of the table; `ratio` is the baseline's time over this one's, error relative."""

    op: str
    method: str
    T: int
    seconds: float
    baseline: str
    ratio: float
    error: float
    peak_mb: float


def timed(call: Callable[[], object], repeats: int = 3) -> tuple[float, float]:
    """Returns the best of some runs in seconds, and the peak memory above the start in MB."""
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # else memory kept from before would hide what is taken
    before = _memory("VmRSS", reset=True)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best, max(0.0, _memory("VmHWM") - before)


def _memory(field: str, reset: bool = False) -> float:
    """Reads the process's memory in MB where the system tells it (Linux), else 0."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0.0
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def worst(values: Tensor, exact: Tensor) -> float:
    """The largest relative error of an entry."""
    return float(((values - exact).abs() / exact.abs().clamp(min=1e-300)).max())


def cpu(lengths: list[int], synthetic: bool) -> tuple[list[Line], str]:
    """Runs all CPU methods at each length."""
    lines: list[Line] = []
    source = ""
    whole = queries_and_keys(max(lengths), synthetic)
    for length in lengths:
        q, k, source = whole[0][:, :length], whole[1][:, :length], whole[2]
        lines += _activation(q, k, length) + _entropy(q, k, length) + _attribution(q, k, length)
    return lines, source


def _sampled(length: int) -> tuple[list[int], float, str]:
    """Blocks of a baseline to time, what to multiply the time by, and how to mark it."""
    starts = list(range(0, length, BLOCK))
    if length <= 2048:
        return starts, 1.0, ""
    some = [starts[(2 * j + 1) * len(starts) // (2 * SAMPLED)] for j in range(SAMPLED)]
    return some, len(starts) / SAMPLED, " (extrapolated)"


def _activation(q: Tensor, k: Tensor, length: int) -> list[Line]:
    case = {"pairs": PAIRS, "scale": SCALE}
    exact = by_sorting(
        prepare(q.double(), k.double(), **case)
    )  # equals the double loop to 1e-12 in the tests
    starts, factor, mark = _sampled(length)

    def tiles() -> None:
        for start in starts:
            stop = start + BLOCK
            pairwise(prepare(q[:, start:stop], k[:, :stop], **case))

    base, peak = timed(tiles, 1)
    base *= factor
    stop = starts[len(starts) // 2] + BLOCK  # one block is enough: all do the same
    block = (q[:, stop - BLOCK : stop], k[:, :stop])
    error = worst(*(pairwise(prepare(*(x.to(dtype) for x in block), **case)) for dtype in DTYPES))
    lines = [Line("activation", "pairwise" + mark, length, base, "pairwise", 1.0, error, peak)]
    for method in ("sorted", "harmonic"):
        seconds, peak = timed(lambda method=method: activation(q, k, method=method, **case))
        error = worst(activation(q, k, method=method, **case).values, exact)
        lines.append(Line("activation", method, length, seconds, "pairwise", base / seconds, error, peak))
    inputs = prepare(q, k, **case)
    for name, m, rule, block in (
        ("series, M = 8", 8, series, 32),
        ("series, M = 16", 16, series, 32),
        ("series, M = 32", 32, series, 32),
        ("minimax, M = 16", 16, minimax, 32),
        ("minimax, M = 32", 32, minimax, 32),
        ("series, M = 16, blocks of 16", 16, series, 16),
        ("series, M = 16, blocks of 64", 16, series, 64),
    ):
        call = lambda m=m, rule=rule, block=block: harmonic(inputs, 1e-3, (m,), rule, block)  # noqa: E731
        seconds, peak = timed(call, 2)
        error = worst(call().values, exact)
        lines.append(Line("activation", name, length, seconds, "pairwise", base / seconds, error, peak))
    return lines


def _entropy(q: Tensor, k: Tensor, length: int) -> list[Line]:
    starts, factor, mark = _sampled(length)
    base, peak = timed(lambda: direct_entropy(q[0], k[0], SCALE, starts, BLOCK), 1)
    base *= factor
    lines = [Line("entropy", "direct" + mark, length, base, "direct", 1.0, 0.0, peak)]
    case = {"pairs": PAIRS, "scale": SCALE}
    ways = {"adaptive": "torch", "adaptive, compiled": "compiled"}
    for name, backend in ways.items() if shutil.which("c++") else [*ways.items()][:1]:
        if backend == "compiled":
            for size in (1, 10):  # not timed: both rules compile
                entropy(size * q[:, :600], k[:, :600], backend=backend, **case)
        call = lambda backend=backend: entropy(q, k, backend=backend, **case)  # noqa: E731
        seconds, peak = timed(call, 3 if length <= 2048 else 1)
        lines.append(Line("entropy", name, length, seconds, "direct", base / seconds, 0.0, peak))
    for p in torch.linspace(1, length - 1, ROWS).long().tolist():
        row, keys = q[:, p : p + 1], k[:, : p + 1]
        exact = entropy(row.double(), keys.double(), tol=1e-9, **case).values[0]
        found = [direct_entropy(q[0, : p + 1], keys[0], SCALE, [p], 1)[:, PAIRS].sum(-1)]
        found += [entropy(row, keys, backend=ways[x.method], **case).values[0] for x in lines[1:]]
        for line, values in zip(lines, found, strict=True):
            error = float(((values - exact).norm(dim=-1) / exact.norm(dim=-1)).max())
            line.error = max(line.error, error)
    return lines


def _attribution(q: Tensor, k: Tensor, length: int) -> list[Line]:
    case = {"pairs": PAIRS, "scale": SCALE, "queries": torch.tensor([-1])}
    one = (q[:, :, :1], k[:, :, :1])
    seconds, peak = timed(lambda: attribution(*one, **case))
    start = time.perf_counter()
    exact = attribution_by_nodes(q[0, -1, 0], k[0, :, 0], SCALE)[:, PAIRS].sum(-1)
    base = time.perf_counter() - start
    found = attribution(*one, **case).values[0, 0, 0]
    error = float((found - exact).abs().max() / exact.abs().max())
    name = "400 nodes"
    return [
        Line("attribution", name, length, base, name, 1.0, float("nan"), float("nan")),
        Line("attribution", "one query", length, seconds, name, base / seconds, error, peak),
    ]


def show(lines: list[Line], title: str, as_json: bool) -> None:
    """Prints the lines as a table, or as one list of JSON objects; what was not measured is empty or null."""
    if as_json:
        rows = [{k: None if v != v else v for k, v in asdict(x).items()} for x in lines]
        print(json.dumps(rows, indent=1))
        return
    print(f"{title}; torch {torch.__version__}, {torch.get_num_threads()} threads")
    print("| op | method | T | seconds | baseline | ratio | worst relative error | peak MB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for x in lines:
        error, peak = ("" if math.isnan(v) else f"{v:{f}}" for v, f in ((x.error, ".1e"), (x.peak_mb, ".0f")))
        print(
            f"| {x.op} | {x.method} | {x.T:,} | {x.seconds:.4g} | {x.baseline} | {x.ratio:.3g} "
            f"| {error} | {peak} |"
        )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one list of objects")
    parser.add_argument("--gpu", action="store_true", help="time the Triton kernels on a CUDA device")
    parser.add_argument("--synthetic", action="store_true", help="do not look for SmolLM2")
    parser.add_argument("--lengths", type=int, nargs="+", default=None, help="numbers of positions")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.gpu:
        from ropelens_kernels.bench_gpu import gpu

        lines, source = gpu(args.lengths or [2048, 8192, 16384])
    else:
        lines, source = cpu(args.lengths or [2048, 16384], args.synthetic)
    show(lines, f"q and k: {source}", args.json)


if __name__ == "__main__":
    main()
