"""Attribution against its definition and its invariants."""

import pytest
import torch
from definitions import ADJACENT, HALF, nudge, sample, softmax, visible_keys
from hypothesis import given, settings
from hypothesis import strategies as st

from ropelens_kernels import attribution, entropy

CASES = {
    "plain": {},
    "window": {"window": 4},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.9},
    "sinks": {"sinks": torch.tensor([0.7, -1.0, 2.0, 0.0], dtype=torch.float64)},
    "gqa": {"kv": 1},
    "softcap and sinks": {"softcap": 2.0, "sinks": torch.tensor([0.7, -1.0, 2.0, 0.0], dtype=torch.float64)},
}


@pytest.mark.parametrize("name", CASES)
def test_attribution_and_entropy_equal_round_robin_nudging(name):
    case = dict(CASES[name])
    q, k = sample(kv=case.pop("kv", 2))
    scale = case.pop("scale", 8**-0.5)
    pairs = HALF(6)  # 3 bands and 2 dims of rest
    head, query = 3, 6
    sink = None if "sinks" not in case else case["sinks"][head]
    keys = visible_keys(query, 7, case.get("window"))
    products = scale * q[0, query, head] * k[0, keys, head // (4 // k.shape[2])]
    by_dim, drop = nudge(products, case.get("softcap"), sink)

    out = attribution(q, k, pairs=pairs, scale=scale, tol=1e-11, queries=torch.tensor([query]), **case)
    torch.testing.assert_close(out.values[0, 0, head, keys], by_dim[:, pairs].sum(-1), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.rest[0, 0, head, keys], by_dim[:, 6:].sum(-1), atol=1e-5, rtol=0)
    assert out.visible[0, 0].nonzero().flatten().tolist() == keys

    last = {"q": q[:, query:], "k": k[:, : query + 1]}  # the sum over one query is the query
    one = entropy(**last, pairs=pairs, scale=scale, tol=1e-9, **case)
    torch.testing.assert_close(one.values[0, head], drop[pairs].sum(-1), atol=1e-5, rtol=0)
    torch.testing.assert_close(one.rest[0, head], drop[6:].sum(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("size", [0.0, 1.0, 30.0])
def test_attribution_is_complete(softcap, sunk, size):
    q, k = sample(query=5, key=9, size=size)
    sinks = torch.tensor([0.0, 1.0, -4.0, 3.0], dtype=torch.float64) if sunk else None
    out = attribution(q, k, pairs=ADJACENT(8)[:3], scale=0.5, softcap=softcap, sinks=sinks)
    assert out.residual.max() <= 1e-9
    shares = torch.tensor([0.25, 0.25, 0.25, 0.25], dtype=torch.float64)
    for query in range(5):
        n = query + 5
        for head in range(4):
            sink = None if sinks is None else sinks[head]
            logits = 0.5 * (q[0, query, head] @ k[0, :n, head // 2].T)
            c = torch.cat([out.values[0, query, head], out.rest[0, query, head][:, None]], 1)
            attention = softmax(logits, softcap, sink)
            torch.testing.assert_close(c[:n].sum(1), attention, atol=1e-9, rtol=0)
            assert (c[n:] == 0).all()
            if sink is None:
                torch.testing.assert_close(c.sum(0), shares, atol=1e-12, rtol=0)
            else:  # the sink is one more outcome and no key
                torch.testing.assert_close(out.sink[0, query, head], 1 - attention.sum(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("gap", [100.0, 1000.0])
def test_attribution_meets_its_tolerance_at_huge_logit_gaps(gap):
    k = torch.zeros(1, 50, 1, 4, dtype=torch.float64)
    k[0, 0, 0, 0], k[0, 1, 0, 1], k[0, 2, 0, 1] = 1, 0.999, 0.5
    q = torch.full((1, 50, 1, 4), gap, dtype=torch.float64)
    out = attribution(q, k, pairs=HALF(4), scale=1.0, queries=torch.tensor([-1]))
    assert out.residual.max() <= 1e-9


def test_attribution_of_a_pad_query_is_zero_and_pads_change_nothing():
    q, k = sample(query=6, key=6)
    plain = attribution(q, k, pairs=HALF(8), scale=0.5)
    for left, right in ((1, 0), (0, 2), (3, 1)):
        pad = lambda x, n: torch.full((1, n, *x.shape[2:]), torch.nan, dtype=x.dtype)  # noqa: E731
        padded = [torch.cat([pad(x, left), x, pad(x, right)], 1) for x in (q, k)]
        mask = torch.tensor([[False] * left + [True] * 6 + [False] * right])
        out = attribution(*padded, pairs=HALF(8), scale=0.5, mask=mask)
        inner = slice(left, left + 6)
        torch.testing.assert_close(out.values[:, inner, :, inner], plain.values, atol=1e-12, rtol=0)
        assert out.values.sum() == pytest.approx(plain.values.sum().item(), abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(
    key=st.integers(1, 12),
    fewer=st.integers(0, 11),
    kv=st.sampled_from([1, 2, 4]),
    window=st.none() | st.integers(1, 13),
    seed=st.integers(0, 10**6),
)
def test_attribution_holds_for_any_shape(key, fewer, kv, window, seed):
    q, k = sample(query=max(1, key - fewer), key=key, kv=kv, seed=seed)
    before = q.clone(), k.clone()
    out = attribution(q, k, pairs=HALF(8), scale=0.5, window=window)
    assert out.residual.max() <= 1e-9
    torch.testing.assert_close(out.values.sum((3, 4)), torch.ones_like(out.rest[..., 0]), atol=1e-9, rtol=0)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
