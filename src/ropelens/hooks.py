"""Hook functions for TransformerLens's own `run_with_hooks`: the plugin way to measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm.auto import tqdm

from ropelens.hosts import Hook, Host, LayerSpec, host_of
from ropelens.hosts.certify import score_tolerance, visible_keys
from ropelens.metrics import (
    ActivationAccumulator,
    BandAccumulator,
    EntropyAccumulator,
    NormProductAccumulator,
)
from ropelens.scores import BandScores

ACCUMULATORS: dict[str, type[BandAccumulator]] = {
    "entropy": EntropyAccumulator,
    "activation": ActivationAccumulator,
    "norm_product": NormProductAccumulator,
}

Consumer = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]
"""Called once a layer and forward pass with (layer, q, k, mask, sound)."""


def entropy_hooks(model: Any, into: EntropyAccumulator) -> list[tuple[str, Hook]]:
    """Returns hooks that measure the entropy drop of every band, for `model.run_with_hooks`.

    The hooks observe only: they change nothing and keep no graph. Pads are recognised by the
    model's own mask, so pass `attention_mask` to the model as ever.

    Args:
        model: A HookedTransformer or a TransformerBridge; it is certified on first use.
        into: Where the sums go; may be used for many forward passes, then `into.result()`.

    Raises:
        ValueError: If the model cannot be read, or `into` holds another model's sums.

    Example:
        ```python
        acc = rl.EntropyAccumulator()
        model.run_with_hooks(tokens, fwd_hooks=rl.entropy_hooks(model, into=acc))
        scores = acc.result()
        ```
    """
    return _metric_hooks(model, into, EntropyAccumulator)


def activation_hooks(model: Any, into: ActivationAccumulator) -> list[tuple[str, Hook]]:
    """Returns hooks that measure the activation of every band, for `model.run_with_hooks`.

    As `entropy_hooks`, for `band_activation`'s metric.

    Args:
        model: A HookedTransformer or a TransformerBridge; it is certified on first use.
        into: Where the sums go.

    Raises:
        ValueError: If the model cannot be read, or `into` holds another model's sums.

    Example:
        ```python
        acc = rl.ActivationAccumulator()
        model.run_with_hooks(tokens, fwd_hooks=rl.activation_hooks(model, into=acc))
        scores = acc.result()
        ```
    """
    return _metric_hooks(model, into, ActivationAccumulator)


def _metric_hooks(
    model: Any, into: BandAccumulator, expected: type[BandAccumulator]
) -> list[tuple[str, Hook]]:
    if not isinstance(into, expected):
        raise ValueError(f"expected into={expected.__name__}(), got {type(into).__name__}")
    host = host_of(model)
    into.bind(host.certificate)
    return layer_hooks(host, range(host.n_layers), into.update)


class Observation:
    """What `observe` has seen so far."""

    def __init__(self, accumulators: Mapping[str, BandAccumulator]) -> None:
        self._accumulators = accumulators

    @property
    def scores(self) -> dict[str, BandScores]:
        """The scores of all forward passes until now, by the name of the metric."""
        return {name: acc.result() for name, acc in self._accumulators.items()}

    def result(self, metric: str, data: str = "") -> BandScores:
        """The scores of one metric; `data` is the digest of the tokens, where known."""
        return self._accumulators[metric].result(data)


@contextmanager
def observe(
    model: Any,
    metrics: Sequence[str] = ("entropy", "activation"),
    *,
    tol: float = 1e-3,
    progress: bool = False,
) -> Iterator[Observation]:
    """Measures bands in every forward pass inside the `with` block.

    Nothing else about the model changes: logits stay bit-identical, the user's own hooks stay, and
    only the hooks added here are removed, also after an error. Hooks of your own that edit queries or
    keys are measured as edited if they were added before; scores refuse to come if they were added
    after. Every forward pass counts, so leave generation outside.

    Args:
        model: A HookedTransformer or a TransformerBridge.
        metrics: Any of "entropy", "activation" and "norm_product".
        tol: Tolerance: nats a row for entropy, relative for activation.
        progress: Whether to show a bar that counts layers.

    Raises:
        ValueError: If a metric is unknown or the model cannot be read.

    Example:
        ```python
        with rl.observe(model, metrics=("entropy",)) as seen:
            model(tokens)
        seen.scores["entropy"].importance()
        ```
    """
    unknown = [m for m in metrics if m not in ACCUMULATORS]
    if unknown or not metrics:
        raise ValueError(f"expected metrics from {', '.join(ACCUMULATORS)}, got {list(metrics)}")
    host = host_of(model)
    accumulators = {m: ACCUMULATORS[m](tol=tol) for m in metrics}
    for acc in accumulators.values():
        acc.bind(host.certificate)
    with tqdm(total=host.n_layers, desc="layers", unit="layer", disable=not progress) as bar:

        def update(layer: int, q: Tensor, k: Tensor, mask: Tensor, sound: Tensor) -> None:
            if layer == 0:
                bar.reset()
            for acc in accumulators.values():
                acc.update(layer, q, k, mask, sound)
            bar.update()

        with host.attached(layer_hooks(host, range(host.n_layers), update)):
            yield Observation(accumulators)


def layer_hooks(host: Host, layers: Sequence[int], consume: Consumer) -> list[tuple[str, Hook]]:
    """Returns the hooks that hand the queries, keys and mask of each layer to `consume`."""
    return [hook for layer in layers for hook in _hooks_of_layer(host, layer, consume)]


def _hooks_of_layer(host: Host, layer: int, consume: Consumer) -> list[tuple[str, Hook]]:
    q_name, k_name, score_name = host.points(layer)
    seen: dict[str, Tensor] = {}

    def keep_q(q: Tensor, hook: Any) -> None:
        seen["q"] = q.detach()

    def keep_k(k: Tensor, hook: Any) -> None:
        seen["k"] = k.detach()

    def take(scores: Tensor, hook: Any) -> None:
        with torch.no_grad():
            q, k = seen.pop("q"), seen.pop("k")
            if q.shape[1] != scores.shape[-1] or k.shape[1] != scores.shape[-1]:
                raise ValueError(
                    f"layer {layer}: {q.shape[1]} queries and {k.shape[1]} keys for {scores.shape[-1]} "
                    "positions: measure without a key-value cache (use_past_kv_cache=False)"
                )
            mask = read_mask(scores)
            consume(layer, q, k, mask, is_sound(q, k, scores, mask, host.certificate.layers[layer]))

    return [(q_name, keep_q), (k_name, keep_k), (score_name, take)]


def read_mask(scores: Float[Tensor, "batch head pos pos"]) -> Bool[Tensor, "batch pos"]:
    """Returns which tokens are real: a query that sees itself is, nothing but a pad is hidden from itself.

    NaN is no mask: its tokens are real, and the metrics refuse them.
    """
    return ~(scores[:, 0].diagonal(dim1=-2, dim2=-1) <= torch.finfo(scores.dtype).min / 2)


def is_sound(
    q: Float[Tensor, "batch pos head d_head"],
    k: Float[Tensor, "batch pos kv_head d_head"],
    scores: Float[Tensor, "batch head pos pos"],
    mask: Bool[Tensor, "batch pos"],
    spec: LayerSpec,
) -> Bool[Tensor, ""]:
    """Returns whether the model attends with these queries and keys, under the certified mask.

    Every score of every real query is rebuilt, in blocks, so that no hook that edits after ropelens's
    goes unnoticed. The answer stays on the device.
    """
    n, low = scores.shape[-1], torch.finfo(scores.dtype).min / 2
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k = spec.scale * q.to(dtype).transpose(1, 2), k.to(dtype).permute(0, 2, 3, 1)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    allowed_keys = visible_keys(n, spec.window, scores.device)
    starts = mask[:, 0].long() + (mask[:, 1:] & ~mask[:, :-1]).sum(-1)
    sound = (starts <= 1).all()  # pads lie at the ends only
    miss, top, bottom = (torch.zeros((), dtype=dtype, device=scores.device) for _ in range(3))
    step = max(1, 2**22 // scores[:, :, 0].numel())
    for rows in (slice(start, start + step) for start in range(0, n, step)):
        shown, expected = scores[:, :, rows] > low, (allowed_keys[rows] & mask[:, None, :])[:, None]
        real = mask[:, None, rows, None]  # what a pad sees does not matter
        sound = sound & ((shown == expected) | ~real).all()
        rebuilt = q[:, :, rows] @ k
        if spec.softcap is not None:
            rebuilt = spec.softcap * torch.tanh(rebuilt / spec.softcap)
        counted = shown & real
        seen = scores[:, :, rows].to(dtype).masked_fill(~counted, 0)
        miss = miss.maximum((rebuilt.masked_fill_(~counted, 0) - seen).abs().amax())
        top, bottom = top.maximum(seen.amax()), bottom.minimum(seen.amin())
    return sound & (miss <= score_tolerance(scores.dtype) * (top - bottom))
