"""areas: heads that use the same bands, and what the model is without each group of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from ropelens.data import Windows
from ropelens.hosts import host_of
from ropelens.interventions.ablate import Mode
from ropelens.interventions.curve import ablation_losses
from ropelens.interventions.results import AblationCurve
from ropelens.interventions.selecting import whole_mask
from ropelens.scores import BandScores

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Areas:
    """Heads in groups, by which bands they use.

    Attributes:
        labels: The group of each head; group 0 has the fastest bands.
        profiles: The mean share of each band in the heads of a group; rows sum to 1.
        wavelength: Of the bands, in tokens.
    """

    labels: Int64[Tensor, "layer head"]
    profiles: Float64[Tensor, "area band"]
    wavelength: Float64[Tensor, " band"]

    def heads(self, area: int) -> Bool[Tensor, "layer head"]:
        """Returns which heads are in a group.

        Raises:
            ValueError: If there is no such group.
        """
        if not 0 <= area < len(self.profiles):
            raise ValueError(f"expected an area from 0 to {len(self.profiles) - 1}, got {area}")
        return self.labels == area

    def shuffled(self, seed: int) -> Areas:
        """Returns the same groups with their heads drawn at random: a partition of equal sizes."""
        order = torch.randperm(self.labels.numel(), generator=torch.Generator().manual_seed(seed))
        labels = self.labels.flatten()[order].reshape(self.labels.shape)
        return Areas(labels, self.profiles, self.wavelength)

    def to_frame(self) -> pd.DataFrame:
        """One row a head: layer, head, area."""
        import pandas as pd

        layers, heads = self.labels.shape
        index = torch.cartesian_prod(torch.arange(layers), torch.arange(heads))
        return pd.DataFrame({"layer": index[:, 0], "head": index[:, 1], "area": self.labels.flatten()})


def areas(scores: BandScores, n: int) -> Areas:
    """Groups heads by their band profiles: the share of each band in the sum of a head's |values|.

    Ward's clustering of the profiles (Euclidean), cut into n groups and numbered by the mean band, fast
    to slow. A head whose values are all 0 has a flat profile.

    Args:
        scores: Of a model whose layers share one ladder of frequencies.
        n: How many groups.

    Returns:
        The group of every head.

    Raises:
        ValueError: If n is not from 2 to the number of heads, or layers have other frequencies.

    Example:
        ```python
        found = rl.areas(activation, n=4)
        found.to_frame()  # layer, head, area; see area_losses
        ```
    """
    from scipy.cluster.hierarchy import fcluster, linkage

    n_layers, n_heads, n_bands = scores.values.shape
    if not 2 <= n <= n_layers * n_heads:
        raise ValueError(f"expected from 2 to {n_layers * n_heads} areas, one a head, got {n}")
    longest = scores.bands.wavelength[scores.bands.exists.sum(1).argmax()]
    apart = (scores.bands.wavelength / longest - 1).abs() > 1e-3  # False where a layer has no such band
    if apart.any():
        layer, band = apart.nonzero()[0].tolist()
        raise ValueError(
            f"expected layers that share one ladder of frequencies, but band {band} of layer {layer} has "
            f"another wavelength than elsewhere: profiles of such layers do not compare band by band"
        )
    size = scores.values.abs().nan_to_num(0.0).flatten(0, 1)
    total = size.sum(1, keepdim=True)
    share = torch.where(total > 0, size / total, 1 / n_bands)
    found = torch.from_numpy(fcluster(linkage(share.numpy(), "ward"), n, "maxclust")).long() - 1
    if int(found.max()) + 1 < n:
        raise ValueError(f"expected heads of {n} kinds, found {int(found.max()) + 1}: ask for fewer areas")
    profiles = torch.stack([share[found == area].mean(0) for area in range(n)])
    order = (profiles @ torch.arange(n_bands).double()).argsort()
    labels = order.argsort()[found].reshape(n_layers, n_heads)
    return Areas(labels, profiles[order], longest)


def area_losses(
    model: Any,
    found: Areas,
    windows: Windows | Int64[Tensor, "batch pos"],
    out: str | os.PathLike[str] | None = None,
    *,
    seeds: Iterable[int] = range(3),
    mode: Mode = "zero",
    progress: bool = True,
) -> AblationCurve:
    """The loss without all bands of each group's heads, beside as many heads drawn at random.

    Args:
        model: The model that the scores were of.
        found: What `areas` returns.
        windows: What `windows` returns, or token ids with a document a row.
        out: A folder for the points, as in `ablation_curve`.
        seeds: Of the random partitions.
        mode: As in `ablate`.
        progress: Whether to show a bar that counts points.

    Returns:
        Rows "area 0", "area 0, random 0" and so on; `paired` compares them on the same documents.

    Raises:
        ValueError: If the groups are of another model, and as `ablation_curve`.

    Example:
        ```python
        curve = rl.area_losses(model, rl.areas(activation, 2), windows, seeds=[0])
        curve.paired("area 0", "area 0, random 0")  # beside as many heads drawn at random
        ```
    """
    host = host_of(model)
    whole, seeds = whole_mask(host), list(seeds)
    if found.labels.shape != whole.shape[:2]:
        raise ValueError(
            f"expected areas of {list(whole.shape[:2])} [layer, head], got {list(found.labels.shape)}: they "
            "are another model's"
        )
    masks = {}
    for area in range(len(found.profiles)):
        masks[f"area {area}"] = whole & found.heads(area)[..., None]
        for seed in seeds:
            drawn = found.shuffled(seed).heads(area)
            masks[f"area {area}, random {seed}"] = whole & drawn[..., None]
    return ablation_losses(model, masks, windows, out, mode=mode, progress=progress)
