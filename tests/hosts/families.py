"""Every RoPE family that ropelens is held to: one table, read by the tests and by docs/hosts.md.

What a family is expected to show is worked out here by hand, not by the code under test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import transformers as hf

HEADS, D_HEAD, WINDOW = 6, 8, 6
SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
Ladder = list[float]


def ladder(base: float = 1e4, width: int = D_HEAD) -> Ladder:
    """The textbook frequencies, `base ** (-2b / width)`."""
    return [base ** (-b / width) for b in range(0, width, 2)]


def llama3_ladder() -> Ladder:
    """The llama3 rule for base 10000, factor 8, 1 and 4 times an original context of 32."""
    found = []
    for freq in ladder():
        wavelength = 2 * math.pi / freq
        if wavelength < 32 / 4:
            found.append(freq)
        elif wavelength > 32 / 1:
            found.append(freq / 8)
        else:
            smooth = (32 / wavelength - 1) / (4 - 1)
            found.append((1 - smooth) * freq / 8 + smooth * freq)
    return found


def yarn_ladder() -> Ladder:
    """The yarn rule for factor 4, an original context of 32, and 32 and 1 turns within it."""
    dim = [D_HEAD * math.log(32 / (turns * 2 * math.pi)) / (2 * math.log(1e4)) for turns in (32, 1)]
    low, high = max(math.floor(dim[0]), 0), min(math.ceil(dim[1]), D_HEAD - 1)
    ramp = [min(max((b - low) / (high - low), 0), 1) for b in range(D_HEAD // 2)]
    return [freq * (1 - r) + freq / 4 * r for freq, r in zip(ladder(), ramp, strict=True)]


SCALED: dict[str, dict[str, Any]] = {
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "short_factor": [1.0, 1.2, 1.5, 2.0],
        "long_factor": [1.0, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 32,
    },
}
LONGROPE_SHORT = [f / s for f, s in zip(ladder(), (1.0, 1.2, 1.5, 2.0), strict=True)]
YARN_AMPLITUDE = 0.1 * math.log(4) + 1
LONGROPE_AMPLITUDE = math.sqrt(1 + math.log(128 / 32) / math.log(32))
MOE = {"num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"}
SLIDING_THEN_FULL = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 20}

NOT_CONVERTED = (
    'HookedTransformer cannot be made from a {model} ({model} is not currently supported.): use host="bridge"'
)
UNLIKE = (
    "layer {layer}: HookedTransformer, made from a {model}, has other {what} than it ({ours} instead of "
    '{its}): use host="bridge"'
)
NEVER_FIRES = (
    "hook point 'blocks.0.attn.hook_rot_q' never fires in this model: TransformerBridge lists it but runs "
    "the attention of layer 0 elsewhere, so its bands cannot be read"
)
WRAPS_ANOTHER = (
    "layer 0: TransformerBridge's attention differs from that of the {model}Attention inside it by {number} "
    'of its range, so that its bands would not be those of the model: use host="transformers"'
)
DOES_NOT_TURN = (
    "layer 0: its queries do not turn with position as RoPE would have them (the closest layout "
    "misses by {number} of their length); other position schemes are not supported"
)
NOT_REBUILT = (
    "layer 0: the scores rebuilt from queries and keys differ from the model's own by {number} of "
    "their range (at most 1e-04 is accepted): TransformerBridge does not show the queries and keys that "
    "this model attends with"
)


@dataclass(frozen=True)
class Family:
    """One family at a tiny size, and what each of its two layers must be found to do.

    Attributes:
        title: Its name in the support table.
        model: The transformers class, without "ForCausalLM".
        extra: Its configuration, on top of `SMALL`.
        special: What bites in it, for the table.
        ladders: The frequencies of each layer; none of a layer that does not rotate.
        refused: The sentence with which a host refuses it, by "hooked", "bridge 3", "bridge 4" or
            "transformers"; a host that is not named carries it. `{number}` stands for any number.
    """

    title: str
    model: str
    extra: dict[str, Any] = field(default_factory=dict)
    special: str = ""
    ladders: tuple[Ladder, Ladder] = (ladder(), ladder())
    adjacent: bool = False
    scale: float = D_HEAD**-0.5
    softcap: float | None = None
    windows: tuple[int | None, int | None] = (None, None)
    sinks: bool = False
    amplitude: float = 1.0
    kv_heads: int = 2
    d_head: int = D_HEAD
    refused: dict[str, str] = field(default_factory=dict)
    half_on: tuple[str, ...] = ()  # hosts whose library cannot run it in float64

    @property
    def config(self) -> Any:
        return self.model_class.config_class

    @property
    def model_class(self) -> Any:
        return getattr(hf, f"{self.model}ForCausalLM")


def not_converted(model: str) -> dict[str, str]:
    return {"hooked": NOT_CONVERTED.format(model=f"{model}ForCausalLM")}


def unlike(model: str, what: str, ours: str, its: str, layer: int = 0) -> dict[str, str]:
    model = f"{model}ForCausalLM"
    return {"hooked": UNLIKE.format(layer=layer, model=model, what=what, ours=ours, its=its)}


def both_bridges(message: str) -> dict[str, str]:
    return {"bridge 3": message, "bridge 4": message}


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", "Llama", special="grouped queries"),
    "llama3": Family(
        "Llama, llama3 scaling",
        "Llama",
        {"rope_parameters": SCALED["llama3"]},
        "slow bands slowed further",
        ladders=(llama3_ladder(), llama3_ladder()),
    ),
    "linear": Family(
        "Llama, linear scaling",
        "Llama",
        {"rope_parameters": SCALED["linear"]},
        "all bands slowed",
        ladders=([f / 4 for f in ladder()],) * 2,
        refused=unlike("Llama", "frequencies", "1 to 0.001", "0.25 to 0.00025"),
    ),
    "dynamic": Family(
        "Llama, dynamic scaling",
        "Llama",
        {"rope_parameters": SCALED["dynamic"]},
        "frequencies change beyond the context",
    ),
    "yarn": Family(
        "Llama, yarn scaling",
        "Llama",
        {"rope_parameters": SCALED["yarn"]},
        "slow bands slowed, amplitude",
        ladders=(yarn_ladder(), yarn_ladder()),
        amplitude=YARN_AMPLITUDE,
        refused=unlike("Llama", "frequencies", "1 to 0.001", "1 to 0.00025"),
    ),
    "longrope": Family(
        "Llama, longrope scaling",
        "Llama",
        {"rope_parameters": SCALED["longrope"]},
        "a factor a band, amplitude; other frequencies beyond the original context",
        ladders=(LONGROPE_SHORT, LONGROPE_SHORT),
        amplitude=LONGROPE_AMPLITUDE,
        refused=unlike("Llama", "frequencies", "1 to 0.001", "1 to 0.0005"),
    ),
    "mistral": Family(
        "Mistral",
        "Mistral",
        {"head_dim": 8, "sliding_window": WINDOW},
        "sliding window",
        windows=(WINDOW, WINDOW),
    ),
    "mixtral": Family(
        "Mixtral",
        "Mixtral",
        {"head_dim": 8, "sliding_window": WINDOW, **MOE},
        "experts, sliding window",
        ladders=(ladder(1e6), ladder(1e6)),
        windows=(WINDOW, WINDOW),
        half_on=("hooked",),
    ),
    "qwen2": Family(
        "Qwen 2",
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        "biases, windows in the upper layers",
        windows=(None, WINDOW),
        refused=unlike("Qwen2", "visible keys", "all", f"the last {WINDOW}", layer=1),
    ),
    "qwen3": Family("Qwen 3", "Qwen3", {"head_dim": 8}, "norms of queries and keys"),
    "phi": Family(
        "Phi",
        "Phi",
        {"num_key_value_heads": 6},
        "half of the dims rotate",
        ladders=(ladder(width=4), ladder(width=4)),
        kv_heads=6,
        refused={
            "hooked": "HookedTransformer cannot be made from a PhiForCausalLM ('PhiConfig' object has no "
            "attribute 'partial_rotary_factor'): use host=\"bridge\""
        },
    ),
    "phi3": Family(
        "Phi-3",
        "Phi3",
        {"partial_rotary_factor": 0.5, "sliding_window": WINDOW},
        "half of the dims rotate, sliding window, joint QKV",
        ladders=(ladder(width=4), ladder(width=4)),
        windows=(WINDOW, WINDOW),
        refused=unlike("Phi3", "rotated dims", "8", "4"),
    ),
    "phi3_longrope": Family(
        "Phi-3, longrope scaling",
        "Phi3",
        {"rope_parameters": SCALED["longrope"], "original_max_position_embeddings": 32},
        "a factor a band, amplitude; other frequencies beyond the original context",
        ladders=(LONGROPE_SHORT, LONGROPE_SHORT),
        amplitude=LONGROPE_AMPLITUDE,
        refused=unlike("Phi3", "frequencies", "1 to 0.001", "1 to 0.0005"),
    ),
    "gpt_neox": Family(
        "GPT-NeoX, Pythia",
        "GPTNeoX",
        {"rotary_pct": 0.5, "num_key_value_heads": None},
        "part of the dims rotates, joint QKV",
        ladders=(ladder(width=4), ladder(width=4)),
        kv_heads=6,
    ),
    "gptj": Family(
        "GPT-J",
        "GPTJ",
        {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 128, "rotary_dim": 4},
        "neighbouring dims, half of them rotate",
        ladders=(ladder(width=4), ladder(width=4)),
        adjacent=True,
        kv_heads=6,
        refused=both_bridges(NEVER_FIRES),
    ),
    "gemma2": Family(
        "Gemma 2",
        "Gemma2",
        {**GEMMA, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0},
        "softcap, alternating windows, a scale of its own",
        scale=20**-0.5,
        softcap=2.0,
        windows=(WINDOW, None),
        refused=not_converted("Gemma2"),
    ),
    "gemma3": Family(
        "Gemma 3",
        "Gemma3",
        {**GEMMA, **SLIDING_THEN_FULL},
        "two bases, windows, norms, a scale of its own",
        ladders=(ladder(), ladder(1e6)),
        scale=20**-0.5,
        windows=(WINDOW, None),
        refused=not_converted("Gemma3"),
    ),
    "glm": Family(
        "GLM",
        "Glm",
        {"head_dim": 8, "partial_rotary_factor": 0.5},
        "neighbouring dims, half of them rotate",
        ladders=(ladder(width=4), ladder(width=4)),
        adjacent=True,
        refused=not_converted("Glm"),
    ),
    "ernie": Family(
        "ERNIE 4.5",
        "Ernie4_5",
        {"head_dim": 8},
        "neighbouring dims",
        ladders=(ladder(5e5), ladder(5e5)),
        adjacent=True,
        refused=not_converted("Ernie4_5"),
    ),
    "cohere": Family(
        "Cohere",
        "Cohere",
        {"logit_scale": 1.0},
        "neighbouring dims",
        ladders=(ladder(5e5), ladder(5e5)),
        adjacent=True,
        refused={**not_converted("Cohere"), "bridge 3": DOES_NOT_TURN},
    ),
    "cohere2": Family(
        "Cohere 2",
        "Cohere2",
        {"logit_scale": 1.0, **SLIDING_THEN_FULL},
        "neighbouring dims, windows, layers without rotation",
        ladders=(ladder(), []),
        adjacent=True,
        windows=(WINDOW, None),
        refused={**not_converted("Cohere2"), "bridge 3": DOES_NOT_TURN},
    ),
    "olmo2": Family(
        "OLMo 2", "Olmo2", special="norms over all heads at once", refused=not_converted("Olmo2")
    ),
    "olmo3": Family(
        "OLMo 3",
        "Olmo3",
        SLIDING_THEN_FULL,
        "norms over all heads at once, windows",
        ladders=(ladder(5e5), ladder(5e5)),
        windows=(WINDOW, None),
    ),
    "smollm3": Family(
        "SmolLM3",
        "SmolLM3",
        {"no_rope_layers": [1, 0]},
        "layers without rotation",
        ladders=(ladder(2e6), []),
        refused=not_converted("SmolLM3"),
    ),
    "exaone4": Family(
        "EXAONE 4",
        "Exaone4",
        {"head_dim": 8, **SLIDING_THEN_FULL},
        "norms, windows, layers without rotation",
        ladders=(ladder(), []),
        windows=(WINDOW, None),
        refused=not_converted("Exaone4"),
    ),
    "gpt_oss": Family(
        "gpt-oss",
        "GptOss",
        {"head_dim": 8, "rope_parameters": SCALED["yarn"], **SLIDING_THEN_FULL, **MOE},
        "learned sinks, yarn amplitude, windows, experts",
        ladders=(yarn_ladder(), yarn_ladder()),
        windows=(WINDOW, None),
        sinks=True,
        amplitude=YARN_AMPLITUDE,
    ),
    "falcon": Family(
        "Falcon",
        "Falcon",
        {"alibi": False, "multi_query": False, "num_key_value_heads": None},
        "joint QKV, attention outside transformers' interface",
        kv_heads=6,
        refused={
            **not_converted("Falcon"),
            "transformers": "FalconForCausalLM runs its attention outside transformers' AttentionInterface, "
            "so its queries and keys cannot be seen: wrap it with TransformerBridge.boot_transformers",
        },
    ),
    "deepseek": Family(
        "DeepSeek V3",
        "DeepseekV3",
        {
            "num_key_value_heads": 6,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 2,
        },
        "multi-head latent attention",
        refused={
            **not_converted("DeepseekV3"),
            **both_bridges(NOT_REBUILT),
            "transformers": DOES_NOT_TURN,
        },
    ),
    "hunyuan": Family(
        "HunYuan",
        "HunYuanDenseV1",
        {"head_dim": 8},
        "norm after the rotation",
        refused={
            **not_converted("HunYuanDenseV1"),
            "bridge 3": WRAPS_ANOTHER.replace("{model}", "HunYuanDenseV1"),
            "bridge 4": NOT_REBUILT,
            "transformers": DOES_NOT_TURN,
        },
    ),
}
