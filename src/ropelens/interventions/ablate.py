"""ablate: what a model does without some bands of its queries, or of its keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from ropelens.hosts import Edit, Host, LayerSpec, host_of
from ropelens.interventions.means import BandMeans
from ropelens.interventions.selecting import by_key_head, checked_mask
from ropelens.interventions.turning import Turn
from ropelens.scores import same_model

Mode = Literal["zero", "derotate", "mean", "keys"]
MODES: tuple[Mode, ...] = ("zero", "derotate", "mean", "keys")


@dataclass(frozen=True, eq=False)
class Ablation:
    """What `ablate` takes away.

    Attributes:
        mode: How.
        mask: Which bands.
        bytes_per_token: What the removed bands of the keys take in a key-value cache of the model's
            dtype, for each token; 0 unless the mode is "keys".
        cache_bytes_per_token: What the whole cache takes, keys and values of as many dims.
    """

    mode: Mode
    mask: Bool[Tensor, "layer head band"]
    bytes_per_token: int
    cache_bytes_per_token: int

    @property
    def n_bands(self) -> int:
        """How many bands of query heads are taken away."""
        return int(self.mask.sum())


@contextmanager
def ablate(
    model: Any,
    mask: Bool[Tensor, "layer head band"],
    mode: Mode = "zero",
    *,
    means: BandMeans | None = None,
) -> Iterator[Ablation]:
    """Takes bands away from a model's attention inside the `with` block.

    - "zero": the bands of the post-rotary queries are 0, and with them what they add to the logits.
    - "derotate": queries and keys keep the content of the bands and lose their rotation: each row is
      turned back from its position by the certified frequencies (and divided by the rotation's
      amplitude), so that the bands see what but not where, as in a partial rotary embedding.
    - "mean": the pre-rotary content of the queries' bands is replaced by `means`, their mean over a
      text, and turned: the bands see where but not what.
    - "keys": the bands of the post-rotary keys are 0. The logits are those of "zero"; here it is the
      key-value cache that can do without them.

    "derotate" and "keys" change keys, which the query heads of a group share: the heads of a group must
    name the same bands; see `share_groups`. "zero" and "mean" take each query head by itself.

    It works in every forward pass and in generation, with left pads and with a key-value cache. Blocks
    nest. With "derotate" and "keys", use a fresh cache inside: TransformerBridge caches edited keys.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        mask: True = take away; from `BandScores.lowest` or `bands_where`.
        mode: How.
        means: For "mean": what `band_means` measured.

    Yields:
        What is taken away.

    Raises:
        ValueError: If the mask is not of this model, the mode is unknown, heads of a group differ where
            they must not, or `means` is missing or another model's.

    Example:
        ```python
        mask = rl.band_activation(model, documents).lowest(0.4)
        with rl.ablate(model, mask):
            logits = model(tokens)
        ```
    """
    host = host_of(model)
    edits, ablation = edits_of(host, mask, mode, means)
    with host.editing(*edits):
        yield ablation


def edits_of(
    host: Host, mask: Bool[Tensor, "layer head band"], mode: Mode, means: BandMeans | None = None
) -> tuple[tuple[Mapping[int, Edit], Mapping[int, Edit]], Ablation]:
    """Returns the edits of queries and of keys by layer, and what they amount to; see `ablate`."""
    mask = checked_mask(host, mask)
    if mode not in MODES:
        raise ValueError(f"expected a mode from {', '.join(MODES)}, got {mode!r}")
    if (means is not None) != (mode == "mean"):
        raise ValueError(f'expected means= with mode="mean" and only then, got mode={mode!r}: see band_means')
    if means is not None and (why := same_model(means.model, host.fingerprint)):
        raise ValueError(f"expected means of this model, got another's ({why}): measure them with band_means")
    key_masks = by_key_head(host, mask, mode) if mode in ("derotate", "keys") else []
    queries: dict[int, Edit] = {}
    keys: dict[int, Edit] = {}
    specs = host.certificate.layers
    for layer, spec in enumerate(specs):
        of_layer = mask[layer, :, : len(spec.rotation.inv_freq)]
        if not of_layer.any():
            continue  # nothing is touched: not one bit changes
        if mode == "zero":
            queries[layer] = _zero(spec, of_layer, host.device)
        elif mode == "mean":
            assert means is not None
            queries[layer] = _mean(spec, of_layer, means.values[layer])
        else:
            of_keys = key_masks[layer][:, : of_layer.shape[1]]
            if mode == "keys":
                keys[layer] = _zero(spec, of_keys, host.device)
            else:
                queries[layer] = Turn(spec.rotation, of_layer).back
                keys[layer] = Turn(spec.rotation, of_keys).back
    size = host.embedding.element_size()
    saved = 2 * size * sum(int(of_keys.sum()) for of_keys in key_masks) if mode == "keys" else 0
    whole = 2 * size * sum(spec.n_kv_heads * spec.d_head for spec in specs)
    return (queries, keys), Ablation(mode, mask, saved, whole)


def _zero(spec: LayerSpec, mask: Bool[Tensor, "head band"], device: torch.device) -> Edit:
    removed = torch.zeros(len(mask), spec.d_head, dtype=torch.bool)
    for dims in spec.rotation.pairs.unbind(-1):
        removed[:, dims] = mask
    removed = removed.to(device)

    def zero(x: Tensor, positions: Tensor) -> Tensor:
        out = removed.to(x.device)
        if len(out) != x.shape[2]:  # HookedTransformer may repeat key heads before it turns them
            out = out.repeat_interleave(x.shape[2] // len(out), 0)
        return x.masked_fill(out, 0)

    return zero


def _mean(spec: LayerSpec, mask: Bool[Tensor, "head band"], means: Tensor) -> Edit:
    turn = Turn(spec.rotation, mask)
    content = means[:, : mask.shape[1]][:, mask.any(0)]

    def mean(x: Tensor, positions: Tensor) -> Tensor:
        return turn.of(x, positions, content)

    return mean
