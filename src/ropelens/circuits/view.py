"""Heads that do nothing, and one head on one text: where it attends, and what that does to the logits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from einops import einsum
from jaxtyping import Float, Float64, Int, Int64
from torch import Tensor

from ropelens.circuits.patterns import attention_at, each_layer, of_heads, score_blocks
from ropelens.hosts import Host, host_of
from ropelens.hosts.tokens import token_strings, tokens_of
from ropelens.hosts.weights import LayerWeights, ends, layer_weights, watching, watching_attention
from ropelens.scores.provenance import facts

if TYPE_CHECKING:
    import pandas as pd

LONGEST = 4096  # tokens of a text to view a head on


def no_op_report(
    model: Any,
    text: str | list[str] | Int[Tensor, "batch pos"],
    *,
    attention_mask: Tensor | None = None,
    tokenizer: Any = None,
) -> pd.DataFrame:
    """How far each head rests: the attention it pays to the first key, and the size of that key's value.

    A head that has nothing to do attends to the first token, whose value writes next to nothing. Attention
    is the mean over all queries but the first; a value's size is the norm of what it would write,
    `|v W_O|`, over the mean of the text's other tokens.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        text: Strings, or token ids.
        attention_mask: For token ids: nonzero where a token is real.
        tokenizer: For strings; `model.tokenizer` by default.

    Returns:
        One row per layer and head: layer, head, first_key (attention, 0 to 1), first_value (ratio of norms:
        below 1, the first token writes less than others), both means over texts.

    Raises:
        ValueError: If the text is not usable, or the weights cannot be read.

    Example:
        ```python
        rl.circuits.no_op_report(model, "The cat sat on the mat.").sort_values("first_key").tail()
        ```
    """
    import pandas as pd

    host = host_of(model)
    documents = tokens_of(host, text, attention_mask, tokenizer).documents()
    weights = [layer_weights(host, layer).repeated() for layer in range(host.n_layers)]
    attention: dict[tuple[int, int], list[float]] = {}
    size: dict[tuple[int, int], list[float]] = {}
    for ids in documents:
        target = torch.zeros_like(ids)
        target[:, 0] = -1

        def take(layer: int, q: Tensor, k: Tensor, target: Tensor = target) -> None:
            paid = attention_at(q, k, host.certificate.layers[layer], {"": target})[""]
            for head, value in enumerate(paid[:, 0].tolist()):
                attention.setdefault((layer, head), []).append(value)

        def look(layer: int, x: Tensor) -> None:
            if layer == host.n_layers:
                return
            norms = einsum(
                _values(weights[layer], x[0].double()), weights[layer].o.double(), "p h d, h d m -> p h m"
            ).norm(dim=-1)
            for head, value in enumerate((norms[0] / norms[1:].mean(0)).tolist()):
                size.setdefault((layer, head), []).append(value)

        with watching(host, look):
            each_layer(host, ids, take)
    rows = [
        {
            "layer": layer,
            "head": head,
            "first_key": sum(attention[layer, head]) / len(documents),
            "first_value": sum(size[layer, head]) / len(documents),
        }
        for layer, head in sorted(attention)
    ]
    return pd.DataFrame(rows)


@dataclass(frozen=True, eq=False)
class HeadView:
    """One head on one text.

    Attributes:
        tokens: The text's tokens.
        pattern: The attention of each query to each key.
        effect: What the head adds to the logit of each position's next token, over its mean over the
            vocabulary; NaN at the last position.
        raised, raised_effect: The token whose logit the head raises most there, and by how much.
        made_from: What it was measured on and how, for `ropelens.plots.provenance`.
    """

    layer: int
    head: int
    tokens: tuple[str, ...]
    pattern: Float64[Tensor, "query key"]
    effect: Float64[Tensor, " query"]
    raised: tuple[str, ...]
    raised_effect: Float64[Tensor, " query"]
    made_from: dict[str, Any] = field(default_factory=dict)

    def to_frame(self) -> pd.DataFrame:
        """Returns one row a token.

        Columns token, attends_to (the position of the key with most attention), attends_token, attention,
        effect (on the logit of the next token), raises (the token raised most), raised_by.
        """
        import pandas as pd

        best = self.pattern.max(1)
        return pd.DataFrame(
            {
                "token": self.tokens,
                "attends_to": best.indices.numpy(),
                "attends_token": [self.tokens[i] for i in best.indices.tolist()],
                "attention": best.values.numpy(),
                "effect": self.effect.numpy(),
                "raises": self.raised,
                "raised_by": self.raised_effect.numpy(),
            }
        ).rename_axis("position")

    def plot(self) -> Any:
        """Returns a Plotly figure: where the head attends, and its effect on each next token's logit."""
        from ropelens.plots.circuits import head_on_text

        title = f"layer {self.layer}, head {self.head}"
        return head_on_text(self.tokens, self.pattern, self.effect, title, source=self.made_from)

    def html(self) -> str:
        """Returns the text as HTML, each token shaded by the head's effect on it; tokens are escaped."""
        from ropelens.plots.circuits import effects_html

        return effects_html(self.tokens, self.pattern, self.effect)

    def _repr_html_(self) -> str:
        return self.html()


