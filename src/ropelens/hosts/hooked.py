"""HookedTransformer (transformer-lens before 4.0) as a host."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ropelens.bands import pair_dims
from ropelens.hosts.layer import LayerClaim, LayerView, Rotation
from ropelens.hosts.lens import LensHost


class HookedHost(LensHost):
    """Reads a HookedTransformer from its cfg and from its own rotary buffers."""

    kind = "HookedTransformer"

    @property
    def n_layers(self) -> int:
        return self.model.cfg.n_layers

    @property
    def vocab_size(self) -> int:
        return self.model.cfg.d_vocab

    @property
    def context(self) -> int | None:
        return self.model.cfg.n_ctx

    @property
    def embedding(self) -> Float[Tensor, "token d_model"]:
        return self.model.embed.W_E

    @property
    def module(self) -> torch.nn.Module:
        return self.model

    def claimed(self, layer: int) -> LayerClaim:
        attn, cfg = self.model.blocks[layer].attn, self.model.cfg
        return LayerClaim(
            scale=1 / float(attn.attn_scale),
            softcap=cfg.attn_scores_soft_cap if cfg.attn_scores_soft_cap > 0 else None,
            window=cfg.window_size if attn.attn_type == "local" else None,
            sinks=attn.sinks.detach() if cfg.use_attention_sinks else None,
        )

    def rotations(self, layer: int, view: LayerView) -> list[Rotation]:
        cfg, attn = self.model.cfg, self.model.blocks[layer].attn
        if cfg.positional_embedding_type != "rotary":
            return []
        sin, cos = attn.rotary_sin[1].double(), attn.rotary_cos[1].double()
        # Both members of a pair carry the pair's angle: next to each other or half the width apart.
        adjacent = bool(cfg.rotary_adjacent_pairs)
        pairs = pair_dims(cfg.rotary_dim, adjacent)
        first = pairs[:, 0].to(sin.device)
        amplitude = float(torch.hypot(sin, cos).mean())
        return [Rotation(torch.atan2(sin, cos)[first].cpu(), pairs, amplitude)]

    def run(
        self, ids: Int64[Tensor, "batch pos"], mask: Bool[Tensor, "batch pos"] | None, logits: bool = True
    ) -> Float[Tensor, "batch pos token"] | None:
        # HookedTransformer takes its own idea of the pads from the padding side where no mask is given.
        full = torch.ones_like(ids) if mask is None else mask.long()
        return self.model(ids, attention_mask=full, return_type="logits" if logits else None)
