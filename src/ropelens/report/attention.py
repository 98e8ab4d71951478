"""The attention of some heads on a short text: every query, split among bands, small enough for a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

import ropelens_kernels as kernels
from ropelens.bands import Bands
from ropelens.circuits.patterns import each_layer, of_heads, score_blocks
from ropelens.hosts import host_of
from ropelens.hosts.tokens import token_strings, tokens_of
from ropelens.report.packing import Packed, packed
from ropelens.scores import BandAttribution, BandScores
from ropelens.scores.provenance import facts

TEXT = """\
The keeper of the light at Ardan Point was called Maira Quellen, and she wrote everything down. "Wind \
north, sea rough," she wrote on Monday. "Wind north, sea rough," she wrote on Tuesday. On Wednesday a boat \
came in late, its sail torn, and the man who rowed it asked for the keeper of the light.
"Who sent you to Ardan Point?" said Maira Quellen. "Nobody sent me," said the man. "I saw the light: \
one, two, three, dark; one, two, three, dark." She wrote it down.
"""
N_HEADS = 32
N_TOKENS = 128
N_EXAMPLES = 6
TOL = 1e-6


@dataclass(frozen=True, eq=False)
class AttentionGrid:
    """The attention that every query of a text pays, in some heads, split among bands.

    Attributes:
        tokens: The text.
        heads: The (layer, head) that are here.
        bands: The model's bands.
        packed: For each head, a row a pair of query and key (query 0; query 1 with keys 0 and 1; and so on)
            and an entry a band, the dims that do not rotate last.
        off: How far the packed numbers, and sums of neighbouring bands, are from the true ones at most.
        residual: The largest miss of a key's entries to add up to its attention.
        examples: For every head of the model, (query, key, attention) of the queries that look most at one
            key, the first key and the query itself aside.
        made_from: See `ropelens.plots.provenance`.
    """

    tokens: tuple[str, ...]
    heads: tuple[tuple[int, int], ...]
    bands: Bands
    packed: dict[tuple[int, int], Packed]
    off: float
    residual: float
    examples: list[list[list[tuple[int, int, float]]]]
    made_from: dict[str, Any]

    def attribution(self, layer: int, head: int, query: int) -> BandAttribution:
        """Returns one query's row as it was packed."""
        n_bands = int(self.bands.exists[layer].sum())
        first = query * (query + 1) // 2
        rows = self.packed[layer, head].values[first : first + query + 1]
        return BandAttribution(
            layer=layer,
            head=head,
            query=query,
            inv_freq=self.bands.inv_freq[layer, :n_bands],
            pairs=self.bands.pairs[layer, :n_bands],
            values=rows[:, :n_bands],
            rest=rows[:, -1],
            visible=torch.ones(query + 1, dtype=torch.bool),
            sink=None,
            tokens=self.tokens[: query + 1],
            residual=self.residual,
            model=self.made_from["model"],
            settings=self.made_from["settings"],
        )


