"""What a model's attention is made of: its weights as plain tensors, one contract for every host.

Everything is in the convention `x @ W`. The tensors are the model's own, in its dtype and on its device;
`folded` makes float64 copies in which the norms' gains are multiplied in, equal on every host.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from ropelens.hosts.base import Host
from ropelens.hosts.certify import LayerClaim, rebuild_output, rebuild_scores, score_tolerance
from ropelens.hosts.layer import Certificate, LayerSpec
from ropelens.hosts.lens import LensHost
from ropelens.hosts.masks import visible_keys
from ropelens.hosts.plain import PlainHost

PROBE = 12  # tokens of the text that weights are checked on

QUERIES, KEYS, VALUES = ("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v")
OUTPUTS = ("o_proj", "dense", "out_proj", "o")
BEFORE = ("input_layernorm", "ln_1", "ln1")
NORMED_AFTER = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")  # HookedTransformer applies their ln1 last
FINAL = ("norm", "final_layer_norm", "final_layernorm", "ln_f", "ln_final")


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


def layer_weights(host: Host, layer: int) -> LayerWeights:
    """Returns the weights of one layer's attention, checked against what the layer does.

    On first use the model runs a few tokens: queries, keys and attention outputs must be those that the
    weights make of the residual stream. Of queries and keys with norms of their own (`qk_norm`) only the
    outputs are checked.

    Raises:
        ValueError: If the projections cannot be named, or are not all that the layer does.
    """
    found = _checked(host)
    if layer in found.errors:
        raise ValueError(found.errors[layer])
    norm, after = found.norms[layer]
    return replace(_weights(host, layer), norm=norm, after=after)


def ends(host: Host) -> Ends:
    """Returns the embedding and the unembedding, checked against the first layer's input and the logits.

    Raises:
        ValueError: If they are not all that the model does before its first and after its last layer.
    """
    found = _checked(host)
    if found.ends is None:
        raise ValueError(found.errors[-1])
    return found.ends


@contextmanager
def watching(host: Host, look: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Hands over the residual stream: what each layer takes, and as one more layer what the last makes.

    Args:
        look: Called with (layer, `[batch, pos, d_model]`), detached, in every forward pass.
    """
    last = host.n_layers - 1
    with ExitStack() as stack:
        for layer in range(host.n_layers):
            stack.enter_context(_looking(_block(host, layer), before=partial(look, layer)))
        stack.enter_context(_looking(_block(host, last), after=partial(look, host.n_layers)))
        yield


@contextmanager
def watching_attention(host: Host, layer: int, look: Callable[[Tensor], None]) -> Iterator[None]:
    """Hands over what a layer's attention makes, `o_bias` included, before any norm of it."""
    with _looking(attention_of(host, layer), after=look):
        yield


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


# Naming ---------------------------------------------------------------------------------------------


def _weights(host: Host, layer: int) -> LayerWeights:
    """The weights of a layer, its norms left out."""
    attn = attention_of(host, layer)
    if host.kind == "HookedTransformer":
        grouped = "_" if hasattr(attn, "_W_K") else ""
        keys = (getattr(attn, grouped + name) for name in ("W_K", "W_V", "b_K", "b_V"))
        k, v, k_bias, v_bias = (x.detach() for x in keys)
        q, o, q_bias, o_bias = (x.detach() for x in (attn.W_Q, attn.W_O, attn.b_Q, attn.b_O))
        normed = getattr(attn, "q_norm", None) is not None
        return LayerWeights(layer, q, k, v, o, q_bias, k_bias, v_bias, o_bias, qk_norm=normed)
    if isinstance(host, LensHost):
        module = attn.original_component
        parts = (attn.W_Q, attn.W_K, attn.W_V, attn.W_O, attn.b_Q, attn.b_K, attn.b_V, attn.b_O)
    else:
        module, parts = attn, _of_module(layer, attn, host.certificate.layers[layer])
    q, k, v, o, *biases = (None if x is None else x.detach() for x in parts)
    assert q is not None and k is not None and v is not None and o is not None  # noqa: PT018
    q_bias, k_bias, v_bias, o_bias = biases
    return LayerWeights(
        layer,
        q,
        k,
        v,
        o,
        q_bias,
        k_bias,
        v_bias,
        o_bias,
        factor=float(getattr(host.text_config, "residual_multiplier", None) or 1.0),
        qk_norm=any(_acts(getattr(module, name, None)) for name in ("q_norm", "q_layernorm", "query_norm")),
    )


