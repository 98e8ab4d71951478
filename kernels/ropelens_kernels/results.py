"""What the three quantities come back as: frozen, float64, one entry a batch row."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float64, Int64
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ActivationResult:
    """Band activation (or the norm product): sums over visible (query, key) pairs, in logit units.

    Attributes:
        values: `sum |scale * q.k in the band's plane|`, at least 0.
        rest: The same for the dims that no band rotates, taken together: `sum |scale * q_rest.k_rest|`.
        by_position: `values` apart for the spans of queries between the edges, or None.
        first_values: The part of `values` that is due to each query's first visible key, or None.
        first_rest: The same part of `rest`.
        bound: `|values - exact| <= bound`, certified up to rounding; 0 for exact methods.
        estimate: A-posteriori estimate of `|values - exact|`; 0 for exact methods.
        n_queries: Counted queries.
        n_pairs: Visible pairs of a counted query and a key.
        method: The method that ran (such as "harmonic"), with its backend if fused.
    """

    values: Float64[Tensor, "batch head band"]
    rest: Float64[Tensor, "batch head"]
    by_position: Float64[Tensor, "batch span head band"] | None
    first_values: Float64[Tensor, "batch head band"] | None
    first_rest: Float64[Tensor, "batch head"] | None
    bound: Float64[Tensor, "batch head band"]
    estimate: Float64[Tensor, "batch head band"]
    n_queries: Int64[Tensor, " batch"]
    n_pairs: Int64[Tensor, " batch"]
    method: str


@dataclass(frozen=True, eq=False)
class EntropyResult:
    """Band entropy: sums over counted queries, in nats; negative where the band sharpens attention.

    Attributes:
        values: `sum over queries of E_b`; with `rest` they add up to `sum of H(attention) - log N`.
        rest: The same for the dims that no band rotates.
        by_position: `values` apart for the spans of queries between the edges, or None.
        residual: Worst row's miss of that identity, in nats.
        residual_mean: Mean row's miss, in nats.
        estimate: Worst sampled row's distance between the band values of two quadrature rules,
            relative to the norm of the row's band values (0 if no row was sampled).
        n_queries: Counted queries.
        n_pairs: Visible pairs of a counted query and a key.
        n_refined: Rows (a query of a head) that the first rule missed and that were redone.
        first_values: The part of `values` that is the entropy of "first visible key or not".
        first_rest: The same part of `rest`.
        method: The method that ran, with its backend if fused.
    """

    values: Float64[Tensor, "batch head band"]
    rest: Float64[Tensor, "batch head"]
    by_position: Float64[Tensor, "batch span head band"] | None
    residual: Float64[Tensor, "batch head"]
    residual_mean: Float64[Tensor, "batch head"]
    estimate: Float64[Tensor, "batch head"]
    n_queries: Int64[Tensor, " batch"]
    n_pairs: Int64[Tensor, " batch"]
    n_refined: Int64[Tensor, "batch head"]
    first_values: Float64[Tensor, "batch head band"] | None
    first_rest: Float64[Tensor, "batch head"] | None
    method: str


@dataclass(frozen=True, eq=False)
class AttributionResult:
    """Band attribution: the attention of each asked query to each key, split among bands.

    Attributes:
        values: `c[i, b]`; over bands and with `rest` they add up to the attention on key i.
        rest: The share of the dims that no band rotates.
        visible: Which keys the query sees; all else is 0.
        sink: The attention on the learned sink, or None without sinks.
        residual: Largest miss over keys of `sum_b c[i, b] + rest = attention`.
        method: The method that ran.
    """

    values: Float64[Tensor, "batch query head key band"]
    rest: Float64[Tensor, "batch query head key"]
    visible: Bool[Tensor, "batch query key"]
    sink: Float64[Tensor, "batch query head"] | None
    residual: Float64[Tensor, "batch query head"]
    method: str
