"""Band entropy by its closed form: quadrature for one weight a key, then one matmul for all bands."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ropelens_kernels.checks import Inputs
from ropelens_kernels.reference.path import HIDDEN, point
from ropelens_kernels.reference.quadrature import Rule, gauss, ladder
from ropelens_kernels.results import EntropyResult

FIRST = 8  # nodes of the first rule
SAMPLE = 64  # one row in so many is done by two rules, for the estimate
BLOCK = 2**18  # elements of a block's [row, key] arrays, so that a core's cache holds them


@dataclass(frozen=True, eq=False)
class Rows:
    """Entropy of some rows (a query of a head each), before the sum over dims of a band.

    Attributes:
        drop: `q * (w @ K)`: summed over a band's dims, the entropy drop of the band, in nats.
        first: The same for the entropy of "first visible key or not", or None.
        residual: `|sum of drop - (H(1) - H(0))|`, in nats.
    """

    drop: Float[Tensor, "*row d_head"]
    first: Float[Tensor, "*row d_head"] | None
    residual: Float[Tensor, "*row"]


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
    sums = _Sums(inputs, split_first)
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


def _block(inputs: Inputs, sums: _Sums, tol: float, row: int, head: int, start: int, stop: int) -> None:
    """Adds the queries `start:stop` of the heads that share a key head, `head` being the first."""
    first, last = inputs.key_span(start, stop)
    heads = slice(head, head + inputs.group)
    counted = inputs.counted[row, start:stop].repeat(inputs.group)
    seen = inputs.visible(start, stop, first, last)[row].repeat(inputs.group, 1)
    q = (inputs.q[row, heads, start:stop] * inputs.scale).flatten(0, 1)
    k = inputs.k[row, head // inputs.group, first:last]
    sink = None if inputs.sinks is None else inputs.sinks[heads].repeat_interleave(stop - start)[:, None]
    found = rows(q, k, seen, gauss(FIRST), inputs, sink, sums.first is not None)
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


class _Sums:
    """Float64 running sums over rows, by head and dim."""

    def __init__(self, inputs: Inputs, split_first: bool) -> None:
        batch, heads, _, d_head = inputs.q.shape
        self.inputs = inputs
        new = lambda *shape: torch.zeros(batch, heads, *shape, dtype=torch.float64, device=inputs.q.device)  # noqa: E731
        self.drop, self.first = new(d_head), new(d_head) if split_first else None
        self.worst, self.total, self.refined, self.estimate = new(), new(), new(), new()

    def add(self, row: int, head: int, found: Rows, counted: Tensor, missed: Tensor) -> None:
        """Adds rows laid out [head of the group, query]."""
        group = self.inputs.group
        heads = slice(head, head + group)
        keep = counted.view(group, -1)
        self.drop[row, heads] += (
            (found.drop.double() * counted[:, None]).view(group, -1, found.drop.shape[-1]).sum(1)
        )
        if self.first is not None and found.first is not None:
            part = (found.first.double() * counted[:, None]).view(group, -1, found.first.shape[-1])
            self.first[row, heads] += part.sum(1)
        residual = found.residual.double().view(group, -1).masked_fill(~keep, 0)
        self.worst[row, heads] = torch.maximum(self.worst[row, heads], residual.amax(1))
        self.total[row, heads] += residual.sum(1)
        self.refined[row, heads] += missed.view(group, -1).sum(1)

    def compare(self, row: int, head: int, which: Tensor, old: Tensor, new: Tensor, passed: Tensor) -> None:
        """Keeps the worst relative distance of two rules over rows that the first rule passed."""
        a, b = (
            torch.cat([(parts := self.inputs.split(x))[0], parts[1][:, None]], 1) for x in (old.double(), new)
        )
        distance = (a - b).norm(dim=1) / b.norm(dim=1).clamp(min=1e-12)
        distance = distance.masked_fill(~passed, 0)
        self.estimate[row, head : head + self.inputs.group].scatter_reduce_(0, which, distance, "amax")

    def result(self) -> EntropyResult:
        """Returns the sums by band."""
        inputs = self.inputs
        values, rest = inputs.split(self.drop)
        first, first_rest = (None, None) if self.first is None else inputs.split(self.first)
        n_queries = inputs.counted.sum(1)
        return EntropyResult(
            values=values,
            rest=rest,
            residual=self.worst,
            residual_mean=self.total / n_queries.clamp(min=1)[:, None],
            estimate=self.estimate,
            n_queries=n_queries,
            n_pairs=inputs.n_visible.sum(1),
            n_refined=self.refined.long(),
            first_values=first,
            first_rest=first_rest,
            method="adaptive",
        )
