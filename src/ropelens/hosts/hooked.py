"""HookedTransformer (transformer-lens before 4.0) as a host."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from ropelens.bands import pair_dims
from ropelens.hosts.layer import LayerClaim, LayerView, Rotation
from ropelens.hosts.lens import LensHost
from ropelens.hosts.positions import HookedPositions
from ropelens.hosts.rotary import amplitude_of

TABLES, GROW = "calculate_sin_cos_rotary", "_extend_rotary_embeddings"  # of an attention module


class HookedHost(LensHost):
    """Reads a HookedTransformer from its cfg and from its own rotary buffers."""

    kind = "HookedTransformer"
    shows_new_keys_only = False

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        repair(model)

    @property
    def n_layers(self) -> int:
        return self.model.cfg.n_layers

    @property
    def context(self) -> int | None:
        return self.model.cfg.n_ctx

    @property
    def embedding(self) -> Float[Tensor, "token d_model"]:
        return self.model.embed.W_E

    @property
    def module(self) -> torch.nn.Module:
        return self.model

    def positions(self) -> HookedPositions:
        return HookedPositions(self.model)

    def claimed(self, layer: int) -> LayerClaim:
        attn, cfg = self.model.blocks[layer].attn, self.model.cfg
        return LayerClaim(
            scale=1 / float(attn.attn_scale),
            softcap=cfg.attn_scores_soft_cap if cfg.attn_scores_soft_cap > 0 else None,
            window=cfg.window_size if attn.attn_type == "local" else None,
            sinks=attn.sinks.detach() if cfg.use_attention_sinks else None,
        )

    def rotations(self, layer: int, view: LayerView) -> list[Rotation]:
        cfg, attn = self.model.cfg, self.model.blocks[layer].attn
        if cfg.positional_embedding_type != "rotary":
            return []
        rotation = _rotation_of(attn)
        if layer == 0 and not isinstance(vars(attn).get(TABLES), Tables):
            _warn_if_unlike_the_original(cfg, rotation)
        return [rotation]

    def turning_now(self) -> HookedTurning | None:
        found = (vars(block.attn).get(TABLES) for block in self.model.blocks)
        return next((tables.turning for tables in found if isinstance(tables, Tables)), None)

    def turn(self, rows: Sequence[Float64[Tensor, " band"] | None]) -> Callable[[], None]:
        turning = HookedTurning(rows)
        undo = [
            _turn(block.attn, row, turning)
            for block, row in zip(self.model.blocks, rows, strict=True)
            if row is not None
        ]

        def back() -> None:
            for one in undo:
                one()

        return back

    def run(
        self, ids: Int64[Tensor, "batch pos"], mask: Bool[Tensor, "batch pos"] | None, logits: bool = True
    ) -> Float[Tensor, "batch pos token"] | None:
        # HookedTransformer takes its own idea of the pads from the padding side where no mask is given.
        full = torch.ones_like(ids) if mask is None else mask.long()
        return self.model(ids, attention_mask=full, return_type="logits" if logits else None)


class HookedTurning:
    """The frequencies of each layer, None for one that stays as it is."""

    def __init__(self, rows: Sequence[Float64[Tensor, " band"] | None]) -> None:
        self.key = tuple(None if row is None else row.contiguous().numpy().tobytes() for row in rows)


class Tables:
    """What makes a layer's cos and sin, with other frequencies, at any length.

    Attributes:
        row: Radians per token of each band.
        kept: The bands that keep the frequency that they had, and so their very columns.
    """

    def __init__(self, attn: Any, row: Float64[Tensor, " band"], turning: HookedTurning) -> None:
        self.turning = turning
        now = _rotation_of(attn)
        self.pairs, self._amplitude = now.pairs, now.amplitude
        self.row, self._before = row, attn.calculate_sin_cos_rotary
        self.kept = row == now.inv_freq

    def __call__(
        self, rotary_dim: int, n_ctx: int, base: float | int = 10_000, dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "pos rotary_dim"], Float[Tensor, "pos rotary_dim"]]:
        sin, cos = self._before(rotary_dim, n_ctx, base=base, dtype=dtype)
        high = torch.float64 if dtype == torch.float64 else torch.float32
        new = ~self.kept
        angle = torch.arange(n_ctx, dtype=high)[:, None] * self.row[new].to(high)
        for table, made in ((sin, angle.sin()), (cos, angle.cos())):
            for dims in self.pairs[new].T:
                table[:, dims] = (self._amplitude * made).to(table.dtype)
        return sin, cos


def _rotation_of(attn: Any) -> Rotation:
    """Returns the rotation that a layer's tables make."""
    sin, cos = _first_turn(attn)
    # Both members of a pair carry the pair's angle: next to each other or half the width apart.
    pairs = pair_dims(attn.cfg.rotary_dim, bool(attn.cfg.rotary_adjacent_pairs))
    row = torch.atan2(sin.double(), cos.double()).cpu()[pairs[:, 0]]
    if isinstance(tables := vars(attn).get(TABLES), Tables):
        row = torch.where(tables.kept, row, tables.row)
    return Rotation(row, pairs, amplitude_of(cos, sin))


