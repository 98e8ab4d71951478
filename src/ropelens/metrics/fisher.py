"""What a gain on each band does: to the model's output (Fisher information), and to its loss (Taylor)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from tqdm.auto import tqdm

from ropelens.hosts import Certificate, Edit, Host, LayerSpec
from ropelens.hosts.tokens import Tokens
from ropelens.metrics.accumulate import Reduction
from ropelens.scores import BandScores, same_model


def fisher(
    host: Host,
    tokens: Tokens,
    *,
    n_samples: int = 1,
    seed: int = 0,
    unit: Literal["band", "dim"] = "band",
    progress: bool = False,
) -> BandScores:
    """Returns the Fisher information of every band; `ropelens.band_fisher` documents it."""
    accumulator = FisherAccumulator(n_samples=n_samples, seed=seed, unit=unit)
    documents = tokens.documents()
    for index, ids in enumerate(tqdm(documents, "Fisher", unit="text", disable=not progress)):
        accumulator.update(host, ids, (index,))
    return accumulator.result(tokens.digest)


@dataclass
class FisherSums:
    """What was added up so far; updates replace these tensors and never change one."""

    values: Float64[Tensor, "layer head band"]
    rest: Float64[Tensor, "layer head"]
    squares: Float64[Tensor, "layer head band"]
    rest_squares: Float64[Tensor, "layer head"]
    spread: Float64[Tensor, "layer head band"]
    n_pairs: Int64[Tensor, " layer"]
    n_tokens: Int64[Tensor, ""]
    n_documents: Int64[Tensor, ""]

    @classmethod
    def zero(cls, certificate: Certificate) -> FisherSums:
        specs, n_bands = certificate.layers, certificate.bands.n_bands
        by_band = torch.zeros(len(specs), specs[0].n_heads, n_bands, dtype=torch.float64)
        by_head, count = by_band[..., :1].sum(-1), torch.zeros((), dtype=torch.int64)
        return cls(by_band, by_head, by_band, by_head, by_band, count.expand(len(specs)), count, count)


class FisherAccumulator:
    """Adds up Fisher information over documents; the arguments are those of `band_fisher`."""

    metric: ClassVar[str] = "fisher"

    def __init__(self, *, n_samples: int = 1, seed: int = 0, unit: Literal["band", "dim"] = "band") -> None:
        if n_samples < 1:
            raise ValueError(f"n_samples must be at least 1, got {n_samples}")
        if unit not in ("band", "dim"):
            raise ValueError(f'unit must be "band" or "dim", got {unit!r}')
        self.n_samples, self.seed, self.unit = n_samples, seed, unit
        self._certificate: Certificate | None = None
        self._sums: FisherSums | None = None

    def bind(self, certificate: Certificate) -> None:
        """Makes room for a model's layers; `update` and `restore` do so too."""
        if self._certificate is None:
            self._certificate, self._sums = certificate, FisherSums.zero(certificate)
        elif why := same_model(self._certificate.fingerprint, certificate.fingerprint):
            raise ValueError(
                f"this accumulator already holds another model's {self.metric} ({why}): use a new one"
            )

    def update(self, host: Host, ids: Int64[Tensor, "1 pos"], index: tuple[int, ...]) -> None:
        """Adds one document.

        Args:
            host: The model.
            ids: The document.
            index: What tells it from all others: with `seed`, it seeds the labels.

        Raises:
            ValueError: If gradients are off, or hold NaN or infinity, naming the layer.
        """
        if torch.is_inference_mode_enabled():
            raise ValueError(f"{self.metric} needs gradients: leave torch.inference_mode() for it")
        self.bind(host.certificate)
        sums, specs = self._sums, host.certificate.layers
        assert sums is not None
        drawn, drawn_rest = zip(*self._draws(host, ids, index), strict=True)
        sampled, rest = torch.stack(drawn), torch.stack(drawn_rest).mean(0)
        values = sampled.mean(0)
        for layer in range(len(specs)):
            if not bool(values[layer].isfinite().all() and rest[layer].isfinite().all()):
                raise ValueError(
                    f"layer {layer}: the gradients hold NaN or infinity; is the model in half precision?"
                )
        n_pairs = torch.tensor([_n_pairs(ids.shape[1], spec.window) for spec in specs])
        self._sums = FisherSums(
            values=sums.values + values,
            rest=sums.rest + rest,
            squares=sums.squares + values.square(),
            rest_squares=sums.rest_squares + rest.square(),
            spread=sums.spread + sampled.var(0) / self.n_samples if self.n_samples > 1 else sums.spread,
            n_pairs=sums.n_pairs + n_pairs,
            n_tokens=sums.n_tokens + ids.shape[1],
            n_documents=sums.n_documents + 1,
        )

    def _draws(
        self, host: Host, ids: Int64[Tensor, "1 pos"], index: tuple[int, ...]
    ) -> Iterator[tuple[Float64[Tensor, "layer head band"], Float64[Tensor, "layer head"]]]:
        for gradient in gain_gradients(host, ids, n_samples=self.n_samples, seed=(self.seed, *index)):
            yield _squared(gradient, host.certificate.layers, host.bands.n_bands, self.unit)

    def settings(self) -> dict[str, object]:
        """Returns what decides the values, for JSON."""
        return {"n_samples": self.n_samples, "seed": self.seed, "unit": self.unit}

    def copy(self) -> FisherAccumulator:
        """Returns an accumulator of the same sums; it keeps them when this one goes on."""
        return copy(self)

    def state(self) -> dict[str, Tensor]:
        """Returns all that was added up, by name."""
        sums = self._sums
        return {} if sums is None else {name: tensor.clone() for name, tensor in vars(sums).items()}

    def restore(self, state: Mapping[str, Tensor], certificate: Certificate) -> None:
        """Goes on from what `state` returned, of this process or summed over several."""
        self.bind(certificate)
        self._sums = FisherSums(**state)

    @staticmethod
    def reduction(name: str) -> Reduction:
        """Returns how an entry of `state` combines with that of another process."""
        return "sum"

    def result(self, data: str = "") -> BandScores:
        """Returns the scores of all that was added.

        Args:
            data: Digest of the tokens, where known.

        Raises:
            ValueError: If nothing was added.
        """
        sums, certificate = self._sums, self._certificate
        if sums is None or certificate is None or not sums.n_documents:
            raise ValueError(f"no {self.metric} was measured: update with a document first")
        missing = ~certificate.bands.exists[:, None, :].expand(sums.values.shape)
        spread = sums.spread.masked_fill(missing, math.nan) if self.n_samples > 1 else None
        return BandScores(
            metric=self.metric,
            bands=certificate.bands,
            values=sums.values.masked_fill(missing, math.nan),
            rest=sums.rest,
            squares=sums.squares.masked_fill(missing, math.nan),
            rest_squares=sums.rest_squares,
            sampling_variance=spread,
            n_queries=int(sums.n_tokens),
            n_pairs=sums.n_pairs,
            n_tokens=int(sums.n_tokens),
            n_documents=int(sums.n_documents),
            model=certificate.fingerprint,
            data=data,
            settings=self.settings(),
        )


