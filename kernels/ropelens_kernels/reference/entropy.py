"""Band entropy by its closed form: quadrature for one weight a key, then one matmul for all bands."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ropelens_kernels.checks import Inputs
from ropelens_kernels.reference.entropy_sums import Rows, Sums
from ropelens_kernels.reference.path import HIDDEN, point
from ropelens_kernels.reference.quadrature import Rule, gauss, ladder, uniform
from ropelens_kernels.results import EntropyResult

FIRST = uniform(5, 2)  # the first rule
SAMPLE = 64  # one row in so many is done by two rules, for the estimate
BLOCK = 2**18  # elements of a block's [row, key] arrays, so that a core's cache holds them


def weights(
    logits: Float[Tensor, "*row key"],
    rule: Rule,
    softcap: float | None = None,
    sink: Float[Tensor, "*row 1"] | None = None,
    split_first: bool = False,
) -> tuple[Float[Tensor, "*row key"], Float[Tensor, "*row key"] | None, Float[Tensor, "*row"]]:
    """Returns each key's weight w in `E_b = sum_i w_i x[i, b]`, the first-key part, and `H(1) - H(0)`.

    Plain: `w = integral a(t) dt - a(1)`. With a sink of logit z: `+ z * integral a_0 a dt`. With a
    softcap: `w = - integral a f'(t l) (f(t l) - E_a f) dt`.
    First key j or not: `integral log((1 - a_j) / a_j) a_j f'_i (delta_ij - a_i) dt`.
    """
    seen = logits > HIDDEN / 2
    n = seen.sum(-1, keepdim=True).clamp(min=1)
    total = torch.zeros_like(logits)
    first = torch.zeros_like(logits) if split_first else None
    j = seen.byte().argmax(-1, keepdim=True) if split_first else None
    for t, dt in zip(*rule, strict=True):
        at = point(logits, t, softcap, sink)
        if softcap is None:
            total += at.attention * (dt if sink is None or at.sink is None else dt * (1 + sink * at.sink))
        else:
            mean = (at.attention * at.potential).sum(-1, keepdim=True)
            if sink is not None and at.sink is not None:
                mean = mean + at.sink * (sink - at.shift)
            total -= at.attention * at.slope * (at.potential - mean) * dt
        if first is not None and j is not None:
            a = at.attention.gather(-1, j)
            odds = (1 - a).clamp(min=1e-30).log() - a.clamp(min=1e-30).log()
            part = -at.attention * (odds * a * dt)
            part.scatter_add_(-1, j, odds * a * dt)
            first += part if at.slope is None else part * at.slope
    end = point(logits, 1.0, softcap, sink)
    if softcap is None:
        total -= end.attention
    entropy = end.log_z - (end.attention * end.potential).sum(-1, keepdim=True)
    start = n.to(logits.dtype).log()
    if sink is not None and end.sink is not None:
        entropy = entropy - end.sink * (sink - end.shift)
        start = torch.logaddexp(start, sink)
        start = start - sink * (sink - start).exp()
    else:
        alone = n == 1
        total = total.masked_fill_(alone, 0)
        entropy, start = entropy.masked_fill(alone, 0), start.masked_fill(alone, 0)
    return total, first, (entropy - start)[..., 0]


def rows(
    q: Float[Tensor, "*stack row d_head"],
    k: Float[Tensor, "*stack key d_head"],
    seen: Tensor,
    rule: Rule,
    inputs: Inputs,
    sink: Float[Tensor, "*stack row 1"] | None,
    split_first: bool,
) -> Rows:
    """Returns the entropy of rows that share their keys; `q` carries the scale."""
    logits = (q @ k.transpose(-1, -2)).masked_fill_(~seen, HIDDEN)
    w, first, drop = weights(logits, rule, inputs.softcap, sink, split_first)
    bands = q * (w @ k)
    return Rows(bands, None if first is None else q * (first @ k), (bands.sum(-1) - drop).abs())


def first_rows(
    q: Float[Tensor, "row d_head"],
    k: Float[Tensor, "key d_head"],
    seen: Tensor,
    n: Tensor,
    sink: Float[Tensor, "row 1"] | None,
) -> Rows:
    """The same as `rows` for the first rule without a softcap, with 7 exponentials for 11 points.

    The rule has the same nodes u_j in both halves of the path, so that with the logits l shifted by
    their maximum `exp((1 + u) / 2 l) = exp(u / 2 l) * exp(l / 2)`, and `exp(l) = exp(l / 2)^2`.
    """
    logits = q @ k.T
    if not seen.all():
        logits.masked_fill_(~seen, HIDDEN)
    top = logits.amax(-1, keepdim=True)
    logits -= top
    half = torch.exp(logits * 0.5)
    total, weight = torch.zeros_like(logits), torch.empty_like(logits)
    nodes, steps = gauss(5)
    for node, step in zip(nodes, steps, strict=True):
        torch.mul(logits, node / 2, out=weight).exp_()
        _accumulate(total, weight, node / 2, step / 2, top, sink)
        weight *= half
        _accumulate(total, weight, (1 + node) / 2, step / 2, top, sink)
    end = torch.mul(half, half, out=half)
    z = end.sum(-1, keepdim=True)
    mean = torch.linalg.vecdot(end, logits)[:, None]
    start = n.clamp(min=1).to(q.dtype).log()
    if sink is None:
        total.addcmul_(end, 1 / z, value=-1)
        drop = torch.where(n > 1, z.log() - mean / z - start, 0)
        total *= n > 1
    else:
        sunk = torch.sigmoid(sink - top - z.log())
        a = (1 - sunk) / z
        total.addcmul_(end, a, value=-1)
        start = torch.logaddexp(start, sink)
        drop = z.log() - torch.log1p(-sunk) - mean * a - sunk * (sink - top)
        drop = drop - (start - sink * (sink - start).exp())
    bands = q * (total @ k)
    return Rows(bands, None, (bands.sum(-1) - drop[:, 0]).abs())


def _accumulate(total: Tensor, weight: Tensor, t: float, dt: float, top: Tensor, sink: Tensor | None) -> None:
    """Adds `dt * a(t)`, with `dt * (1 + z a_0(t))` for dt if there is a sink of logit z."""
    z = weight.sum(-1, keepdim=True)
    if sink is None:
        total.addcmul_(weight, dt / z)
    else:
        sunk = torch.sigmoid(sink - t * top - z.log())
        total.addcmul_(weight, (1 - sunk) * (1 + sink * sunk) * dt / z)


def refined(
    q: Float[Tensor, "row d_head"],
    k: Float[Tensor, "key d_head"],
    seen: Tensor,
    inputs: Inputs,
    sink: Float[Tensor, "row 1"] | None,
    split_first: bool,
    tol: float,
) -> Rows:
    """Climbs the ladder of rules in float64 until each row's residual is at most `tol`.

    A rule is trusted only once the next one agrees: completeness alone can hold by cancellation.
    """
    q, k = q.double(), k.double()
    sink = None if sink is None else sink.double()
    logits = (q @ k.T).masked_fill_(~seen, HIDDEN)
    spread = max(float((logits.amax(-1) - logits.masked_fill(~seen, torch.inf).amin(-1)).max()), 0.0)
    todo = torch.arange(len(q), device=q.device)
    found: Rows | None = None
    for rule in ladder(spread):
        part = None if sink is None else sink[todo]
        new = rows(q[todo], k, seen[todo], rule, inputs, part, split_first)
        if found is None:
            found, open_ = new, torch.ones_like(todo, dtype=torch.bool)
        else:
            change = (new.drop - found.drop[todo]).abs().sum(-1)
            better = new.residual < found.residual[todo]
            open_ = ~((new.residual <= tol) & (change <= 10 * tol))
            keep = todo[better | ~open_]
            pick = better | ~open_
            found.drop[keep] = new.drop[pick]
            found.residual[keep] = new.residual[pick]
            if found.first is not None and new.first is not None:
                found.first[keep] = new.first[pick]
        todo = todo[open_]
        if len(todo) == 0:
            break
    assert found is not None
    return found


def entropy(inputs: Inputs, tol: float, split_first: bool) -> EntropyResult:
    """Returns the band entropy: a first rule for all rows, the ladder for those that it misses."""
    batch, heads, queries, _ = inputs.q.shape
    sums = Sums(inputs, split_first)
    for row in range(batch):
        for head in range(0, heads, inputs.group):
            start = 0
            while start < queries:
                first, last = inputs.key_span(start, min(start + 16, queries))
                step = max(4, BLOCK // (inputs.group * (last - first)))
                stop = min(start + step, queries)
                _block(inputs, sums, tol, row, head, start, stop)
                start = stop
    return sums.result()


def _block(inputs: Inputs, sums: Sums, tol: float, row: int, head: int, start: int, stop: int) -> None:
    """Adds the queries `start:stop` of the heads that share a key head, `head` being the first."""
    first, last = inputs.key_span(start, stop)
    heads = slice(head, head + inputs.group)
    counted = inputs.counted[row, start:stop].repeat(inputs.group)
    q = (inputs.q[row, heads, start:stop] * inputs.scale).flatten(0, 1)
    k = inputs.k[row, head // inputs.group, first:last]
    sink = None if inputs.sinks is None else inputs.sinks[heads].repeat_interleave(stop - start)[:, None]
    seen = inputs.visible(start, stop, first, last)[row].repeat(inputs.group, 1)
    if inputs.softcap is None and sums.first is None:
        n = inputs.n_visible[row, start:stop].repeat(inputs.group)[:, None]
        found = first_rows(q, k, seen, n, sink)
    else:
        found = rows(q, k, seen, FIRST, inputs, sink, sums.first is not None)
    missed = counted & ~(found.residual <= tol)
    again = missed.clone()
    again[:: SAMPLE + 1] = True
    again &= counted
    pick = again.nonzero().flatten()
    if len(pick):
        part = None if sink is None else sink[pick]
        better = refined(q[pick], k, seen[pick], inputs, part, sums.first is not None, tol)
        sums.compare(row, head, pick // (stop - start), found.drop[pick], better.drop, ~missed[pick])
        found.drop[pick] = better.drop.to(q.dtype)
        found.residual[pick] = better.residual.to(q.dtype)
        if found.first is not None and better.first is not None:
            found.first[pick] = better.first.to(q.dtype)
    sums.add(row, head, found, counted, missed)
