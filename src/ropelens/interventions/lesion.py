"""lesion: a model with noise in some bands of its queries and keys."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from ropelens.hosts import Edit, Host, changing_weights, host_of
from ropelens.hosts.once import once
from ropelens.hosts.tokens import Tokens, tokens_of
from ropelens.hosts.weights.rows import Rows, query_and_key_rows, require_own_rows
from ropelens.interventions.noise import PositionNoise, noisy_rows
from ropelens.interventions.selecting import bands_where, by_key_head, checked_mask

Target = Literal["weights", "queries", "keys", "both"]
TARGETS: tuple[Target, ...] = ("weights", "queries", "keys", "both")
WhichBands = str | tuple[float | int, float | int] | Iterable[int] | Tensor

# What the noise is for, as a number that it is drawn with.
_QUERY_ROWS, _KEY_ROWS, _QUERIES, _KEYS = range(4)

# What the root mean square of queries and keys is measured on.
CALIBRATION = """The harbour lies where the river meets the sea, and for six hundred years the town has lived
on both. In spring the boats go out before dawn; by noon the market smells of salt, tar and
oranges, and the gulls quarrel over what falls from the baskets. My grandfather, who mended
nets until he was ninety, used to say that a town like ours is a long conversation: nobody
remembers how it began, and everybody adds a sentence. When I was nine he gave me a
notebook. "Write down," he said, "what the weather does, what fish costs, and who is not
speaking to whom. The rest will follow." I have 41 of those notebooks now, one for each
year, and he was right."""


@dataclass(frozen=True, eq=False)
class Lesion:
    """What `lesion` does to a model.

    Attributes:
        layers: Which layers.
        mask: Which bands of which heads.
        std: The noise's standard deviation, in units of each band's root mean square.
        seeds: One, or one for each row of a batch.
        target: Where the noise is.
    """

    layers: tuple[int, ...]
    mask: Bool[Tensor, "layer head band"]
    std: float
    seeds: tuple[int, ...]
    target: Target


@contextmanager
def lesion(
    model: Any,
    layer: int | Iterable[int],
    bands: WhichBands = "slowest:20%",
    *,
    std: float | int = 0.5,
    seed: int | Sequence[int] = 0,
    target: Target = "weights",
) -> Iterator[Lesion]:
    """Adds noise to bands of a model's queries and keys inside the `with` block.

    - "weights": to the rows of the query and key projections that make these bands, the same noise in
      every forward pass: `row + std * rms * N(0, 1)`, rms = the root mean square of the band's two rows in
      that head. Biases stay. Afterwards the weights are what they were, bit for bit, also after an error.
    - "queries", "keys", "both": to these bands of the post-rotary activations, new noise at each absolute
      position: `q + std * rms * N(0, 1)`, rms = the band's root mean square in that head over a fixed text
      (`ropelens.interventions.lesion.CALIBRATION`; random tokens for a model without a tokenizer).

    Noise depends on seed, layer, head, band and position alone: it is the same on every host and device,
    with a key-value cache and without, and in a larger choice of bands. It grows in proportion to `std`. With
    a `std` of 0 nothing is touched.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.
        layer: One or several; negative numbers count from the last.
        bands: "slowest:12" or "fastest:12", so many by frequency; "slowest:20%", a share; a tuple (low,
            high), the wavelengths low <= wavelength < high in tokens; a list or range of indices; or a mask
            [layer, head, band].
        std: Of the noise, in units of each band's root mean square.
        seed: Of the noise, from 0 up. Several: one for each row of the batches that the model is given.
        target: Where the noise is.

    Yields:
        What is hurt.

    Raises:
        ValueError: If `std` is negative or no number, layers or bands do not exist, heads that share keys
            differ in the mask where keys are hurt, or the weights cannot be written.

    Example:
        ```python
        with rl.lesion(model, layer=25, bands="slowest:12", std=0.5, seed=1):
            logits = model(tokens)
        ```
    """
    host = host_of(model)
    plan = plan_of(host, layer, bands, std, seed, target)
    with hurt(host, plan):
        yield plan


def plan_of(
    host: Host,
    layer: int | Iterable[int],
    bands: WhichBands,
    std: float | int,
    seed: int | Sequence[int],
    target: Target,
) -> Lesion:
    """Returns what `lesion` would do, its arguments checked."""
    if isinstance(std, bool) or not isinstance(std, (int, float)) or not 0 <= std < math.inf:
        raise ValueError(
            f"expected a std of 0 or more, in units of each band's root mean square, got {std!r}"
        )
    if target not in TARGETS:
        raise ValueError(f"expected a target from {', '.join(TARGETS)}, got {target!r}")
    seeds = (seed,) if isinstance(seed, int) else tuple(seed)
    if not seeds or any(not isinstance(s, int) or isinstance(s, bool) or s < 0 for s in seeds):
        raise ValueError(f"expected a seed from 0 up, or one for each row of a batch, got {seed!r}")
    layers = _layers(host, layer)
    mask = _mask(host, bands, layers)
    if target != "queries":
        by_key_head(host, mask, target)  # which refuses what keys cannot do
    return Lesion(layers, mask, float(std), seeds, target)


@contextmanager
def hurt(host: Host, plan: Lesion) -> Iterator[None]:
    """Does what a plan says inside the block."""
    if plan.std == 0:
        yield
    elif plan.target != "weights":
        with host.editing(**_edits(host, plan)):
            yield
    elif len(plan.seeds) == 1:
        with _other_weights(host, plan):
            yield
    else:
        with hurt_rows(host, [plan]):
            yield


@contextmanager
def hurt_rows(host: Host, plans: Sequence[Lesion]) -> Iterator[None]:
    """Does several plans inside the block, each to as many rows of a batch as it has seeds, in turn."""
    n_rows, start = sum(len(plan.seeds) for plan in plans), 0
    with ExitStack() as stack:
        for plan in plans:
            rows = slice(start, start + len(plan.seeds))
            start = rows.stop
            if plan.std == 0:
                continue
            if plan.target == "weights":
                stack.enter_context(_other_outputs(host, plan, rows, n_rows))
            else:
                edits = {
                    name: {layer: _InRows(edit, rows, n_rows) for layer, edit in each.items()}
                    for name, each in _edits(host, plan).items()
                }
                stack.enter_context(host.editing(**edits))
        yield


# Which -----------------------------------------------------------------------------------------------


def _layers(host: Host, layer: int | Iterable[int]) -> tuple[int, ...]:
    asked = [layer] if isinstance(layer, int) else list(layer)
    n = host.n_layers
    wrong = [x for x in asked if isinstance(x, bool) or not isinstance(x, int) or not -n <= x < n]
    if wrong or not asked:
        raise ValueError(f"expected layers from 0 to {n - 1}, got {wrong[0] if wrong else 'none'}")
    return tuple(dict.fromkeys(x % n for x in asked))


def _mask(host: Host, bands: WhichBands, layers: tuple[int, ...]) -> Bool[Tensor, "layer head band"]:
    if isinstance(bands, Tensor):
        mask = checked_mask(host, bands, "bands as a mask").clone()
        others = torch.ones(host.n_layers, dtype=torch.bool)
        others[list(layers)] = False
        mask[others] = False
    elif isinstance(bands, tuple):
        if len(bands) != 2:
            raise ValueError(
                f"expected wavelengths as a tuple (low, high), got one of {len(bands)}: put indices in a list"
            )
        mask = bands_where(host.model, wavelength=(bands[0], bands[1]), layers=layers)
    else:
        mask = bands_where(host.model, bands, layers=layers)
    for layer in layers:
        if not mask[layer].any():
            n = int(host.bands.exists[layer].sum())
            raise ValueError(f"expected bands that layer {layer} has, which are {n}, got none of them")
    return mask


# Weights ---------------------------------------------------------------------------------------------


def _targets(host: Host, plan: Lesion) -> Iterator[tuple[int, int, Rows, Tensor, Tensor]]:
    """Yields layer, stream, rows, pairs and the mask of their heads, for each projection."""
    require_own_rows(host, plan.layers)
    key_masks = by_key_head(host, plan.mask, plan.target)
    for layer in plan.layers:
        pairs = host.certificate.layers[layer].rotation.pairs.cpu()
        queries, keys = query_and_key_rows(host, layer)
        yield layer, _QUERY_ROWS, queries, pairs, plan.mask[layer][:, : len(pairs)]
        yield layer, _KEY_ROWS, keys, pairs, key_masks[layer][:, : len(pairs)]


@contextmanager
def _other_weights(host: Host, plan: Lesion) -> Iterator[None]:
    saved: list[tuple[Tensor, Tensor]] = []
    with changing_weights(host):
        try:
            for layer, stream, rows, pairs, mask in list(_targets(host, plan)):
                places = rows.weight, *rows.twins
                saved += [(place, place.clone()) for place in places]
                own = rows.weight.double().cpu().contiguous()
                new = noisy_rows(own, pairs, mask, plan.std, plan.seeds[0], stream, layer)
                at = _dims(mask, pairs, rows.weight.shape[1]).to(rows.weight.device)
                for place in places:
                    place[at] = new.to(place)[at]
            yield
        finally:
            for weight, before in reversed(saved):
                weight.copy_(before)


@contextmanager
def _other_outputs(host: Host, plan: Lesion, rows: slice, n_rows: int) -> Iterator[None]:
    """Other weights for each of some rows of a batch: their outputs take the place of the own ones."""
    with ExitStack() as stack:
        for layer, stream, its, pairs, mask in list(_targets(host, plan)):
            if its.linear is None:
                raise ValueError(
                    f"expected one seed on a {host.kind}, got {n_rows}: its projections are no "
                    "layers of their own, so that rows of a batch cannot have different ones"
                )
            own = its.weight.double().cpu().contiguous()
            at = _dims(mask, pairs, own.shape[1])
            each = [noisy_rows(own, pairs, mask, plan.std, seed, stream, layer)[at] for seed in plan.seeds]
            weights = torch.stack(each).to(its.weight)
            features = its.features[at].to(its.weight.device)
            handle = its.linear.register_forward_hook(_replacing(weights, features, rows, n_rows))
            stack.callback(handle.remove)
        yield


def _replacing(weights: Tensor, features: Tensor, rows: slice, n_rows: int) -> Any:
    def hook(linear: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x = args[0]
        _require_rows(len(x), n_rows)
        new = x[rows] @ weights.transpose(1, 2)
        if linear.bias is not None:
            new = new + linear.bias[features]
        new = new.to(output.dtype)  # autocast makes it another one
        if n_rows == len(weights):
            return output.index_copy(-1, features, new)
        return torch.cat(
            [output[: rows.start], output[rows].index_copy(-1, features, new), output[rows.stop :]]
        )

    return hook


def _require_rows(found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"expected a batch of {expected} rows, one for each seed of the lesion, got {found}")


@dataclass(frozen=True, eq=False)
class _InRows:
    """An edit of some rows of a batch, which leaves the others alone."""

    edit: Edit
    rows: slice
    n_rows: int

    def __call__(self, x: Tensor, positions: Int64[Tensor, "batch pos"]) -> Tensor:
        _require_rows(len(x), self.n_rows)
        new = self.edit(x[self.rows], positions[self.rows])
        return torch.cat([x[: self.rows.start], new, x[self.rows.stop :]])


def _dims(mask: Bool[Tensor, "head band"], pairs: Tensor, d_head: int) -> Bool[Tensor, "head d_head"]:
    at = torch.zeros(len(mask), d_head, dtype=torch.bool)
    for dims in pairs.unbind(-1):
        at[:, dims] = mask
    return at


# Activations -----------------------------------------------------------------------------------------


def _edits(host: Host, plan: Lesion) -> dict[str, dict[int, Edit]]:
    edits: dict[str, dict[int, Edit]] = {}
    key_masks = [] if plan.target == "queries" else by_key_head(host, plan.mask, plan.target)
    sizes = band_sizes(host)
    for name, stream, which in (("queries", _QUERIES, 0), ("keys", _KEYS, 1)):
        if plan.target not in (name, "both"):
            continue
        edits[name] = {}
        for layer in plan.layers:
            spec = host.certificate.layers[layer]
            pairs = spec.rotation.pairs.cpu()
            mask = (plan.mask if which == 0 else key_masks)[layer][:, : len(pairs)]
            scale = torch.zeros(len(mask), spec.d_head, dtype=torch.float64)
            for dims in pairs.unbind(-1):
                scale[:, dims] = torch.where(mask, plan.std * sizes[layer][which], 0.0)
            edits[name][layer] = PositionNoise(scale, pairs.flatten(), plan.seeds, stream, layer)
    return edits


Sizes = list[tuple[Float64[Tensor, "head band"], Float64[Tensor, "kv_head band"]]]


@once
def band_sizes(host: Host) -> Sizes:
    """Returns for each layer the root mean square of each band of the bare model's queries and keys.

    Over the dims of the band and the tokens of a fixed text; measured once for each certificate.
    """
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(layer: int, q: Tensor, k: Tensor, mask: Tensor, sound: Tensor) -> None:
        spec = host.certificate.layers[layer]
        pairs = spec.rotation.pairs.to(q.device)
        if k.shape[2] != spec.n_kv_heads:
            k = k[:, :, :: k.shape[2] // spec.n_kv_heads]
        both = [x[..., pairs].double().square().mean((0, 1, -1)).sqrt().cpu() for x in (q, k)]
        found[layer] = both[0], both[1]

    with torch.no_grad(), host.alone(), host.observing(range(host.n_layers), keep):
        host.run(_calibration(host).ids, None, logits=False)
    return [found[layer] for layer in range(host.n_layers)]


def _calibration(host: Host) -> Tokens:
    longest = min(x for x in (host.context, host.steady, 256) if x is not None)
    if getattr(host.model, "tokenizer", None) is None:
        ids = torch.randint(host.vocab_size, (1, longest), generator=torch.Generator().manual_seed(2))
    else:
        ids = torch.tensor([host.model.tokenizer.encode(CALIBRATION)[:longest]])
    return tokens_of(host, ids)
