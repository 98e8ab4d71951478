"""Run with TRITON_INTERPRET=1: the fused kernels on CPU tensors against the reference."""

import sys

import torch
from definitions import HALF, sample

from ropelens_kernels.checks import prepare
from ropelens_kernels.fused.activation import WIDTH, far_terms, pairwise_planes
from ropelens_kernels.fused.entropy import first_rule_rows
from ropelens_kernels.fused.methods import harmonic_fused, pairwise_fused
from ropelens_kernels.reference.entropy import entropy, rows
from ropelens_kernels.reference.harmonic import harmonic
from ropelens_kernels.reference.pairwise import pairwise
from ropelens_kernels.reference.quadrature import gauss

torch.set_num_threads(1)


def planes(x, pairs):
    """[batch, head, time, d_head] -> [batch, head, band, 2, time]."""
    return x[..., pairs].permute(0, 1, 3, 4, 2).contiguous()


def activation_case(length, fewer, heads, kv, window):
    q, k = sample(query=length - fewer, key=length, heads=heads, kv=kv, dtype=torch.float32)
    inputs = prepare(q, k, pairs=HALF(6), scale=1.0, window=window)
    exact = pairwise(prepare(q.double(), k.double(), pairs=HALF(6), scale=1.0, window=window))
    found = pairwise_planes(planes(inputs.q, HALF(6)), planes(inputs.k, HALF(6)), heads // kv, window)
    plain = (pairwise(inputs) - exact).abs().max()
    assert (found - exact).abs().max() <= 2 * plain + 1e-6 * exact.max()


def harmonic_case(length):
    q, k = sample(query=length, key=length, heads=2, kv=1, dtype=torch.float32)
    wide = prepare(q.double(), k.double(), pairs=HALF(8), scale=1.0)
    a, b = planes(wide.q, HALF(8)), planes(wide.k, HALF(8))
    block = torch.arange(length) // 64
    phase = torch.atan2(a[:, :, :, 1], a[:, :, :, 0]), torch.atan2(b[:, :, :, 1], b[:, :, :, 0])
    turn = phase[0][..., :, None] - phase[1][..., None, :]
    size = a.norm(dim=3)[..., :, None] * b.norm(dim=3)[..., None, :]
    apart = block[:, None] > block[None]
    narrow = prepare(q, k, pairs=HALF(8), scale=1.0)
    terms = far_terms(planes(narrow.q, HALF(8)), planes(narrow.k, HALF(8)), 5, 2)
    near = pairwise_planes(planes(narrow.q, HALF(8)), planes(narrow.k, HALF(8)), 2, near=True)
    whole = (size * apart).sum((-1, -2))
    for j in range(6):
        exact = (size * torch.cos(2 * j * turn) * apart).sum((-1, -2))
        assert (terms[j] - exact).abs().max() <= 1e-5 * (1 + whole.max())
    same = (block[:, None] == block[None]) & torch.ones(length, length, dtype=torch.bool).tril()
    exact = (size * turn.cos().abs() * same).sum((-1, -2))
    torch.testing.assert_close(near, exact, rtol=1e-5, atol=1e-6)


def entropy_case(length, fewer, window, sinks, d, pads):
    q, k = sample(query=length - fewer, key=length, heads=4, kv=2, d=d, dtype=torch.float32)
    mask = (torch.arange(length) >= pads)[None]
    inputs = prepare(q, k, pairs=HALF(8), scale=0.4, window=window, mask=mask, sinks=sinks)
    before = inputs.q.clone()
    drop, residual = first_rule_rows(
        inputs.q, inputs.k, inputs.real, inputs.n_visible, 0.4, window, inputs.sinks
    )
    assert torch.equal(before, inputs.q)
    seen = inputs.visible(0, 0, length - fewer, 0, length)
    real = inputs.counted[0]
    for head in range(4):
        sink = None if sinks is None else sinks[head].double().expand(length - fewer, 1)
        a, b = inputs.q[0, head].double() * 0.4, inputs.k[0, head // 2].double()
        exact = rows(a, b, seen, gauss(12), inputs, sink, False)
        low = rows(
            a.float(), b.float(), seen, gauss(12), inputs, None if sink is None else sink.float(), False
        )
        plain = (low.drop - exact.drop)[real].abs().max()
        assert (drop[0, head] - exact.drop)[real].abs().max() <= 2 * plain + 5e-6
        assert (residual[0, head] - exact.residual)[real].abs().max() <= 2e-5


def whole_methods(window):
    q, k = sample(batch=2, query=140, key=150, dtype=torch.float32)
    exact = pairwise(prepare(q.double(), k.double(), pairs=HALF(6), scale=-0.4, window=window))
    inputs = prepare(q, k, pairs=HALF(6), scale=-0.4, window=window)
    torch.testing.assert_close(pairwise_fused(inputs), exact, rtol=1e-5, atol=0)
    mine, theirs = harmonic_fused(inputs, 3e-2, (4, 8)), harmonic(inputs, 3e-2, (4, 8), block=WIDTH)
    assert mine.m == theirs.m
    assert ((mine.values - exact).abs() <= mine.bound).all()
    torch.testing.assert_close(mine.estimate, theirs.estimate, rtol=1e-3, atol=1e-5)
    assert harmonic_fused(inputs, 1e-9, (4, 8)).m == 8
    mine, theirs = entropy(inputs, 1e-3, False, first_rule_rows), entropy(inputs, 1e-3, False)
    torch.testing.assert_close(mine.values, theirs.values, rtol=0, atol=140e-5)
    assert mine.method == "adaptive, fused"


def main():
    """Each case by name, so that the test that runs this can list them."""
    for case in ((1, 0, 1, 1, None), (63, 0, 4, 2, None), (130, 0, 2, 1, 50), (130, 97, 2, 2, None)):
        activation_case(*case)
    harmonic_case(150)
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    for case in (
        (1, 0, None, None, 8, 0),
        (63, 0, None, None, 12, 0),
        (100, 0, 30, None, 16, 7),
        (100, 66, None, sinks, 8, 3),
    ):
        entropy_case(*case)
    whole_methods(None)
    whole_methods(100)
    print("ok")


if __name__ == "__main__":
    sys.exit(main())
