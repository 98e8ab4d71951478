"""Measuring in forward passes that the user runs: TransformerLens's own hooks, and `observe`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm

from ropelens.hosts import Hook, LensHost, host_of
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
    if not isinstance(host, LensHost):
        raise ValueError(
            f"expected a HookedTransformer or a TransformerBridge, which take hooks, got {host.kind}'s "
            f"{type(model).__name__}: measure it inside `with ropelens.observe(model) as seen:`"
        )
    into.bind(host.certificate)
    return host.layer_hooks(range(host.n_layers), into.update)


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

    Nothing else about the model changes: logits stay bit-identical, the user's own hooks and a
    transformers model's attention implementation stay, and only what was added here is removed, also
    after an error. Hooks of your own that edit queries or keys are measured as edited if they were
    added before; scores refuse to come if they were added after. Every forward pass counts. Generation
    with a key-value cache counts each query once, as one pass over the final text would, but for its last
    token, which is never put in; the block must begin before its first pass. Leave generation without a
    cache outside: it puts the whole text in again at every token.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
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

        with host.observing(range(host.n_layers), update):
            yield Observation(accumulators)
