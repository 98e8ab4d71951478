"""Skip trigrams: which tokens look for a source token through one head, and which outputs that raises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from ropelens.circuits.learning import single_documents
from ropelens.data import Windows
from ropelens.hosts import Host, host_of
from ropelens.hosts.layer import LayerSpec
from ropelens.hosts.tokens import token_strings
from ropelens.hosts.weights import Ends, LayerWeights, ends, layer_weights, require_qk

if TYPE_CHECKING:
    import pandas as pd

BLOCK = 512  # tokens of the vocabulary at a time
NEAR = range(1, 65)  # distances, in tokens


@dataclass(frozen=True, eq=False)
class SkipTrigrams:
    """What one head makes of one source token: `source ... destination -> output`; see `skip_trigrams`.

    The effect of a trigram is a product: how much of the destination's attention the source gets, times
    the output's logit. So if `A ... B -> C` and `A ... B' -> C'` are both likely through this head, then
    `A ... B -> C'` and `A ... B' -> C` are too, whether or not they are right: its bugs.

    Attributes:
        layer, head, source: Which head; the source token's id.
        distances: Over which offsets (in tokens) `destinations` is averaged.
        destinations: Attention logit of every token, as the query, with the source as its key.
        above: The same, above the mean over all tokens as the key: how much the query prefers the source.
        outputs: What full attention to the source adds to the logit of every token.
        tokens: All tokens as strings, or ids without a tokenizer.
    """

    layer: int
    head: int
    source: int
    distances: tuple[int, ...]
    destinations: Float64[Tensor, " token"]
    above: Float64[Tensor, " token"]
    outputs: Float64[Tensor, " token"]
    tokens: tuple[str, ...]

    @property
    def copying(self) -> bool:
        """Whether the token that the source raises most is the source itself."""
        return int(self.outputs.argmax()) == self.source

    def to_frame(self, k: int = 10) -> pd.DataFrame:
        """The k destinations that want the source most, beside the k outputs that it raises most.

        Columns destination, qk (`above`), output, ov (`outputs` above their mean), in logit units.
        """
        import pandas as pd

        wanting, raised = self.above.topk(k), (self.outputs - self.outputs.mean()).topk(k)
        return pd.DataFrame(
            {
                "destination": [self.tokens[i] for i in wanting.indices.tolist()],
                "qk": wanting.values,
                "output": [self.tokens[i] for i in raised.indices.tolist()],
                "ov": raised.values,
            }
        )

    def bugs(self, windows: Windows | Int64[Tensor, "batch pos"], k: int = 10) -> pd.DataFrame:
        """All pairs of the k destinations and k outputs, with how often each trigram is in a text.

        The head favours every pair; those that a text never has are forced on it by the others.

        Args:
            windows: From `rl.windows`, or token ids: the text to count in, the source at one of
                `distances` before the destination.
            k: How many of each.

        Returns:
            One row a pair, strongest destination first, then strongest output: destination, output, qk,
            ov, n_destination (source ... destination, whatever follows) and n (the output follows).

        Raises:
            ValueError: If windows hold several documents.
        """
        import pandas as pd

        wanting, raised = self.above.topk(k), (self.outputs - self.outputs.mean()).topk(k)
        counts = torch.zeros(k, k, dtype=torch.int64)
        totals = torch.zeros(k, dtype=torch.int64)
        for ids, _ in single_documents(windows):
            after = torch.zeros(len(ids), dtype=torch.bool)
            for place in (ids == self.source).nonzero()[:, 0]:
                reached = place + torch.tensor(self.distances)
                after[reached[reached < len(ids)]] = True
            after[-1] = False  # nothing follows it
            follows = ids.roll(-1)
            is_destination = after[:, None] & (ids[:, None] == wanting.indices)
            totals += is_destination.sum(0)
            counts += is_destination.T.long() @ (follows[:, None] == raised.indices).long()
        return pd.DataFrame(
            {
                "destination": self.tokens[b],
                "output": self.tokens[c],
                "qk": wanting.values[i].item(),
                "ov": raised.values[j].item(),
                "n_destination": totals[i].item(),
                "n": counts[i, j].item(),
            }
            for i, b in enumerate(wanting.indices.tolist())
            for j, c in enumerate(raised.indices.tolist())
        )


def skip_trigrams(
    model: Any,
    layer: int,
    head: int,
    source: str | int,
    *,
    distances: int | Sequence[int] = NEAR,
    divisor: float | None = None,
    tokenizer: Any = None,
) -> SkipTrigrams:
    """Skip trigrams of a head and a source token: what looks for it (QK), and what it raises (OV).

    With the residual stream holding the embeddings alone, as in layer 0, the attention logit of token B
    that looks at token A, d tokens before, is `scale * q(B) . R(-d) k(A)`, before any softcap, averaged
    over `distances`; full attention to A adds `v(A) W_O W_U / divisor` to the logits. In layer 0 of a
    one-layer model without MLPs both are exact: the change of a logit is the attention times the entry,
    `divisor` being that of the final norm at that place. In later layers, and with MLPs, these are the
    direct paths alone. Source: Elhage et al. 2021, "Skip-trigram tables".

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        layer: Which layer.
        head: Which query head.
        source: A token: a string that the tokenizer makes one token of, or an id.
        distances: How far the source is before the destination, in tokens: the attention logit's mean
            over these. It depends on the distance, since RoPE turns queries against keys.
        divisor: What the final norm divides by; by default what it divides embeddings by, on average.
        tokenizer: For strings; `model.tokenizer` by default.

    Returns:
        One number a token of the vocabulary for both questions; `.to_frame()` for the strongest.

    Raises:
        ValueError: If there is no such layer, head or token, or the layer's circuits cannot be read from
            its weights.

    Example:
        ```python
        small = rl.load("attn-only-1l", host="transformers")
        rl.circuits.skip_trigrams(small, layer=0, head=0, source=" people").to_frame()
        ```
    """
    host = host_of(model)
    spec, weights = _head_of(host, layer, head)
    require_qk(weights)
    end = ends(host).folded()
    token = token_id(host, source, tokenizer)
    offsets = (distances,) if isinstance(distances, int) else tuple(distances)
    if not offsets or min(offsets) < 0:
        raise ValueError(f"expected distances of at least 0 tokens, got {list(offsets)}")
    k_head, v_head = head // weights.group, weights.v[head // weights.group]
    source_row = _read(end, weights, torch.tensor([token]))
    keys = v_head.new_zeros(2, weights.k.shape[2])  # the source's, and the mean over tokens
    keys[0] = source_row[0] @ weights.k[k_head]
    for rows in torch.arange(host.vocab_size).split(BLOCK):
        keys[1] += (_read(end, weights, rows) @ weights.k[k_head]).sum(0) / host.vocab_size
    if weights.k_bias is not None:
        keys += weights.k_bias[k_head]
    keys = spec.scale * _turned_back(keys, spec, offsets)
    logits = torch.empty(host.vocab_size, 2, dtype=torch.float64)
    for rows in torch.arange(host.vocab_size).split(BLOCK):
        q = _read(end, weights, rows) @ weights.q[head]
        q = q if weights.q_bias is None else q + weights.q_bias[head]
        logits[rows] = (q @ keys.T).cpu()
    value = source_row[0] @ v_head
    value = value if weights.v_bias is None else value + weights.v_bias[k_head]
    return SkipTrigrams(
        layer=layer,
        head=head,
        source=token,
        distances=offsets,
        destinations=logits[:, 0],
        above=logits[:, 0] - logits[:, 1],
        outputs=(value @ weights.o[head] @ end.unembedding / (divisor or _divisor(end))).cpu(),
        tokens=token_strings(host, torch.arange(host.vocab_size), tokenizer),
    )


def copied_tokens(model: Any, layer: int, head: int, *, k: int = 20, tokenizer: Any = None) -> pd.DataFrame:
    """Which tokens a head copies: those whose own logit it raises most when it attends to them.

    The diagonal of the full OV circuit, above the mean over outputs, and the rank of the source among all
    that it raises (0: nothing is raised more). In blocks over the vocabulary: the table itself is never
    held. As in `skip_trigrams`, the residual stream is taken to hold the embedding alone.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        layer: Which layer.
        head: Which query head.
        k: How many tokens.
        tokenizer: For the tokens' text; `model.tokenizer` by default.

    Returns:
        One row a token, the most copied first: token, ov (logit units, full attention), rank; in
        `.attrs["share"]` the share of the vocabulary that is copied: rank 0, and raised at all.

    Raises:
        ValueError: If there is no such layer or head, or its OV circuit cannot be read from the weights.

    Example:
        ```python
        rl.circuits.copied_tokens(rl.load("attn-only-1l", host="transformers"), layer=0, head=0)
        ```
    """
    import pandas as pd

    host = host_of(model)
    _, weights = _head_of(host, layer, head)
    end = ends(host).folded()
    k_head = head // weights.group
    out = weights.o[head] @ end.unembedding / _divisor(end)
    own = torch.empty(host.vocab_size, dtype=torch.float64)
    rank = torch.empty(host.vocab_size, dtype=torch.int64)
    for rows in torch.arange(host.vocab_size).split(BLOCK):
        value = _read(end, weights, rows) @ weights.v[k_head]
        value = value if weights.v_bias is None else value + weights.v_bias[k_head]
        raised = value @ out
        itself = raised[torch.arange(len(rows)), rows][:, None]
        own[rows] = (itself[:, 0] - raised.mean(1)).cpu()
        rank[rows] = (raised > itself).sum(1).cpu()
    best = own.topk(min(k, len(own))).indices
    names = token_strings(host, best, tokenizer)
    frame = pd.DataFrame({"token": names, "ov": own[best], "rank": rank[best]})
    frame.attrs["share"] = float(((rank == 0) & (own > 0)).double().mean())
    return frame


def _head_of(host: Host, layer: int, head: int) -> tuple[LayerSpec, LayerWeights]:
    """Returns what a layer does and its folded weights."""
    if not 0 <= layer < host.n_layers:
        raise ValueError(f"expected a layer from 0 to {host.n_layers - 1}, got {layer}")
    spec = host.certificate.layers[layer]
    if not 0 <= head < spec.n_heads:
        raise ValueError(f"expected a head from 0 to {spec.n_heads - 1}, got {head}")
    weights = layer_weights(host, layer)
    if weights.after is not None:
        raise ValueError(
            f"layer {layer} norms what its heads write, all of them together, so that no head's output "
            "follows from its weights alone"
        )
    return spec, weights.folded()


def _read(end: Ends, weights: LayerWeights, tokens: Int64[Tensor, " row"]) -> Float64[Tensor, "row d_model"]:
    """Returns what a layer reads where the residual stream holds these tokens' embeddings."""
    x = end.embedding[tokens.to(end.embedding.device)]
    return x if weights.norm is None else x / weights.norm.divisor(x)


