"""What to look at first: the heads with the lowest entropy, and one head and one query worth showing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ropelens.plots.scores import check_index
from ropelens.scores import BandScores

LONG_RANGE = 64
"""Wavelength in tokens from which a band reaches further than the words nearby."""


@dataclass(frozen=True)
class HeadSummary:
    """One head's entropy drop and the bands that carry most of it.

    Attributes:
        drop: Mean entropy below uniform attention, in nats a query; negative = sharper.
        carriers: (wavelength in tokens, share of what all lowering bands lower together), largest
            first.
    """

    layer: int
    head: int
    drop: float
    carriers: tuple[tuple[float, float], ...]


def lowest_heads(
    entropy: BandScores, n: int, layer: int | None = None, n_carriers: int = 3
) -> list[HeadSummary]:
    """Returns the n heads whose attention is sharpest, of one layer or of the model, sharpest first.

    Raises:
        ValueError: If the scores are not entropy.
    """
    if entropy.metric != "entropy":
        raise ValueError(f"expected entropy scores, got {entropy.metric}: measure with band_entropy")
    bands = entropy.mean()
    rest = entropy.rest / entropy.count()[:, None]
    drop = bands.nansum(-1) + rest
    if layer is not None:
        others = torch.arange(len(drop)) != layer
        drop = drop.masked_fill(others[:, None], torch.inf)
    found = []
    for place in drop.flatten().argsort(stable=True)[:n].tolist():
        row, head = divmod(place, drop.shape[1])
        lowering = (-bands[row, head]).nan_to_num(0.0).clamp(min=0)
        largest = lowering.topk(min(n_carriers, len(lowering)))
        total = lowering.sum().item()
        carriers = tuple(
            (entropy.bands.wavelength[row, band].item(), value / total)
            for value, band in zip(largest.values.tolist(), largest.indices.tolist(), strict=True)
            if value > 0.005 * total  # less would read 0%
        )
        found.append(HeadSummary(row, head, drop[row, head].item(), carriers))
    return found


def choose_head(
    entropy: BandScores, longest: int, layer: int | None = None, head: int | None = None
) -> tuple[int, int]:
    """Returns (layer, head) of a head in mid-network that uses distance over a long range.

    Among the middle half of the layers: the head whose entropy is lowered most by the bands with a
    wavelength between 64 tokens and the length of the text. Slower bands hardly turn within the
    text, so they tell content rather than distance, and they are what carries the heads that only
    rest on the first token.

    Args:
        longest: The length of the text in tokens.
        layer: Choose among the heads of this layer only.
        head: Choose among the heads of this number only.

    Raises:
        ValueError: If there is no such layer or head.
    """
    wavelength = entropy.bands.wavelength
    useful = (wavelength >= LONG_RANGE) & (wavelength <= max(longest, LONG_RANGE))
    drop = entropy.mean().nan_to_num(0.0).mul(useful[:, None, :]).sum(-1)
    n_layers, n_heads = drop.shape
    check_index("layer", layer, n_layers)
    check_index("head", head, n_heads)
    layers = range(n_layers // 4, n_layers - n_layers // 4) if layer is None else [layer]
    heads = range(n_heads) if head is None else [head]
    return min(((a, b) for a in layers for b in heads), key=lambda place: drop[place].item())


def choose_query(ids: Sequence[int], min_distance: int = 64) -> int:
    """Returns the position where the longest phrase ends that stood in the text once before.

    There a head can do something worth seeing: find the earlier place. The two must lie at least
    `min_distance` tokens apart; among equally long phrases the last one is taken. Without any
    repeated token it is the last position.

    Example:
        >>> choose_query([5, 6, 7, 8, 9, 6, 7, 1], min_distance=2)
        6
    """
    best, best_length = len(ids) - 1, 0
    seen: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}  # earlier position -> length of the phrase that ends there and here
    for position, token in enumerate(ids):
        lengths = {
            earlier: lengths.get(earlier - 1, 0) + 1
            for earlier in seen.get(token, [])
            if position - earlier >= min_distance
        }
        longest = max(lengths.values(), default=0)
        if longest and longest >= best_length:
            best, best_length = position, longest
        seen.setdefault(token, []).append(position)
    return best
