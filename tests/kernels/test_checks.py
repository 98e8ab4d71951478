"""Bad input: one sentence that says what was expected, what came and what to do."""

import subprocess
import sys

import pytest
import torch
from definitions import HALF, sample

import ropelens_kernels as rk
from ropelens_kernels.checks import prepare

Q, K = sample()
GOOD = {"q": Q, "k": K, "pairs": HALF(8), "scale": 0.5}
BAD = {
    "axes": ({"q": Q[0]}, r"expected q \[batch, query, head, d_head\].*got \[7, 4, 8\]"),
    "d_head": ({"k": K[..., :4]}, "equal batch and d_head"),
    "too many queries": ({"k": K[:, :3]}, "expected 1 to 3 queries.*got 7"),
    "heads": ({"q": Q[:, :, :3]}, "multiple of the key heads, got 3 and 2"),
    "integers": ({"q": Q.long()}, "expected floating-point q and k"),
    "mask shape": (
        {"mask": torch.ones(1, 5, dtype=torch.bool)},
        r"expected a Bool mask \[batch, key\] = \[1, 7\]",
    ),
    "mask dtype": ({"mask": torch.ones(1, 7)}, "attention_mask.bool"),
    "sinks": ({"sinks": torch.zeros(2)}, r"expected sinks \[head\] = \[4\], got \[2\]"),
    "nan sinks": ({"sinks": torch.full((4,), torch.nan)}, "expected finite sinks"),
    "nan": ({"q": Q * torch.nan}, "got NaN or infinity in q"),
    "infinity": ({"k": K * torch.inf}, "got NaN or infinity in k"),
    "pair range": ({"pairs": HALF(8) + 1}, "expected dims from 0 to 7 in pairs, got 1 to 8"),
    "pair twice": ({"pairs": torch.tensor([[0, 1], [1, 2]])}, "a dim twice"),
    "pair shape": ({"pairs": torch.arange(8)}, r"expected pairs as integers \[band, 2\]"),
    "window": ({"window": 0}, "window of at least 1 key, got 0"),
    "softcap": ({"softcap": -1.0}, "positive softcap, got -1.0"),
    "scale": ({"scale": float("nan")}, "finite scale, got nan"),
    "tol": ({"tol": 0.0}, "positive tolerance, got 0.0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_sentence(name):
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message) as caught:
        prepare(**{**GOOD, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("function", [rk.activation, rk.entropy, rk.attribution])
def test_unknown_choices_are_refused(function):
    with pytest.raises(ValueError, match="expected method to be one of auto"):
        function(**GOOD, method="magic")
    with pytest.raises(ValueError, match="expected backend to be one of auto"):
        function(**GOOD, backend="magic")


@pytest.mark.parametrize("function", [rk.activation, rk.entropy])
def test_fused_kernels_refuse_cpu_tensors(function):
    with pytest.raises(ValueError, match=r"expected CUDA tensors.*got cpu tensors"):
        function(**GOOD, backend="fused")


def test_queries_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"expected queries from -7 to 6, got \[7\]"):
        rk.attribution(**GOOD, queries=torch.tensor([7]))


def test_exports_are_pinned():
    assert rk.__all__ == [
        "ActivationResult",
        "AttributionResult",
        "EntropyResult",
        "activation",
        "attribution",
        "entropy",
        "norm_product",
    ]


def test_importing_brings_in_no_model_library_and_no_triton():
    code = (
        "import sys, ropelens_kernels; "
        "print(sorted({'ropelens', 'transformers', 'transformer_lens', 'triton'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_results_carry_no_gradient():
    q, k = sample()
    q.requires_grad_()
    out = rk.entropy(q, k, pairs=HALF(8), scale=0.5)
    assert not out.values.requires_grad
    assert out.values.dtype == torch.float64


@pytest.mark.parametrize("method", ["pairwise", "sorted", "harmonic"])
def test_autocast_takes_no_digit(method):
    q, k = sample(query=70, key=70, dtype=torch.float32)
    case = {"pairs": HALF(8), "scale": 0.5, "edges": (32,)}
    expected = rk.activation(q, k, method=method, **case), rk.entropy(q, k, **case)
    with torch.autocast("cpu", torch.bfloat16):
        found = rk.activation(q, k, method=method, **case), rk.entropy(q, k, **case)
    for mine, its in zip(found, expected, strict=True):
        assert torch.equal(mine.values, its.values)
        assert torch.equal(mine.by_position, its.by_position)
