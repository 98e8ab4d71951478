"""Path expansion: what the paths through no head, one head and several contribute to the loss."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from ropelens.circuits.frozen import Frozen, freeze
from ropelens.circuits.learning import clustered_stderr, loss_by_position, single_documents, token_losses
from ropelens.data import Windows
from ropelens.hosts import host_of
from ropelens.hosts.masks import visible_keys
from ropelens.hosts.weights import ends

if TYPE_CHECKING:
    import pandas as pd

Head = tuple[int, int]  # layer, head


@dataclass(frozen=True, eq=False)
class PathImportance:
    """What paths contribute to the loss, in nats a token, a row a window; made by `path_importance`.

    Attributes:
        total: The model's own loss.
        orders: Loss with all paths of at most n heads, n from 0 (the direct path) on.
        layers: By how much the loss rises without the paths of n heads, n from 1 on, whose last head is
            in layer l; 0 where there are none.
        heads: By how much it rises without the path through one head alone.
        virtual: The same for the path through two heads alone, by `pairs`.
        pairs: Their heads, (layer, head) each, the earlier first.
        positional: Share of each head's attention that its offset explains, 0 to 1; see
            `path_importance`.
        documents: Which document each window is from.
        residual: How far the sum of all paths was from the logits, at most, in logit units.
        other: Largest entry of what layers add besides their heads, by that of the residual stream: 0
            for an attention-only model without value and output biases.
    """

    total: Float64[Tensor, " window"]
    orders: Float64[Tensor, "window order"]
    layers: Float64[Tensor, "window layer passed"]
    heads: Float64[Tensor, "window layer head"]
    virtual: Float64[Tensor, "window pair"]
    pairs: tuple[tuple[Head, Head], ...]
    positional: Float64[Tensor, "layer head"]
    documents: tuple[str, ...]
    residual: float
    other: float

    def to_frame(self, of: Literal["orders", "layers", "heads", "virtual"] = "heads") -> pd.DataFrame:
        """Means over windows, with standard errors over documents, in nats a token.

        Args:
            of: "orders": order, loss, marginal (its loss minus that of the order below), stderr (of
                marginal). "layers": layer, order, importance, stderr. "heads": layer, head, importance,
                stderr, positional. "virtual": first_layer, first_head, layer, head, importance, stderr.

        Raises:
            ValueError: If `of` is something else.
        """
        import pandas as pd

        if of == "orders":
            marginal = torch.cat([self.orders[:, :1], self.orders.diff(dim=1)], 1)
            return pd.DataFrame(
                {
                    "order": range(self.orders.shape[1]),
                    "loss": self.orders.mean(0).numpy(),
                    "marginal": marginal.mean(0).numpy(),
                    "stderr": clustered_stderr(marginal, self.documents).numpy(),
                }
            )
        if of not in ("layers", "heads", "virtual"):
            raise ValueError(f'expected of="orders", "layers", "heads" or "virtual", got {of!r}')
        values = getattr(self, of)
        frame = pd.DataFrame(
            {
                "importance": values.mean(0).flatten().numpy(),
                "stderr": clustered_stderr(values.flatten(1), self.documents).numpy(),
            }
        )
        if of == "virtual":
            rows = [(*first, *second) for first, second in self.pairs]
            names = ["first_layer", "first_head", "layer", "head"]
            return pd.concat([pd.DataFrame(rows, columns=names), frame], axis=1)
        n = values.shape[2]
        frame.insert(0, "layer", [i // n for i in range(len(frame))])
        if of == "layers":
            frame.insert(1, "order", [i % n + 1 for i in range(len(frame))])
            return frame.query("order <= layer + 1").reset_index(drop=True)
        frame.insert(1, "head", [i % n for i in range(len(frame))])
        return frame.assign(positional=self.positional.flatten().numpy())

    def n_positional(self, threshold: float = 0.5) -> int:
        """How many heads attend by offset: those whose `positional` share is at least the threshold."""
        return int((self.positional >= threshold).sum())


def path_importance(
    model: Any,
    windows: Windows | Int64[Tensor, "batch pos"],
    *,
    max_order: int | None = None,
    pairs: bool = True,
    progress: bool = False,
) -> PathImportance:
    """Path importance: what the direct path, single heads and virtual heads contribute to the loss.

    The model runs once on each window; then attention patterns and the divisors of all norms are held,
    which makes the logits a sum over paths: token -> no head, one head, or several, a later layer's
    reading what an earlier one's wrote -> logits. `orders` adds paths up by how many heads they pass;
    `heads`, `virtual` and `layers` take terms away from the whole, one at a time. On an attention-only
    model that is all there is, and paths are functions of the tokens alone. Elsewhere the outputs of
    MLPs are held as they were and start paths of their own, as the embedding does: the sum is still the
    logits, but what came through an MLP counts as its own. Source: Elhage et al. 2021, "Term
    importance analysis"; there, orders are run one after the other with frozen patterns, with the same
    result.

    A head's `positional` share is of how its pattern, on these windows, differs from uniform attention to
    the keys that it can see: the part of the sum of squares of that difference that a function of the
    offset alone explains.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        windows: From `rl.windows`, a document a window, or token ids.
        max_order: Up to how many heads a path is followed; by default as many as there are layers. With
            fewer, `residual` is what the longer paths add up to, at most.
        pairs: Whether virtual heads are taken away one by one: one run of the unembedding for each.
        progress: Whether to show a bar that counts windows.

    Returns:
        Losses and rises of the loss in nats a token.

    Raises:
        ValueError: If a layer's weights cannot be read, or windows hold several documents.

    Example:
        ```python
        import torch

        small = rl.load("attn-only-2l", host="transformers")
        found = rl.circuits.path_importance(small, torch.randint(512, (1, 64)))
        found.to_frame("orders"), found.to_frame("virtual")
        ```
    """
    from tqdm import tqdm

    host = host_of(model)
    n_orders = host.n_layers if max_order is None else min(max_order, host.n_layers)
    rows: list[dict[str, Tensor]] = []
    names: list[str] = []
    residual, other = 0.0, 0.0
    sums: Tensor | None = None
    combined: tuple[tuple[Head, Head], ...] = ()
    for ids, name in tqdm(single_documents(windows), desc="paths", disable=not progress):
        held = freeze(host, ids[None])
        row, combined = _terms(held, n_orders, pairs)
        rows.append(row)
        names.append(name)
        residual = max(residual, float(row["residual"]))
        size = max(float(x.abs().max()) for x in held.other) / float(held.last.abs().max())
        other = max(other, size)
        layers = zip(held.patterns, host.certificate.layers, strict=True)
        ours = torch.stack([_by_offset(p, spec.window) for p, spec in layers])
        sums = ours if sums is None or ours.shape != sums.shape else sums + ours
    assert sums is not None
    explained = (sums[..., 0].square() / sums[..., 2].clamp(min=1)).sum(-1)
    spread = sums[..., 1].sum(-1)
    return PathImportance(
        **{
            name: torch.stack([row[name] for row in rows]).cpu()
            for name in ("total", "orders", "layers", "heads", "virtual")
        },
        pairs=combined,
        positional=torch.where(spread > 0, explained / spread, 0.0).cpu(),
        documents=tuple(names),
        residual=residual,
        other=other if other > 1e-6 else 0.0,
    )


def _terms(
    held: Frozen, n_orders: int, pairs: bool
) -> tuple[dict[str, Tensor], tuple[tuple[Head, Head], ...]]:
    """Returns the losses of one window, and which pairs of heads they are of."""
    n_layers, n_heads = held.n_layers, held.n_heads
    whole = held.logits(held.last)
    total = _loss(held, whole)

    def rise(term: Tensor) -> Tensor:
        return _loss(held, whole - held.logits(term)) - total

    # parts[n]: of the residual stream, all paths of n heads; first[l]: what single heads write
    parts = [held.start, *(torch.zeros_like(held.start) for _ in range(n_orders))]
    first: list[Tensor] = []
    layers = total.new_zeros(n_layers, n_orders)
    for layer in range(n_layers):
        written = [held.heads(layer, part) for part in parts[:n_orders]]
        for n, heads in enumerate(written):
            if n <= layer:
                layers[layer, n] = rise(heads.sum(1))
        first.append(written[0])
        parts = [
            parts[0] + held.other[layer],
            *(p + w.sum(1) for p, w in zip(parts[1:], written, strict=True)),
        ]
    sums = torch.stack(parts).cumsum(0)
    heads = torch.stack(
        [torch.stack([rise(first[i][:, h]) for h in range(n_heads)]) for i in range(n_layers)]
    )
    virtual: list[Tensor] = []
    combined: list[tuple[Head, Head]] = []
    for a in range(n_layers) if pairs else ():
        for h in range(n_heads):
            for b in range(a + 1, n_layers):
                through = held.heads(b, first[a][:, h])
                virtual += [rise(through[:, g]) for g in range(n_heads)]
                combined += [((a, h), (b, g)) for g in range(n_heads)]
    missing = held.logits(sums[-1] - held.last).abs().max()
    row = {
        "total": total,
        "orders": torch.stack([_loss(held, held.logits(x)) for x in sums]),
        "layers": layers,
        "heads": heads,
        "virtual": torch.stack(virtual) if virtual else total.new_zeros(0),
        "residual": missing,
    }
    return row, tuple(combined)


def _loss(held: Frozen, logits: Float64[Tensor, "batch pos token"]) -> Float64[Tensor, ""]:
    if held.ends.bias is not None:
        logits = logits + held.ends.bias
    if held.ends.softcap is not None:
        logits = held.ends.softcap * torch.tanh(logits / held.ends.softcap)
    return token_losses(logits, held.ids)[:, 1:].mean()


def _by_offset(
    attention: Float64[Tensor, "batch head query key"], window: int | None
) -> Float64[Tensor, "head offset 3"]:
    """Sums, by offset, of the attention above uniform over visible keys, of its square, and of ones."""
    n = attention.shape[-1]
    visible = visible_keys(n, window, attention.device)
    above = (attention - 1 / visible.sum(1, keepdim=True)).masked_fill(~visible, 0)
    place = torch.arange(n, device=attention.device)
    offset = (place[:, None] - place)[visible]
    flat = above[..., visible]
    parts = torch.stack([flat.sum(0), flat.square().sum(0), torch.full_like(flat[0], len(flat))], -1)
    out = parts.new_zeros(attention.shape[1], n, 3)
    return out.index_add_(1, offset, parts)


@dataclass(frozen=True)
class Bigrams:
    """The direct path against the bigrams of a text, in nats; made by `bigrams`.

    Attributes:
        direct: Loss of the direct path alone on the text's bigrams.
        bigram: Entropy of a token given the one before, counted on the text itself: the least that the
            direct path can lose.
        unigram: Entropy of a token, likewise.
        correlation: Of the direct path's log-probabilities with the bigrams', over the pairs that occur,
            weighted by how often they do.
        token_1, token_2: The model's loss on the tokens at positions 1 and 2 of the windows.
        n_pairs: Bigrams counted.
    """

    direct: float
    bigram: float
    unigram: float
    correlation: float
    token_1: float
    token_2: float
    n_pairs: int


def bigrams(model: Any, windows: Windows | Int64[Tensor, "batch pos"]) -> Bigrams:
    """How far the direct path is a table of bigrams, and what the first tokens lose.

    Without heads, a token's logits follow from it alone: `norm(embedding) @ unembedding`, with the norm's
    divisor that of the embedding. Trained well, that path gives bigram log-probabilities; and where
    windows begin with BOS, a model can lose no less than the unigram entropy at position 1 and the
    bigram entropy at position 2. Source: Elhage et al. 2021, "Zero-layer transformers".

    Counted entropies are lower than those of the source of the text; with few windows, much lower.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        windows: From `rl.windows`, a document a window, or token ids; position 0, where a BOS may be, is
            not counted.

    Returns:
        Losses and entropies in nats a token.

    Raises:
        ValueError: If the ends of the model cannot be read, or windows have fewer than 3 tokens.

    Example:
        ```python
        import torch

        rl.circuits.bigrams(rl.load("attn-only-1l", host="transformers"), torch.randint(512, (2, 64)))
        ```
    """
    host = host_of(model)
    end = ends(host).folded()
    ids = torch.stack([row for row, _ in single_documents(windows)])
    if ids.shape[1] < 3:
        raise ValueError(f"expected windows of at least 3 tokens, got {ids.shape[1]}")
    first, second = ids[:, 1:-1].flatten(), ids[:, 2:].flatten()
    n_vocab = host.vocab_size
    pairs, counts = torch.unique(first * n_vocab + second, return_counts=True)
    weights = counts.double() / counts.sum()
    a, b = pairs // n_vocab, pairs % n_vocab
    marginal = torch.zeros(n_vocab, dtype=torch.float64).index_add_(0, a, weights)
    log_p = (weights / marginal[a]).log()
    log_q = torch.empty_like(log_p)
    tokens, starts = torch.unique_consecutive(a, return_counts=True)
    bounds = [0, *starts.cumsum(0).tolist()]
    for block in range(0, len(tokens), 256):
        chosen = tokens[block : block + 256]
        x = end.embedding[chosen.to(end.embedding.device)]
        x = x if end.norm is None else x / end.norm.divisor(x)
        logits = x @ end.unembedding + (0.0 if end.bias is None else end.bias)
        if end.softcap is not None:
            logits = end.softcap * torch.tanh(logits / end.softcap)
        logs = logits.log_softmax(-1).cpu()
        for i, (lo, hi) in enumerate(pairwise(bounds[block : block + len(chosen) + 1])):
            log_q[lo:hi] = logs[i, b[lo:hi]]
    unigram = torch.bincount(ids[:, 1:].flatten()).double()
    unigram = unigram[unigram > 0] / unigram.sum()
    losses = loss_by_position(model, ids[:, :3], batch=64).mean
    return Bigrams(
        direct=float(-(weights * log_q).sum()),
        bigram=float(-(weights * log_p).sum()),
        unigram=float(-(unigram * unigram.log()).sum()),
        correlation=_correlation(log_p, log_q, weights),
        token_1=float(losses[1]),
        token_2=float(losses[2]),
        n_pairs=int(counts.sum()),
    )


def _correlation(x: Tensor, y: Tensor, weights: Tensor) -> float:
    x, y = x - (weights * x).sum(), y - (weights * y).sum()
    return float((weights * x * y).sum() / ((weights * x * x).sum() * (weights * y * y).sum()).sqrt())