def _norms(host: Host, layer: int) -> tuple[Norm | None, Norm | None]:
    """Returns the norms before a layer's attention and of its output."""
    block = _block(host, layer)
    if host.kind == "HookedTransformer":
        ln1 = _norm(host, block.ln1)
        if host.model.cfg.original_architecture in NORMED_AFTER:
            return None, ln1
        return ln1, _norm(host, getattr(block, "ln1_post", None))
    own = block.original_component if isinstance(host, LensHost) else block
    # Where there are norms on both sides of the MLP, the one named after the attention is its output's.
    both = hasattr(own, "post_feedforward_layernorm")
    after = getattr(own, "post_attention_layernorm" if both else "post_self_attn_layernorm", None)
    return _norm(host, named(own, BEFORE)), _norm(host, after)


def _of_module(layer: int, module: Any, spec: LayerSpec) -> tuple[Tensor | None, ...]:
    """Returns q, k, v, o and their biases of a transformers attention module."""
    heads, kv_heads, d_head = spec.n_heads, spec.n_kv_heads, spec.d_head
    out = named(module, OUTPUTS)
    apart = [named(module, names) for names in (QUERIES, KEYS, VALUES)]
    joint, by_head = named(module, ("qkv_proj",)), named(module, ("query_key_value",))
    if out is None or (None in apart and joint is None and by_head is None):
        raise ValueError(
            f"layer {layer}: {type(module).__name__} has no projections that ropelens knows by name, so its "
            "circuits cannot be read from the weights: use a TransformerBridge"
        )
    if by_head is not None:  # GPT-NeoX: query, key and value of a head side by side
        ws = rearrange(by_head.weight, "(head three d) m -> three (head d) m", three=3, d=d_head)
        bs = by_head.bias
        bs = (
            [None] * 3 if bs is None else rearrange(bs, "(head three d) -> three (head d)", three=3, d=d_head)
        )
    elif joint is not None:
        widths = [heads * d_head, kv_heads * d_head, kv_heads * d_head]
        ws = joint.weight.split(widths)
        bs = [None] * 3 if joint.bias is None else joint.bias.split(widths)
    else:
        ws, bs = [m.weight for m in apart], [m.bias for m in apart]
    q, k, v = (rearrange(w, "(head d) m -> head m d", d=d_head) for w in ws)
    biases = (None if b is None else rearrange(b, "(head d) -> head d", d=d_head) for b in bs)
    o = rearrange(out.weight, "m (head d) -> head d m", d=d_head)
    return (q, k, v, o, *biases, out.bias)


def _ends(host: Host, factor: float) -> Ends:
    model = host.model
    if host.kind == "HookedTransformer":
        softcap = model.cfg.output_logits_soft_cap
        final = getattr(model, "ln_final", None)
        return Ends(
            host.embedding.detach(),
            model.W_U.detach(),
            model.b_U.detach(),
            _norm(host, final),
            softcap=softcap if softcap > 0 else None,
        )
    if isinstance(host, LensHost):
        final, unembed = model.ln_final, model.unembed
        u, bias = model.W_U.detach(), getattr(unembed, "b_U", None)
    else:
        unembed = model.get_output_embeddings()
        if unembed is None:
            raise ValueError(
                f"expected a model with logits, got {type(model).__name__}, which has no language-model "
                "head: load it with AutoModelForCausalLM"
            )
        final, u, bias = named(_trunk(host), FINAL), unembed.weight.detach().T, unembed.bias
    config = host.text_config
    division = getattr(config, "logits_scaling", None)  # Granite
    scale = getattr(config, "logit_scale", None)  # Cohere
    return Ends(
        host.embedding.detach() * factor if factor != 1 else host.embedding.detach(),
        u,
        None if bias is None else bias.detach(),
        _norm(host, final),
        float(scale if scale is not None else 1 / division if division else 1.0),
        getattr(config, "final_logit_softcapping", None),
    )


def _block(host: Host, layer: int) -> Any:
    if isinstance(host, LensHost):
        return host.model.blocks[layer]
    lists = (m for m in _trunk(host).modules() if isinstance(m, torch.nn.ModuleList))
    found = next((m for m in lists if len(m) == host.n_layers and _attention_in(m[0]) is not None), None)
    if found is None:
        raise ValueError(
            f"{type(host.model).__name__} has no list of {host.n_layers} layers with an attention module "
            "each, so its weights cannot be read: use a TransformerBridge"
        )
    return found[layer]


def attention_of(host: Host, layer: int) -> Any:
    """Returns a layer's attention module."""
    block = _block(host, layer)
    return block.attn if isinstance(host, LensHost) else _attention_in(block)


def _attention_in(block: Any) -> Any:
    return named(block, ("self_attn", "attention", "attn"))


def _trunk(host: Host) -> Any:
    assert isinstance(host, PlainHost)
    return host.owner.base_model


