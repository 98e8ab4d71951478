"""Where the layers, their attention and its parts are in a model: what libraries call them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ropelens.hosts.base import Host
from ropelens.hosts.lens import LensHost
from ropelens.hosts.plain import PlainHost

QUERIES, KEYS, VALUES = ("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v")
OUTPUTS = ("o_proj", "dense", "out_proj", "o")
BEFORE = ("input_layernorm", "ln_1", "ln1")
FINAL = ("norm", "final_layer_norm", "final_layernorm", "ln_f", "ln_final")


def block_of(host: Host, layer: int) -> Any:
    """Returns the module of a layer.

    Raises:
        ValueError: If the layers of a transformers model cannot be found.
    """
    if isinstance(host, LensHost):
        return host.model.blocks[layer]
    lists = (m for m in trunk_of(host).modules() if isinstance(m, torch.nn.ModuleList))
    found = next((m for m in lists if len(m) == host.n_layers and _attention_in(m[0]) is not None), None)
    if found is None:
        raise ValueError(
            f"{type(host.model).__name__} has no list of {host.n_layers} layers with an attention module "
            "each, so its weights cannot be read: use a TransformerBridge"
        )
    return found[layer]


def attention_of(host: Host, layer: int) -> Any:
    """Returns a layer's attention module."""
    block = block_of(host, layer)
    return block.attn if isinstance(host, LensHost) else _attention_in(block)


def _attention_in(block: Any) -> Any:
    return named(block, ("self_attn", "attention", "attn"))


def trunk_of(host: Host) -> Any:
    """Returns a transformers model without its language-model head."""
    assert isinstance(host, PlainHost)
    return host.owner.base_model


def here(host: Host, tensor: Tensor) -> Tensor:
    """Returns a tensor, detached, on the embedding's device: itself, unless the model is on several.

    Raises:
        ValueError: If it is a weight that is offloaded.
    """
    if tensor.is_meta:
        raise ValueError(
            "expected weights that are in memory, got offloaded ones, which come when their layer runs: load "
            "the model onto devices that hold all of it"
        )
    return tensor.detach().to(host.device)


def named(module: Any, names: tuple[str, ...]) -> Any:
    """Returns the first submodule that there is of these names, else None."""
    return next((m for m in (getattr(module, name, None) for name in names) if m is not None), None)


def acts(module: Any) -> bool:
    """Whether there is a module, and it is no placeholder."""
    return module is not None and type(module).__name__ != "Identity"
