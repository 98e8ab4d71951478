"""How a head spreads a metric over its bands, as a few numbers a head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float64
from torch import Tensor

from ropelens.bands import Bands

if TYPE_CHECKING:
    import pandas as pd

    from ropelens.scores.band_scores import BandScores


def shares(values: Float64[Tensor, "*any band"]) -> Float64[Tensor, "*any band"]:
    """Returns `|values|` as shares of their sum over bands; 0 for bands that do not exist or all 0."""
    size = values.abs().nan_to_num(0.0)
    total = size.sum(-1, keepdim=True)
    return size / total.where(total > 0, 1.0)


def centroid(share: Float64[Tensor, "*any band"], bands: Bands, layer: int) -> Float64[Tensor, "*any"]:
    """Returns the mean wavelength in tokens, geometric, weighted by `share`.

    Pairs that are not rotated have no wavelength and no weight.
    """
    log = bands.wavelength[layer].log()
    turning = log.isfinite()
    weight = share[..., turning]
    return ((weight * log[turning]).sum(-1) / weight.sum(-1)).exp()


def profile(scores: BandScores) -> pd.DataFrame:
    """Returns one row a head; see `BandScores.profile`."""
    import pandas as pd

    share = shares(scores.values)
    n_layers, n_heads, _ = share.shape
    top = share.max(-1)
    spread = torch.special.entr(share).sum(-1).exp()
    dead = share.sum(-1) == 0
    wavelength = scores.bands.wavelength[:, None].expand_as(share)
    columns = {
        "layer": torch.arange(n_layers)[:, None].expand(-1, n_heads),
        "head": torch.arange(n_heads)[None].expand(n_layers, -1),
        "total": scores.values.nan_to_num(0.0).sum(-1),
        "centroid": torch.stack([centroid(share[layer], scores.bands, layer) for layer in range(n_layers)]),
        "effective_bands": spread.masked_fill(dead, torch.nan),
        "top_band": top.indices,
        "top_wavelength": wavelength.gather(-1, top.indices[..., None])[..., 0],
        "top_share": top.values,
    }
    return pd.DataFrame({name: column.flatten().numpy() for name, column in columns.items()})
