"""A plain transformers model as a host: the fast one, since it keeps no scores.

Its queries and keys are seen where transformers hands them to an attention function, after the rotation
and the norms; scale, softcap, window and sinks come along by name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ropelens.bands import Bands, pair_dims
from ropelens.hosts.base import Consumer, Edit, Host
from ropelens.hosts.layer import LayerClaim, LayerSpec, LayerView, Rotation
from ropelens.hosts.masks import is_certified, pads_at_ends, visible_keys
from ropelens.hosts.passes import Passes
from ropelens.hosts.positions import RotaryPositions
from ropelens.hosts.rotary import buffered, rotations_from, steady_length
from ropelens.hosts.taps import Call, Tap, implementation_of, switched, tapped
from ropelens.hosts.turning import (
    LayerTables,
    Row,
    Turning,
    is_turning_hook,
    rotary_modules,
    set_turning,
    turning_of,
)

ATTENTION = ("self_attn", "attention", "attn", "self_attention")  # what transformers calls these modules


class PlainHost(Host):
    """Reads a transformers model through the attention function that it calls."""

    kind = "transformers"

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def owner(self) -> Any:
        """The transformers model whose config the attention layers ask: the text part of a larger one."""
        config = self.config
        parts = (m for m in self.model.modules() if getattr(m, "config", None) is config)
        return next((m for m in parts if hasattr(m, "set_attn_implementation")), self.model)

    @property
    def n_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def context(self) -> int | None:
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def steady(self) -> int | None:
        return steady_length(self.config)

    @property
    def embedding(self) -> Float[Tensor, "token d_model"]:
        return self.model.get_input_embeddings().weight

    @property
    def module(self) -> torch.nn.Module:
        return self.model

    def run(
        self, ids: Int64[Tensor, "batch pos"], mask: Bool[Tensor, "batch pos"] | None, logits: bool = True
    ) -> Float[Tensor, "batch pos token"] | None:
        extra: dict[str, Any] = {"use_cache": False}
        if mask is not None:
            extra |= {"attention_mask": mask.long(), "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        if not logits:
            self.model.base_model(ids, **extra)
            return None
        found = self.model(ids, **extra)
        if not hasattr(found, "logits"):
            raise ValueError(
                f"expected a model with logits, got {type(self.model).__name__}, which has no language-model "
                "head: load it with AutoModelForCausalLM"
            )
        return found.logits

    # What is certified ------------------------------------------------------------------------------

    def settings(self) -> tuple[object, ...]:
        names = ("scaling", "attn_logit_softcapping", "sliding_window")
        modules = (m for m in self.model.modules() if hasattr(m, "layer_idx"))
        values = tuple(tuple(getattr(m, name, None) for name in names) for m in modules)
        turning = self.turning_now()
        known = (implementation_of(self.owner), None if turning is None else turning.key)
        return (*known, *(v for v in values if any(x is not None for x in v)))

    def probe(self, ids: Int64[Tensor, "batch pos"]) -> list[LayerView]:
        return self._probe(ids)

    def probe_turns(self, token: int, n: int) -> list[LayerView]:
        # Each alone at its position: with a sink, what is attended to would depend on how much there is.
        positions = torch.arange(n, device=self.device)[:, None]
        views = self._probe(torch.full_like(positions, token), position_ids=positions)
        itself = torch.eye(n, dtype=torch.bool, device=self.device)[None, None]
        return [replace(view, visible=itself, **_as_one_sequence(view)) for view in views]

    def _probe(self, ids: Int64[Tensor, "batch pos"], **extra: Tensor) -> list[LayerView]:
        views: dict[int, LayerView] = {}
        tables: list[tuple[int | None, Tensor, Tensor]] = []

        def look(call: Call) -> None:
            if call.layer in views:
                raise ValueError(
                    f"layer {call.layer} attends more than once in a forward pass: "
                    "its bands cannot be told apart"
                )
            shown = _shown(call)
            if shown is None:
                raise ValueError(
                    f"layer {call.layer}: the attention implementation {call.implementation!r} makes no mask "
                    'that can be checked: call model.set_attn_implementation("sdpa") first'
                )
            views[call.layer] = LayerView(
                q=call.q.transpose(1, 2),
                k=call.k.transpose(1, 2),
                visible=shown.expand(len(call.q), -1, -1, -1),
                v=call.v.transpose(1, 2),
                output=call.output,
                tables=tuple((cos, sin) for of, cos, sin in tables if of in (None, call.layer)),
                given=call.options,
            )

        owner = self.owner
        looks = tapped(owner, Tap(observe=look))
        with torch.no_grad(), self.alone(), _tables_into(tables, self.model), looks:
            self.model.base_model(ids, use_cache=False, **extra)
        for layer in range(self.n_layers):
            if layer not in views:
                raise ValueError(
                    f"layer {layer} never reaches transformers' AttentionInterface: "
                    f"{type(self.model).__name__} runs its attention elsewhere, so its bands cannot be read"
                )
        return [views[layer] for layer in range(self.n_layers)]

    def claim(self, layer: int, view: LayerView) -> LayerClaim:
        scale, sinks = _scale(view.given, view.q.shape[-1]), view.given.get("s_aux")
        return LayerClaim(
            scale=scale,
            softcap=view.given.get("softcap"),
            window=view.given.get("sliding_window"),
            sinks=None if sinks is None else sinks.detach(),
        )

    def rotations(self, layer: int, view: LayerView) -> list[Rotation]:
        d_head, turning = view.q.shape[-1], self.turning_now()
        row = None if turning is None else turning.rows[layer]
        if view.tables:
            exact = buffered(self.model) if row is None else [row.float()]
            return [r for cos, sin in view.tables for r in rotations_from(cos, sin, d_head, exact)]
        # GPT-J keeps no table to look at, and follows the textbook.
        width = getattr(self.config, "rotary_dim", None) or d_head
        ladder = Bands.uniform(1, d_head, base=10_000.0, rotary_dim=width).inv_freq[0]
        ladder = ladder if row is None else row.float().double()
        return [Rotation(ladder, pair_dims(width, adjacent)) for adjacent in (False, True)]

    # What is observed and edited --------------------------------------------------------------------

    def observing(self, layers: Sequence[int], consume: Consumer) -> AbstractContextManager[None]:
        specs, masks = self.certificate.layers, MaskReader()
        passes = {layer: Passes(layer, specs[layer].window) for layer in layers}

        def look(call: Call) -> None:
            if call.layer not in passes:
                return
            with torch.no_grad():
                q, k = call.q.detach().transpose(1, 2), call.k.detach().transpose(1, 2)
                spec, before = specs[call.layer], passes[call.layer]
                mask, sound = masks.read(call, spec.window, before)
                self.require_steady(before.n_tokens)
                consume(call.layer, q, k, mask, sound & (call.used and _as_certified(call, spec)))

        return tapped(self.owner, Tap(observe=look))

    @contextmanager
    def editing(
        self, queries: Mapping[int, Edit] | None = None, keys: Mapping[int, Edit] | None = None
    ) -> Iterator[None]:
        queries, keys, positions = queries or {}, keys or {}, RotaryPositions(self.model)
        tap = Tap(queries, keys, positions=positions)
        with positions.watching(sorted({*queries, *keys})), tapped(self.owner, tap):
            yield

    @cached_property
    def _rotary(self) -> list[torch.nn.Module]:
        return rotary_modules(self.model)

    def turning_now(self) -> Turning | None:
        return turning_of(self._rotary)

    def turn(self, rows: Sequence[Row | None]) -> Callable[[], None]:
        return set_turning(self.model, self.attention, Turning(rows))

    @property
    def text_config(self) -> Any:
        return self.config

    @property
    def attention(self) -> list[torch.nn.Module]:
        """The attention module of each layer.

        Raises:
            ValueError: If there is not just one for each.
        """
        found: dict[int, list[torch.nn.Module]] = {}
        for name, module in self.owner.named_modules():
            if hasattr(module, "layer_idx") and name.rpartition(".")[2] in ATTENTION:
                found.setdefault(module.layer_idx, []).append(module)
        if sorted(found) != list(range(self.n_layers)) or any(len(m) > 1 for m in found.values()):
            raise ValueError(
                f"expected one attention module for each of the {self.n_layers} layers of a "
                f"{type(self.model).__name__}, found {sum(map(len, found.values()))}: its frequencies cannot "
                "be set"
            )
        return [found[layer][0] for layer in range(self.n_layers)]

    def fast(self) -> AbstractContextManager[None]:
        """SDPA, whatever was set; not with a softcap or sinks, which it does not know."""
        owner, layers = self.owner, self.certificate.layers
        if any(spec.softcap is not None or spec.sinks is not None for spec in layers):
            return nullcontext()
        if owner.config._attn_implementation != implementation_of(owner):
            raise ValueError("expected a model that is not being observed: choose the fast attention before")
        return switched(owner, "sdpa") if owner._supports_sdpa else nullcontext()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lays taps and the user's own hooks aside, and dropout, so that the bare model can be measured."""
        owner, model = self.owner, self.model
        training = [m for m in model.modules() if m.training]
        saved = [
            (hooks, OrderedDict(hooks))
            for m in model.modules()
            for hooks in (m._forward_hooks, m._forward_pre_hooks)
        ]
        try:
            for module in training:
                module.training = False
            for hooks, before in saved:
                for key, hook in before.items():
                    if not _of_a_library(hook) and not is_turning_hook(hook):
                        del hooks[key]
            with switched(owner, implementation_of(owner)):
                yield
        finally:
            for hooks, before in saved:
                hooks.clear()
                hooks.update(before)
            for module in training:
                module.training = True


