"""Accumulators: they take queries and keys layer by layer and give `BandScores` in the end."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

import ropelens_kernels as kernels
from ropelens.hosts import Certificate
from ropelens.scores import BandScores, same_model


@dataclass
class LayerSums:
    """What one layer has added up so far, on the layer's own device.

    Updates replace these tensors and never change one, so that a copy of the references is a snapshot.
    Two processes' sums add up, unless a field's `reduce` says otherwise.
    """

    values: Float64[Tensor, "head band"]
    rest: Float64[Tensor, " head"]
    squares: Float64[Tensor, "head band"]
    rest_squares: Float64[Tensor, " head"]
    residual: Float64[Tensor, " head"] = field(metadata={"reduce": "max"})
    bound: Float64[Tensor, "head band"]
    n_queries: Int64[Tensor, ""]
    n_pairs: Int64[Tensor, ""]
    n_documents: Int64[Tensor, ""]
    sound: Bool[Tensor, ""] = field(metadata={"reduce": "min"})

    @classmethod
    def zero(cls, n_heads: int, n_bands: int, device: torch.device) -> LayerSums:
        by_band = torch.zeros(n_heads, n_bands, dtype=torch.float64, device=device)
        by_head, count = by_band.new_zeros(n_heads), torch.zeros((), dtype=torch.int64, device=device)
        return cls(
            values=by_band,
            rest=by_head,
            squares=by_band,
            rest_squares=by_head,
            residual=by_head,
            bound=by_band,
            n_queries=count,
            n_pairs=count,
            n_documents=count,
            sound=torch.ones((), dtype=torch.bool, device=device),
        )


Reduction = Literal["sum", "max", "min"]
_REDUCTIONS: dict[str, Reduction] = {f.name: f.metadata.get("reduce", "sum") for f in fields(LayerSums)}


def _map(sums: LayerSums, change: Callable[[Tensor], Tensor]) -> LayerSums:
    tensors = {f.name: getattr(sums, f.name) for f in fields(sums)}
    return LayerSums(**{name: None if t is None else change(t) for name, t in tensors.items()})  # pyright: ignore[reportArgumentType]


class BandAccumulator:
    """Adds up one metric over forward passes; every row of a batch is one document.

    Args:
        tol: Tolerance of the kernel (entropy: nats a row; activation: relative, harmonic method).
        method: Method of the kernel; see `ropelens_kernels`.
    """

    metric: ClassVar[str]
    _kernel: ClassVar[Callable[..., kernels.EntropyResult | kernels.ActivationResult]]

    def __init__(self, *, tol: float = 1e-3, method: str = "auto") -> None:
        self.tol, self.method = tol, method
        self._certificate: Certificate | None = None
        self._sums: list[LayerSums | None] = []

    def bind(self, certificate: Certificate) -> None:
        """Makes room for a model's layers; called by the hook functions.

        Raises:
            ValueError: If the accumulator already holds another model's sums.
        """
        if self._certificate is None:
            self._certificate = certificate
            self._sums = [None] * len(certificate.layers)
        elif why := same_model(self._certificate.fingerprint, certificate.fingerprint):
            raise ValueError(
                f"this accumulator already holds another model's {self.metric} ({why}): use a new one"
            )

    def update(
        self,
        layer: int,
        q: Float[Tensor, "batch pos head d_head"],
        k: Float[Tensor, "batch pos kv_head d_head"],
        mask: Bool[Tensor, "batch pos"],
        sound: Bool[Tensor, ""] | None = None,
    ) -> None:
        """Adds the queries of one forward pass through one layer.

        Args:
            layer: Which layer.
            q: Post-rotary queries.
            k: Post-rotary keys.
            mask: Which tokens are real.
            sound: Whether the model's scores were those of q and k under the certified mask;
                `result` refuses if it ever was False.

        Raises:
            ValueError: If q or k hold NaN or infinity, naming the layer.
        """
        if self._certificate is None:
            raise ValueError(
                "an accumulator belongs to a model: pass it to entropy_hooks or activation_hooks"
            )
        spec = self._certificate.layers[layer]
        try:
            found = self._kernel(
                q,
                k,
                pairs=spec.rotation.pairs.to(q.device),
                scale=spec.scale,
                mask=mask,
                window=spec.window,
                softcap=spec.softcap,
                sinks=spec.sinks,
                tol=self.tol,
                method=self.method,
            )
        except ValueError as error:
            raise ValueError(f"layer {layer}: {error}") from error
        sums = self._sums_of(layer, q.device)
        residual, bound = getattr(found, "residual", None), getattr(found, "bound", None)
        self._sums[layer] = LayerSums(
            values=sums.values + found.values.sum(0),
            rest=sums.rest + found.rest.sum(0),
            squares=sums.squares + found.values.square().sum(0),
            rest_squares=sums.rest_squares + found.rest.square().sum(0),
            residual=sums.residual if residual is None else sums.residual.maximum(residual.amax(0)),
            bound=sums.bound if bound is None else sums.bound + bound.sum(0),
            n_queries=sums.n_queries + found.n_queries.sum(),
            n_pairs=sums.n_pairs + found.n_pairs.sum(),
            n_documents=sums.n_documents + (found.n_queries > 0).sum(),  # a row of pads is no document
            sound=sums.sound if sound is None else sums.sound & sound,
        )

    def _sums_of(self, layer: int, device: torch.device) -> LayerSums:
        assert self._certificate is not None
        sums = self._sums[layer]
        if sums is None:
            spec = self._certificate.layers[layer]
            return LayerSums.zero(spec.n_heads, len(spec.rotation.inv_freq), device)
        if sums.values.device == device:
            return sums
        return _map(sums, lambda tensor: tensor.to(device))  # restored: they came from a file

    def copy(self) -> BandAccumulator:
        """Returns an accumulator of the same sums; it keeps them when this one goes on."""
        other = copy(self)
        other._sums = list(self._sums)
        return other

    def state(self) -> dict[str, Tensor]:
        """Returns all that was added up, on the CPU, by name: "3.values" are the values of layer 3."""
        state = {}
        for layer in range(len(self._sums)):
            sums = self._sums_of(layer, torch.device("cpu"))
            state |= {f"{layer}.{f.name}": getattr(sums, f.name) for f in fields(sums)}
        return {name: tensor.clone() for name, tensor in state.items() if tensor is not None}

    def restore(self, state: Mapping[str, Tensor], certificate: Certificate) -> None:
        """Goes on from what `state` returned, of this process or reduced over several."""
        self.bind(certificate)
        for layer in range(len(certificate.layers)):
            tensors = {f.name: state.get(f"{layer}.{f.name}") for f in fields(LayerSums)}
            self._sums[layer] = LayerSums(**tensors)  # pyright: ignore[reportArgumentType]

    def check(self) -> None:
        """Raises a ValueError if the scores of any layer were not those of its queries and keys."""
        for layer, sums in enumerate(self._sums):
            if sums is not None and not bool(sums.sound):
                raise ValueError(not_the_certified(layer))

    @staticmethod
    def reduction(name: str) -> Reduction:
        """Returns how an entry of `state` combines with that of another process."""
        return _REDUCTIONS[name.split(".")[-1]]

    def result(self, data: str = "") -> BandScores:
        """Returns the scores of all that was added.

        Args:
            data: Digest of the tokens, where known.

        Raises:
            ValueError: If nothing was added, a layer missed a forward pass, or the model's scores were
                not those of its queries and keys under the certified mask.
        """
        certificate = self._certificate
        if certificate is None or all(s is None for s in self._sums):
            raise ValueError(f"no {self.metric} was measured: run the model with the hooks in place first")
        done = [0 if s is None else int(s.n_documents) for s in self._sums]
        if min(done) != max(done):
            layer = done.index(min(done))
            raise ValueError(
                f"layer {layer} measured {min(done)} texts and others {max(done)}: a forward pass was cut "
                "short or left out layers; start again with a new accumulator"
            )
        sums = [s for s in self._sums if s is not None]
        self.check()
        bands = certificate.bands

        def table(name: str) -> Float64[Tensor, "layer head band"]:
            rows = torch.full(
                (len(sums), *(sums[0].rest.shape), bands.n_bands), math.nan, dtype=torch.float64
            )
            for row, s in zip(rows, sums, strict=True):
                filled = getattr(s, name).cpu()
                row[:, : filled.shape[-1]] = filled
            return rows

        def column(name: str) -> Float64[Tensor, "layer head"]:
            return torch.stack([getattr(s, name).cpu() for s in sums])

        residual = column("residual")
        if self.metric == "entropy" and float(residual.max()) > self.tol:
            layer, head = divmod(int(residual.argmax()), residual.shape[1])
            warnings.warn(
                f"the bands of a query of layer {layer}, head {head} miss its entropy drop by "
                f"{float(residual.max()):.1e} nats, more than tol={self.tol:g}",
                stacklevel=2,
            )
        n_queries = int(sums[0].n_queries)
        return BandScores(
            metric=self.metric,
            bands=bands,
            values=table("values"),
            rest=column("rest"),
            squares=table("squares"),
            rest_squares=column("rest_squares"),
            residual=residual if self.metric == "entropy" else None,
            bound=table("bound").nan_to_num(0.0) if self.metric == "activation" else None,
            n_queries=n_queries,
            n_pairs=torch.stack([s.n_pairs.cpu() for s in sums]),
            n_tokens=n_queries,
            n_documents=done[0],
            model=certificate.fingerprint,
            data=data,
            settings={"tol": self.tol, "method": self.method},
        )


def not_the_certified(layer: int) -> str:
    """What to say when the scores seen are not those of the queries and keys seen."""
    return (
        f"layer {layer}: the model's scores are not those of its queries and keys under the certified mask: "
        "a hook edits them, or texts are packed; put hooks that edit queries or keys before ropelens's own"
    )


class EntropyAccumulator(BandAccumulator):
    """Adds up the entropy drop of every band; see `band_entropy`.

    Example:
        >>> acc = EntropyAccumulator(tol=1e-6)
        >>> acc.result()
        Traceback (most recent call last):
        ValueError: no entropy was measured: run the model with the hooks in place first
    """

    metric = "entropy"
    _kernel = staticmethod(kernels.entropy)


class ActivationAccumulator(BandAccumulator):
    """Adds up the total activation of every band; see `band_activation`.

    Example:
        >>> ActivationAccumulator().metric
        'activation'
    """

    metric = "activation"
    _kernel = staticmethod(kernels.activation)
