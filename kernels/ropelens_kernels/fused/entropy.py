"""Band entropy on a GPU: the first quadrature rule for every row; the reference redoes those that miss."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ropelens_kernels.reference.quadrature import gauss

QUERIES, KEYS, WARPS = 32, 32, 8  # a tile, and what holds it without spilling on sm_90


@triton.jit
def _scores(queries, k, p, i, d, real, keys, window, k_time, D: tl.constexpr):
    """Returns the keys [key, d], their logits and whether each query sees them."""
    there = i < keys
    block = tl.load(
        k + i[:, None].to(tl.int64) * k_time + d[None, :], mask=there[:, None] & (d[None, :] < D), other=0.0
    )
    token = tl.load(real + i, mask=there, other=0) != 0
    distance = p[:, None] - i[None, :]
    seen = (distance >= 0) & (distance < window) & token[None, :]
    logits = tl.dot(queries, tl.trans(block), input_precision="ieee")
    return block, tl.where(seen, logits, -1e30)


@triton.jit
def entropy_kernel(
    q, k, real, visible, sinks, nodes, steps, drop, residual,
    heads, group, queries, keys, offset, window, scale,
    q_batch, q_head, q_time, k_batch, k_head, k_time,
    D: tl.constexpr, WIDE: tl.constexpr, SINK: tl.constexpr, NODES: tl.constexpr, POINTS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Writes drop[row, query, d] = q (w @ K) and each row's residual, in three sweeps over the keys.

    The last of the NODES is t = 1 with the step -1; POINTS is the next power of two.
    """
    tiles = tl.cdiv(queries, QUERIES)
    tile, row = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = row // heads, row % heads
    place = tile * QUERIES + tl.arange(0, QUERIES)
    d = tl.arange(0, WIDE)
    inside = place < queries
    both = inside[:, None] & (d[None, :] < D)
    block_q = scale * tl.load(
        q + batch * q_batch + head * q_head + place[:, None].to(tl.int64) * q_time + d[None, :],
        mask=both,
        other=0.0,
    )
    k += batch * k_batch + (head // group) * k_head
    real += batch * keys
    p = place + offset
    last = tl.minimum(tile * QUERIES + QUERIES + offset, keys)
    first = tl.maximum(tile * QUERIES + offset - window + 1, 0) // KEYS * KEYS
    top = tl.full((QUERIES,), -1e30, dtype=tl.float32)
    for start in range(first, last, KEYS):
        i = start + tl.arange(0, KEYS)
        _, logits = _scores(block_q, k, p, i, d, real, keys, window, k_time, D)
        top = tl.maximum(top, tl.max(logits, 1))
    point = tl.arange(0, POINTS)
    t_all = tl.load(nodes + point, mask=point < NODES, other=1.0)
    step_all = tl.load(steps + point, mask=point < NODES, other=0.0)
    z = tl.zeros((QUERIES, POINTS), dtype=tl.float32)
    for start in range(first, last, KEYS):
        i = start + tl.arange(0, KEYS)
        _, logits = _scores(block_q, k, p, i, d, real, keys, window, k_time, D)
        logits -= top[:, None]
        for n in range(NODES):
            mass = tl.sum(tl.exp(tl.load(nodes + n) * logits), 1)
            z += tl.where(point[None, :] == n, mass[:, None], 0.0)
    z = tl.where(point[None, :] < NODES, z, 1.0)
    sunk = tl.zeros((QUERIES, POINTS), dtype=tl.float32)
    extra = tl.full((QUERIES, POINTS), 1.0, dtype=tl.float32)
    sink = 0.0
    if SINK:
        sink = tl.load(sinks + head)
        sunk = 1.0 / (1.0 + tl.exp(tl.log(z) + t_all[None, :] * top[:, None] - sink))
        extra = tl.where(step_all[None, :] < 0, 1.0, 1.0 + sink * sunk)
    share = (1.0 - sunk) * extra * step_all[None, :] / z
    total = tl.zeros((QUERIES, WIDE), dtype=tl.float32)
    mean = tl.zeros((QUERIES,), dtype=tl.float32)
    for start in range(first, last, KEYS):
        i = start + tl.arange(0, KEYS)
        block, logits = _scores(block_q, k, p, i, d, real, keys, window, k_time, D)
        logits -= top[:, None]
        w = tl.zeros((QUERIES, KEYS), dtype=tl.float32)
        for n in range(NODES):
            part = tl.sum(tl.where(point[None, :] == n, share, 0.0), 1)
            w += part[:, None] * tl.exp(tl.load(nodes + n) * logits)
        mean += tl.sum(tl.exp(logits) * logits, 1)
        total += tl.dot(w, block, input_precision="ieee")
    count = tl.load(visible + batch * queries + place, mask=inside, other=0).to(tl.float32)
    z_end = tl.sum(tl.where(point[None, :] == NODES - 1, z, 0.0), 1)
    sunk_end = tl.sum(tl.where(point[None, :] == NODES - 1, sunk, 0.0), 1)
    begin = tl.log(tl.maximum(count, 1.0))
    change = tl.log(z_end) - mean / z_end - begin
    if SINK:
        large = tl.maximum(begin, sink)
        begin_all = large + tl.log(tl.exp(begin - large) + tl.exp(sink - large))
        change = (
            tl.log(z_end) - tl.log(1.0 - sunk_end) - mean * (1.0 - sunk_end) / z_end - sunk_end * (sink - top)
        )
        change -= begin_all - sink * tl.exp(sink - begin_all)
    else:
        total = tl.where(count[:, None] > 1, total, 0.0)
        change = tl.where(count > 1, change, 0.0)
    total *= block_q
    at = row * queries + place
    tl.store(drop + at[:, None] * D + d[None, :], total, mask=both)
    tl.store(residual + at, tl.abs(tl.sum(total, 1) - change), mask=inside)


def first_rule_rows(q, k, real, visible, scale, window=None, sinks=None):
    """Returns drop [batch, head, query, d_head] and residual [batch, head, query] of the first rule.

    q is [batch, head, query, d_head], k [batch, kv_head, key, d_head], real [batch, key] and visible
    [batch, query] the number of keys that a query sees.
    """
    (batch, heads, queries, d_head), (kv, keys) = q.shape, k.shape[1:3]
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    rule = gauss(12)  # an exponential a node is cheap here, and Gauss's nodes are the best of their number
    nodes = torch.tensor([*rule[0], 1.0], dtype=torch.float32, device=q.device)
    steps = torch.tensor([*rule[1], -1.0], dtype=torch.float32, device=q.device)
    drop = torch.full((batch, heads, queries, d_head), torch.nan, dtype=torch.float32, device=q.device)
    residual = torch.full((batch, heads, queries), torch.nan, dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):  # the current one may be another
        entropy_kernel[(triton.cdiv(queries, QUERIES) * batch * heads,)](
            q, k, real.to(torch.uint8).contiguous(), visible.to(torch.int32).contiguous(),
            nodes if sinks is None else sinks.float().contiguous(), nodes, steps, drop, residual,
            heads, heads // kv, queries, keys, keys - queries, window or keys, float(scale),
            *q.stride()[:3], *k.stride()[:3],
            D=d_head, WIDE=max(16, triton.next_power_of_2(d_head)), SINK=sinks is not None,
            NODES=len(nodes), POINTS=triton.next_power_of_2(len(nodes)),
            QUERIES=QUERIES, KEYS=KEYS, num_warps=WARPS,
        )  # fmt: skip
    return drop, residual