class MaskReader:
    """Reads which tokens are real from attention masks; layers that share one have it read once."""

    def __init__(self) -> None:
        self._known: list[tuple[Tensor, int, int | None, Bool[Tensor, "batch query"], Bool[Tensor, ""]]] = []

    def read(
        self, call: Call, window: int | None, passes: Passes
    ) -> tuple[Bool[Tensor, "batch key"], Bool[Tensor, ""]]:
        """Returns which keys are real, and whether the mask is the certified one for them.

        Args:
            passes: What the layer has seen of these texts before.
        """
        mask, k = call.mask, call.k.transpose(1, 2)
        n_queries, n_keys = call.q.shape[2], call.k.shape[2]
        if mask is None:
            own = torch.ones(len(k), n_queries, dtype=torch.bool, device=k.device)
            real, goes_on = passes.add(own, k)
            whole = (window is None or window >= n_keys) and _is_causal(call) and n_queries in (1, n_keys)
            return real, goes_on & real.all() & whole
        for known, version, its_window, own, sound in self._known:
            if known is mask and version == mask._version and its_window == window:
                real, goes_on = passes.add(own, k)
                return real, goes_on & sound
        shown = _shown(call)
        if shown is None:
            raise ValueError(
                f"layer {call.layer}: expected a mask [batch, head, query, key], got {type(mask)}"
            )
        shown = shown.expand(len(k), -1, -1, -1)
        own = shown[:, 0].diagonal(n_keys - n_queries, dim1=-2, dim2=-1)
        real, goes_on = passes.add(own, k)
        allowed = visible_keys(n_keys, window, k.device, n_queries)
        sound = pads_at_ends(real) & is_certified(shown, real, own, allowed)
        if mask.dtype != torch.bool:
            sound = sound & ((mask == 0) | ~shown).all()  # what is added to scores of visible keys
        self._known = [*self._known[-3:], (mask, mask._version, window, own, sound)]
        return real, goes_on & sound


