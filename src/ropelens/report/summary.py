"""What to look at first: the heads with the lowest entropy, and one head and one query worth showing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from ropelens.plots.scores import check_index
from ropelens.scores import BandScores


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
        drop, n = drop.masked_fill(others[:, None], torch.inf), min(n, drop.shape[1])
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


class Repeat(NamedTuple):
    """A phrase that stands twice in a text, by the positions of its last token.

    Attributes:
        query: Where the later copy ends.
        earlier: Where the earlier one ends; -1 if nothing repeats.
        length: Tokens in the phrase.
    """

    query: int
    earlier: int
    length: int


def choose_repeat(ids: Sequence[int], min_distance: int = 64) -> Repeat:
    """Returns the longest phrase that a text repeats at a distance of at least `min_distance` tokens.

    At its end a head can do something worth seeing: find the earlier copy. Among equally long
    phrases the last is taken. If nothing repeats, the query is the last position.

    Example:
        >>> choose_repeat([5, 6, 7, 8, 9, 6, 7, 1], min_distance=2)
        Repeat(query=6, earlier=2, length=2)
    """
    best = Repeat(len(ids) - 1, -1, 0)
    seen: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}  # earlier position -> length of the phrase that ends there and here
    for position, token in enumerate(ids):
        lengths = {
            earlier: lengths.get(earlier - 1, 0) + 1
            for earlier in seen.get(token, [])
            if position - earlier >= min_distance
        }
        earlier = max(lengths, key=lengths.__getitem__, default=-1)
        if earlier >= 0 and lengths[earlier] >= best.length:
            best = Repeat(position, earlier, lengths[earlier])
        seen.setdefault(token, []).append(position)
    return best


def choose_head(
    attention: Float64[Tensor, "layer head"], layer: int | None = None, head: int | None = None
) -> tuple[int, int]:
    """Returns (layer, head) of the head that pays most attention to the token asked about.

    Args:
        attention: From the query to that token. For a `Repeat` it is the token after the earlier
            copy: an induction head looks there.
        layer: Choose among the heads of this layer only.
        head: Choose among the heads of this number only.

    Raises:
        ValueError: If there is no such layer or head.
    """
    n_layers, n_heads = attention.shape
    check_index("layer", layer, n_layers)
    check_index("head", head, n_heads)
    layers = range(n_layers) if layer is None else [layer]
    heads = range(n_heads) if head is None else [head]
    return max(((a, b) for a in layers for b in heads), key=lambda place: attention[place].item())
