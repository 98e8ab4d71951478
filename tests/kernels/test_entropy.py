"""Entropy against its definition and its invariants."""

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from definitions import ADJACENT, HALF, fine_entropy, sample, softmax, visible_keys

from ropelens_kernels import entropy

SINKS = torch.tensor([0.7, -1.0, 2.0, 0.0], dtype=torch.float64)
CASES = {
    "plain": {},
    "window": {"window": 5},
    "softcap": {"softcap": 4.0},
    "sinks": {"sinks": SINKS},
    "all": {"window": 5, "softcap": 4.0, "sinks": SINKS},
}


def by_definition(q, k, pairs, scale, window=None, softcap=None, sinks=None):
    """The covariance integral, row by row: [head, band]."""
    out = torch.zeros(q.shape[2], len(pairs), dtype=torch.float64)
    offset = k.shape[1] - q.shape[1]
    for query in range(q.shape[1]):
        keys = visible_keys(query + offset, k.shape[1], window)
        for head in range(q.shape[2]):
            products = scale * (q[0, query, head] * k[0, keys, head // (q.shape[2] // k.shape[2])]).double()
            sink = None if sinks is None else sinks[head]
            if len(keys) > 1 or sink is not None:
                out[head] += fine_entropy(products, pairs, softcap, sink, panels=512)
    return out


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1.0, 12.0])
def test_entropy_equals_the_covariance_integral(name, size):
    q, k = sample(query=9, key=11, size=size)
    pairs = ADJACENT(8)[1:]
    exact = by_definition(q, k, pairs, 0.4, **CASES[name])
    out = entropy(q, k, pairs=pairs, scale=0.4, tol=1e-9, **CASES[name])
    torch.testing.assert_close(out.values[0], exact, atol=1e-7, rtol=0)
    assert out.residual.max() <= 1e-9
    default = entropy(q.float(), k.float(), pairs=pairs, scale=0.4, **CASES[name])
    assert default.residual.max() <= 1e-3
    torch.testing.assert_close(default.values[0], exact, atol=9e-3, rtol=0)  # 9 rows of 1e-3 nats
    assert out.n_queries.tolist() == [9]
    assert out.n_pairs.tolist() == [
        sum(len(visible_keys(p + 2, 11, CASES[name].get("window"))) for p in range(9))
    ]