def _first_turn(attn: Any) -> tuple[Float[Tensor, " rotary_dim"], Float[Tensor, " rotary_dim"]]:
    """Returns sin and cos at position 1; of a model in half precision, as they were before they were rounded.

    Rounded ones tell a frequency to three digits, and the angle at position 1,000 not at all.
    """
    sin, cos = attn.rotary_sin[1], attn.rotary_cos[1]
    if sin.dtype not in (torch.bfloat16, torch.float16):
        return sin, cos
    made = type(attn).calculate_sin_cos_rotary(
        attn, attn.cfg.rotary_dim, 2, base=attn._rotary_base(), dtype=torch.float32
    )
    fine_sin, fine_cos = (table[1].to(sin.device) for table in made)
    same = (fine_sin.to(sin.dtype) == sin) & (fine_cos.to(cos.dtype) == cos)
    return fine_sin.where(same, sin.float()), fine_cos.where(same, cos.float())


def _turn(attn: Any, row: Float64[Tensor, " band"], turning: HookedTurning) -> Callable[[], None]:
    """Replaces the tables of a layer and what makes longer ones; returns what undoes it."""
    before = {name: vars(attn).get(name) for name in (TABLES, GROW)}
    sin, cos = attn.rotary_sin, attn.rotary_cos
    tables = Tables(attn, row, turning)

    def extend(new_size: int) -> None:
        new = tables(attn.cfg.rotary_dim, new_size, base=attn._rotary_base(), dtype=attn.cfg.dtype)
        attn.rotary_sin, attn.rotary_cos = (table.to(sin.device) for table in new)

    def undo() -> None:
        for name, value in before.items():
            if value is None:
                vars(attn).pop(name, None)
            else:
                vars(attn)[name] = value
        attn.rotary_sin, attn.rotary_cos = sin, cos

    vars(attn)[TABLES], vars(attn)[GROW] = tables, extend
    extend(len(sin))
    return undo


def _warn_if_unlike_the_original(cfg: Any, rotation: Rotation) -> None:
    """Warns if the model that was loaded scales its frequencies and this object does not.

    Its transformers config is read where it lies in a folder or in the hub's cache; nothing is fetched.
    """
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if not cfg.tokenizer_name:
        return
    try:
        config = AutoConfig.from_pretrained(cfg.tokenizer_name, local_files_only=True).get_text_config()
    except (OSError, ValueError):  # not there, or of a model that transformers has no class for
        return
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if not isinstance(kind, str) or kind not in ROPE_INIT_FUNCTIONS:
        return
    expected, amplitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    same = expected.shape == rotation.inv_freq.shape and torch.allclose(
        expected.double(), rotation.inv_freq, rtol=1e-4, atol=0
    )
    if not same or abs(amplitude - rotation.amplitude) > 1e-3:
        warnings.warn(
            f"this HookedTransformer does not turn as {cfg.tokenizer_name} does, whose {kind} scaling it "
            "leaves out: what is measured is this object, and not that model; use a TransformerBridge",
            stacklevel=2,
        )


def repair(model: Any) -> None:
    """Lets frequencies that were set last beyond 2,048 positions.

    HookedTransformer (transformer-lens before 4) keeps cos and sin of 2,048 positions and makes new ones
    from its cfg when a text is longer, which silently undoes frequencies that were put into the buffers.
    From now on such buffers grow as they are; those that are as the cfg says grow as ever.
    """
    if int(version("transformer-lens").split(".")[0]) >= 4:
        return
    for block in model.blocks:
        if "_extend_rotary_embeddings" not in vars(block.attn):
            _grow_as_it_is(block.attn)


def _grow_as_it_is(attn: Any) -> None:
    extend = attn._extend_rotary_embeddings

    def grow(new_size: int) -> None:
        sin, cos = attn.rotary_sin, attn.rotary_cos
        extend(new_size)
        if torch.equal(attn.rotary_sin[: len(sin)], sin) and torch.equal(attn.rotary_cos[: len(cos)], cos):
            return
        turn = torch.atan2(sin[1].double(), cos[1].double())
        amplitude = torch.hypot(sin[1].double(), cos[1].double())
        angle = torch.arange(len(sin), new_size, dtype=torch.float64, device=sin.device)[:, None] * turn
        attn.rotary_sin = torch.cat([sin, (amplitude * angle.sin()).to(sin.dtype)])
        attn.rotary_cos = torch.cat([cos, (amplitude * angle.cos()).to(cos.dtype)])

    attn._extend_rotary_embeddings = grow
