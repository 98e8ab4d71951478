"""Tiny random models of several families, in float64, with weights large enough for sharp attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from ropelens.hosts.load import has_hooked_transformer

needs_hooked = pytest.mark.skipif(
    not has_hooked_transformer(), reason="transformer-lens 4 has no HookedTransformer"
)

VOCAB = 61
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {}),
    "llama3": (hf.LlamaForCausalLM, hf.LlamaConfig, {"rope_parameters": LLAMA3}),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, {"head_dim": 8, "sliding_window": 6}),
    "gemma2": (
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config,
        {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0},
    ),
    "phi": (hf.PhiForCausalLM, hf.PhiConfig, {"num_key_value_heads": 6}),
    "glm": (hf.GlmForCausalLM, hf.GlmConfig, {"head_dim": 8, "partial_rotary_factor": 0.5}),
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
}
SLIDING_THEN_FULL = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
# Those that only the plain transformers host is held to so far.
MORE_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt_oss": (
        hf.GptOssForCausalLM,
        hf.GptOssConfig,
        SLIDING_THEN_FULL
        | {
            "head_dim": 8,
            "rope_parameters": YARN,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "experts_implementation": "eager",
        },
    ),
    "gemma3": (
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig,
        SLIDING_THEN_FULL | {"head_dim": 8, "query_pre_attn_scalar": 20},
    ),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {"head_dim": 8}),
    "olmo2": (hf.Olmo2ForCausalLM, hf.Olmo2Config, {}),
    "smollm3": (hf.SmolLM3ForCausalLM, hf.SmolLM3Config, {"no_rope_layers": [1, 0]}),
    "gpt_neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, {}),
    "gptj": (
        hf.GPTJForCausalLM,
        hf.GPTJConfig,
        {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 128, "rotary_dim": 4},
    ),
}


def plain(family: str, seed: int = 0, dtype: torch.dtype = torch.float64, attention: str = "eager") -> Any:
    """Returns the transformers model of a family."""
    torch.manual_seed(seed)
    model_class, config_class, extra = (FAMILIES | MORE_FAMILIES)[family]
    model = model_class(config_class(**(SMALL | extra | {"attn_implementation": attention}))).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.25)
            elif name.endswith("sinks"):
                weight.normal_()
    return model.to(dtype)


def bridge(model: Any) -> Any:
    """Returns a TransformerBridge around a transformers model."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    return build_bridge_from_module(
        model,
        type(model).__name__,
        hf_config=model.config,
        model_name="tiny",
        dtype=next(model.parameters()).dtype,
    )


def ids(batch: int = 2, pos: int = 24, seed: int = 1) -> torch.Tensor:
    """Returns random token ids, pads excepted."""
    return torch.randint(3, VOCAB, (batch, pos), generator=torch.Generator().manual_seed(seed))
