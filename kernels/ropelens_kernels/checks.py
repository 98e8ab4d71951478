"""Inputs, checked once: every complaint is a ValueError in one sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Inputs:
    """Checked inputs, heads first; pads are zeroed in q and k.

    Attributes:
        rest: The dims that no band rotates.
        real: Which positions are tokens rather than pads.
        all_real: Whether all of them are.
    """

    q: Float[Tensor, "batch head query d_head"]
    k: Float[Tensor, "batch kv_head key d_head"]
    pairs: Int64[Tensor, "band 2"]
    rest: Int64[Tensor, " rest"]
    scale: float
    real: Bool[Tensor, "batch key"]
    all_real: bool
    window: int | None
    softcap: float | None
    sinks: Float[Tensor, " head"] | None

    @property
    def offset(self) -> int:
        """The position of query 0 among the keys."""
        return self.k.shape[2] - self.q.shape[2]

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def counted(self) -> Bool[Tensor, "batch query"]:
        """Queries that are tokens."""
        return self.real[:, self.offset :]

    @property
    def n_visible(self) -> Int64[Tensor, "batch query"]:
        """Visible keys of each query; 0 for a pad."""
        seen = self.real.long().cumsum(1)
        before = torch.zeros_like(seen)
        if self.window is not None and self.window < seen.shape[1]:
            before[:, self.window :] = seen[:, : -self.window]
        return (seen - before)[:, self.offset :] * self.counted

    @property
    def first_visible(self) -> Int64[Tensor, "batch query"]:
        """The first key that each query sees; 0 for a pad, which sees none."""
        keys = torch.arange(self.k.shape[2], device=self.q.device)
        later = keys.masked_fill(~self.real, self.k.shape[2]).flip(1).cummin(1).values.flip(1)
        start = keys[self.offset :]
        start = torch.zeros_like(start) if self.window is None else (start - self.window + 1).clamp(min=0)
        return later[:, start].masked_fill(~self.counted, 0)

    def between(self, start: int, stop: int) -> Inputs:
        """The same with the queries `start:stop` only, and the keys that they can see."""
        last = stop + self.offset
        return replace(self, q=self.q[:, :, start:stop], k=self.k[:, :, :last], real=self.real[:, :last])

    def visible(self, row: int, start: int, stop: int, first: int, last: int) -> Bool[Tensor, "query key"]:
        """Which keys `first:last` the queries `start:stop` of a row see: causal, in the window, tokens."""
        queries = torch.arange(start, stop, device=self.q.device)
        return self.visible_to(row, queries, first, last)

    def visible_to(
        self, row: int, queries: Int64[Tensor, " query"], first: int, last: int
    ) -> Bool[Tensor, "query key"]:
        """The same for any queries of a row."""
        p = queries[:, None] + self.offset
        i = torch.arange(first, last, device=self.q.device)[None]
        seen = i <= p
        if self.window is not None:
            seen &= p - i < self.window
        if not self.all_real:
            seen &= self.real[row, first:last]
            seen &= self.real[row, queries + self.offset][:, None]
        return seen

    def key_span(self, start: int, stop: int) -> tuple[int, int]:
        """The keys that any of the queries `start:stop` can see, as a half-open range."""
        last = stop + self.offset
        first = 0 if self.window is None else max(0, start + self.offset - self.window + 1)
        return first, last

    def split(self, products: Tensor) -> tuple[Tensor, Tensor]:
        """Sums `[..., d_head]` over the dims of each band `[..., band]` and over the rest `[...]`."""
        return products[..., self.pairs].sum(-1), products[..., self.rest].sum(-1)


def prepare(
    q: Tensor,
    k: Tensor,
    *,
    pairs: Tensor,
    scale: float,
    mask: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tol: float = 1e-3,
    dtype: torch.dtype | None = None,
) -> Inputs:
    """Returns the inputs checked, in the dtype to compute in, with heads first.

    Args:
        dtype: The dtype to compute in; by default float64 for float64 inputs, else float32.

    Raises:
        ValueError: If anything about the inputs is not as documented.
    """
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            "expected q [batch, query, head, d_head] and k [batch, key, kv_head, d_head] with equal batch "
            f"and d_head, got {list(q.shape)} and {list(k.shape)}: transpose or slice them to these axes"
        )
    (batch, n_query, n_head, d_head), (n_key, n_kv) = q.shape, k.shape[1:3]
    if not q.is_floating_point() or not k.is_floating_point() or q.device != k.device:
        raise ValueError(
            f"expected floating-point q and k on one device, got {q.dtype} on {q.device} and {k.dtype} on "
            f"{k.device}: convert or move them"
        )
    if not 1 <= n_query <= n_key:
        raise ValueError(
            f"expected 1 to {n_key} queries (at most as many as keys), got {n_query}: pass all keys they see"
        )
    if n_kv == 0 or n_head == 0 or n_head % n_kv:
        raise ValueError(
            f"expected the query heads to be a multiple of the key heads, got {n_head} and {n_kv}: "
            "pass k as the model has it, unexpanded, or sliced to the matching head"
        )
    pairs = _checked_pairs(pairs, d_head)
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (batch, n_key)):
        raise ValueError(
            f"expected a Bool mask [batch, key] = {[batch, n_key]}, True for real tokens, "
            f"got {mask.dtype} {list(mask.shape)}: pass attention_mask.bool()"
        )
    if sinks is not None and sinks.shape != (n_head,):
        raise ValueError(
            f"expected sinks [head] = {[n_head]}, got {list(sinks.shape)}: pass one sink logit a query head"
        )
    if window is not None and window < 1:
        raise ValueError(f"expected a window of at least 1 key, got {window}: pass None for no window")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"expected a positive softcap, got {softcap}: pass None for no softcap")
    if not math.isfinite(scale):
        raise ValueError(f"expected a finite scale, got {scale}: pass the factor that multiplies q.k")
    if not 0 < tol < math.inf:
        raise ValueError(f"expected a positive tolerance, got {tol}: pass for instance 1e-3")
    if dtype is None:
        dtype = torch.float64 if torch.float64 in (q.dtype, k.dtype) else torch.float32
    real = torch.ones(batch, n_key, dtype=torch.bool, device=q.device) if mask is None else mask.to(q.device)
    all_real = mask is None or bool(mask.all())
    q, k = q.transpose(1, 2).to(dtype), k.transpose(1, 2).to(dtype)
    if not all_real:
        q = q.masked_fill(~real[:, None, n_key - n_query :, None], 0)
        k = k.masked_fill(~real[:, None, :, None], 0)
    for name, tensor in (("q", q), ("k", k)):
        if not torch.isfinite(tensor.sum(dtype=torch.float64)):  # one pass; float32 cannot overflow it
            raise ValueError(
                f"expected finite numbers, got NaN or infinity in {name}: look for an overflow upstream"
            )
    if sinks is not None and not torch.isfinite(sinks).all():
        raise ValueError("expected finite sinks, got NaN or infinity: pass None for no sinks")
    free = torch.ones(d_head, dtype=torch.bool)
    free[pairs.flatten()] = False
    return Inputs(
        q=q,
        k=k,
        pairs=pairs.to(q.device),
        rest=free.nonzero().flatten().to(q.device),
        scale=float(scale),
        real=real,
        all_real=all_real,
        window=window,
        softcap=softcap,
        sinks=None if sinks is None else sinks.detach().to(q.device, dtype),
    )


def _checked_pairs(pairs: Tensor, d_head: int) -> Tensor:
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.is_floating_point():
        raise ValueError(
            f"expected pairs as integers [band, 2], got {pairs.dtype} {list(pairs.shape)}: "
            "pass the two dims of each band"
        )
    pairs = pairs.detach().to("cpu", torch.int64)
    dims = pairs.flatten()
    if len(dims) and (int(dims.min()) < 0 or int(dims.max()) >= d_head):
        raise ValueError(
            f"expected dims from 0 to {d_head - 1} in pairs, got {int(dims.min())} to {int(dims.max())}: "
            "pass the dims of one head"
        )
    if len(dims.unique()) != len(dims):
        raise ValueError("expected each dim in one band, got a dim twice in pairs: a dim rotates once")
    return pairs


def chosen(name: str, value: str, allowed: tuple[str, ...]) -> str:
    """Returns `value` if it is allowed.

    Raises:
        ValueError: If it is not.
    """
    if value not in allowed:
        raise ValueError(
            f"expected {name} to be one of {', '.join(allowed)}, got {value!r}: choose one of them"
        )
    return value


def checked_edges(edges: tuple[int, ...] | None, n_query: int) -> tuple[int, ...] | None:
    """Returns the edges if they cut the queries into spans that are not empty.

    Raises:
        ValueError: If they do not.
    """
    if edges is not None and any(b <= a for a, b in pairwise((0, *edges, n_query))):
        raise ValueError(
            f"expected ascending edges between 0 and {n_query}, got {list(edges)}: each span needs a query"
        )
    return edges
