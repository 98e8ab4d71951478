"""Where the rotary frequencies are: which pairs of dims rotate, how fast, layer by layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64, Int64
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Bands:
    """The rotary frequency bands of a model: one band is one rotated pair of dims of a head.

    Bands that a layer does not have are NaN in `inv_freq` and -1 in `pairs`; layers are aligned by
    the index of the band, so the number of columns is that of the layer with the most bands.

    Attributes:
        inv_freq: Angular frequency of each band as the model uses it, in radians per token. 0 marks
            a pair that exists but is not rotated.
        pairs: The two dims of a head that make up each band.
        n_rest: Per layer, the number of dims of a head that no band rotates.
        amplitude: Per layer, the factor that the rotation also multiplies q and k with (1 except
            under yarn and longrope scaling).

    Example:
        >>> bands = Bands.uniform(n_layers=2, d_head=8, base=100.0)
        >>> [round(w, 1) for w in bands.wavelength[0].tolist()]
        [6.3, 19.9, 62.8, 198.7]
    """

    inv_freq: Float64[Tensor, "layer band"]
    pairs: Int64[Tensor, "layer band 2"]
    n_rest: Int64[Tensor, " layer"]
    amplitude: Float64[Tensor, " layer"]

    @classmethod
    def of(cls, model: Any) -> Bands:
        """Returns the bands of `model`, with the frequencies measured from its own rotation.

        Args:
            model: A HookedTransformer, a TransformerBridge or a transformers model.

        Raises:
            ValueError: If the model has no rotary layer or its attention cannot be rebuilt.
        """
        from ropelens.hosts import host_of  # hosts import bands: the one arrow that points back

        return host_of(model).bands

    @classmethod
    def stack(cls, layers: list[tuple[Tensor, Tensor, int, float]]) -> Bands:
        """Returns the bands of layers given as (inv_freq [band], pairs [band, 2], n_rest, amplitude)."""
        width = max((len(inv_freq) for inv_freq, *_ in layers), default=0)
        inv_freq = torch.full((len(layers), width), math.nan, dtype=torch.float64)
        pairs = torch.full((len(layers), width, 2), -1, dtype=torch.int64)
        for row, (layer_freq, layer_pairs, _, _) in enumerate(layers):
            inv_freq[row, : len(layer_freq)] = layer_freq.to("cpu", torch.float64)
            pairs[row, : len(layer_freq)] = layer_pairs.to("cpu", torch.int64)
        n_rest = torch.tensor([n for _, _, n, _ in layers], dtype=torch.int64)
        amplitude = torch.tensor([a for *_, a in layers], dtype=torch.float64)
        return cls(inv_freq, pairs, n_rest, amplitude)

    @classmethod
    def uniform(
        cls, n_layers: int, d_head: int, base: float, rotary_dim: int | None = None, adjacent: bool = False
    ) -> Bands:
        """Returns the textbook ladder `base ** (-2b / rotary_dim)` for every layer.

        Args:
            rotary_dim: How many leading dims of a head rotate; all by default.
            adjacent: Whether a band is the dims (2b, 2b+1), rather than (b, b + rotary_dim/2).
        """
        rotary_dim = d_head if rotary_dim is None else rotary_dim
        inv_freq = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
        return cls.stack([(inv_freq, pair_dims(rotary_dim, adjacent), d_head - rotary_dim, 1.0)] * n_layers)

    @property
    def wavelength(self) -> Float64[Tensor, "layer band"]:
        """Tokens for one full turn, `2 pi / inv_freq`; infinite where a pair is not rotated."""
        return 2 * math.pi / self.inv_freq

    @property
    def exists(self) -> Tensor:
        """Bool [layer, band]: which bands each layer has."""
        return ~self.inv_freq.isnan()

    @property
    def n_layers(self) -> int:
        return self.inv_freq.shape[0]

    @property
    def n_bands(self) -> int:
        """The number of columns: the bands of the layer that has most."""
        return self.inv_freq.shape[1]

    def layer_pairs(self, layer: int) -> Tensor:
        """Int [band, 2]: the pairs of dims of the bands that `layer` has."""
        return self.pairs[layer][self.exists[layer]]

    def differs_from(self, other: Bands, rtol: float = 1e-6) -> str | None:
        """Returns in a few words how `other` differs, or None if both describe the same bands."""
        if self.inv_freq.shape != other.inv_freq.shape:
            return f"{list(self.inv_freq.shape)} against {list(other.inv_freq.shape)} [layer, band]"
        if not torch.equal(self.pairs, other.pairs) or not torch.equal(self.n_rest, other.n_rest):
            return "the pairs of dims differ"
        if not torch.allclose(self.inv_freq, other.inv_freq, rtol=rtol, atol=0, equal_nan=True):
            return "the frequencies differ"
        return None


def pair_dims(rotary_dim: int, adjacent: bool) -> Int64[Tensor, "band 2"]:
    """Returns the dims of each band: (2b, 2b+1) if `adjacent`, else (b, b + rotary_dim/2).

    Example:
        >>> pair_dims(4, adjacent=False).tolist()
        [[0, 2], [1, 3]]
    """
    dims = torch.arange(rotary_dim)
    return dims.reshape(-1, 2) if adjacent else dims.reshape(2, -1).T.contiguous()
