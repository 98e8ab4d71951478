"""The public functions: check, choose a method and a backend, compute."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens_kernels import methods as _activation
from ropelens_kernels.checks import checked_edges, chosen, prepare
from ropelens_kernels.reference import attribution as _attribution
from ropelens_kernels.reference import entropy as _entropy
from ropelens_kernels.results import ActivationResult, AttributionResult, EntropyResult

SINGLE = 1e-5  # tolerances below this are out of float32's reach: compute in float64

P = ParamSpec("P")
R = TypeVar("R")


def _undisturbed(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps gradients off, and autocast, under which matmuls of float32 would be in half precision."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            return function(*args, **kwargs)

    return run


@_undisturbed
def activation(
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key kv_head d_head"],
    *,
    pairs: Int[Tensor, "band 2"],
    scale: float,
    mask: Bool[Tensor, "batch key"] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " head"] | None = None,
    tol: float = 1e-3,
    method: str = "auto",
    backend: str = "auto",
    split_first: bool = False,
    edges: tuple[int, ...] | None = None,
) -> ActivationResult:
    """Band activation: `sum over visible pairs of |scale * q.k in the band's plane|`, in logit units.

    Query head h reads key head `h // (heads / kv_heads)`; fewer queries than keys are the last ones.

    Args:
        q: Post-rotary queries.
        k: Post-rotary keys, unexpanded.
        pairs: The two dims of each band; dims in no pair are taken together as `rest`.
        scale: The factor that makes q.k a logit.
        mask: True for real tokens; pads count neither as keys nor as queries. All by default.
        window: Key i is visible to query p if `i <= p` and `p - i < window`. Causal by default.
        softcap: Accepted for a uniform signature and ignored: activation is taken before any softcap.
        sinks: Accepted for a uniform signature and ignored: a sink's logit has no band.
        tol: For "harmonic": the a-posteriori error, relative to `(2/pi) sum |q||k|`, to stay below.
        method: "pairwise" (the definition), "sorted", "harmonic" or "auto".
        backend: "torch", "fused" (Triton, CUDA tensors) or "auto".
        split_first: Whether to return the part that is due to each query's first visible key too.
        edges: Places between queries, ascending: sums apart for the spans between them too.

    Raises:
        ValueError: If an input is not as described, or the backend does not suit the device.

    Example:
        >>> import torch
        >>> q = k = torch.eye(2).reshape(1, 2, 1, 2)
        >>> activation(q, k, pairs=torch.tensor([[0, 1]]), scale=1.0).values.tolist()
        [[[2.0]]]
    """
    chosen("method", method, ("auto", "pairwise", "sorted", "harmonic"))
    fused = _runs_fused(backend, q)
    inputs = prepare(q, k, pairs=pairs, scale=scale, mask=mask, window=window, tol=tol)
    if fused and method == "sorted":
        if backend == "fused":
            raise ValueError(
                'expected "pairwise" or "harmonic" for the fused activation, got \'sorted\': choose one'
            )
        fused = False
    return _activation.activation(inputs, tol, method, fused, split_first, checked_edges(edges, q.shape[1]))


@_undisturbed
def norm_product(
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key kv_head d_head"],
    *,
    pairs: Int[Tensor, "band 2"],
    scale: float,
    mask: Bool[Tensor, "batch key"] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " head"] | None = None,
    tol: float = 1e-3,
    method: str = "auto",
    split_first: bool = False,
    edges: tuple[int, ...] | None = None,
) -> ActivationResult:
    """Norm product: `sum over visible pairs of |scale| |q_b| |k_b|`, in logit units.

    The largest activation that a band could have with queries and keys of these norms; activation over
    it says how well their angles agree. KV-cache compression ranks dims by the like. Exact, and linear
    in the number of positions.

    Args:
        q: Post-rotary queries.
        k: Post-rotary keys, unexpanded.
        pairs: The two dims of each band; dims in no pair are taken together as `rest`.
        scale: The factor that makes q.k a logit.
        mask: True for real tokens; pads count neither as keys nor as queries. All by default.
        window: Key i is visible to query p if `i <= p` and `p - i < window`. Causal by default.
        softcap: Accepted for a uniform signature and ignored.
        sinks: Accepted for a uniform signature and ignored.
        tol: Accepted for a uniform signature and ignored: the result is exact.
        method: "auto".
        split_first: Whether to return the part that is due to each query's first visible key too.
        edges: Places between queries, ascending: sums apart for the spans between them too.

    Raises:
        ValueError: If an input is not as described.

    Example:
        >>> import torch
        >>> q = k = torch.eye(2).reshape(1, 2, 1, 2)
        >>> norm_product(q, k, pairs=torch.tensor([[0, 1]]), scale=1.0).values.tolist()
        [[[3.0]]]
    """
    chosen("method", method, ("auto",))
    inputs = prepare(q, k, pairs=pairs, scale=scale, mask=mask, window=window, tol=tol)
    return _activation.norm_product(inputs, split_first, checked_edges(edges, q.shape[1]))


@_undisturbed
def entropy(
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key kv_head d_head"],
    *,
    pairs: Int[Tensor, "band 2"],
    scale: float,
    mask: Bool[Tensor, "batch key"] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " head"] | None = None,
    tol: float = 1e-3,
    method: str = "auto",
    backend: str = "auto",
    split_first: bool = False,
    edges: tuple[int, ...] | None = None,
) -> EntropyResult:
    """Band entropy: the drop from log N to the attention's entropy, split among bands, in nats.

    `E_b = -integral t Cov_a(t)(x_b, l) dt`, summed over counted queries; negative where the band
    sharpens attention. Completeness, `sum_b E_b = H(a) - log N`, is measured on every row.

    Args:
        q: Post-rotary queries.
        k: Post-rotary keys, unexpanded.
        pairs: The two dims of each band; dims in no pair are taken together as `rest`.
        scale: The factor that makes q.k a logit.
        mask: True for real tokens; pads count neither as keys nor as queries. All by default.
        window: Key i is visible to query p if `i <= p` and `p - i < window`. Causal by default.
        softcap: c in `c * tanh(logit / c)`.
        sinks: Learned sink logits: one more outcome, with a fixed logit and no band.
        tol: Nats a row; below 1e-5 the computation is in float64, where 1e-9 can be reached.
        method: "adaptive" or "auto".
        backend: "torch", "fused" (Triton, CUDA tensors), "compiled" (torch.compile for the passes over
            the logits: twice as fast on a CPU, after half a minute or so for the first call; needs a C++
            compiler, no softcap and tol >= 1e-5) or "auto", which is one of the first two.
        split_first: Whether to return the part that is the entropy of "first visible key or not" too.
        edges: Places between queries, ascending: sums apart for the spans between them too.

    Raises:
        ValueError: If an input is not as described, or the backend does not suit the device.

    Example:
        >>> import torch
        >>> q = torch.ones(1, 4, 1, 2)
        >>> entropy(q, q, pairs=torch.tensor([[0, 1]]), scale=1.0).values.abs().max().item() < 1e-6
        True
    """
    chosen("method", method, ("auto", "adaptive"))
    compiled = backend == "compiled"
    fused = not compiled and _runs_fused(backend, q)
    if compiled and (softcap is not None or tol < SINGLE or q.dtype == torch.float64):
        raise ValueError(
            'expected no softcap, no float64 and tol >= 1e-5 for backend="compiled", got another: '
            'use backend="torch"'
        )
    if fused and (softcap is not None or split_first or tol < SINGLE or q.dtype == torch.float64):
        if backend == "fused":
            raise ValueError(
                "expected no softcap, no split_first, no float64 and tol >= 1e-5 for the fused entropy, "
                'got another: use backend="torch"'
            )
        fused = False
    inputs = prepare(
        q,
        k,
        pairs=pairs,
        scale=scale,
        mask=mask,
        window=window,
        softcap=softcap,
        sinks=sinks,
        tol=tol,
        dtype=torch.float64 if tol < SINGLE else None,
    )
    first_rule = _first_rule() if fused else None
    edges = checked_edges(edges, q.shape[1])
    return _entropy.entropy(inputs, tol, split_first, first_rule, edges, compiled)


@_undisturbed
def attribution(
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key kv_head d_head"],
    *,
    pairs: Int[Tensor, "band 2"],
    scale: float,
    mask: Bool[Tensor, "batch key"] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " head"] | None = None,
    tol: float = 1e-9,
    method: str = "auto",
    backend: str = "auto",
    queries: Int[Tensor, " asked"] | None = None,
) -> AttributionResult:
    """Band attribution: the attention that each asked query pays to each key, split among bands.

    `c[i, b] = share_b / N + integral a_i(t) (x[i, b] - sum_k a_k(t) x[k, b]) dt`, the path integral
    from uniform attention to the real one. Computed in float64; the result has a key and a band axis,
    so pass one head (q and its k sliced) and few queries.

    Args:
        q: Post-rotary queries.
        k: Post-rotary keys, unexpanded.
        pairs: The two dims of each band; dims in no pair are taken together as `rest`.
        scale: The factor that makes q.k a logit.
        mask: True for real tokens; a pad query gets zeros. All by default.
        window: Key i is visible to query p if `i <= p` and `p - i < window`. Causal by default.
        softcap: c in `c * tanh(logit / c)`.
        sinks: Learned sink logits: one more outcome, with a fixed logit and no band.
        tol: Largest miss of any key's `sum_b c = attention`.
        method: "adaptive" or "auto".
        backend: "torch" or "auto"; there is no fused kernel, since one row is cheap.
        queries: Indices into the query axis, negative from the end; all by default.

    Raises:
        ValueError: If an input is not as described.

    Example:
        >>> import torch
        >>> q = torch.tensor([0.0, 2.0]).reshape(1, 2, 1, 1).expand(1, 2, 1, 2)
        >>> out = attribution(q, q, pairs=torch.tensor([[0, 1]]), scale=1.0, queries=torch.tensor([-1]))
        >>> [round(c, 4) for c in out.values.flatten().tolist()]
        [0.0003, 0.9997]
    """
    chosen("method", method, ("auto", "adaptive"))
    chosen("backend", backend, ("auto", "torch"))
    inputs = prepare(
        q,
        k,
        pairs=pairs,
        scale=scale,
        mask=mask,
        window=window,
        softcap=softcap,
        sinks=sinks,
        tol=tol,
        dtype=torch.float64,
    )
    n_query = q.shape[1]
    asked = torch.arange(n_query) if queries is None else queries.detach().to("cpu", torch.int64)
    if asked.numel() == 0 or int(asked.min()) < -n_query or int(asked.max()) >= n_query:
        raise ValueError(
            f"expected queries from {-n_query} to {n_query - 1}, got {asked.tolist()}: choose among them"
        )
    return _attribution.attribution(inputs, asked % n_query, tol)


def _runs_fused(backend: str, q: Tensor) -> bool:
    """Returns whether the Triton kernels run.

    Raises:
        ValueError: If they are asked for and cannot.
    """
    chosen("backend", backend, ("auto", "torch", "fused"))
    if backend == "fused" and not q.is_cuda:
        raise ValueError(
            f'expected CUDA tensors for backend="fused", got {q.device.type} tensors: Triton kernels run on '
            'a GPU only, so move q and k there or use backend="torch"'
        )
    return backend == "fused" or (backend == "auto" and q.is_cuda and find_spec("triton") is not None)


def _first_rule() -> _entropy.FirstRule:
    """The Triton kernel, imported only when it runs."""
    from ropelens_kernels.fused.entropy import first_rule_rows

    return first_rule_rows
