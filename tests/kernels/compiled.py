"""The compiled entropy against the eager one and float64; run by test_entropy.py in its own process."""

import torch
from definitions import HALF, sample

from ropelens_kernels import entropy

torch.set_num_threads(1)
for size in (2.0, 12.0):  # narrow and wide logits
    q, k = (x.float() for x in sample(query=90, key=100, heads=4, kv=2, size=size))
    case = {"pairs": HALF(8), "scale": 0.4, "split_first": True, "edges": (32,)}
    found = entropy(q, k, backend="compiled", **case)
    plain = entropy(q, k, backend="torch", **case)
    exact = entropy(q.double(), k.double(), tol=1e-9, **case)
    assert found.method == "adaptive, compiled"
    assert torch.equal(found.n_refined > 0, plain.n_refined > 0)
    for name in ("values", "first_values", "by_position"):
        mine, eager, true = (getattr(x, name) for x in (found, plain, exact))
        assert (mine - true).abs().max() <= 2 * (eager - true).abs().max() + 90 * 1e-6, name
print("ok")
