"""Activation, every method, against the double loop, and the certified bound."""

import math

import pytest
import torch
from definitions import ADJACENT, HALF, activation_loop, sample
from hypothesis import given, settings
from hypothesis import strategies as st

from ropelens_kernels import activation
from ropelens_kernels.checks import prepare
from ropelens_kernels.reference.harmonic import harmonic, minimax, series
from ropelens_kernels.reference.pairwise import pairwise

EXACT = ["pairwise", "sorted"]


def run(q, k, method, pairs, **kwargs):
    return activation(q, k, pairs=pairs, scale=0.3, method=method, **kwargs)


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize("length", [1, 2, 63])
@pytest.mark.parametrize(("heads", "kv"), [(1, 1), (9, 3), (8, 1)])
def test_exact_methods_equal_the_double_loop(method, length, heads, kv):
    q, k = sample(query=length, key=length, heads=heads, kv=kv, d=6)
    pairs = ADJACENT(6)[:2]
    out = run(q, k, method, pairs)
    exact = activation_loop(q[0], k[0], pairs, 0.3)
    torch.testing.assert_close(out.values[0], exact, rtol=1e-12, atol=1e-12)
    assert out.method == method
    assert (out.bound == 0).all()
    assert out.n_pairs.tolist() == [length * (length + 1) // 2]


def test_the_tiles_of_pairs_equal_the_double_loop_with_window_pads_and_fewer_queries():
    q, k = sample(query=70, key=100, heads=2, kv=1, d=4)
    real = torch.arange(100) >= 40
    out = run(q, k, "pairwise", HALF(4), window=33, mask=real[None])
    exact = activation_loop(q[0], k[0], HALF(4), 0.3, 33, real)
    torch.testing.assert_close(out.values[0], exact, rtol=1e-12, atol=1e-12)
    assert out.n_queries.tolist() == [60]


@pytest.mark.parametrize("length", [64, 100, 257, 300])
@pytest.mark.parametrize("window", [None, 1, 2, 40, 64, 99, 256])
@pytest.mark.parametrize("method", ["sorted", "harmonic"])
def test_fast_methods_equal_the_pairs(method, length, window):
    q, k = sample(query=length, key=length, heads=6, kv=2)
    exact = run(q, k, "pairwise", HALF(6), window=window)
    out = run(q, k, method, HALF(6), window=window)
    if method == "sorted":
        torch.testing.assert_close(out.values, exact.values, rtol=1e-12, atol=1e-12)
    else:
        assert ((out.values - exact.values).abs() <= out.bound).all()
        torch.testing.assert_close(out.values, exact.values, rtol=1e-3, atol=0)
    torch.testing.assert_close(out.rest, exact.rest, rtol=1e-12, atol=0)
    assert torch.equal(out.n_pairs, exact.n_pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", ["pairwise", "sorted", "harmonic"])
def test_low_precision_inputs_are_computed_in_float32(method, dtype):
    q, k = sample(batch=2, query=200, key=200, dtype=dtype)
    exact = run(q.double(), k.double(), "pairwise", HALF(8))
    out = run(q, k, method, HALF(8))
    rtol = 1e-3 if method == "harmonic" else 1e-6
    torch.testing.assert_close(out.values, exact.values, rtol=rtol, atol=0)


def test_sums_of_many_keys_do_not_round_in_float32():
    """Keys near one direction and queries across it: all queries of a node share a prefix sum.

    Each pair's rounding is at most 3 float32 ulps of |q||k| = 1/cos of what it adds, here below 20, and
    independent of the others': averaged over n pairs it is far below 1e-7. A shared rounding would not be.
    """
    length = 4096
    g = torch.Generator().manual_seed(0)
    angle = 0.1 * torch.randn(2, length, 2, generator=g) + torch.tensor([1.3, 0.0])[:, None, None]
    vectors = torch.stack([angle.cos(), angle.sin()], -1)
    q, k = vectors[:1], vectors[1:, :, :1]
    out = run(q, k, "sorted", HALF(2)).values
    exact = run(q.double(), k.double(), "pairwise", HALF(2)).values
    torch.testing.assert_close(out, exact, rtol=1e-7, atol=0)


@pytest.mark.parametrize("method", ["pairwise", "sorted", "harmonic"])
@pytest.mark.parametrize(("left", "right"), [(0, 5), (5, 0), (40, 31)])
def test_pads_change_nothing(method, left, right):
    q, k = sample(query=90, key=90)
    plain = run(q, k, method, HALF(8), window=50)
    pad = lambda x, n: torch.full((1, n, *x.shape[2:]), torch.nan, dtype=x.dtype)  # noqa: E731
    padded = [torch.cat([pad(x, left), x, pad(x, right)], 1) for x in (q, k)]
    mask = torch.tensor([[False] * left + [True] * 90 + [False] * right])
    out = run(*padded, method, HALF(8), window=50, mask=mask)
    tolerance = {"atol": float(plain.bound.max() + out.bound.max()), "rtol": 1e-12}
    torch.testing.assert_close(out.values, plain.values, **tolerance)
    assert torch.equal(out.n_pairs, plain.n_pairs)


@pytest.mark.parametrize("method", ["pairwise", "sorted", "harmonic"])
def test_fewer_queries_are_the_last_positions(method):
    q, k = sample(query=80, key=200)
    out = run(q, k, method, HALF(8))
    exact = activation_loop(q[0, -3:], k[0], HALF(8), 0.3)
    exact = exact + run(q[:, :-3], k[:, :-3], "pairwise", HALF(8)).values[0]
    torch.testing.assert_close(out.values[0], exact, atol=float(out.bound.max()), rtol=1e-12)


@pytest.mark.parametrize("method", ["pairwise", "sorted", "harmonic"])
def test_orthogonal_phases_sum_to_nothing(method):
    q = torch.zeros(1, 300, 1, 2)
    k = torch.zeros(1, 300, 1, 2)
    q[..., 0], k[..., 1] = 1, 1
    out = run(q, k, method, HALF(2))
    size = 0.3 * 300 * 301 / 2
    allowed = size * 1e-6 if method != "harmonic" else float(out.bound.max())
    assert float(out.values.abs().max()) <= allowed
    if method == "harmonic":
        assert float(out.values.abs().max()) <= 1e-2 * size


@pytest.mark.parametrize("method", ["pairwise", "sorted", "harmonic"])
def test_zeros_and_no_bands(method):
    zero = torch.zeros(1, 100, 2, 4)
    assert (run(zero, zero, method, HALF(4)).values == 0).all()
    q, k = sample(query=100, key=100, heads=2, kv=1, d=4)
    out = run(q, k, method, torch.zeros(0, 2, dtype=torch.int64))
    assert out.values.shape == (1, 2, 0)
    whole = sum(
        float((0.3 * (k[0, : p + 1, 0] @ q[0, p, 0])).abs().sum()) for p in range(100)
    )  # all dims are rest
    assert float(out.rest[0, 0]) == pytest.approx(whole, rel=1e-12)


def test_auto_says_what_it_picked():
    short, long = sample(query=20, key=20), sample(query=600, key=600, heads=1, kv=1)
    assert activation(*short, pairs=HALF(8), scale=1.0).method == "pairwise"
    assert activation(*long, pairs=HALF(8), scale=1.0).method == "harmonic"
    assert activation(*long, pairs=HALF(8), scale=1.0, tol=1e-6).method == "sorted"


@pytest.mark.parametrize("rule", [series, minimax])
@pytest.mark.parametrize("m", [4, 8, 16, 32, 64])
def test_the_stated_error_of_the_coefficients_is_their_error(rule, m):
    c, worst = rule(m)
    x = torch.linspace(0, math.pi, 200_001, dtype=torch.float64)
    approximation = torch.cos(2 * x[:, None] * torch.arange(m + 1)) @ torch.tensor(c, dtype=torch.float64)
    error = float((approximation - x.cos().abs()).abs().max())
    assert 0.9 * worst <= error <= worst
    if rule is minimax:
        assert worst < series(m)[1]


def phases(kind, g, length, m):
    """Angles of queries and keys: random or chosen against the approximation."""
    if kind == 0:
        return 6.3 * torch.rand(2, length, generator=g, dtype=torch.float64)
    if kind == 1:  # all differences 90 degrees: the worst case of the series
        base = torch.full((length,), float(torch.rand((), generator=g)), dtype=torch.float64)
        return torch.stack([base, base + math.pi / 2])
    if kind == 2:  # a rotation whose harmonics line up
        turn = torch.arange(length, dtype=torch.float64) * math.pi / (m + 1)
        return torch.stack([turn, turn + 0.5 * math.pi])
    slow = torch.arange(length, dtype=torch.float64) * 10 ** (-4 * float(torch.rand((), generator=g)))
    return torch.stack([slow, slow + float(torch.rand((), generator=g))])


@pytest.mark.parametrize("rule", [series, minimax])
def test_the_certified_bound_holds_on_a_thousand_inputs(rule):
    g = torch.Generator().manual_seed(0)
    for trial in range(20):  # 25 heads x 2 bands each
        m, length = (2, 4, 8, 16)[trial % 4], 70 + trial
        vectors = torch.empty(2, length, 25, 4, dtype=torch.float64)
        for head in range(25):
            for band in range(2):
                size = torch.rand(2, length, generator=g, dtype=torch.float64) ** (1 + 9 * (head % 2))
                angle = phases((head + band) % 4, g, length, m)
                vectors[:, :, head, 2 * band] = size * angle.cos()
                vectors[:, :, head, 2 * band + 1] = size * angle.sin()
        for dtype in (torch.float32, torch.float64):
            q, k = vectors[:, None].to(dtype)
            exact = pairwise(prepare(q.double(), k.double(), pairs=ADJACENT(4), scale=-0.5))
            found = harmonic(prepare(q, k, pairs=ADJACENT(4), scale=-0.5), 1e-3, ladder=(m,), rule=rule)
            assert ((found.values - exact).abs() <= found.bound).all()


@settings(max_examples=25, deadline=None)
@given(
    key=st.integers(1, 140),
    fewer=st.integers(0, 139),
    kv=st.sampled_from([1, 2, 4]),
    window=st.none() | st.integers(1, 150),
    method=st.sampled_from(["sorted", "harmonic"]),
    kind=st.sampled_from(["random", "integers", "equal"]),
    seed=st.integers(0, 10**6),
)
def test_fast_methods_hold_for_any_shape(key, fewer, kv, window, method, kind, seed):
    q, k = sample(query=max(1, key - fewer), key=key, kv=kv, seed=seed)
    if kind == "integers":  # many ties of angles and zero vectors
        q, k = q.round(), k.round()
    elif kind == "equal":
        q, k = torch.ones_like(q), torch.ones_like(k)
    before = q.clone(), k.clone()
    exact = run(q, k, "pairwise", HALF(8), window=window)
    out = run(q, k, method, HALF(8), window=window)
    size = 1e-9 * (1 + float(exact.values.max()))
    assert ((out.values - exact.values).abs() <= out.bound + size).all()
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


@pytest.mark.parametrize("method", ["pairwise", "sorted", "harmonic"])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("edges", [(32, 64, 96), (1, 33), (128,)])
def test_sums_by_position_are_those_of_the_queries_between_the_edges(method, window, edges):
    q, k = sample(query=130, key=130, heads=4, kv=2)
    out = run(q, k, method, HALF(6), window=window, edges=edges)
    assert out.by_position.shape == (q.shape[0], len(edges) + 1, 4, 3)
    torch.testing.assert_close(out.by_position.sum(1), out.values, rtol=1e-12, atol=1e-12)
    for span, (a, b) in enumerate(zip((0, *edges), (*edges, 130), strict=True)):
        alone = run(q[:, a:b], k[:, :b], "pairwise", HALF(6), window=window).values
        size = run(q[:, a:b], k[:, :b], "harmonic", HALF(6), window=window)
        room = size.bound if method == "harmonic" else 1e-9 * alone
        assert ((out.by_position[:, span] - alone).abs() <= room + 1e-12).all()


@pytest.mark.parametrize(("window", "pads"), [(None, 0), (None, 3), (7, 0), (7, 3)])
def test_the_first_keys_part_is_what_remains_without_the_other_keys(window, pads):
    q, k = sample(query=20, key=20, heads=4, kv=2)
    mask = torch.ones(q.shape[0], 20, dtype=torch.bool)
    mask[0, :pads] = False
    out = run(q, k, "pairwise", HALF(6), window=window, mask=mask, split_first=True)
    expected = torch.zeros_like(out.values)
    for row in range(q.shape[0]):
        start = pads if row == 0 else 0
        for p in range(start, 20):
            i = start if window is None else max(start, p - window + 1)
            for head in range(4):
                x = 0.3 * q[row, p, head].double() * k[row, i, head // 2].double()
                expected[row, head] += x[HALF(6)].sum(-1).abs()
    torch.testing.assert_close(out.first_values, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("edges", [(0,), (5, 5), (9, 3), (20,)])
def test_edges_that_leave_a_span_without_queries_are_refused(edges):
    q, k = sample(query=20, key=20)
    with pytest.raises(ValueError, match="expected ascending edges between 0 and 20"):
        run(q, k, "pairwise", HALF(6), edges=edges)
