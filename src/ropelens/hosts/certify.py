"""Self-certification: a host's claims about a model, checked against the model's own numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from einops import einsum, repeat
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from ropelens.bands import Bands
from ropelens.hosts.base import Host
from ropelens.hosts.layer import Certificate, LayerClaim, LayerSpec, LayerView, Rotation
from ropelens.hosts.masks import visible_keys

PROBE = 24  # tokens a sequence: enough to tell any two layouts apart, cheap on any model
LONGEST_PROBE = 160  # windows up to about this length are crossed by the probe itself


def certify(host: Host) -> Certificate:
    """Checks every layer of a model and returns what was confirmed.

    Two short forward passes. One shows a single token at every position: its queries are then the same
    before the rotation, so the rotated ones show the rotation itself. The other is of random
    tokens: its scores must be rebuilt from queries, keys, scale, head map, softcap and mask; where a
    host shows no scores, the attention's output must be, from the values and the sinks as well.

    Raises:
        ValueError: Naming the first layer that is not what the host says, or that has no rotation
            anywhere to read.
    """
    seen = _probe(host)
    specs = [_certify_layer(host, layer, *views) for layer, views in enumerate(seen)]
    if all(len(spec.rotation.inv_freq) == 0 for spec in specs):
        raise ValueError(
            f"this {host.kind} has no rotary position embedding in any layer: "
            "ropelens needs a model with RoPE"
        )
    bands = Bands.stack(
        [
            (s.rotation.inv_freq, s.rotation.pairs, s.d_head - s.rotation.pairs.numel(), s.rotation.amplitude)
            for s in specs
        ]
    )
    return Certificate(tuple(specs), bands, _fingerprint(host, specs, [varied for *_, varied in seen]))


def certify_each(host: Host) -> list[LayerSpec | ValueError]:
    """As `certify`, layer by layer: what was confirmed of each, or why it cannot be read."""
    try:
        seen = _probe(host)
    except ValueError as error:
        return [error] * host.n_layers
    found: list[LayerSpec | ValueError] = []
    for layer, views in enumerate(seen):
        try:
            found.append(_certify_layer(host, layer, *views))
        except ValueError as error:
            found.append(error)
    return found


def _probe(host: Host) -> list[tuple[LayerClaim, LayerView, LayerView]]:
    """Returns what each layer claims, and what it shows of one token and of random ones."""
    same = host.probe_turns(int(_tokens(host, 1, 1)), PROBE)
    claims = [host.claim(layer, view) for layer, view in enumerate(same)]
    length = max([PROBE, *(c.window + 8 for c in claims if c.window and c.window + 8 <= LONGEST_PROBE)])
    length = min(length, host.context or length)
    return list(zip(claims, same, host.probe(_tokens(host, 2, length)), strict=True))


def state_of(host: Host) -> int:
    """Returns a number that changes when the model's tensors or what it claims change.

    A tensor's version misses edits through `.data` and under inference mode, hence the few values. Weights
    that are offloaded have none until their layer runs.
    """
    tensors = [t for t in (*host.module.parameters(), *host.module.buffers()) if not t.is_meta]
    state: list[Any] = [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors]
    with torch.no_grad():
        state += [float(t.flatten()[:: max(1, t.numel() // 16)].double().sum()) for t in tensors]
    return hash((*state, host.settings()))


def _tokens(host: Host, batch: int, length: int) -> Int64[Tensor, "batch pos"]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(host.vocab_size, (batch, length), generator=generator).to(host.device)


def _certify_layer(
    host: Host, layer: int, claim: LayerClaim, same: LayerView, varied: LayerView
) -> LayerSpec:
    q, k, visible = varied.q, varied.k, varied.visible
    if q.ndim != 4 or k.ndim != 4 or q.shape[-1] != k.shape[-1] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"layer {layer}: queries {list(q.shape)} and keys {list(k.shape)} do not form "
            "[batch, pos, head, d_head] with a whole number of query heads per key head"
        )
    rotation = _find_rotation(layer, same.q, host.rotations(layer, same))
    expected = visible_keys(visible.shape[-1], claim.window, visible.device)
    if not torch.equal(visible, expected.expand_as(visible)):
        raise ValueError(
            f"layer {layer}: the keys that its queries see are not the earlier ones"
            + (f" within the window of {claim.window}" if claim.window else "")
            + " that the host claims; such a mask is not supported"
        )
    rebuilt = rebuild_scores(q, k, claim)
    if varied.scores is not None:
        what, rebuilt, shown = "scores", rebuilt[visible], varied.scores[visible]
    else:
        assert varied.v is not None
        assert varied.output is not None
        what, rebuilt, shown = "outputs", rebuild_output(rebuilt, varied.v, visible, claim), varied.output
    spread = float(shown.max()) - float(shown.min())
    error = float((rebuilt - shown).abs().max()) / max(spread, torch.finfo(torch.float32).tiny)
    allowed = score_tolerance(shown.dtype)
    if not error <= allowed:  # also refuses NaN
        raise ValueError(
            f"layer {layer}: the {what} rebuilt from queries and keys differ from the model's own by "
            f"{error:.1e} of their range (at most {allowed:.0e} is accepted): {host.kind} does not show "
            "the queries and keys that this model attends with"
        )
    if varied.doubt:
        raise ValueError(f"layer {layer}: {varied.doubt}")
    return LayerSpec(
        n_heads=q.shape[2],
        n_kv_heads=k.shape[2],
        d_head=q.shape[-1],
        scale=claim.scale,
        softcap=claim.softcap,
        window=claim.window,
        sinks=claim.sinks,
        rotation=rotation,
        layout=_layout(rotation),
        error=error,
    )


def score_tolerance(dtype: torch.dtype) -> float:
    """How far rebuilt scores may lie from the model's own, as a share of the scores' range."""
    return 1e-4 if dtype in (torch.float32, torch.float64) else 4 * torch.finfo(dtype).eps


def rebuild_scores(
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key kv_head d_head"],
    claim: LayerClaim | LayerSpec,
) -> Float[Tensor, "batch head query key"]:
    """Returns the scores before the mask, in float64, by the plain definition."""
    k = repeat(k, "batch key kv d -> batch key (kv group) d", group=q.shape[2] // k.shape[2])
    scores = claim.scale * einsum(q.double(), k.double(), "b query h d, b key h d -> b h query key")
    return scores if claim.softcap is None else claim.softcap * torch.tanh(scores / claim.softcap)


def rebuild_pattern(
    scores: Float[Tensor, "batch head query key"],
    visible: Bool[Tensor, "*batch_heads query key"],
    claim: LayerClaim | LayerSpec,
) -> Float[Tensor, "batch head query key"]:
    """Returns the attention that scores make, a sink's part left out."""
    n_keys = scores.shape[-1]
    scores = scores.masked_fill(~visible, -torch.inf)
    if claim.sinks is not None:
        sink = claim.sinks.to(scores)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    return scores.softmax(-1)[..., :n_keys]


