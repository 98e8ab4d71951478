"""The quantities by brute force, in float64 loops: what every implementation is held against."""

from itertools import pairwise

import torch

HALF = lambda d: torch.arange(d).reshape(2, -1).T  # noqa: E731
ADJACENT = lambda d: torch.arange(d).reshape(-1, 2)  # noqa: E731


def visible_keys(p, n_key, window=None, real=None):
    """The keys that the query at position p sees."""
    if real is not None and not real[p]:
        return []
    return [
        i
        for i in range(n_key)
        if i <= p and (window is None or p - i < window) and (real is None or bool(real[i]))
    ]


def softmax(logits, softcap=None, sink=None):
    """Attention on the keys, the sink left out."""
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if sink is None:
        return torch.softmax(logits, -1)
    return torch.softmax(torch.cat([logits, sink.expand(*logits.shape[:-1], 1)], -1), -1)[..., :-1]


def entropy_of(attention):
    """In nats, a sink's outcome included."""
    sunk = (1 - attention.sum(-1, keepdim=True)).clamp(min=0)
    outcomes = torch.cat([attention, sunk], -1)
    return torch.special.entr(outcomes).sum(-1)


def nudge(products, softcap=None, sink=None, rounds=2000):
    """Raises the dims' gains from 0 to 1 in equal steps, one dim after the other, orders alternating.

    Each nudge's change of the attention [key] and of its entropy is credited to the nudged dim.
    """
    d_head = products.shape[1]
    gains = torch.zeros(d_head, dtype=torch.float64)
    attention = torch.zeros(products.shape, dtype=torch.float64)
    entropy = torch.zeros(d_head, dtype=torch.float64)
    order = torch.arange(d_head)
    for step in range(rounds):
        track = [gains.clone()]
        dims = order if step % 2 == 0 else order.flip(0)
        for dim in dims:
            gains = gains.clone()
            gains[dim] = (step + 1) / rounds
            track.append(gains)
        a = softmax(torch.stack(track) @ products.T, softcap, sink)
        h = entropy_of(a)
        attention[:, dims] += (a[1:] - a[:-1]).T
        entropy[dims] += h[1:] - h[:-1]
    start = softmax(torch.zeros(len(products), dtype=torch.float64), softcap, sink)
    return attention + start[:, None] / d_head, entropy


def fine_entropy(products, pairs, softcap=None, sink=None, panels=4096, nodes=4):
    """`-integral Cov_a(f' x_b, f) dt` for each band by a plain composite rule: no closed form."""
    x = products[:, pairs].sum(-1)
    logits = products.sum(-1)
    cells = torch.linspace(0, 1, panels + 1, dtype=torch.float64) ** 3  # finer near 0
    grid, width = [], []
    u, w = (torch.from_numpy(z) for z in __import__("numpy").polynomial.legendre.leggauss(nodes))
    for left, right in pairwise(cells.tolist()):
        grid.append(left + (right - left) * (u + 1) / 2)
        width.append((right - left) * w / 2)
    t, dt = torch.cat(grid)[:, None], torch.cat(width)
    total = torch.zeros(len(pairs), dtype=torch.float64)
    for part, weight in zip(t.split(512), dt.split(512), strict=True):
        a = softmax(part * logits, softcap, sink)
        f = part * logits if softcap is None else softcap * torch.tanh(part * logits / softcap)
        slope = 1 if softcap is None else 1 - torch.tanh(part * logits / softcap) ** 2
        mean = (a * f).sum(-1, keepdim=True)
        if sink is not None:
            mean = mean + (1 - a.sum(-1, keepdim=True)) * sink
        total -= (weight[:, None] * (a * slope * (f - mean))).sum(0) @ x
    return total


def activation_loop(q, k, pairs, scale, window=None, real=None):
    """The double loop over pairs; q [query, head, d], k [key, kv_head, d] -> [head, band]."""
    (n_query, heads, _), n_key, group = q.shape, len(k), q.shape[1] // k.shape[1]
    q, k = q.double(), k.double()
    out = torch.zeros(heads, len(pairs), dtype=torch.float64)
    for query in range(n_query):
        for i in visible_keys(query + n_key - n_query, n_key, window, real):
            for head in range(heads):
                products = scale * q[query, head] * k[i, head // group]
                out[head] += products[pairs].sum(-1).abs()
    return out


def sample(batch=1, query=7, key=7, heads=4, kv=2, d=8, seed=0, size=1.5, dtype=torch.float64):
    """Random q and k with the usual axes."""
    g = torch.Generator().manual_seed(seed)
    q = size * torch.randn(batch, query, heads, d, generator=g, dtype=torch.float64)
    k = torch.randn(batch, key, kv, d, generator=g, dtype=torch.float64)
    return q.to(dtype), k.to(dtype)
