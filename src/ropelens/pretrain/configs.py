"""What is trained, and how: named configurations."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """A Llama with tied embeddings, and its training.

    Attributes:
        vocab_size: Of the tokenizer, too.
        mlp: Width of the SwiGLU's hidden layer.
        context: Tokens in a sequence.
        tokens: Training tokens, rounded down to whole steps.
        batch: Sequences a step, over all devices.
        micro_batch: Sequences a device takes at once; gradients are accumulated to a whole batch.
        lr: Peak of the learning rate, which warms up over `warmup` of the steps and then falls to a
            tenth along a cosine.
        weight_decay: Of all parameters but the embeddings (and frequencies, where these are learned).
        base: Of the original frequencies, `base ** (-2b / d_head)`.
    """

    name: str
    vocab_size: int
    layers: int
    heads: int
    width: int
    mlp: int
    context: int
    tokens: int
    batch: int
    micro_batch: int
    lr: float
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    warmup: float = 0.02
    base: float = 10_000.0

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"expected a width that {self.heads} heads share evenly in pairs, got {self.width}"
            )
        if self.batch % self.micro_batch:
            raise ValueError(
                f"expected a batch of whole micro-batches of {self.micro_batch}, got {self.batch}"
            )
        if self.steps < 1:
            raise ValueError(
                f"expected at least one step of {self.batch * self.context:,} tokens, got {self.tokens:,}"
            )

    @property
    def steps(self) -> int:
        return self.tokens // (self.batch * self.context)

    @property
    def d_head(self) -> int:
        return self.width // self.heads

    @property
    def facts(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self) | {"betas": list(self.betas)}

    def llama(self) -> Any:
        """Returns the transformers configuration."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.width,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=self.context,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": self.base},
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=None,
            use_cache=False,
        )

    def build(self, seed: int) -> Any:
        """Returns a new model with random weights; the global random state stays as it was."""
        from transformers import LlamaForCausalLM

        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return LlamaForCausalLM(self.llama())

    def n_parameters(self) -> int:
        """Counts the parameters without allocating them."""
        from transformers import LlamaForCausalLM

        with torch.device("meta"):
            model = LlamaForCausalLM(self.llama())
            model.tie_weights()
        return sum(p.numel() for p in model.parameters())


CONFIGS = {
    config.name: config
    for config in (
        PretrainConfig(
            name="study-100m",
            vocab_size=50_257,
            layers=10,
            heads=12,
            width=768,
            mlp=2048,
            context=1024,
            tokens=2_000_000_000,
            batch=512,
            micro_batch=16,
            lr=6e-4,
        ),
        PretrainConfig(
            name="small-10m",
            vocab_size=8192,
            layers=6,
            heads=5,
            width=320,
            mlp=864,
            context=512,
            tokens=200_000_000,
            batch=64,
            micro_batch=16,
            lr=1e-3,
        ),
        PretrainConfig(
            name="tiny-1m",
            vocab_size=2048,
            layers=4,
            heads=2,
            width=128,
            mlp=344,
            context=256,
            tokens=4_000_000,
            batch=16,
            micro_batch=16,
            lr=2e-3,
        ),
    )
}


def config_of(name: str | PretrainConfig) -> PretrainConfig:
    """Returns a configuration by its name, or as it is.

    Raises:
        ValueError: If there is none of that name.
    """
    if isinstance(name, PretrainConfig):
        return name
    if name not in CONFIGS:
        raise ValueError(f"expected a configuration out of {', '.join(CONFIGS)}, got {name!r}")
    return CONFIGS[name]