def _divisor(end: Ends) -> float:
    return 1.0 if end.norm is None else float(end.norm.divisor(end.embedding).mean())


def _turned_back(
    keys: Float64[Tensor, "row d_head"], spec: LayerSpec, distances: Sequence[int]
) -> Float64[Tensor, "row d_head"]:
    """Returns `mean over d of R(-d) k`: a query at p meets keys at p - d as if neither were turned."""
    rotation = spec.rotation
    angle = torch.tensor(distances, dtype=torch.float64)[:, None] * rotation.inv_freq
    cos, sin = (rotation.amplitude**2 * f(angle).mean(0).to(keys) for f in (torch.cos, torch.sin))
    first, second = rotation.pairs.unbind(-1)
    out = keys.clone()
    a, b = keys[:, first], keys[:, second]
    out[:, first], out[:, second] = a * cos + b * sin, b * cos - a * sin
    return out


def token_id(host: Host, token: str | int, tokenizer: Any = None) -> int:
    """Returns the id of a token that is named by its text.

    Raises:
        ValueError: If there is no such token, or the text is several.
    """
    if isinstance(token, int):
        if not 0 <= token < host.vocab_size:
            raise ValueError(f"expected a token id from 0 to {host.vocab_size - 1}, got {token}")
        return token
    tokenizer = tokenizer or getattr(host.model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: pass tokenizer=, or a token id")
    ids = tokenizer.encode(token, add_special_tokens=False)
    if len(ids) != 1:
        parts = [tokenizer.decode([i]) for i in ids]
        raise ValueError(f"expected one token, got {token!r}, which is {len(ids)}: {parts}")
    return ids[0]
