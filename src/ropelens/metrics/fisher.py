"""Fisher information of a gain on each band: how much the model's output depends on it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from tqdm.auto import tqdm

from ropelens.hosts import Edit, Host, LayerSpec
from ropelens.hosts.tokens import Tokens
from ropelens.scores import BandScores


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
    if n_samples < 1:
        raise ValueError(f"n_samples must be at least 1, got {n_samples}")
    if torch.is_inference_mode_enabled():
        raise ValueError("Fisher information needs gradients: leave torch.inference_mode() for it")
    if unit not in ("band", "dim"):
        raise ValueError(f'unit must be "band" or "dim", got {unit!r}')
    specs, bands = host.certificate.layers, host.bands
    shape = (len(specs), specs[0].n_heads, bands.n_bands)
    values, squares, spread = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
    rest, rest_squares = (
        torch.zeros(shape[:2], dtype=torch.float64),
        torch.zeros(shape[:2], dtype=torch.float64),
    )
    n_pairs = torch.zeros(len(specs), dtype=torch.int64)
    documents = tokens.documents()
    for index, ids in enumerate(tqdm(documents, "Fisher", unit="text", disable=not progress)):
        drawn, drawn_rest = [], []
        for gradient in gain_gradients(host, ids, n_samples=n_samples, seed=(seed, index)):
            by_band, by_rest = _squared(gradient, specs, bands.n_bands, unit)
            drawn.append(by_band)
            drawn_rest.append(by_rest)
        sampled, document_rest = torch.stack(drawn), torch.stack(drawn_rest).mean(0)
        values += sampled.mean(0)
        squares += sampled.mean(0).square()
        if n_samples > 1:
            spread += sampled.var(0) / n_samples
        rest += document_rest
        rest_squares += document_rest.square()
        n_pairs += torch.tensor([_n_pairs(ids.shape[1], spec.window) for spec in specs])
    for layer in range(len(specs)):
        if not bool((values[layer].isfinite()).all() and rest[layer].isfinite().all()):
            raise ValueError(
                f"layer {layer}: the gradients hold NaN or infinity; is the model in half precision?"
            )
    missing = ~bands.exists[:, None, :].expand(shape)
    n_tokens = sum(ids.shape[1] for ids in documents)
    return BandScores(
        metric="fisher",
        bands=bands,
        values=values.masked_fill(missing, math.nan),
        rest=rest,
        squares=squares.masked_fill(missing, math.nan),
        rest_squares=rest_squares,
        sampling_variance=spread.masked_fill(missing, math.nan) if n_samples > 1 else None,
        n_queries=n_tokens,
        n_pairs=n_pairs,
        n_tokens=n_tokens,
        n_documents=len(documents),
        model=host.fingerprint,
        data=tokens.digest,
        settings={"n_samples": n_samples, "seed": seed, "unit": unit},
    )


def gain_gradients(
    host: Host, ids: Int64[Tensor, "1 pos"], *, n_samples: int, seed: tuple[int, int]
) -> Iterator[list[Float64[Tensor, "head d_head"]]]:
    """Yields, for each sample, the gradient of the sampled tokens' log-probability by every gain.

    The gain of a dim multiplies that dim of a head's post-rotary queries, at every position; it is 1.
    Next tokens are drawn from the model's own distribution and are labels only: the input stays.
    """
    gains = [
        torch.ones(spec.n_heads, spec.d_head, dtype=torch.float64, device=host.device, requires_grad=True)
        for spec in host.certificate.layers
    ]
    edits = {layer: _multiply_by(gain) for layer, gain in enumerate(gains)}
    with torch.enable_grad(), _frozen(host.model), host.editing(queries=edits):
        logits = host.run(ids, None)
        assert logits is not None
        # Half precision is too coarse for logarithms; float64 stays what it is.
        log_probs = logits[0].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        for sample in range(n_samples):
            labels = sample_labels(log_probs.detach(), seed=(*seed, sample))
            picked = log_probs.gather(-1, labels[:, None]).sum()
            gradient = torch.autograd.grad(picked, gains, retain_graph=sample + 1 < n_samples)
            yield [g.cpu() for g in gradient]


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
    def multiply(q: Tensor) -> Tensor:
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


def _n_pairs(n: int, window: int | None) -> int:
    seen = n if window is None else min(window, n)
    return seen * (seen + 1) // 2 + (n - seen) * seen
