"""New rotary frequencies drawn from those that a model uses most."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from ropelens.scores import BandScores, saving


def resample_frequencies(
    scores: BandScores,
    *,
    method: str = "sample",
    per: str = "layer",
    shuffle: bool = False,
    seed: int = 0,
    clamp: tuple[float | int, float | int] = (5, 95),
    model: Any = None,
) -> Float64[Tensor, "*layer_head band"]:
    """New rotary frequencies for each layer, more of them where the model's bands are active.

    The absolute scores are clamped to two percentiles of all of them (layers, heads and bands together)
    and summed over the heads of each layer. Each of a layer's n bands then draws one of the n old
    frequencies, with replacement and with probability proportional to that sum:
    `P(b) = sum_h clip(|A[h, b]|) / sum_h,b' clip(|A[h, b']|)`.

    Args:
        scores: Usually the activation; see `band_activation` and `collect`.
        method: "sample" draws; "quantile" takes the quantiles (i + 1/2)/n of the same distribution, so
            that every frequency appears as often as expected, to within one.
        per: "layer"; "head": each head draws from its own clamped scores; "model": one draw from the sum
            over layers, the same for all of them (a control).
        shuffle: Whether the sums are permuted over the bands of a layer before the draw, the same spread
            of probabilities without the knowledge of where they belong (a control).
        seed: Of the draws and permutations.
        clamp: The percentiles, 0 to 100.
        model: If given, the scores must be of this model.

    Returns:
        Radians per token, `[layer, band]` (`[layer, head, band]` per head), from fast to slow; NaN for
        bands that a layer does not have.

    Raises:
        ValueError: If an argument is outside of what is listed here, a layer's scores are all 0, or they
            are another model's.

    Example:
        ```python
        new = rl.resample_frequencies(rl.band_activation(model, text), seed=0)
        with rl.frequencies(model, new):
            model(tokens)
        ```
    """
    if method not in ("sample", "quantile"):
        raise ValueError(f'expected method="sample" or "quantile", got {method!r}')
    if per not in ("layer", "head", "model"):
        raise ValueError(f'expected per="layer", "head" or "model", got {per!r}')
    if model is not None:
        saving.check_model("these scores", scores.model, model)
    generator = torch.Generator().manual_seed(seed)
    weights, old = clamped(scores, clamp), scores.bands.inv_freq
    if per == "head":
        rows = [
            _row(weights[layer, head], old[layer], method, shuffle, generator)
            for layer in range(weights.shape[0])
            for head in range(weights.shape[1])
        ]
        return torch.stack(rows).reshape(weights.shape)
    summed = weights.sum(1)
    if per == "layer":
        pairs = zip(summed, old, strict=True)
        return torch.stack([_row(w, f, method, shuffle, generator) for w, f in pairs])
    if why := _unlike(old):
        raise ValueError(f'expected layers with the same bands for per="model", but {why}')
    has = scores.bands.exists.any(-1)
    one = _row(summed[has].sum(0), old[has][0], method, shuffle, generator)
    return torch.where(has[:, None], one, math.nan)


def clamped(scores: BandScores, clamp: tuple[float | int, float | int]) -> Float64[Tensor, "layer head band"]:
    """Returns the absolute scores, clamped to two percentiles of all that exist; NaN stays NaN."""
    low, high = clamp
    if not 0 <= low < high <= 100:
        raise ValueError(f"expected clamp=(low, high), percentiles with 0 <= low < high <= 100, got {clamp}")
    size = scores.values.abs()
    ends = torch.tensor([low, high], dtype=torch.float64) / 100
    bottom, top = _quantiles(size[~size.isnan()], ends)
    return size.clamp(bottom, top)


def _quantiles(values: Float64[Tensor, " n"], at: Float64[Tensor, " q"]) -> tuple[float, ...]:
    """As torch.quantile, which takes 16 million values at most."""
    values = values.sort().values
    place = at * (len(values) - 1)
    below, above = place.floor().long(), place.ceil().long()
    return tuple(torch.lerp(values[below], values[above], place - below).tolist())


def _row(
    weights: Float64[Tensor, " band"],
    old: Float64[Tensor, " band"],
    method: str,
    shuffle: bool,
    generator: torch.Generator,
) -> Float64[Tensor, " band"]:
    new, has = old.clone(), ~old.isnan()
    weights, old = weights[has], old[has]
    if not len(old):
        return new
    if not float(weights.sum()) > 0:
        raise ValueError("expected a band with a score above 0 in every layer, got one with none")
    if shuffle:
        weights = weights[torch.randperm(len(old), generator=generator)]
    chance = weights / weights.sum()
    if method == "sample":
        drawn = torch.multinomial(chance, len(old), replacement=True, generator=generator)
    else:
        middles = (torch.arange(len(old), dtype=torch.float64) + 0.5) / len(old)
        drawn = torch.searchsorted(chance.cumsum(0), middles).clamp(max=len(old) - 1)
    new[has] = old[drawn].sort(descending=True).values
    return new


def _unlike(old: Float64[Tensor, "layer band"]) -> str | None:
    rows = old[~old.isnan().all(-1)]
    for row in rows[1:]:
        if not torch.equal(row.nan_to_num(-1), rows[0].nan_to_num(-1)):
            return "these scores' layers differ in their frequencies"
    return None
