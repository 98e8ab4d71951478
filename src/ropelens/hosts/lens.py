"""What HookedTransformer and TransformerBridge share: TransformerLens's hook points."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ropelens.hosts.base import Consumer, Edit, Host
from ropelens.hosts.certify import score_tolerance
from ropelens.hosts.layer import LayerClaim, LayerSpec, LayerView
from ropelens.hosts.masks import is_certified, pads_at_ends, visible_keys
from ropelens.hosts.passes import Passes
from ropelens.hosts.positions import Positions

Hook = Callable[[Tensor, Any], Tensor | None]
"""TransformerLens's hook contract: `(activation, hook_point)` to None, or to the new activation."""


class LensHost(Host):
    """A TransformerLens model, read at its hook points."""

    shows_new_keys_only: bool
    """With a key-value cache: whether the keys' hook point shows those of the new tokens, or all again."""

    @abstractmethod
    def claimed(self, layer: int) -> LayerClaim:
        """Returns what the model's settings say of the layer's scores."""
        ...

    @abstractmethod
    def positions(self) -> Positions:
        """Returns what tells where queries and keys stand."""
        ...

    def rotary_points(self, layer: int) -> tuple[str, ...]:
        """Names of the hook points that show the layer's cos and sin, where there are any."""
        return ()

    def points(self, layer: int) -> tuple[str, str, str]:
        """Names of the hook points of the post-rotary queries, the keys and the masked scores."""
        stem = f"blocks.{layer}.attn."
        return stem + "hook_rot_q", stem + "hook_rot_k", stem + "hook_attn_scores"

    def _require_points(self, layer: int) -> None:
        missing = [name for name in self.points(layer) if name not in self.model.hook_dict]
        if missing:
            raise ValueError(
                f"layer {layer} has no hook point {missing[0]!r}: its attention is not one that "
                f"{self.kind} takes apart, so its bands cannot be read"
            )

    # What is certified ------------------------------------------------------------------------------

    def settings(self) -> tuple[object, ...]:
        found: list[object] = []
        for layer in range(self.n_layers):
            self._require_points(layer)
            claim = self.claimed(layer)
            found.append((claim.scale, claim.softcap, claim.window))
        turning = self.turning_now()
        return (*found, None if turning is None else turning.key)

    def claim(self, layer: int, view: LayerView) -> LayerClaim:
        return self.claimed(layer)

    def probe(self, ids: Int64[Tensor, "batch pos"]) -> list[LayerView]:
        return self._probe(ids, [])

    def probe_turns(self, token: int, n: int) -> list[LayerView]:
        # Each layer starts from the same state at every position: sinks, and all else that attends to
        # a different number of keys at each, would make it differ from the second layer on.
        def same(state: Tensor, hook: Any) -> Tensor:
            return state[:, :1].expand_as(state)

        ids = torch.full((1, n), token, device=self.device)
        return self._probe(ids, [(f"blocks.{layer}.hook_resid_pre", same) for layer in range(self.n_layers)])

    def _probe(self, ids: Int64[Tensor, "batch pos"], edits: list[tuple[str, Hook]]) -> list[LayerView]:
        seen: dict[str, Tensor] = {}

        def keep(value: Tensor, hook: Any) -> None:
            # First one wins: generation and shared layers may fire a point more than once.
            seen.setdefault(hook.name, value.detach().clone())

        layers = range(self.n_layers)
        for layer in layers:
            self._require_points(layer)
        names = [n for layer in layers for n in (*self.points(layer), *self.rotary_points(layer))]
        with torch.no_grad(), self.alone(), self.attached([*edits, *((name, keep) for name in names)]):
            self.run(ids, None, logits=False)
        return [self._view(layer, seen) for layer in layers]

    def _view(self, layer: int, seen: dict[str, Tensor]) -> LayerView:
        for name in self.points(layer):
            if name not in seen:
                raise ValueError(
                    f"hook point {name!r} never fires in this model: {self.kind} lists it but runs the "
                    f"attention of layer {layer} elsewhere, so its bands cannot be read"
                )
        q, k, scores = (seen[name] for name in self.points(layer))
        table = tuple(seen[name][0] for name in self.rotary_points(layer) if name in seen)
        return LayerView(
            q=q,
            k=k,
            visible=scores > torch.finfo(scores.dtype).min / 2,
            scores=scores,
            tables=((table[0], table[1]),) if len(table) == 2 else (),
        )

    # What is observed and edited --------------------------------------------------------------------

    def observing(self, layers: Sequence[int], consume: Consumer) -> AbstractContextManager[None]:
        return self.attached(self.layer_hooks(layers, consume))

    @contextmanager
    def editing(
        self, queries: Mapping[int, Edit] | None = None, keys: Mapping[int, Edit] | None = None
    ) -> Iterator[None]:
        queries, keys, positions = queries or {}, keys or {}, self.positions()
        hooks = [
            (self.points(layer)[0], _edit_hook(edit, partial(positions.queries, layer)))
            for layer, edit in queries.items()
        ]
        hooks += [
            (self.points(layer)[1], _edit_hook(edit, partial(positions.keys, layer)))
            for layer, edit in keys.items()
        ]
        with positions.watching(sorted({*queries, *keys})), self.attached(hooks):
            yield

    def fast(self) -> AbstractContextManager[None]:
        return nullcontext()  # a hook point for the scores leaves no other way

    def layer_hooks(self, layers: Sequence[int], consume: Consumer) -> list[tuple[str, Hook]]:
        """Returns the hooks that hand the queries, keys and mask of each layer to `consume`."""
        first: dict[str, Tensor] = {}  # which queries are real, as the first of these layers shows it
        at_first = min(layers, default=0)
        return [
            hook
            for layer in layers
            for hook in self._hooks_of_layer(layer, consume, first, layer == at_first)
        ]

    def _hooks_of_layer(
        self, layer: int, consume: Consumer, first: dict[str, Tensor], is_first: bool
    ) -> list[tuple[str, Hook]]:
        q_name, k_name, score_name = self.points(layer)
        seen: dict[str, Tensor] = {}
        spec = self.certificate.layers[layer]
        passes = Passes(layer, spec.window)

        def keep_q(q: Tensor, hook: Any) -> None:
            seen["q"] = q.detach()

        def keep_k(k: Tensor, hook: Any) -> None:
            seen["k"] = k.detach()

        def take(scores: Tensor, hook: Any) -> None:
            with torch.no_grad():
                q, k = seen.pop("q"), seen.pop("k")
                n_queries, n_keys = scores.shape[-2:]
                if self.shows_new_keys_only:
                    k = passes.whole(k, n_keys)
                if q.shape[1] != n_queries or k.shape[1] != n_keys:
                    raise ValueError(
                        f"layer {layer}: expected {n_queries} queries and {n_keys} keys, as its scores have, "
                        f"got {q.shape[1]} and {k.shape[1]}: observe generation with a key-value cache from "
                        "its first pass on"
                    )
                own = read_mask(scores)
                if is_first:
                    first["own"] = own
                elif first["own"].shape == own.shape:  # a row of pads may be NaN by now; pads it stays
                    own = own & first["own"].to(own.device)
                mask, goes_on = passes.add(own, k)
                self.require_steady(passes.n_tokens)
                consume(layer, q, k, mask, goes_on & is_sound(q, k, scores, mask, spec))

        return [(q_name, keep_q), (k_name, keep_k), (score_name, take)]

    @contextmanager
    def attached(self, hooks: Sequence[tuple[str, Hook]]) -> Iterator[None]:
        """Adds hooks for the duration; removes exactly these afterwards, also after an error.

        Warns if they were gone by then, since what ran without them was not seen.
        """
        added = []
        try:
            for name, hook in hooks:
                point = self.model.hook_dict[name]
                point.add_hook(hook)
                added.append((point, point.fwd_hooks[-1]))
            yield
        finally:
            kept = [(point, handle) for point, handle in added if handle in point.fwd_hooks]
            for point, handle in kept:
                handle.hook.remove()
                point.fwd_hooks.remove(handle)
            if len(kept) < len(added):
                warnings.warn(
                    "ropelens's hooks were reset before their block ended: what ran after that was not seen",
                    stacklevel=4,
                )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lays the user's own hooks aside for the duration, so that the bare model can be measured."""
        saved = []
        try:
            for point in set(self.model.hook_dict.values()):
                before = OrderedDict(point._forward_hooks)
                saved.append((point, before))
                for handle in point.fwd_hooks:
                    if not handle.is_permanent:
                        point._forward_hooks.pop(handle.hook.id, None)
            yield
        finally:
            for point, before in saved:
                point._forward_hooks.clear()
                point._forward_hooks.update(before)