def attention_grid(
    model: Any,
    text: str | Tensor = TEXT,
    *,
    heads: Sequence[tuple[int, int]],
    tokenizer: Any = None,
    progress: bool = False,
) -> AttentionGrid:
    """Measures the attention of some heads on the first 128 tokens of a text, every query, by band.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        text: A string, or one row of token ids.
        heads: The (layer, head) to split among bands.
        tokenizer: For strings, and to show tokens; `model.tokenizer` by default.
        progress: Whether to show a bar that counts layers.

    Raises:
        ValueError: If there is no such head, the text is not usable, or attention cannot be rebuilt.
    """
    host = host_of(model)
    tokenizer = tokenizer or getattr(host.model, "tokenizer", None)
    if isinstance(text, str) and tokenizer is not None:  # cut before it is held against the model's context
        text = torch.tensor([tokenizer.encode(text)[:N_TOKENS]])
    tokens = tokens_of(host, text, None, tokenizer)
    ids = tokens.ids[:1, :N_TOKENS]
    specs = host.certificate.layers
    wanted = sorted({(int(layer), int(head)) for layer, head in heads})
    for layer, head in wanted:
        if not (0 <= layer < host.n_layers and 0 <= head < specs[layer].n_heads):
            raise ValueError(f"expected heads of this model, got layer {layer}, head {head}")
    n = ids.shape[1]
    lower = torch.ones(n, n, dtype=torch.bool).tril()
    found: dict[tuple[int, int], Packed] = {}
    examples: list[list[list[tuple[int, int, float]]]] = [[] for _ in range(host.n_layers)]
    off = residual = 0.0

    def take(layer: int, q: Tensor, k: Tensor) -> None:
        nonlocal off, residual
        spec = specs[layer]
        pattern = torch.zeros(spec.n_heads, n, n, dtype=torch.float64)
        for rows, scores, norm in score_blocks(q, k, spec, torch.arange(n, device=q.device)):
            assert norm is not None
            pattern[:, rows.cpu()] = (scores[0] - norm[0, ..., None]).exp().double().cpu()
        examples[layer] = [_examples(one, lower) for one in pattern]
        for head in [head for at, head in wanted if at == layer]:
            one_q, one_k, one = of_heads(q, k, spec, [head])
            split = kernels.attribution(one_q, one_k, **one.kernel_arguments(q.device), tol=TOL)
            entries = torch.cat([split.values[0, :, 0], split.rest[0, :, 0, :, None]], -1).cpu()
            found[layer, head] = packed(entries[lower])
            off = max(off, found[layer, head].bound)
            residual = max(residual, float(split.residual.max()))

    each_layer(host, ids, take, progress=progress)
    return AttentionGrid(
        tokens=token_strings(host, ids[0], tokenizer),
        heads=tuple(wanted),
        bands=host.bands,
        packed=found,
        off=off,
        residual=residual,
        examples=examples,
        made_from=facts("AttentionGrid", host.fingerprint, tokens.digest, settings={"tol": TOL, "tokens": n}),
    )


def choose_heads(entropy: BandScores, scores: Any = None, n: int = N_HEADS) -> list[tuple[int, int]]:
    """Returns heads worth looking at: the strongest of each kind, the sharpest of each layer, the sharpest.

    Args:
        entropy: Of the model; of another metric, the heads of the largest sums are taken for the sharpest.
        scores: The table of `HeadScores.to_frame`, if there is one.
        n: How many, if the model has as many.
    """
    drop = entropy.values.nansum(-1) + entropy.rest
    drop = drop if entropy.metric == "entropy" else -drop
    n_heads = drop.shape[1]
    chosen: list[tuple[int, int]] = []
    if scores is not None:
        for kind in ("induction", "previous_token", "duplicate_token"):
            if kind in scores:
                best = scores.nlargest(3, kind)
                chosen += zip(best["layer"].tolist(), best["head"].tolist(), strict=True)
    by_layer = [(layer, int(row.argmin())) for layer, row in enumerate(drop)]
    by_layer.sort(key=lambda place: drop[place].item())
    every = [divmod(at, n_heads) for at in drop.flatten().argsort(stable=True).tolist()]
    return sorted(list(dict.fromkeys([*chosen, *by_layer, *every]))[:n])


def _examples(
    pattern: Float64[Tensor, "query key"], lower: Bool[Tensor, "query key"]
) -> list[tuple[int, int, float]]:
    """The queries that pay most attention to one key, one query a key, the strongest first."""
    looks = pattern.masked_fill(~lower, 0.0).clone()
    looks[:, 0] = 0.0
    looks.fill_diagonal_(0.0)
    found, keys = [], set()
    best = looks.max(1)
    for query in best.values.argsort(descending=True, stable=True).tolist():
        key, value = int(best.indices[query]), float(best.values[query])
        if len(found) == N_EXAMPLES or value < 0.02:
            break
        if key not in keys:
            keys.add(key)
            found.append((query, key, float(f"{value:.4g}")))
    return found
