"""What a layer's attention does, as data: what a host claims and what certification confirms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from ropelens.bands import Bands


@dataclass(frozen=True, eq=False)
class Rotation:
    """One way in which a layer may rotate its queries and keys.

    Attributes:
        inv_freq: Radians per token of each band, as used.
        pairs: The dims of a head that make up each band.
        amplitude: The factor that rotated dims are also multiplied with.
    """

    inv_freq: Float64[Tensor, " band"]
    pairs: Int64[Tensor, "band 2"]
    amplitude: float = 1.0


@dataclass(frozen=True, eq=False)
class LayerView:
    """What a host shows of one layer in one forward pass.

    Attributes:
        q: Post-rotary queries.
        k: Post-rotary keys.
        visible: Which keys each query sees.
        scores: The model's own scores, where the host shows them.
        v, output: The values, and what the model's own attention made of them, where it does not.
        tables: The (cos, sin) that the layer may have rotated with, a position a row.
        given: What the model handed to its attention function, by name, where there is one.
        doubt: Why the host itself does not trust the layer, or "".
    """

    q: Float[Tensor, "batch pos head d_head"]
    k: Float[Tensor, "batch pos kv_head d_head"]
    visible: Bool[Tensor, "batch heads query key"]
    scores: Float[Tensor, "batch head query key"] | None = None
    v: Float[Tensor, "batch pos kv_head d_value"] | None = None
    output: Float[Tensor, "batch pos head d_value"] | None = None
    tables: tuple[tuple[Float[Tensor, "row width"], Float[Tensor, "row width"]], ...] = ()
    given: dict[str, Any] = field(default_factory=dict)
    doubt: str = ""


@dataclass(frozen=True, eq=False)
class LayerClaim:
    """What a host says of one layer before anything is measured.

    Attributes:
        scale: The multiplier of `q . k`.
        softcap: `c` where scores are `c * tanh(score / c)`.
        window: A query at p sees the keys i with `p - i < window`; None: all earlier ones.
        sinks: Learned logits of an extra outcome without a key, one a head.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Float[Tensor, " head"] | None = None


@dataclass(frozen=True, eq=False)
class LayerSpec:
    """One layer whose attention was rebuilt from its queries and keys.

    Attributes:
        scale, softcap, window, sinks: As in `LayerClaim`, confirmed.
        rotation: The rotation that the queries were seen to go through.
        layout: "half" (dims b and b + rotary_dim/2 form a band), "adjacent" (2b and 2b+1) or "none".
        error: The largest difference between the model's own scores (attention outputs, where a host
            shows no scores) and the rebuilt ones, as a share of their range.
    """

    n_heads: int
    n_kv_heads: int
    d_head: int
    scale: float
    softcap: float | None
    window: int | None
    sinks: Float[Tensor, " head"] | None
    rotation: Rotation
    layout: str
    error: float

    def kernel_arguments(self, device: torch.device) -> dict[str, Any]:
        """Returns what `ropelens_kernels` wants to know of a layer besides its queries and keys."""
        return {
            "pairs": self.rotation.pairs.to(device),
            "scale": self.scale,
            "window": self.window,
            "softcap": self.softcap,
            "sinks": self.sinks,
        }


@dataclass(frozen=True, eq=False)
class Certificate:
    """Every layer of a model, certified, and what identifies the model.

    Attributes:
        layers: One specification a layer.
        bands: The same rotations in one table.
        fingerprint: JSON-able identity of the model, equal on every host: a hash of the embedding
            and, per layer, the spread of its scores on a fixed sequence of tokens.
    """

    layers: tuple[LayerSpec, ...]
    bands: Bands
    fingerprint: dict[str, object] = field(repr=False)
