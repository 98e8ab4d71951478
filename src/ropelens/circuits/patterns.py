"""The attention paid at chosen pairs of query and key, in blocks: no pattern is ever whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from tqdm.auto import tqdm

from ropelens.hosts import Host, LayerSpec
from ropelens.hosts.masks import visible_keys
from ropelens.metrics.accumulate import not_the_certified

BLOCK = 2**21  # scores that a block holds

LayerConsumer = Callable[[int, Tensor, Tensor], None]
"""Takes (layer, q `[batch, pos, head, d_head]`, k `[batch, pos, kv_head, d_head]`), post-rotary."""


def each_layer(
    host: Host,
    ids: Int64[Tensor, "batch pos"],
    consume: LayerConsumer,
    *,
    layers: Sequence[int] | None = None,
    progress: bool = False,
) -> None:
    """Runs the model once and hands over each layer's queries and keys, on the embedding's device.

    Raises:
        ValueError: If a layer did not attend with them as certified.
    """
    layers = range(host.n_layers) if layers is None else layers
    bar = tqdm(total=len(layers), desc="layers", disable=not progress)

    def take(layer: int, q: Tensor, k: Tensor, mask: Tensor, sound: Tensor) -> None:
        if not bool(sound):
            raise ValueError(not_the_certified(layer))
        consume(layer, q.to(host.device), k.to(host.device))
        bar.update()

    with bar, torch.no_grad(), _fastest(host), host.observing(list(layers), take):
        host.run(ids, None, logits=False)


def _fastest(host: Host) -> AbstractContextManager[None]:
    try:
        return host.fast()
    except ValueError:  # edits are in front of the attention that is set, which has to stay then
        return nullcontext()


def of_heads(
    q: Float[Tensor, "batch pos head d_head"],
    k: Float[Tensor, "batch pos kv_head d_head"],
    spec: LayerSpec,
    heads: Sequence[int],
) -> tuple[Float[Tensor, "batch pos some d_head"], Float[Tensor, "batch pos some d_head"], LayerSpec]:
    """The queries, keys and sinks of some heads of a layer, keys once for each of them."""
    group = q.shape[2] // k.shape[2]
    sinks = None if spec.sinks is None else spec.sinks[list(heads)]
    return q[:, :, list(heads)], k[:, :, [head // group for head in heads]], replace(spec, sinks=sinks)


def attention_at(
    q: Float[Tensor, "batch pos head d_head"],
    k: Float[Tensor, "batch pos kv_head d_head"],
    spec: LayerSpec,
    targets: Mapping[str, Int64[Tensor, "batch pos"]],
) -> dict[str, Float64[Tensor, "head batch"]]:
    """The mean attention that queries pay to their targets, by name, head and sequence.

    `exp(score - logsumexp of the scores of visible keys)`, softcap and sinks as the layer has them.
    """
    n_heads, batch = q.shape[2], q.shape[0]
    sums = {name: q.new_zeros(n_heads, batch, dtype=torch.float64) for name in targets}
    for rows, scores, norm in score_blocks(q, k, spec, _asked(targets)):
        for name, target in targets.items():
            at = target[:, rows]
            paid = _gathered(scores, norm, at)
            sums[name] += paid.double().sum(-1).T
    counts = {name: (target >= 0).sum(1).to(q.device) for name, target in targets.items()}
    return {name: total / counts[name] for name, total in sums.items()}


def attention_without(
    q: Float[Tensor, "batch pos head d_head"],
    k: Float[Tensor, "batch pos kv_head d_head"],
    spec: LayerSpec,
    target: Int64[Tensor, "batch pos"],
    parts: Sequence[Int64[Tensor, " dim"]],
) -> Float64[Tensor, "part head batch"]:
    """The mean attention to the targets with some dims of the queries set to zero, of each part in turn.

    Exactly what a head pays whose own dims are ablated: its queries and keys do not depend on it.
    """
    sums = q.new_zeros(len(parts), q.shape[2], q.shape[0], dtype=torch.float64)
    for rows, scores, _ in score_blocks(q, k, spec, _asked({"": target}), raw=True):
        for i, dims in enumerate(parts):
            without = scores - _scores(q[:, rows][..., dims], k[..., dims], spec)
            finished, norm = _finish(without, spec, rows)
            sums[i] += _gathered(finished, norm, target[:, rows]).double().sum(-1).T
    return sums / (target >= 0).sum(1).to(q.device)


def score_blocks(
    q: Float[Tensor, "batch pos head d_head"],
    k: Float[Tensor, "batch pos kv_head d_head"],
    spec: LayerSpec,
    asked: Int64[Tensor, " row"],
    raw: bool = False,
) -> Iterator[tuple[Int64[Tensor, " row"], Float[Tensor, "batch head row key"], Tensor | None]]:
    """Yields rows, their scores (-inf where a key is not visible) and the logarithm of their sum.

    Args:
        asked: The query positions.
        raw: Scores before softcap and mask, and no sum.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(dtype), k.to(dtype)
    step = max(1, BLOCK // (q.shape[0] * q.shape[1] * q.shape[2]))
    for rows in asked.split(step):
        scores = _scores(q[:, rows], k, spec)
        if raw:
            yield rows, scores, None
        else:
            yield (rows, *_finish(scores, spec, rows))


def _scores(
    q: Float[Tensor, "batch row head dim"], k: Float[Tensor, "batch key kv_head dim"], spec: LayerSpec
) -> Float[Tensor, "batch head row key"]:
    batch, rows, heads, dim = q.shape
    kv = k.shape[2]
    grouped = q.transpose(1, 2).reshape(batch, kv, heads // kv * rows, dim)
    return (spec.scale * grouped @ k.permute(0, 2, 3, 1)).reshape(batch, heads, rows, -1)


def _finish(
    scores: Float[Tensor, "batch head row key"], spec: LayerSpec, rows: Int64[Tensor, " row"]
) -> tuple[Float[Tensor, "batch head row key"], Float[Tensor, "batch head row"]]:
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~visible_keys(scores.shape[-1], spec.window, rows.device)[rows], -torch.inf)
    norm = scores.logsumexp(-1)
    if spec.sinks is not None:
        norm = torch.logaddexp(norm, spec.sinks.to(norm)[None, :, None])
    return scores, norm


def _asked(targets: Mapping[str, Int64[Tensor, "batch pos"]]) -> Int64[Tensor, " row"]:
    some = torch.stack([(target >= 0).any(0) for target in targets.values()]).any(0)
    return some.nonzero().flatten()


def _gathered(scores: Tensor, norm: Any, at: Int64[Tensor, "batch row"]) -> Float[Tensor, "batch head row"]:
    """The attention to each row's target; 0 where it has none."""
    index = at.clamp(min=0)[:, None, :, None].expand(-1, scores.shape[1], -1, -1)
    paid = (scores.gather(-1, index)[..., 0] - norm).exp()
    return paid * (at >= 0)[:, None]
