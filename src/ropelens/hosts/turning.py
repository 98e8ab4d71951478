"""Other rotary frequencies, a row a layer, in transformers' models: alone, or inside a bridge.

transformers makes one table of cos and sin for all layers and hands it down. Here its rotary module hands
down one for each layer, made by the module's own code from other frequencies, and each attention module
takes its own: with the frequencies that it had, a model computes the same to the last bit.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn

Row = Float64[Tensor, " band"]
CACHES = ("cache", "past_key_values", "layer_past")  # what transformers has called it


class LayerTables:
    """A table of cos and sin for each layer, in the place where a model hands down a single one."""

    def __init__(self, tables: Sequence[Any], turning: Turning) -> None:
        self.tables = tables
        self.turning = turning


class Turning:
    """The frequencies of each layer, and the hooks by which a model turns with them.

    Args:
        rows: Radians per token of each layer's bands; None for a layer that stays as it is.
        learned: Returns the rows of a forward pass instead, so that they can be trained.
    """

    def __init__(
        self, rows: Sequence[Row | None], learned: Callable[[], Sequence[Tensor]] | None = None
    ) -> None:
        self._rows = tuple(rows)
        self._learned = learned
        # Layers that turn alike share a table.
        self._first = [
            next((i for i in range(layer) if _alike(rows[i], rows[layer])), layer)
            for layer in range(len(rows))
        ]
        self._copies: dict[int, nn.Module] = {}
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def rows(self) -> tuple[Row | None, ...]:
        if self._learned is None:
            return self._rows
        return tuple(row.detach().to("cpu", torch.float64) for row in self._learned())

    @property
    def key(self) -> tuple[bytes | None, ...]:
        """Equal for equal frequencies."""
        return tuple(None if row is None else row.contiguous().numpy().tobytes() for row in self.rows)

    def make_tables(self, module: nn.Module, args: Any, options: Any, made: Any) -> LayerTables:
        """Forward hook of a rotary module: hands down a table for each layer."""
        inner = _inner(module)
        kind = options.get("layer_type", args[2] if len(args) > 2 else None)
        kinds = None if kind is None else inner.config.layer_types
        learned = None if self._learned is None else self._learned()
        tables: list[Any] = []
        for layer, row in enumerate(self._rows):
            first = self._first[layer]
            if row is None or (kinds is not None and kinds[layer] != kind):
                tables.append(made.tables[layer] if isinstance(made, LayerTables) else made)
            elif learned is not None:
                tables.append(type(inner).forward(_with(inner, learned[layer]), *args, **options))
            elif first < layer and (kinds is None or kinds[first] == kind):
                tables.append(tables[first])
            else:
                tables.append(type(inner).forward(self._copy(inner, layer, row), *args, **options))
        if learned is not None and torch.is_grad_enabled() and not tables[0][0].requires_grad:
            raise ValueError(
                f"{type(inner).__name__} makes cos and sin without gradients in this version of "
                "transformers: its frequencies cannot be learned; use transformers 5.24 or newer"
            )
        return LayerTables(tables, self)

    def _copy(self, inner: nn.Module, layer: int, row: Row) -> nn.Module:
        """The rotary module with a layer's frequencies: made once, and again when the module has moved."""
        known = self._copies.get(layer)
        if known is None or type(known) is not type(inner) or _device(known) != _device(inner):
            known = self._copies[layer] = _with(inner, row)
        return known

    def check_cache(self, cache: Any, layer: int) -> None:
        """Makes an empty key-value cache ours, and refuses one with keys that were turned otherwise.

        Raises:
            ValueError: If it holds keys and is not ours.
        """
        if self._rows[layer] is None or cache in self._caches:
            return
        if int(cache.get_seq_length(layer)) > 0:
            raise ValueError(
                f"layer {layer}: expected a key-value cache that was filled under these frequencies, got one "
                "with keys that were turned otherwise: start generation anew"
            )
        self._caches.add(cache)

    def spoil_caches(self) -> None:
        """Makes the caches that were filled under these frequencies refuse to go on without them."""
        for cache in self._caches:
            cache.update = _refuse_to_go_on


