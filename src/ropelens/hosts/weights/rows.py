"""The rows of the query and key projections, in the model's own memory: to be changed and put back."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ropelens.hosts.base import Host
from ropelens.hosts.lens import LensHost
from ropelens.hosts.weights.checking import layer_weights
from ropelens.hosts.weights.modules import KEYS, QUERIES, attention_of, named


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one projection by head: `q[head, d] = weight[head, d] @ x + bias`.

    Attributes:
        weight: A view of the model's parameter: what is written to it is what the model computes with.
        linear: The linear layer that the rows belong to; None where the model has none.
        features: Which of the linear layer's outputs each row makes.
        twins: Views of other places that hold the same numbers: a TransformerBridge splits a joint
            projection and keeps the whole one beside it.
    """

    weight: Float[Tensor, "head d_head d_model"]
    linear: nn.Module | None
    features: Int64[Tensor, "head d_head"]
    twins: tuple[Float[Tensor, "head d_head d_model"], ...] = ()


# Models whose rows were compared with the weights that were checked against what their layers do.
_compared: weakref.WeakKeyDictionary[Any, set[tuple[int, int]]] = weakref.WeakKeyDictionary()


def query_and_key_rows(host: Host, layer: int) -> tuple[Rows, Rows]:
    """Returns the rows of a layer's query projection and of its key projection.

    Raises:
        ValueError: If they cannot be told apart in the model's memory, are no floating-point numbers, or
            have a norm's gain folded in.
    """
    _require_unfolded(host)
    rows = _rows(host, layer)
    done = _compared.setdefault(host.model, set())
    mark = layer, rows[0].weight.data_ptr()
    if mark not in done:
        checked = layer_weights(host, layer)
        owned = {p.untyped_storage().data_ptr() for p in host.model.parameters()}
        for name, mine, read in (("query", rows[0], checked.q), ("key", rows[1], checked.k)):
            read = read.transpose(1, 2).to(mine.weight.device)
            if any(not torch.equal(w, read) for w in (mine.weight, *mine.twins)):
                raise ValueError(
                    f"layer {layer}: the rows of its {name} projection are not laid out as ropelens expects "
                    'of this model, so they cannot be changed: use target="queries", "keys" or "both"'
                )
            if mine.weight.untyped_storage().data_ptr() not in owned:
                raise ValueError(
                    f"layer {layer}: its {name} projection is not one of the model's parameters, so changing "
                    'it changes nothing: use target="queries", "keys" or "both"'
                )
        done.add(mark)
    return rows


def require_own_rows(host: Host, layers: Sequence[int]) -> None:
    """Refuses layers whose projections are other layers' too.

    Raises:
        ValueError: If they share memory.
    """
    places: dict[int, int] = {}
    for layer in range(host.n_layers):
        for place in {rows.weight.data_ptr() for rows in _rows(host, layer)}:
            other = places.setdefault(place, layer)
            if other != layer and {other, layer} & set(layers):
                raise ValueError(
                    f"layers {other} and {layer} share the weights of their queries and keys, so one cannot "
                    'be changed alone: use target="queries", "keys" or "both"'
                )


def _rows(host: Host, layer: int) -> tuple[Rows, Rows]:
    attn, spec = attention_of(host, layer), host.certificate.layers[layer]
    if host.kind == "HookedTransformer":
        weights = attn.W_Q, attn._W_K if hasattr(attn, "_W_K") else attn.W_K
        query, key = (_of_array(layer, w.detach().transpose(1, 2)) for w in weights)
        return query, key
    counts = spec.n_heads, spec.n_kv_heads
    joint = _joint(
        layer, attn.original_component if isinstance(host, LensHost) else attn, counts, spec.d_head
    )
    if isinstance(host, LensHost):
        query, key = (getattr(attn, name).original_component for name in ("q", "k"))
    elif joint is not None:
        return joint
    else:
        query, key = named(attn, QUERIES), named(attn, KEYS)
    if query is None or key is None:
        raise ValueError(
            f"layer {layer}: {type(attn).__name__} has no projections that ropelens knows by name, so they "
            'cannot be changed: use target="queries", "keys" or "both"'
        )
    found = [
        _of_linear(layer, linear, torch.arange(n * spec.d_head).unflatten(0, (n, spec.d_head)))
        for linear, n in zip((query, key), counts, strict=True)
    ]
    if joint is not None:
        found = [replace(own, twins=(whole.weight,)) for own, whole in zip(found, joint, strict=True)]
    return found[0], found[1]


def _joint(layer: int, attn: Any, counts: tuple[int, int], d_head: int) -> tuple[Rows, Rows] | None:
    """The rows of a joint projection of queries, keys and values, where there is one."""
    by_head = named(attn, ("query_key_value",))
    whole = named(attn, ("qkv_proj",)) if by_head is None else by_head
    if whole is None:
        return None
    whole = getattr(whole, "original_component", whole)
    if by_head is not None:  # GPT-NeoX: query, key and value of a head side by side
        at = torch.arange(3 * counts[0] * d_head).unflatten(0, (counts[0], 3, d_head))
        return _of_linear(layer, whole, at[:, 0]), _of_linear(layer, whole, at[:, 1])
    at = torch.arange(sum(counts) * d_head).unflatten(0, (sum(counts), d_head))
    return _of_linear(layer, whole, at[: counts[0]]), _of_linear(layer, whole, at[counts[0] :])


def _of_linear(layer: int, linear: Any, features: Int64[Tensor, "head d_head"]) -> Rows:
    weight = linear.weight.detach()
    _require_floats(layer, weight)
    # Heads lie a fixed number of rows apart, so that a view can show them.
    first = int(features[0, 0])
    apart = int(features[1, 0]) - first if len(features) > 1 else features.shape[1]
    row, column = weight.stride()
    size, step = (*features.shape, weight.shape[1]), (apart * row, row, column)
    view = weight.as_strided(size, step, weight.storage_offset() + first * row)
    return Rows(view, linear, features)


def _of_array(layer: int, weight: Float[Tensor, "head d_head d_model"]) -> Rows:
    _require_floats(layer, weight)
    return Rows(weight, None, torch.arange(weight.shape[0] * weight.shape[1]).view(weight.shape[:2]))


def _require_floats(layer: int, weight: Tensor) -> None:
    if not weight.is_floating_point() or weight.dtype.itemsize < 2:
        raise ValueError(
            f"layer {layer}: expected projections of floating-point numbers, got {weight.dtype}: noise "
            'cannot be added to quantised weights; use target="queries", "keys" or "both"'
        )


def _require_unfolded(host: Host) -> None:
    folded = getattr(host.model, "_weights_processed", False) if host.kind == "TransformerBridge" else False
    if host.kind == "HookedTransformer":
        folded = str(host.model.cfg.normalization_type).endswith("Pre")
    if folded:
        raise ValueError(
            f"expected a {host.kind} with its weights as published, got one with the norms' gains folded in: "
            "noise on its projections would be other noise than on every other host; load it with "
            "ropelens.load, or with fold_ln=False"
        )