def named(module: Any, names: tuple[str, ...]) -> Any:
    """Returns the first submodule that there is of these names, else None."""
    return next((m for m in (getattr(module, name, None) for name in names) if m is not None), None)


def _parameter(modules: tuple[Any, ...], names: tuple[str, ...]) -> Tensor | None:
    found = (getattr(module, name, None) for module in modules for name in names)
    return next((x.detach() for x in found if isinstance(x, Tensor)), None)


def _acts(module: Any) -> bool:
    return module is not None and type(module).__name__ != "Identity"


def _norm(host: Host, module: Any) -> Norm | None:
    """Reads a norm off what it does to a few vectors, since classes write their gain as w or as 1 + w."""
    if not _acts(module):
        return None
    inner = getattr(module, "original_component", module)
    names = ("variance_epsilon", "eps", "epsilon")
    eps = next(
        (float(e) for m in (inner, module) for n in names if (e := getattr(m, n, None)) is not None), 1e-6
    )
    weight, bias = (_parameter((inner, module), names) for names in (("weight", "w"), ("bias", "b")))
    like = host.embedding.detach()
    d_model = like.shape[1]
    x = torch.randn(1, 4, d_model, generator=torch.Generator().manual_seed(0)).to(like)
    with torch.no_grad():
        y, shifted = module(x).double(), module(x + 1).double()
    x = x.double()
    tolerance = max(score_tolerance(like.dtype), 1e-4) * float(y.abs().max())
    kind = "layer" if bool((y - shifted).abs().max() < tolerance) else "rms"
    gains = [None] if weight is None else [None, weight, 1 + weight.double()]
    tried = [Norm(kind, eps, gain, bias) for gain in gains]
    misses = [float((norm(x) - y).abs().max()) for norm in tried]
    best = min(range(len(tried)), key=misses.__getitem__)
    if misses[best] > tolerance:
        raise ValueError(
            f"{type(inner).__name__} is neither a layer norm nor an RMS norm with its weights as gain, so "
            "the circuits on either side of it cannot be read from the weights"
        )
    found = tried[best]
    return replace(found, bias=None) if bias is not None and not bool(bias.any()) else found


# Checking -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """What was read of a model, and a sentence for each layer (-1: the ends) that does more than that."""

    norms: list[tuple[Norm | None, Norm | None]]
    ends: Ends | None
    errors: dict[int, str]


# Holds no reference to the model; made anew with its certificate.
_known: weakref.WeakKeyDictionary[Any, tuple[Certificate, _Found]] = weakref.WeakKeyDictionary()


def _checked(host: Host) -> _Found:
    known = _known.get(host.model)
    if known is None or known[0] is not host.certificate:
        known = host.certificate, _check(host)
        _known[host.model] = known
    return known[1]


def _check(host: Host) -> _Found:
    """Runs a few tokens and compares what each layer did with what its weights make of its input."""
    generator = torch.Generator().manual_seed(1)
    length = min(PROBE, host.context or PROBE)
    ids = torch.randint(host.vocab_size, (1, length), generator=generator).to(host.device)
    layers = range(host.n_layers)
    states: dict[int, Tensor] = {}
    made: dict[int, Tensor] = {}
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(layer: int, q: Tensor, k: Tensor, mask: Tensor, sound: Tensor) -> None:
        seen[layer] = q.double(), k.double()

    def keep_state(layer: int, x: Tensor) -> None:
        states[layer] = x.double()

    def keep_made(layer: int, x: Tensor) -> None:
        made[layer] = x.double()

    with torch.no_grad(), host.alone():
        with ExitStack() as stack:
            stack.enter_context(watching(host, keep_state))
            for layer in layers:
                stack.enter_context(watching_attention(host, layer, partial(keep_made, layer)))
            stack.enter_context(host.observing(list(layers), keep))
            logits = host.run(ids, None)
        assert logits is not None
        norms: list[tuple[Norm | None, Norm | None]] = []
        errors: dict[int, str] = {}
        for layer in layers:
            try:
                norms.append(_norms(host, layer))
                _check_layer(host, layer, norms[layer], states[layer], made[layer], *seen[layer])
            except ValueError as error:
                norms[layer:] = [(None, None)]
                errors[layer] = str(error)
        found = None
        try:
            found = _check_ends(host, ids, states[0], states[host.n_layers], logits.double())
        except ValueError as error:
            errors[-1] = str(error)
    return _Found(norms, found, errors)


