"""Tiny random models of several families, in float64, with weights large enough for sharp attention."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch

from ropelens.hosts.load import has_hooked_transformer

needs_hooked = pytest.mark.skipif(
    not has_hooked_transformer(), reason="transformer-lens 4 has no HookedTransformer"
)

HOSTS = ("transformers", "bridge", *(("hooked",) if has_hooked_transformer() else ()))
VOCAB = 61
# Those on which all metrics are tried, and those on which the plain transformers host is tried further.
FAMILIES = ("llama", "llama3", "mistral", "gemma2", "phi", "glm")
MORE_FAMILIES = ("gpt_oss", "gemma3", "qwen3", "olmo2", "smollm3", "gpt_neox", "gptj")


def refusal(family: str, host: str) -> str | None:
    """The sentence with which this host must refuse this family; None if it carries it."""
    key = host if host != "bridge" else f"bridge {3 if has_hooked_transformer() else 4}"
    return families.FAMILIES[family].refused.get(key)


def carried(*names: str) -> list[tuple[str, str]]:
    """Each of these families with each host that carries it."""
    return [(family, host) for host in HOSTS for family in names if refusal(family, host) is None]


def plain(family: str, seed: int = 0, dtype: torch.dtype = torch.float64, attention: str = "eager") -> Any:
    """Returns the transformers model of a family."""
    torch.manual_seed(seed)
    found = families.FAMILIES[family]
    config = found.config(**(families.SMALL | found.extra | {"attn_implementation": attention}))
    model = found.model_class(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.25)
            elif name.endswith("sinks"):
                weight.normal_()
            elif "norm" in name and "attn" in name:  # of queries and keys: one that is all ones hides much
                weight.uniform_(0.5, 1.5)
    return model.to(dtype)


def varied(family: str) -> Any:
    """As `plain`, with norms and biases that are not those that all models begin with."""
    model = plain(family)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1 and not name.endswith("sinks"):
                weight += 0.3 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return model


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
