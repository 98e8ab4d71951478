"""patch_bands: some bands of one run's queries and keys put into another's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ropelens.hosts import Edit, LayerSpec, host_of
from ropelens.hosts.tokens import tokens_of
from ropelens.interventions.selecting import by_key_head, checked_mask, whole_mask


@contextmanager
def patch_bands(
    model: Any,
    clean: str | list[str] | Int[Tensor, "batch pos"],
    mask: Bool[Tensor, "layer head band"],
    *,
    rest: bool = False,
    queries: bool = True,
    keys: bool = True,
    attention_mask: Tensor | None = None,
    tokenizer: Any = None,
) -> Iterator[None]:
    """Puts bands of a clean run's post-rotary queries and keys into the runs inside the `with` block.

    The model runs once on `clean`; inside, every forward pass (on the corrupt text, of as many tokens)
    attends with the clean run's bands where the mask says so, and with its own elsewhere. With all
    bands and `rest` of queries and keys, it attends as the clean run did.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        clean: Strings, or token ids.
        mask: Which bands; from `bands_where`, say.
        rest: Whether to take the unrotated dims too, of heads all of whose bands are taken; of layers
            without bands, where the mask takes every band that there is.
        queries: Whether to put queries in.
        keys: Whether to put keys in; heads of a group must then agree, see `share_groups`.
        attention_mask: For token ids: nonzero where a token is real.
        tokenizer: For strings; `model.tokenizer` by default.

    Raises:
        ValueError: If the mask or the text is not usable, heads of a group differ, or a pass inside has
            another number of tokens.

    Example:
        ```python
        fast = rl.bands_where(model, "fastest:50%")
        with rl.patch_bands(model, tokens, fast):
            logits = model(tokens.flip(1))
        ```
    """
    host = host_of(model)
    mask = checked_mask(host, mask)
    if not queries and not keys:
        raise ValueError("expected queries or keys to patch, got neither")
    groups = by_key_head(host, mask, "patch_bands") if keys else []
    tokens = tokens_of(host, clean, attention_mask, tokenizer)
    everything = torch.equal(mask, whole_mask(host))
    kept: dict[tuple[str, int], Tensor] = {}

    def keep(name: str, layer: int) -> Edit:
        def look(x: Tensor, positions: Tensor) -> Tensor:
            kept[name, layer] = x.detach()
            return x

        return look

    q_edits: dict[int, Edit] = {}
    k_edits: dict[int, Edit] = {}
    for layer, spec in enumerate(host.certificate.layers):
        with_rest = rest and (everything or len(spec.rotation.pairs) > 0)
        of_queries = _dims(spec, mask[layer], with_rest)
        if queries and of_queries.any():
            q_edits[layer] = _put("queries", layer, of_queries, kept)
        if keys and (of_keys := _dims(spec, groups[layer], with_rest)).any():
            k_edits[layer] = _put("keys", layer, of_keys, kept)
    with (
        torch.no_grad(),
        host.editing({n: keep("queries", n) for n in q_edits}, {n: keep("keys", n) for n in k_edits}),
    ):
        host.run(tokens.ids, tokens.mask, logits=False)
    with host.editing(q_edits, k_edits):
        yield


def _dims(spec: LayerSpec, mask: Bool[Tensor, "head band"], rest: bool) -> Bool[Tensor, "head d_head"]:
    """Returns the dims of these bands, with those that do not rotate where asked."""
    mask = mask[:, : len(spec.rotation.pairs)]
    dims = torch.zeros(len(mask), spec.d_head, dtype=torch.bool)
    unrotated = torch.ones(spec.d_head, dtype=torch.bool)
    for these in spec.rotation.pairs.unbind(-1):
        dims[:, these] = mask
        unrotated[these] = False
    return dims | (mask.all(1)[:, None] & unrotated) if rest else dims


def _put(name: str, layer: int, dims: Tensor, kept: dict[tuple[str, int], Tensor]) -> Edit:
    def put(x: Tensor, positions: Tensor) -> Tensor:
        clean = kept[name, layer]
        if clean.shape[1:] != x.shape[1:] or clean.shape[0] not in (1, x.shape[0]):
            raise ValueError(
                f"layer {layer}: expected {name} of {list(clean.shape)}, as the clean text has, got "
                f"{list(x.shape)}: the two texts must have as many tokens, and no key-value cache"
            )
        where = dims.to(x.device)
        if len(where) != x.shape[2]:  # HookedTransformer may repeat key heads before it turns them
            where = where.repeat_interleave(x.shape[2] // len(where), 0)
        return torch.where(where, clean, x)

    return put