def _check_layer(
    host: Host,
    layer: int,
    norms: tuple[Norm | None, Norm | None],
    x: Tensor,
    made: Tensor,
    q: Tensor,
    k: Tensor,
) -> None:
    w = _weights(host, layer)
    spec, dtype = host.certificate.layers[layer], host.embedding.dtype
    read = x if norms[0] is None else norms[0](x)

    def project(weight: Tensor, bias: Tensor | None) -> Tensor:
        out = einsum(read, weight.double(), "batch pos m, head m d -> batch pos head d")
        return out if bias is None else out + bias.double()

    claim = LayerClaim(spec.scale, spec.softcap, spec.window, spec.sinks)
    visible = visible_keys(x.shape[1], spec.window, x.device)[None, None]
    z = rebuild_output(rebuild_scores(q, k, claim), project(w.v, w.v_bias), visible, claim)
    out = einsum(z, w.o.double(), "batch pos head d, head d m -> batch pos m")
    compared = [("attention outputs", out if w.o_bias is None else out + w.o_bias.double(), made)]
    if not w.qk_norm:
        keys = turn(project(w.k, w.k_bias), spec)
        keys = keys.repeat_interleave(k.shape[2] // keys.shape[2], 2)  # a bridge may show them repeated
        compared = [("queries", turn(project(w.q, w.q_bias), spec), q), ("keys", keys, k), *compared]
    for what, rebuilt, shown in compared:
        if problem := _differ(rebuilt, shown, dtype):
            raise ValueError(
                f"layer {layer}: the {what} rebuilt from the weights differ from the model's own by "
                f"{problem:.1e} of their range, so that this {host.kind}'s circuits cannot be read from its "
                "weights"
            )


def _check_ends(host: Host, ids: Tensor, first: Tensor, last: Tensor, logits: Tensor) -> Ends:
    rows = host.embedding.detach()[ids].double()
    factor = float((first * rows).sum() / rows.square().sum())
    if abs(factor - 1) < 1e-6:
        factor = 1.0
    found, dtype = _ends(host, factor), host.embedding.dtype
    if problem := _differ(found.embedding[ids].double(), first, dtype):
        raise ValueError(
            f"the input of layer 0 differs from the tokens' embeddings by {problem:.1e} of its range: what "
            "else goes into it is not in the weights that ropelens reads"
        )
    x = last if found.norm is None else found.norm(last)
    rebuilt = x @ found.unembedding.double()
    rebuilt = (rebuilt if found.bias is None else rebuilt + found.bias.double()) * found.scale
    if found.softcap is not None:
        rebuilt = found.softcap * torch.tanh(rebuilt / found.softcap)
    if problem := _differ(rebuilt, logits, dtype):
        raise ValueError(
            f"the logits rebuilt from the last layer's output differ from the model's own by {problem:.1e} "
            "of their range: what else happens to them is not in the weights that ropelens reads"
        )
    return found


def _differ(rebuilt: Tensor, shown: Tensor, dtype: torch.dtype) -> float | None:
    """Returns by how much of its range a tensor is missed, None if by no more than is accepted."""
    spread = max(float(shown.max() - shown.min()), torch.finfo(torch.float32).tiny)
    error = float((rebuilt - shown).abs().max()) / spread
    return None if error <= score_tolerance(dtype) else error


def turn(
    x: Float[Tensor, "batch pos head d_head"], spec: LayerSpec
) -> Float[Tensor, "batch pos head d_head"]:
    """Returns queries or keys as the layer rotates them, the first at position 0."""
    rotation, out = spec.rotation, x.clone()
    first, second = rotation.pairs.to(x.device).unbind(-1)
    pos = torch.arange(x.shape[1], dtype=torch.float64, device=x.device)
    angle = (pos[:, None] * rotation.inv_freq.to(x.device))[:, None, :]
    cos, sin = (rotation.amplitude * f(angle) for f in (torch.cos, torch.sin))
    a, b = x[..., first], x[..., second]
    out[..., first], out[..., second] = (a * cos - b * sin).to(x.dtype), (a * sin + b * cos).to(x.dtype)
    return out


@contextmanager
def _looking(
    module: torch.nn.Module,
    *,
    before: Callable[[Tensor], None] | None = None,
    after: Callable[[Tensor], None] | None = None,
) -> Iterator[None]:
    """Hands over what a module takes and makes."""

    def take(_: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        assert before is not None
        before((args[0] if args else options["hidden_states"]).detach())

    def make(_: Any, args: Any, made: Any) -> None:
        assert after is not None
        after((made[0] if isinstance(made, tuple) else made).detach())

    handles: list[Any] = []
    if before is not None:
        handles.append(module.register_forward_pre_hook(take, with_kwargs=True))
    if after is not None:
        handles.append(module.register_forward_hook(make))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
