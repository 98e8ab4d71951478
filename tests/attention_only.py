"""Small random models of attention only, in float64, as the teaching models are made."""

from __future__ import annotations

from typing import Any

import torch

from ropelens.pretrain.teaching import Recipe, make_model


def attention_only(n_layers: int, d_model: int = 16, seed: int = 0) -> Any:
    recipe = Recipe(n_layers=n_layers, d_model=d_model, n_heads=2, n_vocab=61, context=64, seed=seed)
    model = make_model(recipe).double().eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "mlp" in name or "v_proj.bias" in name or "post_attention" in name:
                continue
            if "norm" in name:
                weight.copy_(0.5 + torch.rand(weight.shape, generator=draw))
            else:
                weight.copy_(0.3 * torch.randn(weight.shape, generator=draw))
    return model.requires_grad_(False)
