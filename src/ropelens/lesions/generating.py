"""Texts from a model, and what another state of it thinks of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropelens.hosts import Host
from ropelens.hosts.decoding import Decoder


def generate(
    host: Host,
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
    *,
    stop: frozenset[int] = frozenset(),
    temperature: float | int = 0.0,
    seeds: Sequence[int] = (),
    cached: bool = True,
) -> list[list[int]]:
    """Returns what a model adds to each prompt, the token that stops it left out.

    Args:
        n_tokens: How many at most.
        stop: Tokens that end a text.
        temperature: 0 takes the likeliest token (the first of equals); else tokens are drawn.
        seeds: Of the drawing, one for each prompt.
        cached: Whether keys and values are kept between tokens.
    """
    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = torch.tensor(prompt), 1
    draws = [np.random.default_rng([seed, 1]) for seed in seeds]
    texts: list[list[int]] = [[] for _ in prompts]
    going = [True] * len(prompts)
    with torch.no_grad():
        decoder = Decoder(host, ids.to(host.device), mask.to(host.device), cached)
        for _ in range(n_tokens):
            logits = decoder.logits()
            found = _chosen(logits, temperature, draws)
            sound = logits.isfinite().all(-1).tolist()
            broken = [row for row, prompt in enumerate(prompts) if not sound[row] and len(prompt) < width]
            if broken and not any(texts):
                raise ValueError(
                    f"the logits after a text of {len(prompts[broken[0]])} tokens with pads before it are "
                    "not finite: this model's attention cannot hide pads in its dtype; load it in float32, "
                    'or with attn_implementation="sdpa"'
                )
            for row, token in enumerate(found.tolist()):
                going[row] = going[row] and sound[row] and token not in stop
                if going[row]:
                    texts[row].append(token)
            if not any(going):
                break
            decoder.add(found.to(host.device))
    return texts


def token_losses(
    host: Host, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Returns the nats that each token of each text costs after its prompt, in one forward pass."""
    rows = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(width) < lengths[:, None]
    with torch.no_grad():
        logits = host.run(ids.to(host.device), None if bool(mask.all()) else mask.to(host.device))
        assert logits is not None
        found = []
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            before = logits[row, len(prompt) - 1 : len(prompt) + len(text) - 1].float()
            target = torch.tensor(list(text), dtype=torch.int64, device=before.device)
            found.append(torch.nn.functional.cross_entropy(before, target, reduction="none").tolist())
    return found


def _chosen(logits: Tensor, temperature: float | int, draws: list[Any]) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1).cpu()
    weights = (logits.double().cpu() / temperature).softmax(-1).cumsum(-1)
    u = torch.tensor([draw.random() for draw in draws], dtype=torch.float64)[:, None]
    at = torch.searchsorted(weights, u * weights[:, -1:])[:, 0]
    return at.clamp(max=logits.shape[-1] - 1)


class Chat:
    """How a tokenizer turns what is said into tokens: by its chat template, where it has one."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.has_turns = getattr(tokenizer, "chat_template", None) is not None

    def prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Returns the tokens before the next answer. Without a template: those of a single message."""
        if not self.has_turns:
            return list(self.tokenizer.encode(messages[-1]["content"]))
        text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Returns the text that each token adds: together they are the text.

        Where a character is spread over several tokens, the last of them brings it.
        """
        whole, pieces, done = self.text(tokens), [], 0
        for n in range(1, len(tokens) + 1):
            start = max(0, n - 8)  # far enough back for any character
            stem, grown = self.text(tokens[start : n - 1]), self.text(tokens[start:n])
            piece = grown[len(stem) :] if grown.startswith(stem) else ""
            if grown.endswith("\ufffd") or not whole.startswith(piece, done):
                piece = ""
            pieces.append(piece)
            done += len(piece)
            if done < len(whole) and n == len(tokens):
                pieces[-1] += whole[done:]
        return pieces


def stop_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Returns the tokens that end an answer: the tokenizer's and the generation settings'."""
    settings = getattr(getattr(model, "original_model", model), "generation_config", None)
    found = getattr(settings, "eos_token_id", None)
    many = found if isinstance(found, list | tuple) else [found]
    own = getattr(tokenizer, "eos_token_id", None)
    return frozenset(int(token) for token in (*many, own) if token is not None)
