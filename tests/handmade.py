"""Attention-only models whose weights are written down here: heads that do what their name says, with RoPE.

The residual stream holds one coordinate a token, one for "the token before was this one", and a constant.
A head's first bands are fast, its last ones turn less than a tenth of a radian in a text: content goes there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

V, D_HEAD = 40, 64
CONSTANT, D_MODEL = 2 * V, 2 * D_HEAD
BASE = 1e8
FAST = range(12)  # bands whose wavelength is below 5,000 tokens
SLOW = range(12, 32)  # 20 bands, two dims each: one a token


@dataclass
class Head:
    """One head: what its queries and keys read, and what it writes.

    Attributes:
        looks: "before" (the previous token), "same" (the same token), "after" (the token whose previous
            token is this one), or "nowhere".
        writes: "token" (raises what it sees), "-token" (lowers it), "before" (remembers it as the token
            before) or "nothing".
    """

    looks: str = "nowhere"
    writes: str = "nothing"


def model(*layers: tuple[Head, Head], sharpness: float = 30.0) -> Any:
    """Returns a float64 Llama of two heads a layer, without an MLP."""
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=D_MODEL,
        intermediate_size=8,
        num_hidden_layers=len(layers),
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=D_HEAD,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
        attn_implementation="eager",
        tie_word_embeddings=False,
    )
    found = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for weight in found.parameters():
            if weight.ndim > 1:
                weight.zero_()
        found.model.embed_tokens.weight[:, :V] = torch.eye(V)
        found.model.embed_tokens.weight[:, CONSTANT] = 1
        found.lm_head.weight[:, :V] = torch.eye(V)
        for layer, heads in zip(found.model.layers, layers, strict=True):
            for number, head in enumerate(heads):
                _write(layer.self_attn, number, head, sharpness)
    return found


def _write(attn: Any, number: int, head: Head, sharpness: float) -> None:
    dims = slice(number * D_HEAD, (number + 1) * D_HEAD)
    q, k, v, o = (torch.zeros(D_MODEL, D_HEAD, dtype=torch.float64) for _ in range(4))
    inv_freq = BASE ** (-torch.arange(32, dtype=torch.float64) / 32)
    # A norm makes the entries of a token sqrt(D_MODEL / 2); the scale is 1/8.
    gain = (sharpness * 8 / (D_MODEL / 2)) ** 0.5
    if head.looks == "before":
        for band in FAST:  # the key is the query, turned by one token
            q[CONSTANT, band] = gain
            k[CONSTANT, band], k[CONSTANT, band + 32] = (
                gain * inv_freq[band].cos(),
                gain * inv_freq[band].sin(),
            )
    if head.looks in ("same", "after"):
        slow = torch.tensor([b + half for b in SLOW for half in (0, 32)])
        reads = 0 if head.looks == "same" else V
        q[torch.arange(V), slow] = gain
        k[reads + torch.arange(V), slow] = gain
    if head.writes != "nothing":
        to = V if head.writes == "before" else 0
        v[torch.arange(V), torch.arange(V)] = 1
        # As large as a token's own coordinate, or large enough to outdo it in the logits.
        size = (D_MODEL / 2) ** -0.5 * (1 if head.writes == "before" else 4)
        o[to + torch.arange(V), torch.arange(V)] = -size if head.writes == "-token" else size
    attn.q_proj.weight[dims], attn.k_proj.weight[dims] = q.T, k.T
    attn.v_proj.weight[dims], attn.o_proj.weight[:, dims] = v.T, o


def induction() -> Any:
    """Two layers: a previous-token head, and an induction head that reads what it wrote."""
    return model((Head("before", "before"), Head()), (Head("after", "token"), Head()))
