"""The loss of a model on every document of a text, by position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from ropelens.data import Windows
from ropelens.data import windows as windows_of
from ropelens.hosts import Host


@dataclass(frozen=True)
class Piece:
    """A run of tokens that is evaluated by itself, and the hash of the document it is from."""

    ids: Int64[Tensor, " pos"]
    document: str


def pieces(host: Host, windows: Any) -> Iterator[Piece]:
    """Yields the documents in every window, each alone.

    Raises:
        ValueError: If windows are something else, longer than the model's context, or hold tokens that
            it does not have.
    """
    if isinstance(windows, Tensor):
        windows = windows_of(windows)
    if not isinstance(windows, Windows):
        raise ValueError(
            "expected windows from ropelens.windows or token ids of shape [batch, pos], got "
            f"{type(windows).__name__}"
        )
    if host.context is not None and windows.context > host.context:
        raise ValueError(
            f"expected windows of at most {host.context} tokens, the context of this model, got "
            f"{windows.context}: make them with context={host.context}"
        )
    host.require_steady(windows.context)
    for window in windows:
        low, high = int(window.ids.min()), int(window.ids.max())
        if low < 0 or high >= host.vocab_size:
            raise ValueError(
                f"expected token ids from 0 to {host.vocab_size - 1}, got {low if low < 0 else high}: were "
                "they made by another model's tokenizer?"
            )
        for ids, document in zip(window.ids.split(list(window.lengths)), window.documents, strict=True):
            yield Piece(ids, document)


def token_losses(host: Host, ids: Int64[Tensor, " pos"]) -> Float64[Tensor, " _"]:
    """Returns `-log P(token p | tokens before it)` for p from 1 on, in nats, on the CPU."""
    ids = ids.to(host.device)
    logits = host.run(ids[None], None)
    assert logits is not None
    logits = logits[0, :-1].to(torch.promote_types(logits.dtype, torch.float32))
    losses = torch.nn.functional.cross_entropy(logits, ids[1:].to(logits.device), reduction="none")
    return losses.cpu().double()
