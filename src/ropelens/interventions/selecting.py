"""Choosing bands: by wavelength, layer and head, and what a mask of bands must be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from ropelens.hosts import Host, host_of


def bands_where(
    model: Any,
    bands: str | Iterable[int] | None = None,
    *,
    wavelength: tuple[float | int, float | int] | None = None,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | Iterable[tuple[int, int]] | None = None,
) -> Bool[Tensor, "layer head band"]:
    """A mask of bands, for `ablate`: True where all that is asked for holds.

    Args:
        model: A model that ropelens reads.
        bands: "fastest:12" or "slowest:12", so many of each layer's bands by frequency; "fastest:50%",
            a share of them, rounded; or indices.
        wavelength: (low, high) in tokens: the bands with low <= wavelength < high.
        layers: Which layers; negative numbers count from the last.
        heads: Which query heads, of every layer, or (layer, head) pairs.

    Returns:
        True for the bands chosen. Bands that a layer does not have are never chosen.

    Raises:
        ValueError: If there is no such layer, head or band, or nothing is chosen.

    Example:
        ```python
        rl.bands_where(model, wavelength=(0, 64), layers=range(10))  # fast bands of the first layers
        rl.bands_where(model, "slowest:25%", heads=[(10, 1)])  # slow bands of one head
        ```
    """
    host = host_of(model)
    mask = whole_mask(host)
    n_layers, n_heads, n_bands = mask.shape
    if bands is not None:
        mask &= _chosen(host, bands)[:, None]
    if wavelength is not None:
        low, high = wavelength
        if not low < high:
            raise ValueError(f"expected wavelength=(low, high) with low < high, got {wavelength}")
        mask &= ((host.bands.wavelength >= low) & (host.bands.wavelength < high))[:, None]
    if layers is not None:
        keep = torch.zeros(n_layers, dtype=torch.bool)
        keep[_indices("layer", layers, n_layers)] = True
        mask &= keep[:, None, None]
    if heads is not None:
        mask &= _heads(list(heads), n_layers, n_heads)[..., None]
    if not mask.any():
        raise ValueError(
            f"expected a choice that some of the {n_layers} layers x {n_heads} heads x {n_bands} bands fit, "
            "got one that none fits: widen it"
        )
    return mask


def whole_mask(host: Host) -> Bool[Tensor, "layer head band"]:
    """Returns the mask of all bands that there are."""
    n_heads = host.certificate.layers[0].n_heads
    return host.bands.exists[:, None].repeat(1, n_heads, 1)


def checked_mask(host: Host, mask: Tensor, what: str = "a mask") -> Bool[Tensor, "layer head band"]:
    """Returns a mask on the CPU.

    Raises:
        ValueError: If it is none of this model's bands.
    """
    whole = whole_mask(host)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != whole.shape:
        got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"expected {what} of bool {list(whole.shape)}, this model's layers, heads and bands, got {got}: "
            "make it with bands_where, or from scores of this model with .lowest"
        )
    mask = mask.cpu()
    if (mask & ~whole).any():
        layer, _, band = (mask & ~whole).nonzero()[0].tolist()
        raise ValueError(
            f"expected {what} of bands that there are, but it holds band {band} of layer {layer}, which has "
            f"{int(whole[layer, 0].sum())}: combine it with bands_where(model)"
        )
    return mask


def by_key_head(host: Host, mask: Bool[Tensor, "layer head band"], mode: str) -> list[Tensor]:
    """Returns for each layer which bands of its key heads are meant, Bool [kv_head, band].

    Raises:
        ValueError: If query heads that share a key head differ.
    """
    found = []
    for layer, spec in enumerate(host.certificate.layers):
        groups = mask[layer].unflatten(0, (spec.n_kv_heads, -1))
        apart = groups.any(1) & ~groups.all(1)
        if apart.any():
            key_head, band = apart.nonzero()[0].tolist()
            size = groups.shape[1]
            first = key_head * size
            raise ValueError(
                f'mode "{mode}" changes keys, which query heads share: expected heads {first} to '
                f"{first + size - 1} of layer {layer} to agree on band {band}, but only "
                f"{int(groups[key_head, :, band].sum())} of {size} name it: see ropelens.share_groups"
            )
        found.append(groups.all(1))
    return found


def share_groups(
    model: Any, mask: Bool[Tensor, "layer head band"], how: str = "all"
) -> Bool[Tensor, "layer head band"]:
    """The mask with all query heads of a key head agreeing, as edits of keys need it.

    Args:
        model: A model that ropelens reads.
        mask: A mask of bands.
        how: "all": a band stays in the mask where all heads of its group name it; "any": it comes in
            where one does.

    Returns:
        A mask in which groups agree.

    Raises:
        ValueError: If the mask is not of this model, or `how` is something else.

    Example:
        ```python
        with rl.ablate(model, rl.share_groups(model, mask), mode="keys") as ablation:
            ablation.bytes_per_token  # of the key-value cache, that need not be kept
        ```
    """
    if how not in ("all", "any"):
        raise ValueError(f'expected how="all" or "any", got {how!r}')
    host = host_of(model)
    mask = checked_mask(host, mask)
    rows = []
    for layer, spec in enumerate(host.certificate.layers):
        groups = mask[layer].unflatten(0, (spec.n_kv_heads, -1))
        agreed = groups.all(1) if how == "all" else groups.any(1)
        rows.append(agreed.repeat_interleave(groups.shape[1], 0))
    return torch.stack(rows)


def _chosen(host: Host, bands: str | Iterable[int]) -> Bool[Tensor, "layer band"]:
    exists = host.bands.exists
    if not isinstance(bands, str):
        chosen = torch.zeros(exists.shape[1], dtype=torch.bool)
        chosen[_indices("band", bands, exists.shape[1])] = True
        return chosen & exists
    end, _, amount = bands.partition(":")
    number = amount.removesuffix("%")
    whole = number.replace(".", "", 1) if amount.endswith("%") else number
    if end not in ("fastest", "slowest") or not whole.isdecimal():
        raise ValueError(f'expected bands as "fastest:12", "slowest:20%" or indices, got {bands!r}')
    mask = torch.zeros_like(exists)
    for layer, row in enumerate(host.bands.inv_freq):
        n = int(exists[layer].sum())
        count = round(float(number) / 100 * n) if amount.endswith("%") else int(number)
        if count > n and n:
            raise ValueError(f"expected at most {n} bands, as many as layer {layer} has, got {bands!r}")
        slow_last = torch.where(exists[layer], row, -1.0).argsort(descending=True, stable=True)[:n]
        mask[layer, slow_last[:count] if end == "fastest" else slow_last[n - min(count, n) :]] = True
    return mask


def _heads(heads: list[Any], n_layers: int, n_heads: int) -> Bool[Tensor, "layer head"]:
    keep = torch.zeros(n_layers, n_heads, dtype=torch.bool)
    if heads and isinstance(heads[0], int):
        keep[:, _indices("head", heads, n_heads)] = True
        return keep
    for layer, head in heads:
        keep[_indices("layer", [layer], n_layers), _indices("head", [head], n_heads)] = True
    return keep


def _indices(name: str, values: Iterable[int], count: int) -> list[int]:
    found = list(values)
    for value in found:
        if not -count <= value < count:
            raise ValueError(f"expected a {name} from 0 to {count - 1}, got {value}")
    return [value % count for value in found]