def head_view(
    model: Any,
    text: str | Int[Tensor, "batch pos"],
    *,
    layer: int,
    head: int,
    tokenizer: Any = None,
) -> HeadView:
    """Where one head attends on one text, and its direct effect on the logits at each token.

    The effect is what the head writes at a position, through the final norm as it was there (its divisor
    frozen) and the unembedding, at the token that comes next, over the mean of all tokens: what later
    layers make of it is left out, and so is a softcap of the logits.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        text: One string, or one row of token ids.
        layer: Which layer.
        head: Which query head.
        tokenizer: For strings, and to show tokens; `model.tokenizer` by default.

    Returns:
        Attention from 0 to 1, effects in logit units.

    Raises:
        ValueError: If there is no such layer or head, the text is not one of 2 to 4,096 tokens, or the
            weights cannot be read.

    Example:
        ```python
        view = rl.circuits.head_view(model, "The cat sat. The cat", layer=layer, head=head)
        view.to_frame()  # view itself shows as HTML in a notebook, view.plot() as a figure
        ```
    """
    host = host_of(model)
    if not 0 <= layer < host.n_layers or not 0 <= head < host.certificate.layers[layer].n_heads:
        raise ValueError(
            f"expected a layer from 0 to {host.n_layers - 1} and a head from 0 to "
            f"{host.certificate.layers[0].n_heads - 1}, got layer {layer}, head {head}"
        )
    tokens = tokens_of(host, text, None, tokenizer)
    ids = tokens.ids
    if len(ids) != 1 or ids.shape[1] > LONGEST:
        raise ValueError(
            f"expected one text of at most {LONGEST} tokens, got {list(ids.shape)} token ids: cut a piece out"
        )
    w, last = layer_weights(host, layer), ends(host)
    spec, n = host.certificate.layers[layer], ids.shape[1]
    state: dict[int, Tensor] = {}
    made: list[Tensor] = []
    pattern = torch.zeros(n, n, dtype=torch.float64, device=ids.device)

    def look(at: int, x: Tensor) -> None:
        if at in (layer, host.n_layers):
            state[at] = x[0].double()

    def take(_: int, q: Tensor, k: Tensor) -> None:
        one = of_heads(q, k, spec, [head])
        for rows, scores, norm in score_blocks(*one, torch.arange(n, device=q.device)):
            assert norm is not None
            pattern[rows] = (scores - norm[..., None]).exp()[0, 0].double()

    with watching(host, look), watching_attention(host, layer, made.append):
        each_layer(host, ids, take, layers=[layer])
    folded = w.folded()
    z = pattern @ _values(w.repeated(), state[layer])[:, head]
    out = z @ folded.o[head]
    if folded.after is not None:
        out = out / folded.after.divisor(made[0][0].double())
    if last.norm is not None:
        out = out / last.norm.divisor(state[host.n_layers])
    effect, raised, by = _effects(host, out, ids[0])
    return HeadView(
        layer=layer,
        head=head,
        tokens=token_strings(host, ids[0], tokenizer),
        pattern=pattern.cpu(),
        effect=effect.cpu(),
        raised=token_strings(host, raised, tokenizer),
        raised_effect=by.cpu(),
        made_from=facts("HeadView", host.fingerprint, tokens.digest, layer=layer, head=head),
    )


def _effects(
    host: Host, out: Float64[Tensor, "pos d_model"], ids: Int64[Tensor, " pos"], block: int = 8192
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the effect on the next token, the token raised most and by how much, over the mean token."""
    last = ends(host)
    read = out if last.norm is None else last.norm.linear(out)
    n_tokens = last.unembedding.shape[1]
    total, best = read.new_zeros(len(read)), read.new_full((len(read),), -math.inf)
    raised = torch.zeros_like(ids)
    for start in range(0, n_tokens, block):
        logits = last.scale * read @ last.unembedding[:, start : start + block].double()
        total += logits.sum(1)
        top = logits.max(1)
        better = top.values > best
        best, raised = torch.where(better, top.values, best), torch.where(better, top.indices + start, raised)
    mean = total / n_tokens
    following = last.unembedding[:, ids[1:]].double()
    effect = torch.full_like(mean, math.nan)
    effect[:-1] = last.scale * (read[:-1] * following.T).sum(1) - mean[:-1]
    return effect, raised, best - mean


def _values(w: LayerWeights, x: Float[Tensor, "pos d_model"]) -> Float64[Tensor, "pos head d_head"]:
    read = x if w.norm is None else w.norm(x)
    v = einsum(read, w.v.double(), "pos d_model, head d_model d_head -> pos head d_head")
    return v if w.v_bias is None else v + w.v_bias.double()
