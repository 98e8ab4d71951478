"""Accumulators: they take queries and keys layer by layer and give `BandScores` in the end."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import fields
from itertools import pairwise
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

import ropelens_kernels as kernels
from ropelens.hosts import Certificate, LayerSpec
from ropelens.metrics.sums import REDUCTIONS, LayerSums, OpenDocuments, Reduction, mapped, more_squared
from ropelens.scores import BandScores, same_model


class BandAccumulator:
    """Adds up one metric over forward passes; every row of a batch is one document.

    Args:
        tol: Tolerance of the kernel (entropy: nats a row; activation: relative, harmonic method).
        method: Method of the kernel; see `ropelens_kernels`.
        split_first: Whether to keep the part of each query's first visible key apart too.
        edges: Positions, ascending, between which queries are summed apart too; texts must begin at the
            first place of their row then.
    """

    metric: ClassVar[str]
    _kernel: ClassVar[Callable[..., kernels.EntropyResult | kernels.ActivationResult]]

    def __init__(
        self,
        *,
        tol: float = 1e-3,
        method: str = "auto",
        split_first: bool = False,
        edges: Sequence[int] = (),
    ) -> None:
        if any(b <= a for a, b in pairwise((0, *edges))):
            raise ValueError(f"expected ascending edges above 0, got {list(edges)}")
        self.tol, self.method = tol, method
        self.split_first, self.edges = split_first, tuple(edges)
        self._certificate: Certificate | None = None
        self._sums: list[LayerSums | None] = []
        self._open: list[OpenDocuments | None] = []

    def bind(self, certificate: Certificate) -> None:
        """Makes room for a model's layers; called by the hook functions.

        Raises:
            ValueError: If the accumulator already holds another model's sums.
        """
        if self._certificate is None:
            self._certificate = certificate
            self._sums = [None] * len(certificate.layers)
            self._open = [None] * len(certificate.layers)
        elif why := same_model(self._certificate.fingerprint, certificate.fingerprint):
            raise ValueError(
                f"this accumulator already holds another model's {self.metric} ({why}): use a new one"
            )

    def update(
        self,
        layer: int,
        q: Float[Tensor, "batch query head d_head"],
        k: Float[Tensor, "batch key kv_head d_head"],
        mask: Bool[Tensor, "batch key"],
        sound: Bool[Tensor, ""] | None = None,
    ) -> None:
        """Adds the queries of one forward pass through one layer.

        Fewer queries than keys are the last ones, as with a key-value cache: each row goes on with the
        document of the pass before.

        Args:
            layer: Which layer.
            q: Post-rotary queries.
            k: Post-rotary keys.
            mask: Which of the keys' tokens are real.
            sound: Whether the model's scores were those of q and k under the certified mask;
                `result` refuses if it ever was False.

        Raises:
            ValueError: If q or k hold NaN or infinity, naming the layer, or if there is no pass before
                to go on with.
        """
        if self._certificate is None:
            raise ValueError(
                "an accumulator belongs to a model: pass it to entropy_hooks or activation_hooks"
            )
        spec = self._certificate.layers[layer]
        before = self._begun(layer, q, k)
        edges = tuple(edge for edge in self.edges if edge < q.shape[1])
        if self.edges and not bool(mask[:, 0].all()):
            raise ValueError(
                f"layer {layer}: expected texts that begin at the first place, to count positions from "
                "there, got pads: pad on the right"
            )
        try:
            found = self._kernel(
                q,
                k,
                **spec.kernel_arguments(q.device),
                mask=mask,
                tol=self.tol,
                method=self.method,
                split_first=self.split_first,
                edges=edges or None,
                **self._options(spec, q),
            )
        except ValueError as error:
            raise ValueError(f"layer {layer}: {error}") from error
        sums = self._sums_of(layer, q.device)
        documents = OpenDocuments.of(found)
        added = documents if before is None else before + documents
        self._open[layer] = added
        residual, bound = getattr(found, "residual", None), getattr(found, "bound", None)
        self._sums[layer] = LayerSums(
            **self._parts(sums, found, mask, edges, before),
            values=sums.values + found.values.sum(0),
            rest=sums.rest + found.rest.sum(0),
            squares=sums.squares + more_squared(found.values, before and before.values),
            rest_squares=sums.rest_squares + more_squared(found.rest, before and before.rest),
            residual=sums.residual if residual is None else sums.residual.maximum(residual.amax(0)),
            bound=sums.bound if bound is None else sums.bound + bound.sum(0),
            n_queries=sums.n_queries + found.n_queries.sum(),
            n_pairs=sums.n_pairs + found.n_pairs.sum(),
            n_documents=sums.n_documents + documents.begun(before),
            sound=sums.sound if sound is None else sums.sound & sound,
        )

    def _begun(self, layer: int, q: Tensor, k: Tensor) -> OpenDocuments | None:
        """The documents that a pass goes on with; None if it begins its own."""
        if q.shape[1] == k.shape[1]:
            return None
        if self.edges:
            raise ValueError(
                f"layer {layer}: expected whole texts, to count positions in, got {q.shape[1]} queries for "
                f"{k.shape[1]} keys: measure by position without a key-value cache"
            )
        before = self._open[layer]
        if before is None or len(before.values) != len(q):
            raise ValueError(
                f"layer {layer}: expected a pass before with {len(q)} texts to go on with, got none: measure "
                "generation with a key-value cache from its first pass on"
            )
        return before

    def _options(self, spec: LayerSpec, q: Tensor) -> dict[str, str]:
        """What else the kernel is told for this layer."""
        return {}

    def _parts(
        self,
        sums: LayerSums,
        found: kernels.EntropyResult | kernels.ActivationResult,
        mask: Bool[Tensor, "batch pos"],
        edges: tuple[int, ...],
        before: OpenDocuments | None,
    ) -> dict[str, Tensor]:
        """The new sums of the first key's part and by position, as far as they were asked for."""
        new: dict[str, Tensor] = {}
        first, first_rest = found.first_values, found.first_rest
        if first is not None and first_rest is not None:
            new |= {"first": first.sum(0), "first_rest": first_rest.sum(0)}
            new["later_squares"] = more_squared(found.values - first, before and before.later)
            new["later_rest_squares"] = more_squared(found.rest - first_rest, before and before.later_rest)
        if self.edges:
            by_position = found.values[:, None] if found.by_position is None else found.by_position
            counted = torch.stack([mask[:, a:b].sum() for a, b in pairwise((0, *edges, mask.shape[1]))])
            missing = len(self.edges) + 1 - len(counted)  # spans beyond the end of these texts
            pad = torch.nn.functional.pad
            new["by_position"] = pad(by_position.sum(0), (0, 0, 0, 0, 0, missing))
            new["span_queries"] = pad(counted, (0, missing))
        return {name: getattr(sums, name) + more for name, more in new.items()}

    def _sums_of(self, layer: int, device: torch.device) -> LayerSums:
        assert self._certificate is not None
        sums = self._sums[layer]
        if sums is None:
            spec = self._certificate.layers[layer]
            n_spans = len(self.edges) + 1 if self.edges else 0
            return LayerSums.zero(
                spec.n_heads, len(spec.rotation.inv_freq), device, self.split_first, n_spans
            )
        if sums.values.device == device:
            return sums
        return mapped(sums, lambda tensor: tensor.to(device))  # restored: they came from a file

    def copy(self) -> BandAccumulator:
        """Returns an accumulator of the same sums; it keeps them when this one goes on."""
        other = copy(self)
        other._sums, other._open = list(self._sums), list(self._open)
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
        return REDUCTIONS[name.split(".")[-1]]

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

        def spans() -> Float64[Tensor, "span layer head band"]:
            n_spans = len(self.edges) + 1
            rows = torch.full((n_spans, *table("values").shape), math.nan, dtype=torch.float64)
            for layer, s in enumerate(sums):
                assert s.by_position is not None
                rows[:, layer, :, : s.by_position.shape[-1]] = s.by_position.cpu()
            return rows

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
            settings={"tol": self.tol, "method": self.method}
            | ({"edges": list(self.edges)} if self.edges else {}),
            first=table("first") if self.split_first else None,
            first_rest=column("first_rest") if self.split_first else None,
            later_squares=table("later_squares") if self.split_first else None,
            later_rest_squares=column("later_rest_squares") if self.split_first else None,
            by_position=spans() if self.edges else None,
            span_queries=sums[0].span_queries.cpu() if sums[0].span_queries is not None else None,
        )


