"""What a head attends to: previous-token, duplicate-token and induction scores, and prefix matching."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from ropelens.circuits.eigenvalues import copying_score
from ropelens.circuits.patterns import attention_at, each_layer
from ropelens.circuits.texts import repeated_tokens, shuffled_chunks, text_facts
from ropelens.hosts import Host, host_of
from ropelens.scores.provenance import tagged

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class HeadScores:
    """Scores of every head, each a mean over the queries that have what it asks for.

    Attributes:
        by_sequence: Per name, the score of each head in each sequence.
        copying: `copying_score`; NaN where it cannot be read from the weights.
        made_from: What it was measured on and how, for `ropelens.plots.provenance`.
    """

    by_sequence: dict[str, Float64[Tensor, "layer head sequence"]]
    copying: Float64[Tensor, "layer head"] | None = None
    made_from: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Float64[Tensor, "layer head"]:
        """The score of that name, over all sequences."""
        if name == "copying" and self.copying is not None:
            return self.copying
        if name not in self.by_sequence:
            raise ValueError(f"expected one of {[*self.by_sequence]}, got {name!r}")
        return self.by_sequence[name].mean(-1)

    def stderr(self, name: str) -> Float64[Tensor, "layer head"]:
        """Standard error of a score over sequences; NaN with fewer than two."""
        found = self.by_sequence[name]
        if found.shape[-1] < 2:
            return torch.full_like(found[..., 0], math.nan)
        return found.std(-1) / found.shape[-1] ** 0.5

    def top(self, name: str, n: int = 10) -> list[tuple[int, int]]:
        """The (layer, head) of the n heads with the highest score, the highest first."""
        found = self[name].nan_to_num(nan=-math.inf)
        order = found.flatten().argsort(descending=True, stable=True)[:n].tolist()
        return [divmod(index, found.shape[1]) for index in order]

    def to_frame(self) -> pd.DataFrame:
        """Returns one row per layer and head, a column a score."""
        import pandas as pd

        names = list(self.by_sequence)
        n_layers, n_heads = self[names[0]].shape
        columns: dict[str, Any] = {
            "layer": torch.arange(n_layers).repeat_interleave(n_heads).numpy(),
            "head": torch.arange(n_heads).repeat(n_layers).numpy(),
        }
        columns |= {name: self[name].flatten().numpy() for name in names}
        if self.copying is not None:
            columns["copying"] = self.copying.flatten().numpy()
        return tagged(pd.DataFrame(columns), self.made_from)


def head_scores(
    model: Any,
    *,
    n_sequences: int = 4,
    length: int = 512,
    seed: int = 0,
    copying: bool = True,
    tokenizer: Any = None,
    progress: bool = False,
) -> HeadScores:
    """How much every head attends as a previous-token, a duplicate-token or an induction head would.

    On random tokens that come twice (`repeated_tokens`), the mean attention that queries pay to the token
    before; in the second copy, to the same token in the first copy, and to the token after it (prefix
    matching, Olsson et al. 2022); and to the first position, where heads rest. "copying" is
    `copying_score`, from the weights. Patterns are never whole in memory.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        n_sequences: Sequences of random tokens.
        length: Tokens of each.
        seed: Of the tokens.
        copying: Whether to read copying scores from the weights too; NaN where they cannot be.
        tokenizer: Says which tokens are special; `model.tokenizer` by default, none if there is none.
        progress: Whether to show a bar that counts layers.

    Returns:
        Attention from 0 to 1 under "previous_token", "duplicate_token", "induction" and "first_key"; copying
        from -1 to 1.

    Raises:
        ValueError: If the length does not suit the model, or its attention cannot be rebuilt.

    Example:
        ```python
        scores = rl.circuits.head_scores(model, n_sequences=2, length=64)
        scores.to_frame().sort_values("induction").tail()
        ```
    """
    host = host_of(model)
    text = repeated_tokens(model, n_sequences=n_sequences, length=length, seed=seed, tokenizer=tokenizer)
    found = attention_to_targets(host, text.ids, text.targets, progress=progress)
    weights = None
    if copying:
        try:
            weights = copying_score(model)
        except ValueError:  # its weights cannot be read; what it attends to can
            weights = torch.full_like(found["induction"][..., 0], math.nan)
    return HeadScores(found, weights, text_facts("HeadScores", host, text.ids, seed))


def prefix_matching(
    model: Any,
    *,
    n_sequences: int = 4,
    length: int = 512,
    seed: int = 0,
    tokenizer: Any = None,
    progress: bool = False,
) -> HeadScores:
    """Prefix matching by matched length: attention to the token after an earlier 1, 2, 3 or 4 tokens.

    On random chunks that come again in another order (`shuffled_chunks`), so that exactly that many of a
    query's last tokens came before. Heads that need more than one to match look it at longer lengths only.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        n_sequences: Sequences of random tokens.
        length: Tokens of each at most.
        seed: Of the tokens.
        tokenizer: Says which tokens are special; `model.tokenizer` by default, none if there is none.
        progress: Whether to show a bar that counts layers.

    Returns:
        Attention from 0 to 1 under "matched_1" to "matched_4".

    Raises:
        ValueError: If the length does not suit the model, or its attention cannot be rebuilt.

    Example:
        ```python
        rl.circuits.prefix_matching(model, n_sequences=2, length=64).to_frame()
        ```
    """
    host = host_of(model)
    text = shuffled_chunks(model, n_sequences=n_sequences, length=length, seed=seed, tokenizer=tokenizer)
    found = attention_to_targets(host, text.ids, text.targets, progress=progress)
    return HeadScores(found, made_from=text_facts("HeadScores", host, text.ids, seed))


def attention_to_targets(
    host: Host,
    ids: Int64[Tensor, "batch pos"],
    targets: dict[str, Int64[Tensor, "batch pos"]],
    progress: bool = False,
) -> dict[str, Float64[Tensor, "layer head sequence"]]:
    """Returns the mean attention to each kind of target, by head and sequence.

    Raises:
        ValueError: If a layer did not attend as certified.
    """
    layers: list[dict[str, Tensor]] = [{} for _ in range(host.n_layers)]

    def take(layer: int, q: Tensor, k: Tensor) -> None:
        layers[layer] = attention_at(q, k, host.certificate.layers[layer], targets)

    each_layer(host, ids, take, progress=progress)
    return {name: torch.stack([found[name] for found in layers]).cpu() for name in targets}