class TakeTable:
    """Forward pre-hook of an attention module: takes a layer's own table, to its device."""

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def __call__(self, module: nn.Module, args: Any, options: dict[str, Any]) -> Any:
        tables = options.get("position_embeddings")
        if not isinstance(tables, LayerTables):
            return None
        cache = next((options[name] for name in CACHES if options.get(name) is not None), None)
        if cache is not None:
            tables.turning.check_cache(cache, self.layer)
        table, state = tables.tables[self.layer], args[0] if args else options.get("hidden_states")
        if isinstance(state, Tensor):  # a model may be spread over devices
            table = _moved(table, state.device)
        return args, options | {"position_embeddings": table}


def is_turning_hook(hook: Any) -> bool:
    """Whether a module's hook is one of these, and so part of how the model turns."""
    return isinstance(hook, TakeTable) or isinstance(getattr(hook, "__self__", None), Turning)


def rotary_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that a transformers model calls for cos and sin; a bridge's wrap its own."""
    own = [m for m in model.modules() if any(_is_table(name) for name in m._buffers)]
    wrappers = {
        id(inner): m
        for m in model.modules()
        if isinstance(inner := getattr(m, "original_component", None), nn.Module)
    }
    return [wrappers.get(id(module), module) for module in own]


def turning_of(rotary: Sequence[nn.Module]) -> Turning | None:
    """Returns the frequencies that were set last in a model's rotary modules; None if it has its own."""
    for module in rotary:
        for hook in reversed(module._forward_hooks.values()):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, Turning):
                return owner
    return None


def set_turning(model: nn.Module, attention: Sequence[nn.Module], turning: Turning) -> Callable[[], None]:
    """Makes a transformers model turn with other frequencies; returns what undoes it.

    Args:
        model: The transformers model; a bridge's is the one that it wraps.
        attention: The module of each layer that is called with `position_embeddings`.

    Raises:
        ValueError: If the model has no module that makes cos and sin for its layers.
    """
    rotary = rotary_modules(model)
    if not rotary:
        raise ValueError(
            f"{type(model).__name__} has no module that makes cos and sin for all layers: its frequencies "
            "cannot be set"
        )
    handles = [
        module.register_forward_pre_hook(TakeTable(layer), with_kwargs=True)
        for layer, module in enumerate(attention)
    ]
    handles += [m.register_forward_hook(turning.make_tables, with_kwargs=True) for m in rotary]

    def undo() -> None:
        for handle in handles:
            handle.remove()
        turning.spoil_caches()

    return undo


def _inner(module: nn.Module) -> Any:
    return getattr(module, "original_component", module)


def _is_table(name: str) -> bool:
    return name.endswith("inv_freq") or name == "embed_positions"


def _device(module: nn.Module) -> torch.device:
    return next(buffer.device for buffer in module._buffers.values() if buffer is not None)


def _moved(table: Any, device: torch.device) -> Any:
    if isinstance(table, Tensor):
        return table.to(device)
    return tuple(each.to(device) for each in table)  # cos and sin


def _alike(a: Row | None, b: Row | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)


def _with(inner: nn.Module, row: Tensor) -> Any:
    """Returns a rotary module that differs from `inner` in its frequencies, and keeps them at any length."""
    made: Any = copy.copy(inner)
    made._buffers = dict(inner._buffers)
    for name, buffer in inner._buffers.items():
        if buffer is None or not _is_table(name):
            continue
        freq = row.to(buffer.device, torch.float32)
        if name == "embed_positions":  # GPT-J's: sin and cos of every position
            angle = torch.arange(len(buffer), device=buffer.device).float()[:, None] * freq
            freq = torch.cat([angle.sin(), angle.cos()], dim=1).to(buffer.dtype)
        made._buffers[name] = freq
    kind = getattr(made, "rope_type", None)
    if kind is not None:  # dynamic and longrope make other frequencies for longer texts
        made.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"
    return made


def _refuse_to_go_on(*args: Any, **options: Any) -> None:
    raise ValueError(
        "this key-value cache was filled under frequencies that are no longer set: start generation anew"
    )
