"""The weights of a layer's attention and of a model's ends as tensors, and what folding makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from einops import einsum
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Norm:
    """`(x - mean) / sqrt(mean square + eps) * gain + bias`; a kind of "rms" subtracts no mean.

    Attributes:
        gain, bias: None where there is none, or it was folded into the weights that follow.
    """

    kind: Literal["rms", "layer"]
    eps: float
    gain: Float[Tensor, " d_model"] | None = None
    bias: Float[Tensor, " d_model"] | None = None

    def divisor(self, x: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows 1"]:
        """What the norm divides each row by: the part of it that is not linear."""
        centred = x - x.mean(-1, keepdim=True) if self.kind == "layer" else x
        return (centred.square().mean(-1, keepdim=True) + self.eps).sqrt()

    def __call__(self, x: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows d_model"]:
        out = self.linear(x / self.divisor(x))
        return out if self.bias is None else out + self.bias.to(x)

    def linear(self, x: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows d_model"]:
        """The part of the norm that is linear: the mean taken off, and the gain."""
        if self.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        return x if self.gain is None else x * self.gain.to(x)

    def into(self, w: Float[Tensor, "*heads d_model out"]) -> Float[Tensor, "*heads d_model out"]:
        """Weights that read what the norm was given as `w` reads what it makes, the divisor apart."""
        w = w if self.gain is None else w * self.gain.to(w)[:, None]
        return w - w.mean(-2, keepdim=True) if self.kind == "layer" else w


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer's attention: `q = norm(x) @ q`, ..., `x += after(z @ o + o_bias) * factor`.

    Attributes:
        q, k, v, o: Projections; head h reads key head `h // group`.
        q_bias, k_bias, v_bias, o_bias: None where there is none.
        norm: What the residual stream passes before the projections.
        after: What the attention's output passes before it is added; None in most families.
        factor: What the output is multiplied with last (Granite's residual multiplier).
        qk_norm: Whether queries and keys pass norms of their own, which q and k do not show.
    """

    layer: int
    q: Float[Tensor, "head d_model d_head"]
    k: Float[Tensor, "kv_head d_model d_head"]
    v: Float[Tensor, "kv_head d_model d_head"]
    o: Float[Tensor, "head d_head d_model"]
    q_bias: Float[Tensor, "head d_head"] | None = None
    k_bias: Float[Tensor, "kv_head d_head"] | None = None
    v_bias: Float[Tensor, "kv_head d_head"] | None = None
    o_bias: Float[Tensor, " d_model"] | None = None
    norm: Norm | None = None
    after: Norm | None = None
    factor: float = 1.0
    qk_norm: bool = False

    @property
    def n_heads(self) -> int:
        return self.q.shape[0]

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q.shape[0] // self.k.shape[0]

    def repeated(self) -> LayerWeights:
        """The same with keys and values once for every query head."""

        def each(x: Tensor | None) -> Any:
            return None if x is None else x.repeat_interleave(self.group, 0)

        return replace(
            self, k=each(self.k), v=each(self.v), k_bias=each(self.k_bias), v_bias=each(self.v_bias)
        )

    def folded(self) -> LayerWeights:
        """Float64 copies, with the norms' linear parts multiplied in: `norm` and `after` keep divisors only.

        Before layer norms, which take means off, what is written is centred too. Equal on every host,
        whether a library folded and centred when it loaded the model or not; only value biases may have
        been moved into `o_bias`.
        """

        def read(w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
            w, b = w.double(), None if b is None else b.double()
            if self.norm is None:
                return w, b
            if self.norm.bias is not None:
                more = einsum(self.norm.bias.double(), w, "d_model, head d_model d_head -> head d_head")
                b = more if b is None else b + more
            return self.norm.into(w), b

        (q, q_bias), (k, k_bias), (v, v_bias) = (
            read(w, b) for w, b in ((self.q, self.q_bias), (self.k, self.k_bias), (self.v, self.v_bias))
        )
        o, o_bias = self.o.double(), None if self.o_bias is None else self.o_bias.double()
        if self.after is not None:
            o, o_bias = self.after.linear(o), None if o_bias is None else self.after.linear(o_bias)
        if self.norm is not None and self.norm.kind == "layer":
            o = o - o.mean(-1, keepdim=True)
            o_bias = None if o_bias is None else o_bias - o_bias.mean()
        return replace(
            self,
            q=q,
            k=k,
            v=v,
            o=o * self.factor,
            q_bias=q_bias,
            k_bias=k_bias,
            v_bias=v_bias,
            o_bias=None if o_bias is None else o_bias * self.factor,
            norm=None if self.norm is None else replace(self.norm, gain=None, bias=None),
            after=None if self.after is None else replace(self.after, gain=None, bias=None),
            factor=1.0,
        )


@dataclass(frozen=True, eq=False)
class Ends:
    """Where a model begins and ends: `x = embedding[token]`, `logits = norm(x) @ unembedding + bias`.

    Attributes:
        embedding: What the first layer reads for each token (Gemma's and Granite's factors included).
        norm: What the residual stream passes before the unembedding.
        scale: What the logits are multiplied with last.
        softcap: `c` where logits are then `c * tanh(logit / c)`.
    """

    embedding: Float[Tensor, "token d_model"]
    unembedding: Float[Tensor, "d_model token"]
    bias: Float[Tensor, " token"] | None = None
    norm: Norm | None = None
    scale: float = 1.0
    softcap: float | None = None

    def folded(self) -> Ends:
        """Float64 copies, with the norm's linear part multiplied in and the mean over tokens taken off.

        Before layer norms, which take means off, embeddings are centred too. What is the same for all
        tokens changes no probability, but under a softcap: HookedTransformer takes it off when it loads a
        model; taken off wherever there is no softcap, unembeddings are equal on every host.
        """
        u, bias = self.unembedding.double() * self.scale, self.bias
        bias = None if bias is None else bias.double() * self.scale
        if self.norm is not None:
            if self.norm.bias is not None:
                more = self.norm.bias.double() @ u
                bias = more if bias is None else bias + more
            u = self.norm.into(u)
        e = self.embedding.double()
        if self.norm is not None and self.norm.kind == "layer":
            e = e - e.mean(-1, keepdim=True)
        if self.softcap is None:
            u, bias = u - u.mean(-1, keepdim=True), None if bias is None else bias - bias.mean()
        return Ends(
            e,
            u,
            bias,
            None if self.norm is None else replace(self.norm, gain=None, bias=None),
            1.0,
            self.softcap,
        )


def require_qk(weights: LayerWeights) -> None:
    """Refuses a layer whose queries and keys are more than projections of the residual stream.

    Raises:
        ValueError: If queries and keys pass norms of their own.
    """
    if weights.qk_norm:
        raise ValueError(
            f"layer {weights.layer}: its queries and keys pass norms of their own, so that W_Q and W_K are "
            "not the whole QK circuit: only its OV circuit can be read from the weights"
        )
