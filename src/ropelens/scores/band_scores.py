"""BandScores: a metric for every band of every head. Tensors are on the CPU, float64, detached."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from ropelens.bands import Bands
from ropelens.scores import provenance, saving
from ropelens.scores.saving import same_model

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

_SUMMED = ("values", "rest", "squares", "n_pairs", "bound", "rest_squares", "sampling_variance")
_SUMMED += ("first", "first_rest", "later_squares", "later_rest_squares", "by_position", "span_queries")
_COUNTS = ("n_queries", "n_tokens", "n_documents")


@dataclass(frozen=True, eq=False, kw_only=True)
class BandScores:
    """One number for each rotary band of each head: a metric summed over the queries of some text.

    Attributes:
        metric: "entropy" (nats; negative = the band lowers the entropy), "activation" or
            "norm_product" (logit units), "fisher", "taylor" (nats of loss), or "random".
        bands: Where the frequencies are.
        values: The sum over all counted queries (Fisher, Taylor: over documents); NaN for bands that a
            layer does not have.
        rest: The same for the dims that no band rotates.
        squares: The sum over documents of the squared value of each document.
        n_queries: Counted queries, the same for every layer.
        n_pairs: Visible (query, key) pairs per layer; sliding windows make layers differ.
        n_tokens: Tokens that are no padding.
        n_documents: Documents, the units of `stderr`; where `collect` cut them, each piece in a window.
        residual: The worst row's failure to add up, in the metric's unit; None if not measured.
        bound: A certified bound of the error of `values`; None if the method is exact.
        rest_squares: `squares` for `rest`.
        sampling_variance: The sum over documents of the variance that sampling labels leaves in
            the document's value; None unless labels were sampled at least twice.
        first: The part of `values` that is due to each query's first visible key (entropy: the entropy
            of "first key or not"); None if not kept apart. `first_rest` is the same for `rest`.
        later_squares: `squares` of what remains without it; `later_rest_squares` likewise.
        by_position: `values` apart for the queries between the positions `settings["edges"]`, and
            before and after; None if not kept apart.
        span_queries: How many queries each of these spans counts.
        documents: A number for each document, by its hash (`ropelens.data.document_numbers`), so that
            texts that overlap can be told; None if not kept.
        model: The fingerprint of the model that was measured.
        data: A hexadecimal digest of the text that was measured, or "".
        settings: How it was measured; anything JSON can hold.
    """

    metric: str
    bands: Bands
    values: Float64[Tensor, "layer head band"]
    rest: Float64[Tensor, "layer head"]
    squares: Float64[Tensor, "layer head band"]
    n_queries: int
    n_pairs: Int64[Tensor, " layer"]
    n_tokens: int
    n_documents: int
    residual: Float64[Tensor, "layer head"] | None = None
    bound: Float64[Tensor, "layer head band"] | None = None
    rest_squares: Float64[Tensor, "layer head"] | None = None
    sampling_variance: Float64[Tensor, "layer head band"] | None = None
    first: Float64[Tensor, "layer head band"] | None = None
    first_rest: Float64[Tensor, "layer head"] | None = None
    later_squares: Float64[Tensor, "layer head band"] | None = None
    later_rest_squares: Float64[Tensor, "layer head"] | None = None
    by_position: Float64[Tensor, "span layer head band"] | None = None
    span_queries: Int64[Tensor, " span"] | None = None
    documents: Int64[Tensor, " document"] | None = None
    model: dict[str, Any] = field(default_factory=dict)
    data: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        exists = self.exists
        for wrong, what in (
            (exists & ~self.values.isfinite(), "not finite, but the layer has that band"),
            (~exists & ~self.values.isnan(), "a number, but the layer has no such band"),
        ):
            if wrong.any():
                layer, head, band = wrong.nonzero()[0].tolist()
                raise ValueError(f"the {self.metric} of layer {layer}, head {head}, band {band} is {what}")
        if not self.rest.isfinite().all():
            layer, head = (~self.rest.isfinite()).nonzero()[0].tolist()
            raise ValueError(f"the {self.metric} of the rest of layer {layer}, head {head} is not finite")
        if not set(self.data) <= set("0123456789abcdef"):
            raise ValueError(f"expected data to be a hexadecimal digest or empty, got {self.data!r}")
        object.__setattr__(self, "settings", saving.as_json(self.settings, "settings"))
        object.__setattr__(self, "model", saving.as_json(self.model, "model"))

    def __repr__(self) -> str:
        n_layers, n_heads, n_bands = self.values.shape
        return (
            f"BandScores({self.metric}: {n_layers} layers x {n_heads} heads x {n_bands} bands, "
            f"{self.n_queries:,} queries of {self.n_documents:,} documents)"
        )

    @property
    def made_from(self) -> dict[str, Any]:
        """What these scores are of, as figures of them say: see `ropelens.plots.provenance`."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        more = {"metric": self.metric, **counts, "settings": self.settings}
        return provenance.facts("BandScores", self.model, self.data, **more)

    @property
    def exists(self) -> Bool[Tensor, "layer head band"]:
        """Which bands each layer has, for every head."""
        shape = tuple(self.values.shape)
        if (shape[0], shape[2]) != tuple(self.bands.inv_freq.shape):
            raise ValueError(
                f"values have {shape[0]} layers of {shape[2]} bands, "
                f"but bands has {self.bands.n_layers} of {self.bands.n_bands}"
            )
        return self.bands.exists[:, None, :].expand(shape)

    def count(self, per: str = "query") -> Float64[Tensor, " layer"]:
        """Returns what `mean` divides by, for each layer: queries, visible pairs, or documents.

        Raises:
            ValueError: If `per` is something else, or nothing was counted.
        """
        counts = {"query": self.n_queries, "pair": self.n_pairs, "document": self.n_documents}
        count = torch.as_tensor(counts[_choice("per", per, counts)], dtype=torch.float64)
        if not (count > 0).all():
            raise ValueError(f"there is no mean per {per}: no {per} was counted")
        return count.expand(self.bands.n_layers)

    def mean(self, per: str = "query") -> Float64[Tensor, "layer head band"]:
        """Returns `values` per counted query, per visible (query, key) pair, or per document.

        Args:
            per: "query", "pair" or "document".

        Raises:
            ValueError: If `per` is something else, or nothing was counted.

        Example:
            >>> bands = Bands.uniform(n_layers=1, d_head=2, base=100.0)
            >>> BandScores(
            ...     metric="activation", bands=bands, values=torch.tensor([[[6.0]]]).double(),
            ...     rest=torch.zeros(1, 1).double(), squares=torch.tensor([[[36.0]]]).double(),
            ...     n_queries=3, n_pairs=torch.tensor([6]), n_tokens=3, n_documents=1,
            ... ).mean("pair").item()
            1.0
        """
        return self.values / self.count(per)[:, None, None]

    def mean_by_position(self) -> Float64[Tensor, "span layer head band"]:
        """Returns `by_position` per query of each span; NaN where a span counts none.

        Raises:
            ValueError: If positions were not kept apart.
        """
        if self.by_position is None or self.span_queries is None:
            raise ValueError("these scores were not kept apart by position: measure them with collect")
        return self.by_position / self.span_queries[:, None, None, None]

    def without_first(self) -> BandScores:
        """Returns the scores without the part of each query's first visible key, the usual sink.

        Raises:
            ValueError: If that part was not kept apart.
        """
        if self.first is None or self.first_rest is None or self.later_squares is None:
            raise ValueError("the first key's part was not kept apart in these scores: measure with collect")
        return replace(
            self,
            values=self.values - self.first,
            rest=self.rest - self.first_rest,
            squares=self.later_squares,
            rest_squares=self.later_rest_squares,
            **dict.fromkeys(("first", "first_rest", "later_squares", "later_rest_squares"), None),
            by_position=None,
            span_queries=None,
            settings=self.settings | {"first_key": "left out"},
        )

    def stderr(self) -> Float64[Tensor, "layer head band"]:
        """Returns the standard error of `mean(per="document")`, from the spread between documents.

        Raises:
            ValueError: If there are fewer than 2 documents.
        """
        n = self.n_documents
        if n < 2:
            raise ValueError(f"a standard error needs at least 2 documents, and these scores have {n}")
        variance = (self.squares - self.values**2 / n) / (n - 1)
        return (variance.clamp(min=0) / n).sqrt()  # rounding can leave equal documents just below 0

    def sampling_stderr(self) -> Float64[Tensor, "layer head band"]:
        """Returns the part of the error of `mean(per="document")` that sampling labels leaves.

        Raises:
            ValueError: If labels were not sampled, or only once per document.
        """
        if self.sampling_variance is None:
            raise ValueError(
                "these scores know no sampling error: measure with band_fisher and n_samples >= 2"
            )
        return self.sampling_variance.sqrt() / self.n_documents

    def importance(self, normalize: str = "head") -> Float64[Tensor, "layer head band"]:
        """Returns |values| over the largest of each head, each layer, or the model: 0 to 1.

        The absolute value is taken after summing over queries. A head (layer, model) whose values
        are all 0 stays 0; bands that a layer does not have stay NaN.

        Args:
            normalize: "head", "layer" or "model".

        Raises:
            ValueError: If `normalize` is something else.
        """
        dims = {"head": (2,), "layer": (1, 2), "model": (0, 1, 2)}[_choice("normalize", normalize, _SCOPES)]
        size = self.values.abs()
        largest = size.nan_to_num(0.0).amax(dims, keepdim=True)
        return size / largest.where(largest > 0, 1.0)

    def lowest(
        self, fraction: float | int, scope: str = "model", normalize: str = "head"
    ) -> Bool[Tensor, "layer head band"]:
        """Returns a mask of the least important bands: True = remove.

        Of the n bands that exist in the scope, `round(fraction * n)` are marked; ties go in the
        order layer, head, band.

        Args:
            fraction: 0 to 1.
            scope: Where bands compete: "model" (all of them), or within each "layer" or "head".
            normalize: As in `importance`.

        Raises:
            ValueError: If an argument is outside of what is listed here.
        """
        if not 0 <= fraction <= 1:
            raise ValueError(f"expected a fraction from 0 to 1, got {fraction}")
        n_layers, n_heads, n_bands = self.values.shape
        rows = {"model": 1, "layer": n_layers, "head": n_layers * n_heads}[_choice("scope", scope, _SCOPES)]
        importance = self.importance(normalize).reshape(rows, -1)
        order = importance.argsort(dim=-1, stable=True)  # NaN comes last
        n_lowest = [round(fraction * n) for n in (~importance.isnan()).sum(-1).tolist()]
        chosen = torch.arange(importance.shape[1]) < torch.tensor(n_lowest)[:, None]
        mask = torch.zeros_like(chosen).scatter(1, order, chosen)
        return mask.reshape(n_layers, n_heads, n_bands)

    def merge(self, other: BandScores) -> BandScores:
        """Returns the scores of both texts together; neither operand changes.

        Sums and counts add up, the worst residual is kept, error bounds add up. `data` becomes the
        sum of both digests, so the order of merging does not matter.

        Raises:
            ValueError: If metric, bands, model or settings differ.
        """
        if why := self._differs_from(other):
            raise ValueError(f"these scores cannot be merged: {why}")
        changes: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        for name in (*_SUMMED, "residual"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine is not None:
                changes[name] = torch.maximum(mine, theirs) if name == "residual" else mine + theirs
        changes["documents"] = None
        if self.documents is not None and other.documents is not None:
            changes["documents"] = torch.cat([self.documents, other.documents]).unique()
        width = max(len(self.data), len(other.data))
        digest = (int(self.data or "0", 16) + int(other.data or "0", 16)) % 16**width
        return replace(self, **changes, data=f"{digest:0{width}x}" if width else "")

    def _differs_from(self, other: BandScores) -> str | None:
        if self.metric != other.metric:
            return f"one holds {self.metric}, the other {other.metric}"
        if why := self.bands.differs_from(other.bands):
            return f"their bands differ ({why})"
        if self.values.shape != other.values.shape:
            return f"one has {self.values.shape[1]} heads a layer, the other {other.values.shape[1]}"
        if why := same_model(self.model, other.model):
            return f"they measure different models ({why})"
        for key in sorted(self.settings.keys() | other.settings.keys()):
            if (mine := self.settings.get(key)) != (theirs := other.settings.get(key)):
                return f"the setting {key} is {mine!r} in one and {theirs!r} in the other"
        for name in (*_SUMMED, "residual"):
            if (getattr(self, name) is None) != (getattr(other, name) is None):
                return f"only one of them has {name}"
        return None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes everything into one safetensors file, whole or not at all."""
        tensors = {f"bands.{name}": getattr(self.bands, name) for name in _BANDS}
        names = (*_SUMMED, "residual", "documents")
        tensors |= {name: t for name in names if (t := getattr(self, name)) is not None}
        facts = {name: getattr(self, name) for name in ("metric", *_COUNTS, "model", "data", "settings")}
        saving.write(path, "BandScores", tensors, facts)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any = None) -> BandScores:
        """Returns the scores that `save` wrote.

        Args:
            model: If given, the scores must be of this model.

        Raises:
            OSError: If there is no such file.
            ValueError: If the file is truncated, of another format version, holds something else,
                or the scores of another model than `model`.
        """
        tensors, facts = saving.read(path, "BandScores")
        saving.check_model(path, facts["model"], model)
        bands = Bands(**{name: tensors.pop(f"bands.{name}") for name in _BANDS})
        del facts["kind"], facts["format"]
        return cls(bands=bands, **tensors, **facts)

    def to_frame(self) -> pd.DataFrame:
        """Returns one row per existing band: layer, head, band, wavelength (tokens), value.

        The unrotated dims have no wavelength and no row; they are in `rest`.
        """
        import pandas as pd

        layer, head, band = self.exists.nonzero().T
        columns = {"layer": layer, "head": head, "band": band}
        columns |= {"wavelength": self.bands.wavelength[layer, band], "value": self.values[self.exists]}
        frame = pd.DataFrame({name: column.numpy() for name, column in columns.items()})
        return provenance.tagged(frame, self.made_from)

    def profile(self) -> pd.DataFrame:
        """Returns how each head spreads the metric over its bands: one row a layer and head.

        Shares are those of `|values|` among the bands of the head; `rest` is left out.

        Returns:
            layer, head; total (the sum of `values`); centroid (the mean wavelength in tokens,
            geometric, weighted by shares); effective_bands (exp of the shares' entropy: 1 = one band
            has all, n = n bands have the same); top_band, top_wavelength, top_share (the strongest
            band). A head whose values are all 0 has no centroid and no effective bands.
        """
        from ropelens.scores.profile import profile

        return provenance.tagged(profile(self), self.made_from)

    def plot(self, **kwargs: Any) -> Figure:
        """Returns a layer x band heatmap with a head selector; see `ropelens.plots.band_heatmap`."""
        from ropelens.plots import band_heatmap  # plots import scores: the one arrow that points back

        return band_heatmap(self, **kwargs)


def random_scores(scores: BandScores, seed: int = 0) -> BandScores:
    """Returns scores of the same bands drawn uniformly from 0 to 1: the control for an importance.

    Example:
        >>> bands = Bands.uniform(n_layers=1, d_head=2, base=100.0)
        >>> zero = torch.zeros(1, 1, 1).double()
        >>> scores = BandScores(
        ...     metric="activation", bands=bands, values=zero, rest=zero[0], squares=zero,
        ...     n_queries=1, n_pairs=torch.tensor([1]), n_tokens=1, n_documents=1,
        ... )
        >>> torch.equal(random_scores(scores, seed=3).values, random_scores(scores, seed=3).values)
        True
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(scores.values.shape, generator=generator, dtype=torch.float64)
    values = drawn.where(scores.exists, math.nan)
    return BandScores(
        metric="random",
        bands=scores.bands,
        values=values,
        rest=torch.zeros_like(scores.rest),
        squares=values**2,
        n_queries=scores.n_queries,
        n_pairs=scores.n_pairs,
        n_tokens=scores.n_tokens,
        n_documents=1,  # one draw: no spread, no standard error
        model=scores.model,
        settings={"seed": seed},
    )


_SCOPES = ("head", "layer", "model")
_BANDS = ("inv_freq", "pairs", "n_rest", "amplitude")


def _choice(name: str, value: str, choices: Any) -> str:
    if value not in choices:
        raise ValueError(f"expected {name} to be one of {', '.join(choices)}, got {value!r}")
    return value
