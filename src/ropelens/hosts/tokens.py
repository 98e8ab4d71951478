"""From text to token ids, checked before the model sees them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ropelens.hosts.base import Host


@dataclass(frozen=True, eq=False)
class Tokens:
    """Token ids, padded to one length.

    Attributes:
        ids: Token ids.
        mask: True where a token is real; None if all are.
    """

    ids: Int64[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"] | None

    @property
    def n_documents(self) -> int:
        return len(self.ids)

    def documents(self) -> list[Int64[Tensor, "1 pos"]]:
        """Each row alone, without its pads."""
        if self.mask is None:
            return list(self.ids.split(1))
        return [row[keep][None] for row, keep in zip(self.ids, self.mask, strict=True)]

    @property
    def digest(self) -> str:
        """A hash of the real tokens of each document, the same however they are padded."""
        digest = hashlib.sha256()
        for row in self.documents():
            digest.update(row.cpu().numpy().tobytes() + b"|")
        return digest.hexdigest()[:32]


def tokens_of(
    host: Host,
    text: str | list[str] | Tensor,
    attention_mask: Tensor | None = None,
    tokenizer: Any = None,
) -> Tokens:
    """Returns the token ids of a text on the model's device.

    Args:
        text: A string, several strings, or Int[Tensor, "batch pos"] token ids. Strings go through
            the tokenizer with its own special tokens and are padded on the right.
        attention_mask: For token ids only: nonzero where a token is real, in one run a row.
        tokenizer: Used for strings; `model.tokenizer` by default.

    Raises:
        ValueError: If the input is empty, of a wrong type or shape, outside the vocabulary, shorter
            than 2 tokens or longer than the model's context.
    """
    if isinstance(text, Tensor):
        ids, mask = _checked_ids(text), _checked_mask(text, attention_mask)
    elif isinstance(text, str) or (isinstance(text, list) and all(isinstance(t, str) for t in text)):
        if attention_mask is not None:
            raise ValueError("an attention mask goes with token ids; strings are padded for you")
        ids, mask = _encode([text] if isinstance(text, str) else text, host, tokenizer)
    else:
        raise ValueError(
            f"expected a string, a list of strings or a tensor of token ids, got {type(text).__name__}"
        )
    shortest = ids.shape[1] if mask is None else int(mask.sum(-1).min())
    if shortest < 2:
        raise ValueError(
            f"expected at least 2 tokens in every text, got {shortest}: one token has nothing to attend to"
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= host.vocab_size:
        raise ValueError(
            f"expected token ids from 0 to {host.vocab_size - 1}, got {low if low < 0 else high}: were "
            "they made by another model's tokenizer?"
        )
    if host.context is not None and ids.shape[1] > host.context:
        raise ValueError(
            f"expected at most {host.context} tokens, the context of this model, got {ids.shape[1]}: cut "
            "the text into windows and pass them as rows of a batch"
        )
    host.require_steady(ids.shape[1])
    return Tokens(ids.to(host.device), None if mask is None else mask.to(host.device))


def token_strings(host: Host, ids: Int64[Tensor, " pos"], tokenizer: Any = None) -> tuple[str, ...]:
    """Returns each token as readable text, or its id where there is no tokenizer."""
    tokenizer = tokenizer or getattr(host.model, "tokenizer", None)
    if tokenizer is None:
        return tuple(str(i) for i in ids.tolist())
    return tuple(tokenizer.decode([i]) for i in ids.tolist())


def _encode(texts: list[str], host: Host, tokenizer: Any) -> tuple[Tensor, Tensor | None]:
    if not texts or any(not text.strip() for text in texts):
        raise ValueError("expected text, got an empty string or list")
    tokenizer = tokenizer or getattr(host.model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: pass tokenizer=, or token ids instead of text")
    rows = [torch.tensor(tokenizer.encode(text), dtype=torch.int64) for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return ids, None if bool(mask.all()) else mask


def _checked_ids(ids: Tensor) -> Int64[Tensor, "batch pos"]:
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
        raise ValueError(f"expected integer token ids, got a tensor of {ids.dtype}")
    if ids.ndim != 2:
        raise ValueError(f"expected token ids of shape [batch, pos], got {list(ids.shape)}")
    if ids.numel() == 0:
        raise ValueError(f"expected at least one text of 2 tokens, got token ids of shape {list(ids.shape)}")
    return ids.to(torch.int64)


def _checked_mask(ids: Tensor, mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise ValueError(f"expected an attention mask as a tensor, got {type(mask).__name__}")
    if mask.shape != ids.shape:
        raise ValueError(
            f"expected an attention mask of the shape of the tokens, {list(ids.shape)}, "
            f"got {list(mask.shape)}"
        )
    mask = mask != 0
    starts = mask[:, :1].long().sum(-1) + (mask[:, 1:] & ~mask[:, :-1]).sum(-1)
    if bool((starts > 1).any()):
        row = int((starts > 1).nonzero()[0])
        raise ValueError(
            f"expected one unbroken run of real tokens per row, but the attention mask of row {row} has "
            "gaps: pad on the left or on the right"
        )
    return None if bool(mask.all()) else mask
