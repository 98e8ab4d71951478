"""Texts of random tokens that repeat, and where an induction head should look in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from ropelens.hosts import Host, host_of
from ropelens.hosts.tokens import Tokens
from ropelens.scores.provenance import facts

LENGTHS = 4  # matched lengths that are told apart


@dataclass(frozen=True, eq=False)
class RepeatedTokens:
    """Sequences of random tokens that come twice.

    Attributes:
        ids: Token ids; a prefix of special tokens first, where the tokenizer puts one.
        targets: By name, the key that each query should attend to; -1 for queries without one.
    """

    ids: Int64[Tensor, "batch pos"]
    targets: dict[str, Int64[Tensor, "batch pos"]]


def repeated_tokens(
    model: Any, *, n_sequences: int = 4, length: int = 512, seed: int = 0, tokenizer: Any = None
) -> RepeatedTokens:
    """Random tokens that come twice: `prefix, r1 .. rn, r1 .. rn`.

    Tokens are uniform over the vocabulary without the special ones, no two of a segment alike where the
    vocabulary has enough. Targets: "previous_token" (the token before), "duplicate_token" (the same
    token in the first copy), "induction" (the one after that) and "first_key", of all queries that have
    one; no target is the first position, where attention goes that is meant for no key. Source: Olsson et
    al. 2022, "In-context learning and induction heads".

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        n_sequences: Rows.
        length: Tokens a row, prefix included.
        seed: Of the tokens.
        tokenizer: Says which tokens are special; `model.tokenizer` by default, none if there is none.

    Returns:
        The ids on the model's device, and the targets.

    Raises:
        ValueError: If the length is too small or beyond the model's context.

    Example:
        ```python
        repeated = rl.circuits.repeated_tokens(model, length=64)
        ```
    """
    host = host_of(model)
    prefix, allowed = _vocabulary(host, tokenizer)
    n = (length - len(prefix)) // 2
    _check(host, n_sequences, length, n)
    generator = torch.Generator().manual_seed(seed)
    segments = torch.stack([_draw(allowed, n, generator) for _ in range(n_sequences)])
    ids = torch.cat([prefix.expand(n_sequences, -1), segments, segments], 1)
    at = torch.arange(ids.shape[1])
    second = at >= len(prefix) + n
    # What looks at the first position may be a sink, whatever lies there.
    targets = {
        "previous_token": torch.where(at >= 2, at - 1, -1),
        "duplicate_token": torch.where(second & (at - n >= 1), at - n, -1),
        "induction": torch.where(second, at - n + 1, -1),
        "first_key": torch.where(at >= 1, 0, -1),
    }
    targets = {name: target.expand(n_sequences, -1).to(host.device) for name, target in targets.items()}
    return RepeatedTokens(ids.to(host.device), targets)


def shuffled_chunks(
    model: Any, *, n_sequences: int = 4, length: int = 512, seed: int = 0, tokenizer: Any = None
) -> RepeatedTokens:
    """Random chunks of 4 tokens that come again in another order, so that 1 to 4 tokens match.

    The query at place m of a chunk's second coming has exactly its last m tokens in common with the
    first coming. Targets: "matched_1" to "matched_4", the token after those.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        n_sequences: Rows.
        length: Tokens a row at most, prefix included.
        seed: Of the tokens and the order.
        tokenizer: Says which tokens are special; `model.tokenizer` by default, none if there is none.

    Returns:
        The ids on the model's device, and the targets.

    Raises:
        ValueError: If the length is too small or beyond the model's context.

    Example:
        ```python
        rl.circuits.shuffled_chunks(model, length=64).targets["matched_2"]
        ```
    """
    host = host_of(model)
    prefix, allowed = _vocabulary(host, tokenizer)
    n = (length - len(prefix) - 1) // (2 * LENGTHS)  # one token apart, so that the halves do not run on
    _check(host, n_sequences, length, n)
    generator = torch.Generator().manual_seed(seed)
    rows, targets = [], {f"matched_{m}": [] for m in range(1, LENGTHS + 1)}
    for _ in range(n_sequences):
        tokens = _draw(allowed, n * LENGTHS + 1, generator)
        chunks, between = tokens[1:].reshape(n, LENGTHS), tokens[:1]
        order = _order(n, generator)
        rows.append(torch.cat([prefix, chunks.flatten(), between, chunks[order].flatten()]))
        start = len(prefix) + n * LENGTHS + 1
        for m in range(1, LENGTHS + 1):
            target = torch.full((len(rows[-1]),), -1)
            target[start + m - 1 :: LENGTHS] = len(prefix) + order * LENGTHS + m
            targets[f"matched_{m}"].append(target)
    return RepeatedTokens(
        torch.stack(rows).to(host.device),
        {name: torch.stack(found).to(host.device) for name, found in targets.items()},
    )


def text_facts(kind: str, host: Host, ids: Int64[Tensor, "batch pos"], seed: int) -> dict[str, Any]:
    """Returns the facts of a result that was measured on random tokens."""
    shape = {"n_sequences": len(ids), "length": ids.shape[1], "seed": seed}
    return facts(kind, host.fingerprint, Tokens(ids, None).digest, settings=shape)


def _order(n: int, generator: torch.Generator) -> Int64[Tensor, " chunk"]:
    """A random order in which no chunk follows the one that it followed."""
    while True:
        order = torch.randperm(n, generator=generator)
        if n < 3 or not bool((order.diff() == 1).any()):
            return order if n >= 3 else torch.arange(n).flip(0)
        # Swapping fixes what a fresh order would seldom do: runs are about one a permutation.
        for i in (order.diff() == 1).nonzero().flatten().tolist():
            j = int(torch.randint(n, (1,), generator=generator))
            order[[i + 1, j]] = order[[j, i + 1]]
        if not bool((order.diff() == 1).any()):
            return order


def _vocabulary(host: Host, tokenizer: Any) -> tuple[Int64[Tensor, " prefix"], Int64[Tensor, " token"]]:
    """Returns the tokens that begin every text, and those to draw from."""
    tokenizer = tokenizer or getattr(host.model, "tokenizer", None)
    everything = torch.arange(host.vocab_size)
    if tokenizer is None:
        return everything[:0], everything
    special = torch.tensor(sorted(tokenizer.all_special_ids), dtype=torch.int64)
    known = everything[: min(len(tokenizer), host.vocab_size)]  # embeddings are often padded beyond
    prefix = torch.tensor(tokenizer.encode(""), dtype=torch.int64)
    return prefix, known[~torch.isin(known, special)]


def _draw(allowed: Tensor, n: int, generator: torch.Generator) -> Int64[Tensor, " token"]:
    if n <= len(allowed):
        return allowed[torch.randperm(len(allowed), generator=generator)[:n]]
    return allowed[torch.randint(len(allowed), (n,), generator=generator)]


def _check(host: Host, n_sequences: int, length: int, n: int) -> None:
    if n < 3 or n_sequences < 1:
        raise ValueError(
            f"expected at least one sequence with room for segments, got {n_sequences} of {length} tokens"
        )
    if host.context is not None and length > host.context:
        raise ValueError(
            f"expected at most {host.context} tokens, the context of this model, got length={length}: "
            "choose a smaller length"
        )
    host.require_steady(length)
