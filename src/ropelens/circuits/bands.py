"""Head scores by band: which bands carry the attention to a target, and what is left without each."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

import ropelens_kernels as kernels
from ropelens.bands import Bands
from ropelens.circuits.eigenvalues import Heads
from ropelens.circuits.patterns import attention_at, attention_without, each_layer, of_heads
from ropelens.circuits.texts import LENGTHS, repeated_tokens, shuffled_chunks, text_facts
from ropelens.hosts import LayerSpec, host_of
from ropelens.scores.provenance import tagged

if TYPE_CHECKING:
    import pandas as pd

KINDS = ("induction", "previous_token", "duplicate_token")


@dataclass(frozen=True, eq=False)
class HeadBands:
    """One score, split among bands, of the heads that were asked for; all others are NaN.

    Attributes:
        kind: Which score.
        bands: The model's bands.
        score: The mean attention to the targets.
        attribution: How much of it each band carries; with `rest` it adds up to the score.
        rest: The part of the dims that no band rotates.
        without: The score with that band of the head set to zero, and nothing else changed.
        without_by_sequence: The same in each sequence.
        score_by_sequence: The score in each sequence.
        residual: The largest miss of `sum over bands = attention` at any pair.
        made_from: What it was measured on and how, for `ropelens.plots.provenance`.
    """

    kind: str
    bands: Bands
    score: Float64[Tensor, "layer head"]
    attribution: Float64[Tensor, "layer head band"]
    rest: Float64[Tensor, "layer head"]
    without: Float64[Tensor, "layer head band"]
    without_by_sequence: Float64[Tensor, "layer head band sequence"]
    score_by_sequence: Float64[Tensor, "layer head sequence"]
    residual: float
    made_from: dict[str, Any] = field(default_factory=dict)

    @property
    def heads(self) -> list[tuple[int, int]]:
        """The (layer, head) that were measured."""
        return [(layer, head) for layer, head in (~self.score.isnan()).nonzero().tolist()]

    def strongest(self, layer: int, head: int, n: int) -> list[int]:
        """The n bands that carry most of a head's score, the strongest first."""
        found = self.attribution[layer, head].nan_to_num(nan=-math.inf)
        return found.argsort(descending=True, stable=True)[:n].tolist()

    def to_frame(self) -> pd.DataFrame:
        """Returns one row per head and band that were measured.

        Columns layer, head, band, wavelength (tokens), score, attribution, without, change (without minus
        score: what ablating the band does).
        """
        import pandas as pd

        rows = [
            {
                "layer": layer,
                "head": head,
                "band": band,
                "wavelength": float(self.bands.wavelength[layer, band]),
                "score": float(self.score[layer, head]),
                "attribution": float(self.attribution[layer, head, band]),
                "without": float(self.without[layer, head, band]),
                "change": float(self.without[layer, head, band] - self.score[layer, head]),
            }
            for layer, head in self.heads
            for band in range(self.bands.n_bands)
            if self.bands.exists[layer, band]
        ]
        return tagged(pd.DataFrame(rows), self.made_from)


