"""A forward pass with attention patterns and norms' divisors held: from there on, all paths are linear."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from ropelens.hosts import Host
from ropelens.hosts.certify import rebuild_pattern, rebuild_scores
from ropelens.hosts.layer import LayerSpec
from ropelens.hosts.masks import visible_keys
from ropelens.hosts.weights import Ends, LayerWeights, ends, layer_weights, watching


@dataclass(frozen=True, eq=False)
class Frozen:
    """One forward pass, frozen, in float64.

    The residual stream before layer l + 1 is what it was before layer l, plus `heads(l, that)`, plus
    `other[l]`; the logits are `logits(the last one)`. With patterns and divisors held, both are linear.

    Attributes:
        ids: What was run.
        start: The residual stream before layer 0.
        patterns: Attention of each layer.
        other: What each layer adds besides what its heads read: biases, and the MLP's output as it was.
        last: The residual stream after the last layer.
        before, after, final: Divisors of the norms; `before` and `after` a layer each.
    """

    ids: Int64[Tensor, "batch pos"]
    weights: tuple[LayerWeights, ...]
    ends: Ends
    start: Float64[Tensor, "batch pos d_model"]
    patterns: tuple[Float64[Tensor, "batch head query key"], ...]
    other: tuple[Float64[Tensor, "batch pos d_model"], ...]
    last: Float64[Tensor, "batch pos d_model"]
    before: tuple[Float64[Tensor, "batch pos 1"], ...]
    after: tuple[Float64[Tensor, "batch pos 1"], ...]
    final: Float64[Tensor, "batch pos 1"]

    @property
    def n_layers(self) -> int:
        return len(self.weights)

    @property
    def n_heads(self) -> int:
        return self.weights[0].n_heads

    def heads(
        self, layer: int, x: Float64[Tensor, "batch pos d_model"]
    ) -> Float64[Tensor, "batch head pos d_model"]:
        """Returns what each head of a layer writes of a part x of the residual stream."""
        return (
            _heads(self.weights[layer], self.patterns[layer], x / self.before[layer])
            / self.after[layer][:, None]
        )

    def logits(
        self, x: Float64[Tensor, "*rows batch pos d_model"]
    ) -> Float64[Tensor, "*rows batch pos token"]:
        """Returns the logits of a part x of the residual stream; without the bias, which is no part's."""
        return x / self.final @ self.ends.unembedding


def pattern(
    q: Float[Tensor, "batch pos head d_head"], k: Float[Tensor, "batch pos kv_head d_head"], spec: LayerSpec
) -> Float64[Tensor, "batch head query key"]:
    """Returns the attention that a layer pays with these post-rotary queries and keys."""
    return rebuild_pattern(rebuild_scores(q, k, spec), visible_keys(q.shape[1], spec.window, q.device), spec)


def freeze(host: Host, ids: Int64[Tensor, "batch pos"]) -> Frozen:
    """Runs a model once and returns the pass, frozen.

    Raises:
        ValueError: If a layer's weights cannot be read, or the model attends otherwise than certified.
    """
    layers = range(host.n_layers)
    weights = tuple(layer_weights(host, layer).repeated().folded() for layer in layers)
    end = ends(host).folded()
    patterns: dict[int, Tensor] = {}

    def take(layer: int, q: Tensor, k: Tensor, mask: Tensor, sound: Tensor) -> None:
        if not bool(sound):
            raise ValueError(
                f"layer {layer} does not attend as it was certified to: remove hooks that edit attention"
            )
        patterns[layer] = pattern(q.to(host.device), k.to(host.device), host.certificate.layers[layer])

    states: dict[int, Tensor] = {}

    def keep(layer: int, x: Tensor) -> None:
        states[layer] = x.double().clone()

    ids = ids.to(host.device)
    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(host.observing(list(layers), take))
        stack.enter_context(watching(host, keep))
        host.run(ids, None, logits=False)
        stream = [states[layer] for layer in range(host.n_layers + 1)]
        before, after, other = [], [], []
        for layer, w in enumerate(weights):
            x = stream[layer]
            ones = torch.ones_like(x[..., :1])
            before.append(ones if w.norm is None else w.norm.divisor(x))
            read = _heads(w, patterns[layer], x / before[-1])
            written = read.sum(1)
            if w.after is None:
                after.append(ones)
            else:  # the norm is of all that the attention writes, its biases included
                bias = _bias(w, patterns[layer])
                after.append(w.after.divisor(written + bias))
            other.append(stream[layer + 1] - x - written / after[-1])
        last = stream[-1]
        final = torch.ones_like(last[..., :1]) if end.norm is None else end.norm.divisor(last)
    return Frozen(
        ids=ids,
        weights=weights,
        ends=end,
        start=stream[0],
        patterns=tuple(patterns[layer] for layer in layers),
        other=tuple(other),
        last=last,
        before=tuple(before),
        after=tuple(after),
        final=final,
    )


def _heads(w: LayerWeights, attention: Tensor, read: Tensor) -> Float64[Tensor, "batch head pos d_model"]:
    v = einsum(read, w.v, "batch key m, head m d -> batch head key d")
    z = attention @ v
    return einsum(z, w.o, "batch head pos d, head d m -> batch head pos m")


def _bias(w: LayerWeights, attention: Tensor) -> Tensor | float:
    out: Tensor | float = 0.0 if w.o_bias is None else w.o_bias
    if w.v_bias is not None:
        paid = attention.sum(-1)  # 1, less with a sink
        each = einsum(w.v_bias, w.o, "head d, head d m -> head m")
        out = out + einsum(paid, each, "batch head pos, head m -> batch pos m")
    return out
