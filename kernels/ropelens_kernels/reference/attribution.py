"""Band attribution by its definition: the path integral, as two small matmuls."""

from __future__ import annotations

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from ropelens_kernels.checks import Inputs
from ropelens_kernels.reference.path import point
from ropelens_kernels.reference.quadrature import Rule, gauss, ladder
from ropelens_kernels.results import AttributionResult


def attribution(inputs: Inputs, queries: Int64[Tensor, " query"], tol: float) -> AttributionResult:
    """Returns `c[i, b]` of the asked queries, each with as many nodes as its residual needs."""
    batch, heads, n_key = inputs.q.shape[0], inputs.q.shape[1], inputs.k.shape[2]
    at = queries.to(inputs.q.device)
    visible = torch.stack([inputs.visible_to(row, at, 0, n_key) for row in range(batch)])
    shape = (batch, len(queries), heads)
    values = inputs.q.new_zeros(*shape, n_key, len(inputs.pairs))
    rest = inputs.q.new_zeros(*shape, n_key)
    sink, residual = inputs.q.new_zeros(shape), inputs.q.new_zeros(shape)
    for row, query, head in torch.cartesian_prod(*(torch.arange(n) for n in shape)).reshape(-1, 3).tolist():
        seen = visible[row, query].nonzero().flatten()
        if len(seen) == 0:
            continue
        q = inputs.q[row, head, queries[query]] * inputs.scale
        products = q * inputs.k[row, head // inputs.group, seen]
        logit = None if inputs.sinks is None else inputs.sinks[head]
        bands, other, sunk, missed = _attribute(inputs, products, logit, tol)
        values[row, query, head, seen] = bands
        rest[row, query, head, seen] = other
        sink[row, query, head], residual[row, query, head] = sunk, missed
    return AttributionResult(
        values, rest, visible, sink if inputs.sinks is not None else None, residual, "adaptive"
    )


def _attribute(
    inputs: Inputs, products: Float64[Tensor, "key d_head"], sink: Tensor | None, tol: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Climbs the ladder of rules until every key's bands add up to its attention."""
    logits = products.sum(-1)
    x = torch.cat([(parts := inputs.split(products))[0], parts[1][:, None]], 1)
    gap = float(logits.max() - logits.min())
    best: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    for rule in (gauss(16), *ladder(max(gap, float(logits.abs().max())))):
        c, end, sunk = _integrate(inputs, x, logits, sink, rule)
        missed = (c.sum(-1) - end).abs().max()
        if best is None or missed < best[3]:
            best = (c[:, :-1], c[:, -1], sunk, missed)
        if missed <= tol:
            break
    assert best is not None
    return best


def _integrate(
    inputs: Inputs, x: Tensor, logits: Tensor, sink: Tensor | None, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `c = share/N + x * integral(a f') - sum_n w_n a(t_n) m(t_n)`, a(1) and the sink's a_0(1)."""
    d_head = inputs.q.shape[3]
    share = x.new_tensor([2 / d_head] * len(inputs.pairs) + [len(inputs.rest) / d_head])
    start = 1 / (len(logits) + (0 if sink is None else sink.exp()))
    attention, weighted = [], []
    for t in rule[0]:
        at = point(logits, t, inputs.softcap, None if sink is None else sink[None])
        attention.append(at.attention)
        weighted.append(at.attention if at.slope is None else at.attention * at.slope)
    w = x.new_tensor(rule[1])
    a, b = torch.stack(attention), torch.stack(weighted)  # [node, key]
    c = share * start + x * (w @ b)[:, None] - (a * w[:, None]).T @ (b @ x)
    end = point(logits, 1.0, inputs.softcap, None if sink is None else sink[None])
    return c, end.attention, x.new_zeros(()) if end.sink is None else end.sink[0]