def _edit_hook(edit: Edit, positions: Callable[[Tensor], Tensor]) -> Hook:
    def hook(value: Tensor, hook: Any) -> Tensor:
        return edit(value, positions(value))

    return hook


def read_mask(scores: Float[Tensor, "batch head query key"]) -> Bool[Tensor, "batch query"]:
    """Returns which queries are real: one that sees itself is, nothing but a pad is hidden from itself.

    NaN hides nothing: its tokens are real, and the metrics refuse them.
    """
    itself = scores[:, 0].diagonal(scores.shape[-1] - scores.shape[-2], dim1=-2, dim2=-1)
    return ~(itself <= torch.finfo(scores.dtype).min / 2)


def is_sound(
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key kv_head d_head"],
    scores: Float[Tensor, "batch head query key"],
    mask: Bool[Tensor, "batch key"],
    spec: LayerSpec,
) -> Bool[Tensor, ""]:
    """Returns whether the model attends with these queries and keys, under the certified mask.

    Every score of every real query is rebuilt, in blocks, so that no hook that edits after ropelens's
    goes unnoticed. The answer stays on the device.
    """
    (n_queries, n_keys), low = scores.shape[-2:], torch.finfo(scores.dtype).min / 2
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k = spec.scale * q.to(dtype).transpose(1, 2), k.to(dtype).permute(0, 2, 3, 1)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    allowed = visible_keys(n_keys, spec.window, scores.device, n_queries)
    own = mask[:, n_keys - n_queries :]
    sound = pads_at_ends(mask)
    miss, top, bottom = (torch.zeros((), dtype=dtype, device=scores.device) for _ in range(3))
    step = max(1, 2**22 // scores[:, :, 0].numel())
    for rows in (slice(start, start + step) for start in range(0, n_queries, step)):
        shown = scores[:, :, rows] > low
        sound = sound & is_certified(shown, mask, own[:, rows], allowed[rows])
        rebuilt = q[:, :, rows] @ k
        if spec.softcap is not None:
            rebuilt = spec.softcap * torch.tanh(rebuilt / spec.softcap)
        counted = shown & own[:, None, rows, None]  # what a pad sees does not matter
        seen = scores[:, :, rows].to(dtype).masked_fill(~counted, 0)
        miss = miss.maximum((rebuilt.masked_fill_(~counted, 0) - seen).abs().amax())
        top, bottom = top.maximum(seen.amax()), bottom.minimum(seen.amin())
    return sound & (miss <= score_tolerance(scores.dtype) * (top - bottom))
