"""How far scores agree: with each other, and with what removing single bands does."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from ropelens.data import Windows
from ropelens.hosts import host_of
from ropelens.interventions.ablate import Mode
from ropelens.interventions.curve import ablation_losses
from ropelens.interventions.selecting import bands_where
from ropelens.scores import BandScores, same_model

if TYPE_CHECKING:
    import pandas as pd


def agreement(
    scores: Mapping[str, BandScores], *, normalize: str = "head", n_bootstrap: int = 1000, seed: int = 0
) -> pd.DataFrame:
    """How far the importances of scores agree, pair by pair: of a straight line, and of their ranks.

    Args:
        scores: Two or more of one model, by a name of yours.
        normalize: As in `BandScores.importance`.
        n_bootstrap: Draws of heads for the intervals of the whole model; 0 for none.
        seed: Of these draws.

    Returns:
        A row for each pair and layer, and first of each pair one for the whole model (layer is NA):
        a, b, layer, n (bands), r2 (of b as a linear function of a), r2_low and r2_high (95% of draws of
        heads with replacement), slope, intercept, spearman. NaN where one of them does not vary.

    Raises:
        ValueError: If there are fewer than two scores, or they are not of the same bands or model.

    Example:
        ```python
        rl.agreement({"activation": activation, "entropy": entropy})  # R^2 and Spearman, by layer
        ```
    """
    import pandas as pd

    if len(scores) < 2:
        raise ValueError(f"expected at least two scores to compare, got {len(scores)}")
    first = next(iter(scores.values()))
    for name, found in scores.items():
        same_shape = found.values.shape == first.values.shape
        why = found.bands.differs_from(first.bands) if same_shape else "numbers of heads or bands"
        if why:
            raise ValueError(f"expected scores of the same bands, but those of {name!r} differ: {why}")
        if found.model and first.model and (why := same_model(first.model, found.model)):
            raise ValueError(f"expected scores of one model, but those of {name!r} are of another ({why})")
    importance = {name: found.importance(normalize) for name, found in scores.items()}
    rng = np.random.default_rng(seed)
    rows = []
    for a, b in combinations(scores, 2):
        for layer in [None, *range(len(first.values))]:
            exists = first.exists if layer is None else first.exists[layer : layer + 1]
            x, y = (importance[s] if layer is None else importance[s][layer : layer + 1] for s in (a, b))
            moments = _moments(x, y, exists)
            r2, slope, intercept = _line(moments.sum(0))
            row = {"a": a, "b": b, "layer": layer, "n": int(exists.sum()), "r2": r2}
            if layer is None and n_bootstrap:
                draws = rng.integers(len(moments), size=(n_bootstrap, len(moments)))
                many = [_line(moments[draw].sum(0))[0] for draw in draws]
                row["r2_low"], row["r2_high"] = np.nanquantile(many, [0.025, 0.975])
            ranks = _ranks(x[exists], y[exists])[0] if r2 == r2 else float("nan")
            rows.append(row | {"slope": slope, "intercept": intercept, "spearman": ranks})
    return pd.DataFrame(rows).astype({"layer": "Int64"})


def band_effects(
    model: Any,
    windows: Windows | Int64[Tensor, "batch pos"],
    heads: Iterable[tuple[int, int]],
    out: str | os.PathLike[str] | None = None,
    *,
    mode: Mode = "zero",
    progress: bool = True,
) -> pd.DataFrame:
    """By how much the loss rises without each single band of some heads: a run of the text for each.

    Args:
        model: A model that ropelens reads.
        windows: What `windows` returns, or token ids with a document a row.
        heads: (layer, head) pairs.
        out: A folder for the points, as in `ablation_curve`.
        mode: As in `ablate`.
        progress: Whether to show a bar that counts points.

    Returns:
        A row a band: layer, head, band, wavelength (tokens), rise (nats a token), stderr (over documents).

    Raises:
        ValueError: If there is no such head, and as `ablation_curve`.

    Example:
        ```python
        effects = rl.band_effects(model, windows, [(1, 0)])
        rl.effect_ranks(effects, {"activation": activation})  # do they rank bands alike?
        ```
    """
    import pandas as pd

    bands = host_of(model).bands
    chosen = {
        (layer, head, band): bands_where(model, [band], heads=[(layer, head)])
        for layer, head in heads
        for band in bands.exists[layer].nonzero()[:, 0].tolist()
    }
    named = {f"{layer}.{head}.{band}": mask for (layer, head, band), mask in chosen.items()}
    curve = ablation_losses(model, named, windows, out, mode=mode, progress=progress)
    frame = curve.rises()
    rows = [
        {"layer": layer, "head": head, "band": band, "wavelength": float(bands.wavelength[layer, band])}
        for layer, head, band in chosen
    ]
    return pd.DataFrame(rows).assign(rise=frame["rise"].to_numpy(), stderr=frame["stderr"].to_numpy())


def effect_ranks(effects: pd.DataFrame, scores: Mapping[str, BandScores]) -> pd.DataFrame:
    """The rank correlation of scores with the effects of removing single bands, head by head.

    Args:
        effects: What `band_effects` returns.
        scores: By a name of yours.

    Returns:
        A row for each head and score: layer, head, score, spearman (of |value| and rise), p, n (bands).

    Raises:
        KeyError: If a column of `band_effects` is missing.

    Example:
        ```python
        rl.effect_ranks(effects, {"entropy": entropy, "activation": activation})
        ```
    """
    import pandas as pd

    rows = []
    groups: Any = effects.groupby(["layer", "head"], sort=False)
    for (layer, head), chosen in groups:
        bands, rise = torch.tensor(chosen["band"].to_numpy()), torch.tensor(chosen["rise"].to_numpy())
        for name, found in scores.items():
            ranks, p = _ranks(found.values[int(layer), int(head), bands].abs(), rise)
            row = {"layer": int(layer), "head": int(head), "score": name}
            rows.append(row | {"spearman": ranks, "p": p, "n": len(bands)})
    return pd.DataFrame(rows)


def _moments(x: Tensor, y: Tensor, exists: Tensor) -> np.ndarray:
    """Returns n and the sums of x, y, xx, yy, xy of each head: a row a head."""
    x, y = (t.where(exists, 0.0) for t in (x, y))
    parts = [exists.double(), x, y, x * x, y * y, x * y]
    return torch.stack([part.sum(-1).flatten() for part in parts], -1).numpy()


def _line(moments: np.ndarray) -> tuple[float, float, float]:
    """Returns R^2, slope and intercept of the least-squares line."""
    n, sx, sy, sxx, syy, sxy = moments.tolist()
    nan = float("nan")
    if n < 2:
        return nan, nan, nan
    vx, vy, cxy = sxx - sx * sx / n, syy - sy * sy / n, sxy - sx * sy / n
    tiny = 1e-12 * n
    if vx <= tiny:
        return nan, nan, nan
    slope = cxy / vx
    return cxy**2 / (vx * vy) if vy > tiny else nan, slope, (sy - slope * sx) / n


def _ranks(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Returns Spearman's rank correlation and its p-value."""
    from scipy.stats import spearmanr

    found: Any = spearmanr(x.numpy(), y.numpy())
    return float(found.statistic), float(found.pvalue)