class TaylorAccumulator(FisherAccumulator):
    """Adds up the first-order change of the loss over documents; `ropelens.band_taylor` documents it."""

    metric: ClassVar[str] = "taylor"

    def __init__(self) -> None:
        super().__init__()

    def _draws(
        self, host: Host, ids: Int64[Tensor, "1 pos"], index: tuple[int, ...]
    ) -> Iterator[tuple[Float64[Tensor, "layer head band"], Float64[Tensor, "layer head"]]]:
        with _gained(host, ids) as (gains, log_probs):
            labels = ids[0, 1:, None].to(log_probs.device)
            loss = -log_probs[:-1].gather(-1, labels).sum()
            gradient = torch.autograd.grad(loss, gains)
        # The gains go from 1 to 0, against the gradient.
        yield _summed([-g.cpu() for g in gradient], host.certificate.layers, host.bands.n_bands)

    def settings(self) -> dict[str, object]:
        return {}


def taylor(host: Host, tokens: Tokens, *, progress: bool = False) -> BandScores:
    """Returns the first-order change of the loss; `ropelens.band_taylor` documents it."""
    accumulator = TaylorAccumulator()
    for ids in tqdm(tokens.documents(), "Taylor", unit="text", disable=not progress):
        accumulator.update(host, ids, ())
    return accumulator.result(tokens.digest)


