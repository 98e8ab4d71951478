"""The Triton kernels: interpreted against the reference, and compiled ahead of time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from definitions import HALF, sample

from ropelens_kernels import activation, entropy

HERE = Path(__file__).parent


def script(name, **extra):
    """Runs a script of this folder in its own process, since triton reads the variable when imported."""
    env = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"} | extra
    done = subprocess.run(
        [sys.executable, HERE / name], env=env, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_interpreted_kernels_equal_the_reference():
    assert script("interpreted.py", TRITON_INTERPRET="1").strip() == "ok"


def test_kernels_compile_ahead_without_spills():
    lines = [json.loads(line) for line in script("aot.py").splitlines()]
    assert len(lines) == 10
    for line in lines:
        assert line["spills"] == 0, line
        assert line["registers"] <= 256, line
        assert line["shared"] <= 64 * 1024, line


def test_launches_go_to_the_tensors_device_whatever_their_number(monkeypatch):
    from ropelens_kernels.fused import activation as planes
    from ropelens_kernels.fused import entropy as rows

    on, launched = [], []

    class Guard:
        def __init__(self, tensor):
            self.tensor = tensor

        def __enter__(self):
            on.append(self.tensor)

        def __exit__(self, *error):
            on.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda first, *rest, **options: launched.append((grid, on[-1:] and on[-1] is first))

    monkeypatch.setattr(torch.cuda, "device_of", Guard)
    for module, name in ((planes, "pairs_kernel"), (planes, "harmonics_kernel"), (rows, "entropy_kernel")):
        monkeypatch.setattr(module, name, Kernel())
    many = 2**16  # rows: more than CUDA's grids take on any axis but the first
    x = torch.zeros(many, 1, 1, 2, 1)
    planes.pairwise_planes(x, x, 1)
    planes.block_sums(x, 2)
    q = x[..., 0]
    rows.first_rule_rows(q, q, torch.ones(many, 1, dtype=torch.bool), torch.ones(many, 1), 1.0)
    assert len(launched) == 3
    for grid, guarded in launched:
        assert guarded
        assert max(grid[1:], default=1) < 2**16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("length", [1, 63, 257, 1000])
@pytest.mark.parametrize("window", [None, 50])
def test_native_kernels_equal_the_reference(length, window):
    q, k = sample(query=length, key=length, dtype=torch.float32)
    case = {"pairs": HALF(8), "scale": 0.4, "window": window}
    for method in ("pairwise", "harmonic"):
        plain = activation(q, k, method=method, **case)
        fused = activation(q.cuda(), k.cuda(), method=method, backend="fused", **case)
        atol = float(plain.bound.max() + fused.bound.max()) + 1e-5
        torch.testing.assert_close(fused.values.cpu(), plain.values, rtol=1e-5, atol=atol)
    plain, fused = entropy(q, k, **case), entropy(q.cuda(), k.cuda(), backend="fused", **case)
    assert fused.residual.max() <= 1e-3
    torch.testing.assert_close(fused.values.cpu(), plain.values, rtol=0, atol=length * 2e-3)
