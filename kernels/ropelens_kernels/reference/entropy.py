"""Band entropy by its closed form: quadrature for one weight a key, then one matmul for all bands."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from ropelens_kernels.checks import Inputs
from ropelens_kernels.reference.entropy_sums import Rows, Sums
from ropelens_kernels.reference.path import HIDDEN, point
from ropelens_kernels.reference.quadrature import Rule, ladder, powers, uniform
from ropelens_kernels.results import EntropyResult

FirstRule = Callable[..., tuple[Tensor, Tensor]]  # -> drop [batch, head, query, d_head], residual
FIRST, SECOND = (
    uniform(5, 2),
    uniform(10, 2),
)  # the first rule with a softcap; what first rules are compared with
SAMPLE = 512  # one query in so many, from the last one on, is done by two rules, for the estimate
BLOCK = 2**17  # elements of a block's [row, key] arrays, so that a core's cache holds them


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
        if at.slope is None:
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
    """The same as `rows` without a softcap, with one exponential a logit: all nodes are its powers.

    `seen` may hold the last keys only, where all see the others. With the logits l shifted by their
    maximum and the nodes t of `powers()`, each `exp(t l)` is the product of two others, t = 0 is known,
    and t = 1 is the attention itself.
    """
    logits = q @ k.T
    logits[:, -seen.shape[1] :].masked_fill_(~seen, HIDDEN)
    top = logits.amax(-1, keepdim=True)
    logits -= top
    steps, chain, weight = powers()
    power = logits.new_empty(len(q), len(steps), len(k))
    torch.mul(logits, 1 / steps[-1], out=power[:, 0]).exp_()
    for at, (a, b) in enumerate(chain, 1):
        torch.mul(power[:, a], power[:, b], out=power[:, at])
    dt = logits.new_tensor(weight)
    t = logits.new_tensor(steps) / steps[-1]
    start = n.clamp(min=1).to(q.dtype)
    z = torch.cat([start, power.sum(-1)], 1)  # t = 0 first, where each key seen weighs 1
    mean = torch.linalg.vecdot(power[:, -1], logits)[:, None]
    sunk = (
        z.new_zeros(()) if sink is None else torch.sigmoid(sink - torch.cat([0 * top, t * top], 1) - z.log())
    )
    a = (1 - sunk) / z
    w = dt * a if sink is None else dt * a * (1 + sink * sunk)
    w[:, -1:] -= a[:, -1:]
    total = torch.baddbmm(w[:, :1, None], w[:, None, 1:], power)[:, 0]
    total[:, -seen.shape[1] :].masked_fill_(~seen, 0)
    log_z, start = z[:, -1:].log(), start.log()
    if sink is None:
        drop = torch.where(n > 1, log_z - mean / z[:, -1:] - start, 0)
        total *= n > 1
    else:
        sunk = sunk[:, -1:]
        start = torch.logaddexp(start, sink)
        drop = log_z - torch.log1p(-sunk) - mean * a[:, -1:] - sunk * (sink - top)
        drop = drop - (start - sink * (sink - start).exp())
    bands = q * (total @ k)
    return Rows(bands, None, (bands.sum(-1) - drop[:, 0]).abs())


def refined(
    q: Float[Tensor, "row d_head"],
    k: Float[Tensor, "key d_head"],
    seen: Tensor,
    inputs: Inputs,
    sink: Float[Tensor, "row 1"] | None,
    split_first: bool,
    tol: float,
    found: Rows,
) -> Rows:
    """Climbs the ladder of rules in float64 until each row's residual is at most `tol`.

    A rule is trusted only if it also agrees to some tolerances with the one before: completeness alone
    can hold by cancellation.

    Args:
        found: What the first rule found, in float64; overwritten.
    """
    q, k = q.double(), k.double()
    sink = None if sink is None else sink.double()
    logits = q @ k.T
    high, low = (logits.masked_fill(~seen, end) for end in (-torch.inf, torch.inf))
    spread = float((high.amax(-1) - low.amin(-1)).max())
    todo = torch.arange(len(q), device=q.device)
    for rule in ladder(spread):
        part = None if sink is None else sink[todo]
        new = rows(q[todo], k, seen[todo], rule, inputs, part, split_first)
        done = (new.residual <= tol) & ((new.drop - found.drop[todo]).norm(dim=-1) <= 10 * tol)
        pick = done | (new.residual < found.residual[todo])
        found.drop[todo[pick]] = new.drop[pick]
        found.residual[todo[pick]] = new.residual[pick]
        if found.first is not None and new.first is not None:
            found.first[todo[pick]] = new.first[pick]
        todo = todo[~done]
        if len(todo) == 0:
            break
    return found


def entropy(
    inputs: Inputs, tol: float, split_first: bool, first_rule: FirstRule | None = None
) -> EntropyResult:
    """Returns the band entropy: a first rule for all rows, the ladder for those that it misses.

    Args:
        first_rule: A kernel that does the first rule of all rows at once.
    """
    done: tuple[Tensor, Tensor] | None = None
    if first_rule is not None:
        args = (inputs.q, inputs.k, inputs.real, inputs.n_visible, inputs.scale, inputs.window, inputs.sinks)
        done = first_rule(*args)
    batch, heads, queries, _ = inputs.q.shape
    sums = Sums(inputs, split_first)
    for row in range(batch):
        for head in range(0, heads, inputs.group):
            start = 0
            while start < queries:
                seen = min(start + inputs.offset, inputs.window or inputs.k.shape[2])
                area = BLOCK // inputs.group  # step * (seen + step) elements a head
                step = max(4, int((math.sqrt(seen * seen + 4 * area) - seen) / 2))
                stop = min(start + step, queries)
                _block(inputs, sums, tol, row, head, start, stop, done)
                start = stop
    return sums.result("adaptive" if first_rule is None else "adaptive, fused")


def _block(
    inputs: Inputs,
    sums: Sums,
    tol: float,
    row: int,
    head: int,
    start: int,
    stop: int,
    done: tuple[Tensor, Tensor] | None,
) -> None:
    """Adds the queries `start:stop` of the heads that share a key head, `head` being the first."""
    first, last = inputs.key_span(start, stop)
    heads = slice(head, head + inputs.group)
    counted = inputs.counted[row, start:stop].repeat(inputs.group)
    q = (inputs.q[row, heads, start:stop] * inputs.scale).flatten(0, 1)
    k = inputs.k[row, head // inputs.group, first:last]
    sink = None if inputs.sinks is None else inputs.sinks[heads].repeat_interleave(stop - start)[:, None]
    causal = inputs.window is None and bool(inputs.real[row, :last].all())
    edge = start + inputs.offset if causal else first  # keys before it are seen by every query of the block
    seen = inputs.visible(start, stop, edge, last)[row].repeat(inputs.group, 1)
    if done is not None:
        drop, residual = (x[row, heads, start:stop].flatten(0, 1) for x in done)
        found = Rows(drop, None, residual)
    elif inputs.softcap is None and sums.first is None:
        n = inputs.n_visible[row, start:stop].repeat(inputs.group)[:, None]
        found = first_rows(q, k, seen, n, sink)
    else:
        found = rows(q, k, _whole(seen, k), FIRST, inputs, sink, sums.first is not None)
    missed = counted & ~(found.residual <= tol)
    pick = missed.nonzero().flatten()
    if len(pick):
        part = None if sink is None else sink[pick]
        first_part = None if found.first is None else found.first[pick].double()
        old = Rows(found.drop[pick].double(), first_part, found.residual[pick].double())
        new = refined(q[pick], k, _whole(seen[pick], k), inputs, part, sums.first is not None, tol, old)
        found.drop[pick], found.residual[pick] = new.drop.to(q.dtype), new.residual.to(q.dtype)
        if found.first is not None and new.first is not None:
            found.first[pick] = new.first.to(q.dtype)
    sampled = (inputs.q.shape[2] - 1 - torch.arange(start, stop, device=q.device)) % SAMPLE == 0
    pick = (counted & ~missed & sampled.repeat(inputs.group)).nonzero().flatten()
    if len(pick):
        part = None if sink is None else sink[pick]
        other = rows(q[pick], k, _whole(seen[pick], k), SECOND, inputs, part, False)
        sums.compare(row, head, pick // (stop - start), found.drop[pick], other.drop)
    sums.add(row, head, found, counted, missed)


def _whole(seen: Tensor, k: Tensor) -> Tensor:
    """Adds the keys that every row sees in front."""
    return torch.nn.functional.pad(seen, (len(k) - seen.shape[1], 0), value=True)
