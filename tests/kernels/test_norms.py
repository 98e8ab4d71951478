"""The norm product against its definition."""

import pytest
import torch
from definitions import HALF, sample, visible_keys

from ropelens_kernels import activation, norm_product


@pytest.mark.parametrize(("window", "pads"), [(None, 0), (None, 3), (7, 0), (7, 3)])
def test_norm_product_equals_the_double_loop(window, pads):
    q, k = sample(query=18, key=20, heads=4, kv=2)
    mask = torch.ones(q.shape[0], 20, dtype=torch.bool)
    mask[0, :pads] = False
    pairs, rest = HALF(6), [6, 7]
    case = {"pairs": pairs, "scale": -0.3, "mask": mask, "window": window}
    out = norm_product(q, k, split_first=True, edges=(5, 11), **case)
    values, first = torch.zeros(3, *out.values.shape, dtype=torch.float64), torch.zeros_like(out.values)
    other = torch.zeros_like(out.rest)
    for row in range(q.shape[0]):
        for p in range(18):
            keys = visible_keys(p + 2, 20, window, mask[row])
            for head in range(4):
                for i in keys:
                    x, y = q[row, p, head].double(), k[row, i, head // 2].double()
                    size = 0.3 * x[pairs].norm(dim=-1) * y[pairs].norm(dim=-1)
                    values[0 if p < 5 else 1 if p < 11 else 2, row, head] += size
                    other[row, head] += 0.3 * x[rest].norm() * y[rest].norm()
                    if i == keys[0]:
                        first[row, head] += size
    torch.testing.assert_close(out.values, values.sum(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out.by_position, values.transpose(0, 1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out.first_values, first, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(out.rest, other, rtol=1e-12, atol=1e-12)
    exact = activation(q, k, method="pairwise", **case)
    assert torch.equal(out.n_pairs, exact.n_pairs)
    assert (exact.values <= out.values).all()  # |q.k| is at most |q||k|