def not_the_certified(layer: int) -> str:
    """What to say when the scores seen are not those of the queries and keys seen."""
    return (
        f"layer {layer}: the model's scores are not those of its queries and keys under the certified mask: "
        "a hook edits them, texts are packed, pads lie between tokens, or a beam search mixes texts; put "
        "hooks that edit queries or keys before ropelens's own"
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
    compiled = False
    """Whether torch.compile makes the kernel where it can: on a CPU, in float32, without softcap."""

    def _options(self, spec: LayerSpec, q: Tensor) -> dict[str, str]:
        able = spec.softcap is None and q.device.type == "cpu" and q.dtype != torch.float64
        return {"backend": "compiled"} if self.compiled and able and self.tol >= 1e-5 else {}


class ActivationAccumulator(BandAccumulator):
    """Adds up the total activation of every band; see `band_activation`.

    Example:
        >>> ActivationAccumulator().metric
        'activation'
    """

    metric = "activation"
    _kernel = staticmethod(kernels.activation)


class NormProductAccumulator(BandAccumulator):
    """Adds up, by band, the norm of each query times that of each key it sees, in logit units.

    Example:
        >>> NormProductAccumulator().metric
        'norm_product'
    """

    metric = "norm_product"
    _kernel = staticmethod(kernels.norm_product)
