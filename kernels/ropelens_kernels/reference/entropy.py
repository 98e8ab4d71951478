"""Band entropy by its closed form: quadrature for one weight a key, then one matmul for all bands."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ropelens_kernels.checks import Inputs
from ropelens_kernels.reference.entropy_sums import Rows, sums
from ropelens_kernels.reference.path import HIDDEN, point
from ropelens_kernels.reference.powers import PowerRules
from ropelens_kernels.reference.quadrature import Rule, gauss, ladder, uniform
from ropelens_kernels.results import EntropyResult

FirstRule = Callable[..., tuple[Tensor, Tensor]]  # -> drop [batch, head, query, d_head], residual
FIRST = gauss(12)  # the first rule with a softcap
SECOND = uniform(10, 2)  # what first rules are compared with
WARY = 1 / 3  # rows are redone from this share of the tolerance on: bands can err more than their sum
SAMPLE = 512  # one query in so many, from the last one on, is done by two rules, for the estimate
BLOCK = 2**19  # elements of a block's [row, key] arrays, so that the caches hold them


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
    n: Float[Tensor, "row 1"],
    sink: Float[Tensor, "row 1"] | None,
    first_key: Tensor | None,
    rules: PowerRules,
) -> Rows:
    """The same as `rows` without a softcap, with one exponential a logit: all nodes are its powers.

    With the logits l shifted by their maximum and the nodes t of `powers()`, each `exp(t l)` is the
    product of two others, t = 0 is known, and t = 1 is the attention itself.

    Args:
        seen: [query, key], the same for every head of rows laid out [head, query]; may hold the last
            keys only, where all rows see the others.
        n: How many keys each row sees.
        first_key: The first visible key of each row [row, 1], to split its part off.
    """
    logits = q @ k.T
    low = logits.amin(-1, keepdim=True)
    shape, last, hidden = (-1, *seen.shape[:1]), slice(len(k) - seen.shape[1], None), ~seen
    logits.unflatten(0, shape)[..., last].masked_fill_(hidden, HIDDEN)
    top = logits.amax(-1, keepdim=True)
    logits -= top
    t, dt, sums, mean = rules.sums(logits, float((top - low).max()))
    start = n.clamp(min=1)
    z = torch.cat([start, sums], 1)  # t = 0 first, where each key seen weighs 1
    sunk = z.new_zeros(()) if sink is None else torch.sigmoid(sink - t * top - z.log())
    a = (1 - sunk) / z
    w = dt * a if sink is None else dt * a * (1 + sink * sunk)
    w[:, -1:] -= a[:, -1:]
    weights, odds = w[:, None], None
    if first_key is not None:
        alike = (t * logits.gather(1, first_key)).exp() * a  # the first key's attention
        odds = dt * alike * (torch.log((1 - alike).clamp(min=1e-30)) - torch.log(alike.clamp(min=1e-30)))
        weights = torch.stack([w, -odds * a], 1)
    total = rules.weighted(logits, weights)
    total.unflatten(0, shape)[..., last].masked_fill_(hidden[:, None], 0)
    log_z, start = z[:, -1:].log(), start.log()
    if sink is None:
        total *= (n > 1)[..., None]
        drop = torch.where(n > 1, log_z - mean / z[:, -1:] - start, 0)
    else:
        sunk = sunk[:, -1:]
        start = torch.logaddexp(start, sink)
        drop = log_z - torch.log1p(-sunk) - mean * a[:, -1:] - sunk * (sink - top)
        drop = drop - (start - sink * (sink - start).exp())
    bands, first = q * (total[:, 0] @ k), None
    if first_key is not None and odds is not None:
        first = q * (total[:, 1] @ k + (odds.sum(1, keepdim=True) * (n > 1)) * k[first_key[:, 0]])
    return Rows(bands, first, (bands.sum(-1) - drop[:, 0]).abs())


def refined(
    q: Float[Tensor, "row d_head"],
    k: Float[Tensor, "key d_head"],
    seen: Tensor,
    inputs: Inputs,
    sink: Float[Tensor, "row 1"] | None,
    tol: float,
    found: Rows,
) -> Rows:
    """Climbs the ladder of rules in float64 until each row's residual is at most `tol`.

    A rule is trusted only if it also agrees to some tolerances with the one before: completeness alone
    can hold by cancellation.

    Args:
        found: What the first rule found; overwritten.
    """
    q, k = q.double(), k.double()
    sink = None if sink is None else sink.double()
    logits = q @ k.T
    high, low = (logits.masked_fill(~seen, end) for end in (-torch.inf, torch.inf))
    spread = float((high.amax(-1) - low.amin(-1)).max())
    todo = torch.arange(len(q), device=q.device)
    for rule in ladder(spread):
        part = None if sink is None else sink[todo]
        new = rows(q[todo], k, seen[todo], rule, inputs, part, found.first is not None)
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
    inputs: Inputs,
    tol: float,
    split_first: bool,
    first_rule: FirstRule | None = None,
    edges: tuple[int, ...] | None = None,
    compiled: bool = False,
) -> EntropyResult:
    """Returns the band entropy: a first rule for all rows, the ladder for those that it misses.

    Args:
        first_rule: A kernel that does the first rule of all rows at once.
        edges: Where along the queries a new sum by position begins.
        compiled: Whether torch.compile makes the first rule's passes over the logits.
    """
    if first_rule is not None:
        args = (inputs.q, inputs.k, inputs.real, inputs.n_visible, inputs.scale, inputs.window, inputs.sinks)
        drop, residual = first_rule(*args)
        found = Rows(drop, None, residual)
    else:
        found = first_pass(inputs, split_first, compiled)
    missed = inputs.counted[:, None] & ~(found.residual <= WARY * tol)
    if inputs.q.dtype == torch.float32:
        again(inputs, found, missed, tol)
    for row, heads, queries in _picked(inputs, missed & ~(found.residual <= WARY * tol)):
        q, k, seen, sink = _taken(inputs, row, heads, queries)
        new = refined(q, k, seen, inputs, sink, tol, found.at(row, heads, queries))
        found.put(row, heads, queries, new)
    return sums(
        inputs,
        found,
        missed,
        estimate=_estimate(inputs, found, missed),
        edges=edges,
        method="adaptive, fused" if first_rule else "adaptive, compiled" if compiled else "adaptive",
    )


def again(inputs: Inputs, found: Rows, missed: Bool[Tensor, "batch head query"], tol: float) -> None:
    """Redoes rows by the second rule in float32, far cheaper than the ladder, and keeps what agrees."""
    for row, heads, queries in _picked(inputs, missed):
        q, k, seen, sink = _taken(inputs, row, heads, queries)
        new = rows(q, k, seen, SECOND, inputs, sink, found.first is not None)
        close = (new.drop - found.drop[row, heads, queries]).norm(dim=-1) <= 10 * tol
        good = (close & (new.residual <= WARY * tol)).nonzero()[:, 0]
        first = None if new.first is None else new.first[good]
        found.put(row, heads[good], queries[good], Rows(new.drop[good], first, new.residual[good]))


def first_pass(inputs: Inputs, split_first: bool, compiled: bool = False) -> Rows:
    """Returns every row by the first rule, [batch, head, query], in blocks of queries that share keys."""
    batch, heads, queries, _ = inputs.q.shape
    found = Rows(
        torch.empty_like(inputs.q),
        torch.empty_like(inputs.q) if split_first else None,
        inputs.q.new_empty(batch, heads, queries),
    )
    group, n_visible = inputs.group, inputs.n_visible.to(inputs.q.dtype)
    rules = PowerRules(inputs.q, compiled) if inputs.softcap is None else None
    whole = inputs.window is None and inputs.all_real
    for row, first_head in itertools.product(range(batch), range(0, heads, group)):
        part, k = slice(first_head, first_head + group), inputs.k[row, first_head // group]
        for start, stop in _blocks(inputs):
            first, last = inputs.key_span(start, stop)
            # where all tokens are real, the keys before the block's are seen by every query of the block
            edge = start + inputs.offset if whole else first
            seen = inputs.visible(row, start, stop, edge, last)
            here = (row, part, slice(start, stop))
            q = (inputs.q[here] * inputs.scale).flatten(0, 1)
            sink = (
                None if inputs.sinks is None else inputs.sinks[part].repeat_interleave(stop - start)[:, None]
            )
            if rules is None:
                seen = torch.nn.functional.pad(seen, (edge - first, 0), value=True).repeat(group, 1)
                block = rows(q, k[first:last], seen, FIRST, inputs, sink, split_first)
            else:
                n = n_visible[row, start:stop].repeat(group)[:, None]
                front = None
                if split_first:
                    front = seen.byte().argmax(-1, keepdim=True) * (not whole)
                    front = front.repeat(group, 1)
                block = first_rows(q, k[first:last], seen, n, sink, front, rules)
            found.drop[here] = block.drop.unflatten(0, (group, -1))
            found.residual[here] = block.residual.unflatten(0, (group, -1))
            if found.first is not None and block.first is not None:
                found.first[here] = block.first.unflatten(0, (group, -1))
    return found


def _blocks(inputs: Inputs) -> Iterator[tuple[int, int]]:
    """Yields spans of queries whose [row, key] arrays hold about BLOCK elements a thread."""
    start, queries, area = 0, inputs.q.shape[2], BLOCK * torch.get_num_threads() // inputs.group
    while start < queries:
        seen = min(start + inputs.offset, inputs.window or inputs.k.shape[2])
        step = max(4, int((math.sqrt(seen * seen + 4 * area) - seen) / 2))  # step * (seen + step) = area
        yield start, min(start + step, queries)
        start += step


def _estimate(inputs: Inputs, found: Rows, missed: Bool[Tensor, "batch head query"]) -> Tensor:
    """Returns, by head, the worst sampled row's distance of the first rule from a finer one."""
    worst = inputs.q.new_zeros(inputs.q.shape[:2], dtype=torch.float64)
    sampled = (inputs.q.shape[2] - 1 - torch.arange(inputs.q.shape[2], device=missed.device)) % SAMPLE == 0
    for row, heads, queries in _picked(inputs, inputs.counted[:, None] & ~missed & sampled):
        q, k, seen, sink = _taken(inputs, row, heads, queries)
        finer = rows(q, k, seen, SECOND, inputs, sink, False).drop
        a, b = (inputs.split(x.double()) for x in (found.at(row, heads, queries).drop, finer))
        a, b = (torch.cat([bands, rest[:, None]], 1) for bands, rest in (a, b))
        distance = (a - b).norm(dim=1) / b.norm(dim=1).clamp(min=1e-12)
        worst[row].scatter_reduce_(0, heads, distance, "amax")
    return worst


def _picked(
    inputs: Inputs, chosen: Bool[Tensor, "batch head query"]
) -> Iterator[tuple[int, Int64[Tensor, " row"], Int64[Tensor, " row"]]]:
    """Yields (batch row, heads, queries) of what is chosen, a few at a time, all with one key head."""
    for row, kv in chosen.unflatten(1, (-1, inputs.group)).any(-1).any(-1).nonzero().tolist():
        first = kv * inputs.group
        picked = chosen[row, first : first + inputs.group].nonzero()
        for some in picked.split(max(1, BLOCK // inputs.k.shape[2])):
            yield row, some[:, 0] + first, some[:, 1]


def _taken(
    inputs: Inputs, row: int, heads: Int64[Tensor, " row"], queries: Int64[Tensor, " row"]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns those queries (with the scale), their keys, which of these each sees, and their sinks."""
    last = int(queries.max()) + inputs.offset + 1
    q = inputs.q[row, heads, queries] * inputs.scale
    k = inputs.k[row, int(heads[0]) // inputs.group, :last]
    sink = None if inputs.sinks is None else inputs.sinks[heads, None]
    return q, k, inputs.visible_to(row, queries, 0, last), sink