def head_bands(
    model: Any,
    kind: str = "induction",
    *,
    heads: Heads | None = None,
    n_sequences: int = 4,
    length: int = 256,
    n_queries: int = 16,
    seed: int = 0,
    tol: float = 1e-6,
    tokenizer: Any = None,
    progress: bool = False,
) -> HeadBands:
    """Which bands carry a head's score, and what the score is without each of them.

    At the score's query-key pairs (of `head_scores`, or of `prefix_matching`), the attention paid is split
    among bands as `band_attribution` does, and averaged. And each band of the head is really ablated, by
    setting its dims of the head's queries to zero: since a head's queries and keys do not depend on its own
    attention, the rest of the model need not run again for that.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        kind: "induction", "previous_token", "duplicate_token", or "matched_1" to "matched_4".
        heads: The (layer, head) to measure; all by default.
        n_sequences: Sequences of random tokens.
        length: Tokens of each.
        n_queries: Query positions a sequence, evenly spread over those that have a target.
        seed: Of the tokens.
        tol: Largest miss of the attribution at any pair, in attention.
        tokenizer: Says which tokens are special; `model.tokenizer` by default, none if there is none.
        progress: Whether to show a bar that counts layers.

    Returns:
        Attention from 0 to 1, by layer, head and band.

    Raises:
        ValueError: If there is no such kind or head, the length does not suit the model, or its attention
            cannot be rebuilt.

    Example:
        ```python
        bands = rl.circuits.head_bands(model, "previous_token", heads=[(layer, head)], length=64)
        bands.to_frame().sort_values("change").head()  # the bands that the score falls without
        ```
    """
    host = host_of(model)
    options = {"n_sequences": n_sequences, "length": length, "seed": seed, "tokenizer": tokenizer}
    matched = [f"matched_{m}" for m in range(1, LENGTHS + 1)]
    if kind not in (*KINDS, *matched):
        raise ValueError(f"expected one of {[*KINDS, *matched]}, got {kind!r}")
    text = (shuffled_chunks if kind in matched else repeated_tokens)(model, **options)
    target = _spread(text.targets[kind], n_queries)
    specs = host.certificate.layers
    asked = [(i, h) for i, spec in enumerate(specs) for h in range(spec.n_heads)]
    if heads is not None:
        wanted = {(int(layer), int(head)) for layer, head in heads}
        if wanted - set(asked):
            raise ValueError(
                f"expected heads of this model, got {sorted(wanted - set(asked))} as (layer, head)"
            )
        asked = sorted(wanted)
    n_heads, n_bands = max(spec.n_heads for spec in specs), host.bands.n_bands

    def empty(*shape: int) -> Tensor:
        return torch.full((host.n_layers, n_heads, *shape), math.nan, dtype=torch.float64)

    score, rest, attribution = empty(n_sequences), empty(), empty(n_bands)
    without, residual = empty(n_bands, n_sequences), 0.0

    def take(layer: int, q: Tensor, k: Tensor) -> None:
        nonlocal residual
        spec = specs[layer]
        mine = [head for at, head in asked if at == layer]
        some = of_heads(q, k, spec, mine)
        pairs = spec.rotation.pairs.to(q.device)
        paid = attention_at(*some, {kind: target})[kind].cpu()
        left = attention_without(*some, target, list(pairs)).cpu()
        for i, head in enumerate(mine):
            one = of_heads(q, k, spec, [head])
            score[layer, head] = paid[i]
            without[layer, head, : len(pairs)] = left[:, i]
            attribution[layer, head, : len(pairs)], rest[layer, head], missed = _attributed(*one, target, tol)
            residual = max(residual, missed)

    each_layer(host, text.ids, take, layers=sorted({layer for layer, _ in asked}), progress=progress)
    return HeadBands(
        kind=kind,
        bands=host.bands,
        score=score.mean(-1),
        attribution=attribution,
        rest=rest,
        without=without.mean(-1),
        without_by_sequence=without,
        score_by_sequence=score,
        residual=residual,
        made_from=text_facts("HeadBands", host, text.ids, seed),
    )


def _attributed(
    q: Tensor, k: Tensor, spec: LayerSpec, target: Int64[Tensor, "batch pos"], tol: float
) -> tuple[Float64[Tensor, " band"], Float64[Tensor, ""], float]:
    """Returns one head's attribution at its targets, a mean over sequences of the mean over queries."""
    bands, rest, residual = [], [], 0.0
    for row in range(len(q)):
        queries = (target[row] >= 0).nonzero().flatten()
        last = int(queries[-1]) + 1
        found = kernels.attribution(
            q[[row], :last],
            k[[row], :last],
            **spec.kernel_arguments(q.device),
            tol=tol,
            queries=queries,
        )
        at = torch.arange(len(queries), device=q.device)
        bands.append(found.values[0, at, 0, target[row, queries]].mean(0))
        rest.append(found.rest[0, at, 0, target[row, queries]].mean())
        residual = max(residual, float(found.residual.max()))
    return torch.stack(bands).mean(0).cpu(), torch.stack(rest).mean().cpu(), residual


def _spread(target: Int64[Tensor, "batch pos"], n: int) -> Int64[Tensor, "batch pos"]:
    """Keeps the targets of n queries a row, evenly spread."""
    kept = torch.full_like(target, -1)
    for row, out in zip(target, kept, strict=True):
        queries = (row >= 0).nonzero().flatten()
        chosen = queries[torch.linspace(0, len(queries) - 1, min(n, len(queries))).round().long()]
        out[chosen] = row[chosen]
    return kept
