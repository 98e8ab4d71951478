"""What a report needs and no file holds, measured on a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ropelens.circuits import head_scores, positional_kernel
from ropelens.hooks import observe
from ropelens.hosts import host_of
from ropelens.hosts.tokens import tokens_of
from ropelens.report.attention import TEXT, attention_grid, choose_heads
from ropelens.report.finding import Results
from ropelens.scores import same_model

FARTHEST = 1024


def complete(
    results: Results,
    model: Any,
    ids: Tensor,
    *,
    text: str | Tensor = TEXT,
    say: Callable[[str], None] = lambda doing: None,
    progress: bool = False,
) -> Results:
    """Returns results with what they lack: scores, scores of heads, positional kernels, and attention.

    Args:
        results: Of the same model; they may be empty.
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        ids: One row of token ids, for entropy and activation where there are none; its first 1,024 for
            the kernels.
        text: The short text of the attention page.
        say: Takes a line before each measurement.
        progress: Whether to show bars.

    Raises:
        ValueError: If the results are of another model, or the text is not usable.
    """
    host = host_of(model)
    if results.models and (why := same_model(results.models[0][1], host.fingerprint)):
        raise ValueError(f"expected the model that the results are of, got another ({why}): name that one")
    found = replace(results, scores=dict(results.scores))
    if not found.models:
        found.models = [("the model", host.fingerprint)]
    if not found.scores:
        tokens = tokens_of(host, ids)
        say(f"entropy and activation of every band, on {ids.shape[1]:,} tokens")
        with torch.no_grad(), observe(model, ("entropy", "activation"), progress=progress) as seen:
            host.run(tokens.ids, None, logits=False)
        found.scores = {name: seen.result(name, data=tokens.digest) for name in ("entropy", "activation")}
    limit = host.context or 512
    if found.heads is None:
        say("what every head attends to, on random tokens that repeat")
        scores = head_scores(model, n_sequences=4, length=min(256, limit), progress=progress)
        found.heads = scores.to_frame()
    if found.kernel is None:
        say("what every head owes to distance alone")
        short = ids[:, :FARTHEST]  # enough pairs at every distance
        found.kernel = positional_kernel(model, short, distances=kernel_distances(short.shape[1] // 2))
    if found.grid is None:
        first = next((s for s in found.scores.values() if s.metric == "entropy"), None)
        if first is None:
            first = next(iter(found.scores.values()))
        heads = choose_heads(first, found.heads)
        say(f"the attention of {len(heads)} heads by band, every query of a short text")
        if isinstance(text, str) and getattr(model, "tokenizer", None) is None:
            text = ids  # there is nothing to read words with
        found.grid = attention_grid(model, text, heads=heads, progress=progress)
    return found


def kernel_distances(farthest: int) -> list[int]:
    """Returns distances from 0 up: each up to 16, then ever farther apart, about 8 a doubling.

    Example:
        >>> kernel_distances(32)[14:]
        [14, 15, 16, 17, 19, 21, 23, 25, 27, 29, 32]
    """
    found = list(range(min(16, farthest) + 1))
    step = 1
    while True:
        distance = round(16 * 2 ** (step / 8))
        if distance > farthest:
            return found
        found.append(distance)
        step += 1
