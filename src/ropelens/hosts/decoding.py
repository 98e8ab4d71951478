"""Running a batch of texts on, token by token, with each library's own key-value cache."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ropelens.hosts.base import Host


class Decoder:
    """Texts that a model goes on with: the next token's logits after each step.

    Shorter texts have pads on their left.

    Args:
        ids: The texts to begin with.
        mask: 1 where a token is real.
        cached: Whether keys and values are kept; without, every step runs the whole texts.
    """

    def __init__(
        self,
        host: Host,
        ids: Int64[Tensor, "batch pos"],
        mask: Int64[Tensor, "batch pos"],
        cached: bool = True,
    ) -> None:
        self.host, self.ids, self.mask = host, ids[:, :0], mask[:, :0]
        self._cache = self._empty(len(ids)) if cached else None
        self._new = ids, mask
        forward = inspect.signature(host.model.forward).parameters if host.kind == "transformers" else {}
        self._name = "cache" if "cache" in forward else "past_key_values"  # renamed in transformers 5.24
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in forward else {}

    def logits(self) -> Float[Tensor, "batch token"]:
        """Returns the logits of the token after each text."""
        new, new_mask = self._new
        self.ids, self.mask = torch.cat([self.ids, new], 1), torch.cat([self.mask, new_mask], 1)
        if self._cache is None:
            whole = None if bool(self.mask.all()) else self.mask > 0
            found = self.host.run(self.ids, whole)
            assert found is not None
            return found[:, -1]
        return self._step(new, new_mask)[:, -1]

    def add(self, tokens: Int64[Tensor, " batch"]) -> None:
        """Makes each text a token longer."""
        self._new = tokens[:, None], torch.ones_like(tokens)[:, None]

    def _step(self, new: Tensor, new_mask: Tensor) -> Tensor:
        model = self.host.model
        if self.host.kind == "HookedTransformer":
            return model(new, past_kv_cache=self._cache, attention_mask=new_mask)
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -new.shape[1] :]
        given = {"position_ids": positions, self._name: self._cache, "use_cache": True}
        with warnings.catch_warnings():  # the bridge hands the cache on by the name that it was given under
            warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
            made = model(new, attention_mask=self.mask, **given, **self._last)
        return made if isinstance(made, Tensor) else made.logits

    def _empty(self, batch: int) -> Any:
        model = self.host.model
        if self.host.kind == "HookedTransformer":
            from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

            return TransformerLensKeyValueCache.init_cache(model.cfg, model.cfg.device, batch)
        from transformers import DynamicCache

        return DynamicCache(config=getattr(model, "original_model", model).config)