def rebuild_output(
    scores: Float[Tensor, "batch head query key"],
    v: Float[Tensor, "batch key kv_head d_value"],
    visible: Bool[Tensor, "batch heads query key"],
    claim: LayerClaim | LayerSpec,
) -> Float[Tensor, "batch query head d_value"]:
    """Returns what attention makes of the values, in float64, by the plain definition."""
    pattern = rebuild_pattern(scores, visible, claim)
    v = repeat(v.double(), "batch key kv d -> batch key (kv group) d", group=scores.shape[1] // v.shape[2])
    return einsum(pattern, v, "b h query key, b key h d -> b query h d")


def _find_rotation(
    layer: int, q: Float[Tensor, "1 pos head d_head"], rotations: Sequence[Rotation]
) -> Rotation:
    """Returns the rotation that turns the query of position 0 into those of all others."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    q = q[0].double().cpu()
    none = Rotation(torch.zeros(0, dtype=torch.float64), torch.zeros(0, 2, dtype=torch.int64))
    tolerance = 0.1 if half else 1e-3
    norm = float(q.norm(dim=-1).mean())
    fits = [(float((rotate(q[:1], r) - q).norm(dim=-1).max()) / norm, r) for r in (*rotations, none)]
    error, best = min(fits, key=lambda fit: fit[0])
    if not error <= tolerance:
        raise ValueError(
            f"layer {layer}: its queries do not turn with position as RoPE would have them (the closest "
            f"layout misses by {error:.1e} of their length); other position schemes are not supported"
        )
    return best


def rotate(q: Float[Tensor, "1 head d_head"], rotation: Rotation) -> Float[Tensor, "pos head d_head"]:
    """Returns the first query carried on to each of `PROBE` positions."""
    first, second = rotation.pairs.unbind(-1)
    angle = torch.arange(PROBE, dtype=torch.float64)[:, None, None] * rotation.inv_freq
    out = q.expand(PROBE, -1, -1).clone()
    x, y = q[..., first], q[..., second]
    out[..., first] = x * angle.cos() - y * angle.sin()
    out[..., second] = x * angle.sin() + y * angle.cos()
    return out


def _layout(rotation: Rotation) -> str:
    if len(rotation.pairs) == 0:
        return "none"
    # One pair alone is both; it is named as the textbook has it.
    neighbours = (rotation.pairs[:, 1] - rotation.pairs[:, 0] == 1).all()
    return "adjacent" if len(rotation.pairs) > 1 and bool(neighbours) else "half"


def _fingerprint(host: Host, specs: Sequence[LayerSpec], varied: Sequence[LayerView]) -> dict[str, object]:
    # Rounded to bfloat16, so that a model loaded in another precision is still itself; the spread of
    # the scores tells apart models that share an embedding.
    weights = host.embedding.detach().flatten()
    sample = weights[:: max(1, weights.numel() // 4096)].to("cpu", torch.bfloat16)
    digest = hashlib.sha256(sample.view(torch.int16).numpy().tobytes()).hexdigest()
    raw = (rebuild_scores(view.q, view.k, LayerClaim(s.scale)) for s, view in zip(specs, varied, strict=True))
    signature = [float(scores.std()) for scores in raw]
    first = specs[0]
    shape = [len(specs), first.n_heads, first.n_kv_heads, first.d_head]
    return {"embedding": digest[:32], "signature": signature, "shape": shape}
