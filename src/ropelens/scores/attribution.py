"""BandAttribution: one query's attention, split among bands. Tensors are on the CPU, float64, detached."""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from ropelens.scores import provenance, saving

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

_TENSORS = ("inv_freq", "pairs", "values", "rest", "visible")
_FACTS = ("layer", "head", "query", "sink", "tokens", "residual", "model", "settings")


@dataclass(frozen=True, eq=False, kw_only=True)
class BandAttribution:
    """The attention that one query pays to each key, split among rotary bands.

    Attributes:
        query: The position of the query; the keys are 0 to `query`.
        inv_freq: Angular frequency of the bands of this layer, in radians per token.
        pairs: The two dims of a head that make up each band.
        values: What each band adds to the attention to each key; 0 for keys that are not visible.
        rest: The same for the dims that no band rotates.
        visible: Which keys the query can see.
        sink: The attention that goes to a learned sink, or None without one.
        tokens: The keys as text (their ids, where there was no tokenizer).
        residual: The largest failure of a key's entries to add up to its attention.
        model: The fingerprint of the model.
        settings: How it was measured; anything JSON can hold.
    """

    layer: int
    head: int
    query: int
    inv_freq: Float64[Tensor, " band"]
    pairs: Int64[Tensor, "band 2"]
    values: Float64[Tensor, "key band"]
    rest: Float64[Tensor, " key"]
    visible: Bool[Tensor, " key"]
    sink: float | None
    tokens: tuple[str, ...]
    residual: float
    model: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n_keys, n_tokens = self.values.shape[0], len(self.tokens)
        if not n_keys == n_tokens == self.query + 1:
            raise ValueError(
                f"query {self.query} has {self.query + 1} keys, but there are values for {n_keys} "
                f"and tokens for {n_tokens}"
            )
        if not (self.values.isfinite().all() and self.rest.isfinite().all()):
            raise ValueError(f"the attribution of layer {self.layer}, head {self.head} is not finite")
        object.__setattr__(self, "settings", saving.as_json(self.settings, "settings"))
        object.__setattr__(self, "model", saving.as_json(self.model, "model"))

    def __repr__(self) -> str:
        return (
            f"BandAttribution(layer {self.layer}, head {self.head}, query {self.query}: "
            f"{self.values.shape[0]:,} keys x {self.values.shape[1]} bands)"
        )

    @property
    def made_from(self) -> dict[str, Any]:
        """What this attribution is of, as figures of it say: see `ropelens.plots.provenance`."""
        place = {name: getattr(self, name) for name in ("layer", "head", "query")}
        digest = hashlib.sha256("\0".join(self.tokens).encode()).hexdigest()[:32]
        return provenance.facts("BandAttribution", self.model, digest, **place, settings=self.settings)

    @property
    def pattern(self) -> Float64[Tensor, " key"]:
        """The attention to each key, 0 to 1: the sum of its entries."""
        return self.values.sum(1) + self.rest

    @property
    def band_totals(self) -> Float64[Tensor, " band"]:
        """What each band adds to the attention to all keys together.

        Each total is the band's share of the dims of a head (times the part of the attention that
        starts outside of a learned sink): bands move attention between keys, they add none.
        """
        return self.values.sum(0)

    @property
    def wavelength(self) -> Float64[Tensor, " band"]:
        """Tokens for one full turn of each band."""
        return 2 * math.pi / self.inv_freq

    def to_frame(self) -> pd.DataFrame:
        """Returns one row per key and band: key, token, band, wavelength (tokens), value."""
        import numpy as np
        import pandas as pd

        n_keys, n_bands = self.values.shape
        frame = pd.DataFrame(
            {
                "key": np.repeat(np.arange(n_keys), n_bands),
                "token": np.repeat(np.array(self.tokens, dtype=object), n_bands),
                "band": np.tile(np.arange(n_bands), n_keys),
                "wavelength": np.tile(self.wavelength.numpy(), n_keys),
                "value": self.values.numpy().ravel(),
            }
        )
        return provenance.tagged(frame, self.made_from)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes everything into one safetensors file, whole or not at all."""
        facts = {name: getattr(self, name) for name in _FACTS}
        saving.write(path, "BandAttribution", {n: getattr(self, n) for n in _TENSORS}, facts)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any = None) -> BandAttribution:
        """Returns the attribution that `save` wrote; arguments and errors as in `BandScores.load`."""
        tensors, facts = saving.read(path, "BandAttribution")
        saving.check_model(path, facts["model"], model)
        facts["tokens"] = tuple(facts["tokens"])
        return cls(**tensors, **{name: facts[name] for name in _FACTS})

    def plot(self, **kwargs: Any) -> Figure:
        """Returns a key x band heatmap; see `ropelens.plots.attribution_heatmap`."""
        from ropelens.plots import attribution_heatmap  # as in BandScores.plot

        return attribution_heatmap(self, **kwargs)