def _as_one_sequence(view: LayerView) -> dict[str, Tensor]:
    shown = {name: getattr(view, name) for name in ("q", "k", "v", "output")}
    return {name: tensor.transpose(0, 1) for name, tensor in shown.items()}


def _shown(call: Call) -> Bool[Tensor, "batch heads query key"] | None:
    """Returns which keys each query sees; None if that cannot be told."""
    if isinstance(call.mask, Tensor) and call.mask.ndim == 4:
        mask = call.mask[..., : call.k.shape[2]]
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    if call.mask is None and _is_causal(call):
        return visible_keys(call.k.shape[2], None, call.q.device)[None, None]
    return None


def _is_causal(call: Call) -> bool:
    """Whether the attention function makes a causal mask of its own where it is handed none."""
    causal = call.options.get("is_causal")
    return call.implementation == "sdpa" and bool(
        getattr(call.module, "is_causal", True) if causal is None else causal
    )


def _scale(options: Mapping[str, Any], d_head: int) -> float:
    scale = options.get("scaling")
    return float(d_head**-0.5 if scale is None else scale)


def _as_certified(call: Call, spec: LayerSpec) -> bool:
    return (
        _scale(call.options, spec.d_head) == spec.scale
        and call.options.get("softcap") == spec.softcap
        and call.options.get("sliding_window") == spec.window
        and (call.options.get("s_aux") is None) == (spec.sinks is None)
        and call.options.get("position_bias") is None
    )


def _of_a_library(hook: Any) -> bool:
    """Whether a module's hook is part of how it runs, as with tensor parallelism or offloading."""
    while isinstance(hook, partial):
        hook = hook.func
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return home.split(".")[0] in {"accelerate", "torch", "transformers"}


@contextmanager
def _tables_into(tables: list[tuple[int | None, Tensor, Tensor]], model: torch.nn.Module) -> Iterator[None]:
    """Keeps the different (cos, sin) that the model's rotary modules make, a position a row.

    Those that are for one layer only come with its number.
    """

    def keep(module: torch.nn.Module, args: Any, made: Any) -> None:
        if isinstance(made, LayerTables):
            for layer, table in enumerate(made.tables):
                if isinstance(table, tuple) and len(table) == 2 and table[0].ndim == 3:
                    tables.append((layer, table[0].detach().flatten(0, 1), table[1].detach().flatten(0, 1)))
            return
        if isinstance(made, Tensor) and made.is_complex():
            made = made.real, made.imag
        if isinstance(made, tuple) and len(made) == 2 and made[0].ndim == 3:
            cos, sin = (table.detach().flatten(0, 1) for table in made)
            if not any(c.shape == cos.shape and torch.equal(c.to(cos.device), cos) for _, c, _ in tables):
                tables.append((None, cos, sin))

    names = (name for name, _ in model.named_buffers() if name.endswith("inv_freq"))
    rotary = sorted({name.rpartition(".")[0] for name in names})
    handles = [model.get_submodule(name).register_forward_hook(keep) for name in rotary]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
