"""TransformerBridge (transformer-lens 3.9 and 4.x) as a host.

The bridge's own cfg is not asked about rotation, scale or windows: it shows defaults where the model
differs. The wrapped transformers module and the tensors that pass through the hooks are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from importlib.metadata import version
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from packaging.version import Version
from torch import Tensor

from ropelens.hosts.certify import score_tolerance
from ropelens.hosts.layer import LayerClaim, LayerView, Rotation
from ropelens.hosts.lens import Hook, LensHost
from ropelens.hosts.positions import RotaryPositions
from ropelens.hosts.rotary import buffered, rotations_from, steady_length
from ropelens.hosts.turning import CACHES, Row, Turning, rotary_modules, set_turning, turning_of


class BridgeHost(LensHost):
    """Reads a TransformerBridge from the transformers model inside it."""

    kind = "TransformerBridge"
    shows_new_keys_only = True

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        repair(model)

    @property
    def config(self) -> Any:
        config = self.model.original_model.config
        return config.get_text_config() if hasattr(config, "get_text_config") else config

    @property
    def n_layers(self) -> int:
        return len(self.model.blocks)

    @property
    def context(self) -> int | None:
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def steady(self) -> int | None:
        return steady_length(self.config)

    @property
    def embedding(self) -> Float[Tensor, "token d_model"]:
        return self.model.original_model.get_input_embeddings().weight

    @property
    def module(self) -> torch.nn.Module:
        return self.model.original_model

    def positions(self) -> RotaryPositions:
        return RotaryPositions(self.module)

    def claimed(self, layer: int) -> LayerClaim:
        attn = getattr(self.model.blocks[layer], "attn", None)
        module = getattr(attn, "original_component", None)
        if module is None:
            raise ValueError(f"layer {layer} has no attention that TransformerBridge takes apart")
        scale = getattr(module, "scaling", None)
        if scale is None:
            d_head = getattr(module, "head_dim", None) or self.model.cfg.d_head
            scale = d_head**-0.5
        sinks = getattr(module, "sinks", None)
        return LayerClaim(
            scale=float(scale),
            softcap=getattr(module, "attn_logit_softcapping", None),
            window=self._window(layer),
            sinks=sinks.detach() if isinstance(sinks, Tensor) else None,
        )

    def _window(self, layer: int) -> int | None:
        window = getattr(self.config, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None)
        if kinds is not None:
            return window if kinds[layer] == "sliding_attention" else None
        return window if getattr(self.config, "use_sliding_window", True) else None

    def rotary_points(self, layer: int) -> tuple[str, ...]:
        stem = f"blocks.{layer}.attn."
        return tuple(n for n in (stem + "hook_cos", stem + "hook_sin") if n in self.model.hook_dict)

    def rotations(self, layer: int, view: LayerView) -> list[Rotation]:
        turning = self.turning_now()
        row = None if turning is None else turning.rows[layer]
        exact = buffered(self.module) if row is None else [row.float()]
        return [r for cos, sin in view.tables for r in rotations_from(cos, sin, view.q.shape[-1], exact)]

    @cached_property
    def _rotary(self) -> list[torch.nn.Module]:
        return rotary_modules(self.module)

    def turning_now(self) -> Turning | None:
        return turning_of(self._rotary)

    def turn(self, rows: Sequence[Row | None]) -> Callable[[], None]:
        return set_turning(self.module, [block.attn for block in self.model.blocks], Turning(rows))

    @property
    def text_config(self) -> Any:
        return self.config

    def _probe(self, ids: Int64[Tensor, "batch pos"], edits: list[tuple[str, Hook]]) -> list[LayerView]:
        try:
            return super()._probe(ids, edits)
        except RuntimeError as error:
            dtype = self.embedding.dtype
            if dtype not in (torch.bfloat16, torch.float16) or "dtype" not in str(error):
                raise
            raise ValueError(
                f"expected a TransformerBridge that runs in {dtype}, got its own error ({error}): load the "
                'model in float32, or use host="transformers"'
            ) from error

    def probe(self, ids: Int64[Tensor, "batch pos"]) -> list[LayerView]:
        views, calls = super().probe(ids), dict[int, tuple[tuple[Any, ...], dict[str, Any], Tensor]]()

        def keep(layer: int, module: Any, args: Any, options: Any, made: Any) -> None:
            calls[layer] = args, options, made[0] if isinstance(made, tuple) else made

        handles = [
            block.attn.register_forward_hook(partial(keep, layer), with_kwargs=True)
            for layer, block in enumerate(self.model.blocks)
        ]
        try:
            with torch.no_grad(), self.alone():
                self.run(ids, None, logits=False)
                for handle in handles:
                    handle.remove()
                doubts = {layer: self._doubt(layer, *call) for layer, call in calls.items()}
        finally:
            for handle in handles:
                handle.remove()
        return [replace(view, doubt=doubts.get(layer, "")) for layer, view in enumerate(views)]

    def _doubt(self, layer: int, args: Any, options: Any, made: Tensor) -> str:
        """Says where the bridge computes a layer's attention otherwise than the module that it wraps."""
        wrapped = self.model.blocks[layer].attn.original_component
        options = {name: value for name, value in options.items() if name not in CACHES}
        expected = wrapped(*args, **options)
        expected = expected[0] if isinstance(expected, tuple) else expected
        spread = float(expected.max()) - float(expected.min())
        error = float((made - expected).abs().max()) / max(spread, torch.finfo(torch.float32).tiny)
        if error <= score_tolerance(made.dtype):
            return ""
        return (
            f"TransformerBridge's attention differs from that of the {type(wrapped).__name__} inside it by "
            f"{error:.1e} of its range, so that its bands would not be those of the model: use "
            'host="transformers"'
        )

    def run(
        self, ids: Int64[Tensor, "batch pos"], mask: Bool[Tensor, "batch pos"] | None, logits: bool = True
    ) -> Float[Tensor, "batch pos token"] | None:
        extra = {} if mask is None else {"attention_mask": mask.long()}
        return self.model(ids, return_type="logits" if logits else None, **extra)