def gain_gradients(
    host: Host, ids: Int64[Tensor, "1 pos"], *, n_samples: int, seed: tuple[int, ...]
) -> Iterator[list[Float64[Tensor, "head d_head"]]]:
    """Yields, for each sample, the gradient of the sampled tokens' log-probability by every gain.

    The gain of a dim multiplies that dim of a head's post-rotary queries, at every position; it is 1.
    Next tokens are drawn from the model's own distribution and are labels only: the input stays.
    """
    with _gained(host, ids) as (gains, log_probs):
        for sample in range(n_samples):
            labels = sample_labels(log_probs.detach(), seed=(*seed, sample))
            picked = log_probs.gather(-1, labels[:, None]).sum()
            gradient = torch.autograd.grad(picked, gains, retain_graph=sample + 1 < n_samples)
            yield [g.cpu() for g in gradient]


@contextmanager
def _gained(
    host: Host, ids: Int64[Tensor, "1 pos"]
) -> Iterator[tuple[list[Tensor], Float[Tensor, "pos token"]]]:
    """Runs the model with a gain of 1 on every dim of the queries: gains, and the log-probabilities."""
    gains = [
        torch.ones(spec.n_heads, spec.d_head, dtype=torch.float64, device=host.device, requires_grad=True)
        for spec in host.certificate.layers
    ]
    edits = {layer: _multiply_by(gain) for layer, gain in enumerate(gains)}
    with torch.enable_grad(), _frozen(host.model), host.editing(queries=edits):
        logits = host.run(ids, None)
        assert logits is not None
        # Half precision is too coarse for logarithms; float64 stays what it is.
        yield gains, logits[0].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def sample_labels(log_probs: Float[Tensor, "pos token"], seed: tuple[int, ...]) -> Int64[Tensor, " pos"]:
    """Returns one next token a position, drawn from the model's distribution at temperature 1.

    Drawn on the CPU, so that a seed means the same labels on every device.
    """
    mixed = 0
    for part in seed:
        mixed = (mixed * 1_000_003 + part) % 2**63
    generator = torch.Generator().manual_seed(mixed)
    return torch.multinomial(log_probs.exp().cpu(), 1, generator=generator)[:, 0].to(log_probs.device)


def _multiply_by(gain: Float[Tensor, "head d_head"]) -> Edit:
    def multiply(q: Tensor, positions: Tensor) -> Tensor:
        return q * gain.to(q.device, q.dtype)

    return multiply


@contextmanager
def _frozen(model: torch.nn.Module) -> Iterator[None]:
    """Lets gradients flow to the gains alone: the weights' would cost as much again."""
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        for p in trained:
            p.requires_grad_(False)
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


def _squared(
    gradient: list[Float64[Tensor, "head d_head"]], specs: tuple[LayerSpec, ...], n_bands: int, unit: str
) -> tuple[Float64[Tensor, "layer head band"], Float64[Tensor, "layer head"]]:
    """Returns the squared gradient of each band's gain (or the sum of those of its two dims)."""
    by_band = torch.zeros(len(specs), specs[0].n_heads, n_bands, dtype=torch.float64)
    by_rest = torch.zeros(len(specs), specs[0].n_heads, dtype=torch.float64)
    for layer, (g, spec) in enumerate(zip(gradient, specs, strict=True)):
        pairs = spec.rotation.pairs
        rotated = torch.zeros(spec.d_head, dtype=torch.bool)
        rotated[pairs.flatten()] = True
        of_pairs, of_rest = g[:, pairs], g[:, ~rotated]
        if unit == "band":
            by_band[layer, :, : len(pairs)] = of_pairs.sum(-1).square()
            by_rest[layer] = of_rest.sum(-1).square()
        else:
            by_band[layer, :, : len(pairs)] = of_pairs.square().sum(-1)
            by_rest[layer] = of_rest.square().sum(-1)
    return by_band, by_rest


def _summed(
    gradient: list[Float64[Tensor, "head d_head"]], specs: tuple[LayerSpec, ...], n_bands: int
) -> tuple[Float64[Tensor, "layer head band"], Float64[Tensor, "layer head"]]:
    """Returns the derivative by the gain of each band."""
    by_band = torch.zeros(len(specs), specs[0].n_heads, n_bands, dtype=torch.float64)
    by_rest = torch.zeros(len(specs), specs[0].n_heads, dtype=torch.float64)
    for layer, (g, spec) in enumerate(zip(gradient, specs, strict=True)):
        pairs = spec.rotation.pairs
        by_band[layer, :, : len(pairs)] = g[:, pairs].sum(-1)
        by_rest[layer] = g.sum(-1) - by_band[layer].sum(-1)
    return by_band, by_rest


def _n_pairs(n: int, window: int | None) -> int:
    seen = n if window is None else min(window, n)
    return seen * (seen + 1) // 2 + (n - seen) * seen
