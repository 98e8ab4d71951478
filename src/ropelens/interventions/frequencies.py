"""Other rotary frequencies in a model: for a block, or for good."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ropelens.bands import Bands
from ropelens.hosts import host_of

FASTEST = float(torch.tensor(math.pi, dtype=torch.float32))  # half a turn a token, as a model would hold it


@contextmanager
def frequencies(model: Any, inv_freq: Float[Tensor, "layer band"]) -> Iterator[None]:
    """Makes a model rotate with other frequencies, a row for each layer, inside the block.

    A band of frequency w turns the query and key of position p by `w p`, as RoPE does (Su et al. 2021);
    the model computes angles, cos and sin as ever, so with the frequencies that it had, logits and
    gradients are the same to the last bit. It holds at any length, in training, and with a key-value
    cache that was begun inside the block (one from outside is refused: its keys are turned already).

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        inv_freq: Radians per token, from 0 (the pair is not rotated) to pi, in any order; NaN for bands
            that a layer does not have, as in `Bands.of(model).inv_freq`.

    Raises:
        ValueError: If the shape is not that of the model's bands, or a frequency is negative, not a
            number, or above pi.

    Example:
        ```python
        slower = rl.Bands.of(model).inv_freq / 4
        with rl.frequencies(model, slower):
            loss = model(tokens, return_type="loss")
        ```
    """
    host = host_of(model)
    with host.turning(_rows(inv_freq, host.bands)):
        yield


def set_frequencies(model: Any, inv_freq: Float[Tensor, "layer band"]) -> None:
    """Sets the rotary frequencies of a model for good: they are saved with it, and `load` sets them again.

    As `frequencies`, without an end. A transformers model, alone or inside a bridge, keeps them in its
    config as `ropelens_inv_freq`, which `save_pretrained` writes. transformers itself does not know that
    entry: a model that `from_pretrained` read has its own frequencies, and ropelens refuses to measure it.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        inv_freq: As in `frequencies`.

    Raises:
        ValueError: As in `frequencies`.

    Example:
        ```python
        rl.set_frequencies(model, rl.resample_frequencies(scores, seed=0))
        model.save_pretrained("resampled")
        model = rl.load("resampled", host="transformers")
        ```
    """
    host = host_of(model)
    host.turn_for_good(_rows(inv_freq, host.bands))


def _rows(inv_freq: Float[Tensor, "layer band"], bands: Bands) -> list[Float64[Tensor, " band"] | None]:
    """Returns the checked frequencies of each layer; None for a layer without bands."""
    shape = list(bands.inv_freq.shape)
    if list(inv_freq.shape) != shape:
        raise ValueError(
            f"expected frequencies of shape {shape} [layer, band], as Bands.of(model).inv_freq, "
            f"got {list(inv_freq.shape)}"
        )
    new = inv_freq.detach().to("cpu", torch.float64)
    for wrong, what in (
        (new.isnan() & bands.exists, "expected a number, got NaN"),
        (~new.isnan() & ~bands.exists, "expected NaN, since the layer has no such band, got {}"),
        (new < 0, "expected at least 0, got {}: a turn has no direction to give"),
        (new > FASTEST, "expected at most pi radians per token, half a turn, got {}"),
    ):
        if wrong.any():
            layer, band = wrong.nonzero()[0].tolist()
            value = f"{new[layer, band].item():.6g}"
            raise ValueError(f"the frequency of layer {layer}, band {band}: {what.format(value)}")
    return [row[keep] if keep.any() else None for row, keep in zip(new, bands.exists, strict=True)]