def repair(model: Any) -> None:
    """Mends two faults of a TransformerBridge that it would otherwise be silently wrong by.

    In transformer-lens 3.9 to 4.3, each only where the fault is:

    - attention with a joint QKV matrix (GPT-NeoX, Phi-3) lists `hook_rot_q` and `hook_rot_k` and never
      fires them: they fire after its rotation from now on;
    - transformers from 5.24 on hands the key-value cache to the attention as `cache`, which the bridge
      does not look for, so that in generation each new token attends to itself only.
    """
    faulty, renamed = _faults()
    for block in model.blocks if faulty else ():
        attn = getattr(block, "attn", None)
        kinds = {base.__name__ for base in type(attn).__mro__}
        if "JointQKVPositionEmbeddingsAttentionBridge" in kinds and "_apply_rotary_pos_emb" not in vars(attn):
            _fire_after_rotation(attn)
        if renamed and "AttentionBridge" in kinds and "_update_kv_cache" not in vars(attn):
            _find_cache(attn)


@cache
def _faults() -> tuple[bool, bool]:
    lens, transformers = Version(version("transformer-lens")), Version(version("transformers"))
    return Version("3.9") <= lens < Version("4.4"), transformers >= Version("5.24")


def _fire_after_rotation(attn: Any) -> None:
    rotate = attn._apply_rotary_pos_emb

    def rotate_and_fire(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = rotate(q, k, cos, sin)
        return attn.hook_rot_q(q), attn.hook_rot_k(k)

    attn._apply_rotary_pos_emb = rotate_and_fire


def _find_cache(attn: Any) -> None:
    update = attn._update_kv_cache

    def update_whatever_its_name(k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        found = next((options[name] for name in CACHES if options.get(name) is not None), None)
        return update(k, v, **options | {"past_key_values": found})

    attn._update_kv_cache = update_whatever_its_name
