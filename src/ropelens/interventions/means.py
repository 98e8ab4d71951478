"""The mean pre-rotary content of every band of the queries, for mean ablation."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64, Int64
from torch import Tensor
from tqdm.auto import tqdm

from ropelens.data import Windows
from ropelens.hosts import host_of
from ropelens.interventions.losses import pieces
from ropelens.interventions.turning import Turn
from ropelens.scores import saving


@dataclass(frozen=True, eq=False)
class BandMeans:
    """The mean over tokens of the queries before their rotation, band by band.

    Attributes:
        values: The two dims of each band; NaN for bands that a layer does not have.
        n_tokens: Over how many tokens.
        model: The fingerprint of the model.
    """

    values: Float64[Tensor, "layer head band 2"]
    n_tokens: int
    model: dict[str, Any]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one safetensors file, whole or not at all."""
        saving.write(
            path, "BandMeans", {"values": self.values}, {"n_tokens": self.n_tokens, "model": self.model}
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any = None) -> BandMeans:
        """Returns what `save` wrote.

        Args:
            model: If given, the means must be of this model.

        Raises:
            OSError: If there is no such file.
            ValueError: If it is another kind of file, or another model's.
        """
        tensors, facts = saving.read(path, "BandMeans")
        saving.check_model(path, facts["model"], model)
        return cls(tensors["values"], facts["n_tokens"], facts["model"])


def band_means(
    model: Any, windows: Windows | Int64[Tensor, "batch pos"], *, progress: bool = False
) -> BandMeans:
    """The mean content of every band of the queries over a text, as it is before the rotation.

    Each post-rotary query is turned back from its position by the certified frequencies, and divided by
    the rotation's amplitude. For `ablate(..., mode="mean")`.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        windows: What `windows` returns, or token ids with a document a row.
        progress: Whether to show a bar that counts documents.

    Returns:
        The means over all tokens.

    Raises:
        ValueError: If the windows are not usable, or the queries hold NaN or infinity.

    Example:
        ```python
        means = rl.band_means(model, windows)
        with rl.ablate(model, mask, "mean", means=means):
            logits = model(tokens)
        ```
    """
    host = host_of(model)
    whole = host.bands.exists[:, None].expand(-1, host.certificate.layers[0].n_heads, -1)
    sums = torch.zeros(*whole.shape, 2, dtype=torch.float64)

    def edit_of(layer: int) -> Any:
        rotation = host.certificate.layers[layer].rotation
        n_bands = len(rotation.inv_freq)
        turn = Turn(rotation, whole[layer, :, :n_bands])

        def add(q: Tensor, positions: Tensor) -> Tensor:
            flat = turn.back(q.detach(), positions).double().sum((0, 1)).cpu()
            sums[layer, :, :n_bands] += flat[:, rotation.pairs]
            return q

        return add

    layers = [n for n, spec in enumerate(host.certificate.layers) if len(spec.rotation.inv_freq)]
    n_tokens = 0
    with torch.no_grad(), host.fast(), host.editing({layer: edit_of(layer) for layer in layers}):
        for piece in tqdm(pieces(host, windows), "means", unit="text", disable=not progress):
            host.run(piece.ids[None].to(host.device), None, logits=False)
            n_tokens += len(piece.ids)
    if not sums.isfinite().all():
        layer = int((~sums.isfinite()).nonzero()[0, 0])
        raise ValueError(f"layer {layer}: the queries hold NaN or infinity")
    values = (sums / n_tokens).masked_fill(~whole[..., None], math.nan)
    return BandMeans(values, n_tokens, host.fingerprint)