@pytest.mark.parametrize("name", CASES)
def test_bands_add_up_to_the_entropy_drop(name):
    q, k = sample(query=20, key=20, size=3.0)
    case = CASES[name]
    out = entropy(q, k, pairs=HALF(6), scale=0.4, tol=1e-9, **case)
    for head in range(4):
        total = 0.0
        for p in range(20):
            keys = visible_keys(p, 20, case.get("window"))
            sink = case["sinks"][head] if "sinks" in case else None
            logits = 0.4 * (k[0, keys, head // 2] @ q[0, p, head])
            for sign, at in ((1, logits), (-1, torch.zeros_like(logits))):
                a = softmax(at, case.get("softcap"), sink)
                sunk = (1 - a.sum()).clamp(min=0) if sink is not None else torch.zeros(())
                total += sign * float(torch.special.entr(a).sum() + torch.special.entr(sunk))
        assert float(out.values[0, head].sum() + out.rest[0, head]) == pytest.approx(total, abs=1e-7)


def test_the_first_query_contributes_exactly_nothing():
    q, k = sample(query=1, key=1, dtype=torch.float32)
    out = entropy(q, k, pairs=HALF(8), scale=1.0, split_first=True)
    assert (out.values == 0).all()
    assert (out.rest == 0).all()
    assert (out.first_values == 0).all()


@pytest.mark.parametrize("gap", [20.0, 100.0, 1000.0, 1e5])
@pytest.mark.parametrize("tol", [1e-3, 1e-9])
def test_huge_logit_gaps_still_meet_the_tolerance(gap, tol):
    g = torch.Generator().manual_seed(0)
    k = torch.randn(1, 20, 1, 4, generator=g, dtype=torch.float64)
    k[0, 0] = torch.tensor([1.0, 0, 0, 0]) * gap
    q = torch.randn(1, 20, 1, 4, generator=g, dtype=torch.float64)
    q[..., 0] = 1
    exact = torch.zeros(2, dtype=torch.float64)
    for p in range(1, 20):
        exact += fine_entropy(q[0, p, 0] * k[0, : p + 1, 0], HALF(4))
    out = entropy(q, k, pairs=HALF(4), scale=1.0, tol=tol)
    assert out.residual.max() <= tol
    torch.testing.assert_close(out.values[0, 0], exact, atol=19 * max(tol, 1e-8), rtol=0)


def test_first_key_part_is_the_entropy_of_first_key_or_not():
    q, k = sample(query=12, key=12, heads=2, kv=1, size=3.0)
    out = entropy(q, k, pairs=HALF(8), scale=0.4, tol=1e-9, split_first=True)
    for head in range(2):
        total = 0.0
        for p in range(1, 12):
            a = float(torch.softmax(0.4 * (k[0, : p + 1, 0] @ q[0, p, head]), 0)[0])
            for sign, x in ((1, a), (-1, 1 / (p + 1))):
                total -= sign * (x * math.log(x) + (1 - x) * math.log1p(-x))
        assert float(out.first_values[0, head].sum()) == pytest.approx(total, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_inputs_differ_only_by_their_rounding(dtype):
    q, k = sample(query=40, key=40, dtype=dtype)
    low = entropy(q, k, pairs=HALF(8), scale=0.4)
    high = entropy(q.double(), k.double(), pairs=HALF(8), scale=0.4, tol=1e-9)
    torch.testing.assert_close(low.values, high.values, atol=40e-3, rtol=0)
    assert entropy(q, k, pairs=HALF(8), scale=0.4, tol=1e-9).residual.max() <= 1e-9


@pytest.mark.parametrize(("left", "right"), [(0, 1), (0, 5), (1, 0), (5, 0), (2, 3)])
def test_pads_change_nothing(left, right):
    q, k = sample(batch=2, query=10, key=10)
    case = {"pairs": HALF(8), "scale": 0.4, "tol": 1e-9, "window": 6, "split_first": True}
    plain = entropy(q, k, **case)
    pad = lambda x, n: torch.full((2, n, *x.shape[2:]), torch.inf, dtype=x.dtype)  # noqa: E731
    padded = [torch.cat([pad(x, left), x, pad(x, right)], 1) for x in (q, k)]
    mask = torch.tensor([[False] * left + [True] * 10 + [False] * right] * 2)
    out = entropy(*padded, mask=mask, **case)
    torch.testing.assert_close(out.values, plain.values, atol=10e-9, rtol=0)  # 10 rows of tol
    torch.testing.assert_close(out.first_values, plain.first_values, atol=10e-9, rtol=0)
    assert torch.equal(out.n_queries, plain.n_queries)
    assert torch.equal(out.n_pairs, plain.n_pairs)


def test_grouped_queries_equal_repeated_keys_and_layouts_only_permute():
    q, k = sample(query=30, key=30, heads=8, kv=2)
    grouped = entropy(q, k, pairs=HALF(8), scale=0.4, tol=1e-9)
    repeated = entropy(q, k.repeat_interleave(4, 2), pairs=HALF(8), scale=0.4, tol=1e-9)
    torch.testing.assert_close(grouped.values, repeated.values, atol=30e-9, rtol=0)  # 30 rows of tol
    order = HALF(8).flatten()
    adjacent = entropy(q[..., order], k[..., order], pairs=ADJACENT(8), scale=0.4, tol=1e-9)
    torch.testing.assert_close(grouped.values, adjacent.values, atol=30e-9, rtol=0)


def test_a_future_or_windowed_out_key_has_no_effect_however_large():
    q, k = sample(query=8, key=8)
    short = entropy(q[:, :6], k[:, :6], pairs=HALF(8), scale=0.4, tol=1e-9)
    k[:, 6:] *= 2e5
    longer = entropy(q, k, pairs=HALF(8), scale=0.4, tol=1e-9, mask=torch.arange(8)[None] < 6)
    torch.testing.assert_close(longer.values, short.values, atol=6e-9, rtol=0)  # 6 rows of tol


def test_transposed_strides_are_read_as_they_are():
    q, k = sample(query=20, key=20)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
    a = entropy(q, k, pairs=HALF(8), scale=0.4, tol=1e-9)
    b = entropy(*strided, pairs=HALF(8), scale=0.4, tol=1e-9)
    torch.testing.assert_close(a.values, b.values, atol=1e-12, rtol=0)


@pytest.mark.parametrize("value", [0.0, 5.0])
def test_constant_scores_have_no_entropy_drop(value):
    q = torch.full((1, 10, 1, 4), value, dtype=torch.float64)
    out = entropy(q, q, pairs=HALF(4), scale=1.0, tol=1e-9)
    assert out.values.abs().max() <= 1e-12 * max(value, 1.0) ** 2 * 10


@pytest.mark.parametrize("name", ["plain", "window", "sinks"])
@pytest.mark.parametrize("pads", [0, 3])
def test_the_first_rule_splits_the_first_key_off_as_the_finest_does(name, pads):
    q, k = sample(query=60, key=60, heads=4, kv=2)
    mask = torch.ones(q.shape[0], 60, dtype=torch.bool)
    mask[0, :pads] = False
    case = {"pairs": HALF(8), "scale": 0.4, "mask": mask, "split_first": True, **CASES[name]}
    fast, fine = (entropy(q.double(), k.double(), tol=tol, **case) for tol in (1e-3, 1e-10))
    assert int(fast.n_refined.sum()) == 0  # else the first rule would not be tested
    size = fine.first_values.abs().amax(-1, keepdim=True)
    assert ((fast.first_values - fine.first_values).abs() <= 1e-4 * size).all()
    assert ((fast.values - fine.values).abs() <= 1e-4 * fine.values.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("name", CASES)
def test_sums_by_position_are_those_of_the_queries_between_the_edges(name):
    q, k = sample(query=40, key=43, heads=4, kv=2)
    case = {"pairs": HALF(8), "scale": 0.4, "tol": 1e-9, **CASES[name]}
    out = entropy(q, k, edges=(8, 9, 30), **case)
    for span, (a, b) in enumerate([(0, 8), (8, 9), (9, 30), (30, 40)]):
        alone = entropy(q[:, a:b], k[:, : b + 3], **case).values
        torch.testing.assert_close(out.by_position[:, span], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_passes_equal_the_eager_ones():
    # in another process: torch.compile cannot look through the type checks of the tests
    script = Path(__file__).with_name("compiled.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ok\n"


def test_compiled_passes_refuse_what_they_cannot_do():
    q, k = sample(query=4, key=4)
    for case in ({"softcap": 3.0}, {"tol": 1e-9}):
        with pytest.raises(ValueError, match="expected no softcap, no float64 and tol >= 1e-5"):
            entropy(q.float(), k.float(), pairs=HALF(8), scale=0.4, backend="compiled", **case)


def test_rows_that_the_first_rule_misses_in_float32_meet_the_tolerance():
    q, k = (x.float() for x in sample(query=200, key=200, heads=4, kv=2, size=14.0))
    case = {"pairs": HALF(8), "scale": 0.4}
    out = entropy(q, k, tol=1e-3, **case)
    exact = entropy(q.double(), k.double(), tol=1e-9, **case)
    assert int(out.n_refined.sum()) > 0
    assert float(out.residual.max()) <= 1e-3
    # each row's bands err by about its residual; rounding by 200 rows of 1e-6 of logits of hundreds
    room = 10e-3 / 3 * out.n_refined[..., None] + 200 * 1e-4
    assert ((out.values - exact.values).abs() <= room).all()
