"""The one-call entries: a model and a text in, band scores out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

import ropelens_kernels as kernels
from ropelens.hooks import observe
from ropelens.hosts import host_of
from ropelens.hosts.tokens import token_strings, tokens_of
from ropelens.metrics import fisher, taylor
from ropelens.metrics.accumulate import not_the_certified
from ropelens.scores import BandAttribution, BandScores


def band_entropy(
    model: Any,
    text: str | list[str] | Int[Tensor, "batch pos"],
    *,
    attention_mask: Tensor | None = None,
    tokenizer: Any = None,
    tol: float = 1e-3,
    progress: bool = False,
) -> BandScores:
    """Band entropy: how far each rotary band lowers the entropy of every head's attention.

    The drop from log N (uniform attention over the N visible keys) to the entropy of the attention
    paid is split among bands by the path integral `E_b = -integral t Cov_a(t)(x_b, l) dt` from all
    scores zero to the real ones, and summed over queries. Source: docs/maths.md, after integrated
    gradients (Sundararajan et al. 2017).

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        text: Strings, or token ids.
        attention_mask: For token ids: nonzero where a token is real.
        tokenizer: For strings; `model.tokenizer` by default.
        tol: How far each query's bands may miss its entropy drop, in nats.
        progress: Whether to show a bar that counts layers.

    Returns:
        Scores in nats, negative where a band sharpens attention; `residual` is the worst miss.

    Raises:
        ValueError: If the text is not usable, or the model's attention cannot be rebuilt.

    Example:
        ```python
        scores = rl.band_entropy(model, "The cat sat on the mat. The cat sat on the")
        scores.mean(per="query")[layer, head]  # nats per query, one number a band
        ```
    """
    return _observed(model, text, attention_mask, tokenizer, "entropy", tol, progress)


def band_activation(
    model: Any,
    text: str | list[str] | Int[Tensor, "batch pos"],
    *,
    attention_mask: Tensor | None = None,
    tokenizer: Any = None,
    tol: float = 1e-3,
    progress: bool = False,
) -> BandScores:
    """Band activation: how much each rotary band moves the attention logits, sign aside.

    `A_b = sum over queries p and visible keys i of |scale * q_p . k_i in the plane of band b|`,
    before any softcap. Source: docs/maths.md.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        text: Strings, or token ids.
        attention_mask: For token ids: nonzero where a token is real.
        tokenizer: For strings; `model.tokenizer` by default.
        tol: Relative error that a fast approximate method may make.
        progress: Whether to show a bar that counts layers.

    Returns:
        Scores in logit units, at least 0; `bound` holds a certified error bound.

    Raises:
        ValueError: If the text is not usable, or the model's attention cannot be rebuilt.

    Example:
        ```python
        scores = rl.band_activation(model, ["one text", "another text"])
        scores.importance(normalize="head")  # 1 = the head's strongest band
        ```
    """
    return _observed(model, text, attention_mask, tokenizer, "activation", tol, progress)


def band_fisher(
    model: Any,
    documents: str | list[str] | Int[Tensor, "batch pos"],
    *,
    n_samples: int = 1,
    seed: int = 0,
    unit: Literal["band", "dim"] = "band",
    attention_mask: Tensor | None = None,
    tokenizer: Any = None,
    progress: bool = False,
) -> BandScores:
    """Band Fisher information: how much the model's output depends on a gain on each band.

    The gain, 1, multiplies a band of a head's post-rotary queries at every position. For each
    document the next tokens are sampled from the model's own distribution (labels only, temperature
    1), their log-probabilities summed, and the derivative by each gain squared: an unbiased estimate
    of the second derivative of the KL divergence. Source: docs/maths.md, after Amari's information
    geometry; one backward pass a sample.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        documents: Strings, or token ids with a document a row.
        n_samples: Label samples a document; at least 2 give a sampling error.
        seed: Of the labels; the same on every device.
        unit: "band": one gain a band. "dim": one gain a dim, squares summed over the band's dims.
        attention_mask: For token ids: nonzero where a token is real.
        tokenizer: For strings; `model.tokenizer` by default.
        progress: Whether to show a bar that counts documents.

    Returns:
        Scores in squared nats a document, summed over documents, at least 0.

    Raises:
        ValueError: If the documents are not usable, or the model's attention cannot be rebuilt.

    Example:
        ```python
        scores = rl.band_fisher(model, documents, n_samples=2, seed=0)
        scores.mean(per="document"), scores.stderr(), scores.sampling_stderr()
        ```
    """
    host = host_of(model)
    tokens = tokens_of(host, documents, attention_mask, tokenizer)
    return fisher(host, tokens, n_samples=n_samples, seed=seed, unit=unit, progress=progress)


def band_taylor(
    model: Any,
    documents: str | list[str] | Int[Tensor, "batch pos"],
    *,
    attention_mask: Tensor | None = None,
    tokenizer: Any = None,
    progress: bool = False,
) -> BandScores:
    """Band Taylor score: how much the loss would rise without each band, to first order.

    With a gain g, 1, on a band of a head's post-rotary queries and the loss L, summed over a document's
    true next tokens: `T_b = -dL/dg_b`, the change of L as g goes from 1 to 0 if L were linear in g.
    Positive where removing the band should hurt. Source: the pruning criterion of Molchanov et al. 2017,
    on bands; one forward and one backward pass a document.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        documents: Strings, or token ids with a document a row.
        attention_mask: For token ids: nonzero where a token is real.
        tokenizer: For strings; `model.tokenizer` by default.
        progress: Whether to show a bar that counts documents.

    Returns:
        Scores in nats, of either sign, summed over documents.

    Raises:
        ValueError: If the documents are not usable, or the model's attention cannot be rebuilt.

    Example:
        ```python
        rl.band_taylor(model, documents).lowest(0.4)  # the bands that the loss depends on least
        ```
    """
    host = host_of(model)
    return taylor(host, tokens_of(host, documents, attention_mask, tokenizer), progress=progress)


def band_attribution(
    model: Any,
    text: str | list[str] | Int[Tensor, "batch pos"],
    *,
    layer: int,
    head: int,
    query: int = -1,
    attention_mask: Tensor | None = None,
    tokenizer: Any = None,
    tol: float = 1e-9,
) -> BandAttribution:
    """Band attribution: the attention that one query pays to each key, split among rotary bands.

    `c[i, b] = share_b / N + integral a_i(t) (x[i, b] - E_a(t)[x_b]) dt`: the path integral from
    uniform attention to the attention paid. Source: docs/maths.md.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        text: One text or one row of token ids.
        layer: Which layer.
        head: Which query head.
        query: Position of the query among the real tokens; negative counts from the end.
        attention_mask: For token ids: nonzero where a token is real.
        tokenizer: For strings; `model.tokenizer` by default.
        tol: Largest miss of any key's sum over bands.

    Returns:
        Attention per key and band; over bands and with `rest` it adds up to the attention paid.

    Raises:
        ValueError: If layer, head or query do not exist, or the text is not one usable sequence.

    Example:
        ```python
        rl.band_attribution(model, "The cat sat. The cat", layer=10, head=1).plot()
        ```
    """
    host = host_of(model)
    layer = _index("layer", layer, host.n_layers)
    spec = host.certificate.layers[layer]
    head = _index("head", head, spec.n_heads)
    tokens = tokens_of(host, text, attention_mask, tokenizer)
    if tokens.n_documents != 1:
        raise ValueError(f"expected one text to attribute, got {tokens.n_documents}: pass them one by one")
    ids = tokens.documents()[0]
    query = _index("query", query, ids.shape[1])
    taken: list[tuple[Tensor, Tensor]] = []

    def take(_: int, q: Tensor, k: Tensor, mask: Tensor, sound: Tensor) -> None:
        if not bool(sound):
            raise ValueError(not_the_certified(layer))
        kv_head = head // (q.shape[2] // k.shape[2])
        taken.append((q[:, : query + 1, [head]], k[:, : query + 1, [kv_head]]))

    with torch.no_grad(), host.observing([layer], take):
        host.run(ids, None, logits=False)
    q, k = taken[-1]
    found = kernels.attribution(
        q,
        k,
        **replace(spec, sinks=None if spec.sinks is None else spec.sinks[[head]]).kernel_arguments(q.device),
        tol=tol,
        queries=torch.tensor([query]),
    )
    return BandAttribution(
        layer=layer,
        head=head,
        query=query,
        inv_freq=spec.rotation.inv_freq,
        pairs=spec.rotation.pairs,
        values=found.values[0, 0, 0].cpu(),
        rest=found.rest[0, 0, 0].cpu(),
        visible=found.visible[0, 0].cpu(),
        sink=None if found.sink is None else float(found.sink),
        tokens=token_strings(host, ids[0, : query + 1], tokenizer),
        residual=float(found.residual),
        model=host.fingerprint,
        settings={"tol": tol},
    )


def _observed(
    model: Any,
    text: Any,
    attention_mask: Tensor | None,
    tokenizer: Any,
    metric: str,
    tol: float,
    progress: bool,
) -> BandScores:
    host = host_of(model)
    tokens = tokens_of(host, text, attention_mask, tokenizer)
    with torch.no_grad(), observe(model, (metric,), tol=tol, progress=progress) as seen:
        host.run(tokens.ids, tokens.mask, logits=False)
    return seen.result(metric, data=tokens.digest)


def _index(name: str, value: int, count: int) -> int:
    if not -count <= value < count:
        raise ValueError(
            f"expected a {name} from 0 to {count - 1} (or from the end, -1 to -{count}), got {value}"
        )
    return value % count
