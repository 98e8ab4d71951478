"""ablation_curve: the loss as ever more bands are taken away, resumed at any point."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor
from tqdm.auto import tqdm

from ropelens.data import Windows
from ropelens.data import windows as windows_of
from ropelens.hosts import Host, host_of
from ropelens.interventions.ablate import Mode, edits_of
from ropelens.interventions.losses import pieces, token_losses
from ropelens.interventions.means import BandMeans
from ropelens.interventions.results import AblationCurve, Point
from ropelens.interventions.selecting import checked_mask
from ropelens.scores import BandScores, same_model, saving
from ropelens.streaming.checkpoints import RunFolder

SCOPES = ("model", "layer", "head")
_FORMAT = 1
_KIND = "AblationPoint"


def ablation_curve(
    model: Any,
    scores: Mapping[str, BandScores],
    windows: Windows | Int64[Tensor, "batch pos"],
    fractions: Sequence[float | int],
    scope: str | Sequence[str] = "model",
    out: str | os.PathLike[str] | None = None,
    *,
    mode: Mode = "zero",
    means: BandMeans | None = None,
    normalize: str = "head",
    stderr: float | int | None = None,
    progress: bool = True,
) -> AblationCurve:
    """The loss of a model as the bands with the lowest scores are taken away, score by score.

    For every score, scope and fraction f, `scores.lowest(f, scope, normalize)` is ablated and the loss
    measured on every document; nothing removed comes first. Scores are taken as they are: nothing is
    measured again. Points that remove the same bands are run once. With `out`, each point is kept as it
    is done, and the same call goes on where it stopped; a later call may add scores, scopes and
    fractions. Where keys change ("derotate", "keys"), the query heads of a group go together: ranked by
    the mean of their importances.

    Args:
        model: A model that ropelens reads; a transformers model is the fastest, on SDPA.
        scores: By a name of yours, such as {"activation": ..., "random 0": ...}.
        windows: What `windows` returns, or token ids with a document a row; texts that the scores have
            not seen.
        fractions: Ascending, from 0 to 1.
        scope: Where bands compete: "model", "layer" or "head", or several of these.
        out: A folder for the points.
        mode: As in `ablate`.
        means: As in `ablate`.
        normalize: As in `BandScores.importance`.
        stderr: The largest standard error, in nats a token, that the loss with nothing removed may have.
        progress: Whether to show a bar that counts points.

    Returns:
        Losses in nats a token, at each point, by document.

    Raises:
        ValueError: If an argument is not usable, scores are another model's, `out` holds other losses,
            or the text is too short for the standard error asked for.

    Example:
        ```python
        scores = {"activation": activation, "random": rl.random_scores(activation)}
        curve = rl.ablation_curve(model, scores, windows, [0.4])  # with out=, it can be resumed
        curve.to_frame()  # columns score, scope, fraction, loss, stderr
        curve.paired("activation", "random")  # differences with intervals
        ```
    """
    fractions, scopes = _checked_fractions(fractions), (scope,) if isinstance(scope, str) else tuple(scope)
    if not scopes or [s for s in scopes if s not in SCOPES]:
        raise ValueError(f"expected a scope from {', '.join(SCOPES)}, got {scope!r}")
    if not scores:
        raise ValueError("expected scores by name, got none")
    host = host_of(model)
    for name, found in scores.items():
        _check_scores(host, name, found)
    group = _group(host) if mode in ("derotate", "keys") else 1
    masks = {
        Point(name, s, fraction): _lowest(found, fraction, s, normalize, group)
        for name, found in scores.items()
        for s in scopes
        for fraction in fractions
    }
    run = _Run.of(host, windows, mode, means, out, stderr)
    run.facts |= {"normalize": normalize, "scores": {name: _digest(found) for name, found in scores.items()}}
    run.scored = {name: found.documents for name, found in scores.items()}
    return run.measure(masks, progress)


def ablation_losses(
    model: Any,
    masks: Mapping[str, Bool[Tensor, "layer head band"]],
    windows: Windows | Int64[Tensor, "batch pos"],
    out: str | os.PathLike[str] | None = None,
    *,
    mode: Mode = "zero",
    means: BandMeans | None = None,
    stderr: float | int | None = None,
    progress: bool = True,
) -> AblationCurve:
    """The loss of a model without the bands of each of some masks; as `ablation_curve`, for masks.

    Args:
        model: A model that ropelens reads.
        masks: By a name of yours; from `bands_where`, say.
        windows: What `windows` returns, or token ids with a document a row.
        out: A folder for the points; it may be that of an `ablation_curve` on the same windows.
        mode: As in `ablate`.
        means: As in `ablate`.
        stderr: As in `ablation_curve`.
        progress: Whether to show a bar that counts points.

    Returns:
        A row for each mask: its name as the score, "mask" as the scope, and the share of bands that it
        removes as the fraction; before each, nothing removed.

    Raises:
        ValueError: As `ablation_curve`.

    Example:
        ```python
        masks = {"fast": rl.bands_where(model, "fastest:50%"), "slow": rl.bands_where(model, "slowest:50%")}
        rl.ablation_losses(model, masks, windows, mode="derotate").to_frame()
        ```
    """
    if not masks:
        raise ValueError("expected masks by name, got none")
    host = host_of(model)
    run = _Run.of(host, windows, mode, means, out, stderr)
    n_bands = int(host.bands.exists.sum()) * host.certificate.layers[0].n_heads
    points: dict[Point, Tensor] = {}
    for name, mask in masks.items():
        checked = checked_mask(host, mask, f"mask {name!r}")
        points[Point(name, "mask", 0.0)] = torch.zeros_like(checked)
        points[Point(name, "mask", float(checked.sum()) / n_bands)] = checked
    return run.measure(points, progress)


def derotation_curve(
    model: Any,
    windows: Windows | Int64[Tensor, "batch pos"],
    wavelengths: Sequence[float | int],
    out: str | os.PathLike[str] | None = None,
    *,
    side: str = "slow",
    stderr: float | int | None = None,
    progress: bool = True,
) -> AblationCurve:
    """Which bands can lose their rotation: the loss against a cut-off wavelength.

    In all layers and heads, the bands at least as slow as the cut-off keep their content and lose their
    rotation, as in p-RoPE (Barbero et al. 2025, "Round and round we go!"); with side="fast", those
    that are faster.

    Args:
        model: A model that ropelens reads.
        windows: What `windows` returns, or token ids with a document a row.
        wavelengths: Cut-offs in tokens.
        out: A folder for the points, as in `ablation_curve`.
        side: "slow" or "fast".
        stderr: As in `ablation_curve`.
        progress: Whether to show a bar that counts points.

    Returns:
        A row for each cut-off, named by it.

    Raises:
        ValueError: If no band is on that side of a cut-off, and as `ablation_curve`.

    Example:
        ```python
        rl.derotation_curve(model, windows, [1024]).to_frame()
        ```
    """
    from ropelens.interventions.selecting import bands_where

    if side not in ("slow", "fast"):
        raise ValueError(f'expected side="slow" or "fast", got {side!r}')
    masks = {}
    for cut in wavelengths:
        span = (cut, float("inf")) if side == "slow" else (0.0, cut)
        name = f"slower than {cut:g}" if side == "slow" else f"faster than {cut:g}"
        masks[name] = bands_where(model, wavelength=span)
    return ablation_losses(model, masks, windows, out, mode="derotate", stderr=stderr, progress=progress)


@dataclass
class _Run:
    """One text, and the points measured on it."""

    host: Host
    windows: Windows
    mode: Mode
    means: BandMeans | None
    out: Path | None
    stderr: float | int | None
    facts: dict[str, Any]
    scored: dict[str, Tensor | None] = field(default_factory=dict)
    documents: dict[str, int] = field(default_factory=dict)
    counts: Tensor | None = None

    @classmethod
    def of(
        cls,
        host: Host,
        windows: Any,
        mode: Mode,
        means: BandMeans | None,
        out: Any,
        stderr: Any,
    ) -> _Run:
        windows = windows_of(windows) if isinstance(windows, Tensor) else windows
        if stderr is not None and not stderr > 0:
            raise ValueError(f"expected stderr to be above 0, got {stderr}")
        nothing = torch.zeros(host.bands.exists.shape[0], 1, 1, dtype=torch.bool)
        edits_of(host, nothing & _whole(host), mode, means)  # whether mode and means can be used, now
        facts = {"model": host.fingerprint, "mode": mode}
        if isinstance(windows, Windows):  # otherwise `pieces` will refuse it
            facts |= {"data": windows.fingerprint, "shard": windows.shard, "n_windows": windows.n_windows}
        facts |= {"dtype": str(host.embedding.dtype).removeprefix("torch."), "host": host.kind}
        if means is not None:
            facts |= {"means": hashlib.sha256(means.values.numpy().tobytes()).hexdigest()[:32]}
        run = cls(host, windows, mode, means, None if out is None else Path(out), stderr, {})
        run.facts = saving.as_json(facts, "facts")
        return run

    @property
    def edges(self) -> tuple[int, ...]:
        """1, and doubling positions from 32 on: 1, 32, 64, 128, ..."""
        return (1, *(32 << n for n in range(32) if 32 << n < self.windows.context))

    def measure(self, masks: Mapping[Point, Tensor], progress: bool) -> AblationCurve:
        with ExitStack() as held:
            if self.out is not None:
                held.enter_context(RunFolder(self.out).held())
                self._claim()
            held.enter_context(torch.no_grad())
            held.enter_context(self.host.fast())
            todo = {self._name(mask): mask for mask in masks.values()}
            nothing = torch.zeros_like(next(iter(masks.values())))
            todo = {self._name(nothing): nothing, **todo}
            done: dict[str, Tensor] = {}
            for name, mask in tqdm(todo.items(), "ablation", unit="point", disable=not progress):
                done[name] = self._point(name, mask)
                if not done.keys() - {name}:
                    self._check_text(done[name])
        assert self.counts is not None
        points = list(masks)
        curve = AblationCurve(
            points=tuple(points),
            sums=torch.stack([done[self._name(masks[p])] for p in points]),
            counts=self.counts,
            edges=self.edges,
            documents=tuple(self.documents),
            mode=self.mode,
            facts=self.facts,
        )
        if self.out is not None:
            curve.save(self.out / f"{self.mode}.safetensors")
            csv = curve.to_frame().to_csv(index=False)
            saving.write_bytes(self.out / f"{self.mode}.csv", csv.encode())
        return curve

    def _claim(self) -> None:
        """Makes the folder this text's, or refuses it if it is another's."""
        assert self.out is not None
        path = self.out / "curve.json"
        mine = {"format": _FORMAT, **{k: v for k, v in self.facts.items() if k in _IDENTITY}}
        if not path.exists():
            saving.write_bytes(path, (json.dumps(mine, indent=1) + "\n").encode())
            return
        theirs = json.loads(path.read_text())
        if why := same_model(theirs.get("model", {}), mine["model"]):
            raise ValueError(f"{self.out} holds losses of another model ({why}): choose another folder")
        for key in mine:
            if key != "model" and theirs.get(key) != mine[key]:
                raise ValueError(
                    f"{self.out} holds other losses: its {key} is {theirs.get(key)!r}, not {mine[key]!r}; "
                    "choose another folder"
                )

    def _name(self, mask: Bool[Tensor, "layer head band"]) -> str:
        """What a point is kept under: the bands removed, and how."""
        how = [self.mode, self.facts.get("means")] if mask.any() else []  # nothing is nothing in any mode
        digest = hashlib.sha256(json.dumps([list(mask.shape), *how]).encode())
        digest.update(mask.numpy().tobytes())
        return digest.hexdigest()[:24]

    def _point(self, name: str, mask: Tensor) -> Float64[Tensor, "document span"]:
        path = None if self.out is None else self.out / "points" / f"{name}.safetensors"
        if path is not None and path.exists():
            tensors, facts = saving.read(path, _KIND)
            self._take(facts["documents"], tensors["counts"])
            return tensors["sums"]
        documents: dict[str, int] = {}
        rows: list[Tensor] = []
        counts: list[Tensor] = []
        edits, _ = edits_of(self.host, mask, self.mode, self.means)
        with self.host.editing(*edits):
            for piece in pieces(self.host, self.windows):
                if len(piece.ids) < 2:
                    continue
                losses = token_losses(self.host, piece.ids)
                if not losses.isfinite().all():
                    raise ValueError(
                        f"the loss of document {piece.document} is not finite: is the model in half "
                        "precision?"
                    )
                place = torch.bucketize(
                    torch.arange(1, len(piece.ids)), torch.tensor(self.edges[1:]), right=True
                )
                if piece.document not in documents:
                    documents[piece.document] = len(rows)
                    rows.append(torch.zeros(len(self.edges), dtype=torch.float64))
                    counts.append(torch.zeros(len(self.edges), dtype=torch.int64))
                row = documents[piece.document]
                rows[row].index_add_(0, place, losses)
                counts[row].index_add_(0, place, torch.ones_like(place))
        if not rows:
            raise ValueError("expected at least one document of 2 tokens to predict, got none")
        found, n = torch.stack(rows), torch.stack(counts)
        self._take(list(documents), n)
        if path is not None:
            saving.write(path, _KIND, {"sums": found, "counts": n}, {"documents": list(documents)})
        return found

    def _take(self, documents: Sequence[str], counts: Tensor) -> None:
        if self.counts is not None and (list(self.documents) != list(documents)):
            raise ValueError("the text changed between two points: read the same windows every time")
        self.documents, self.counts = {name: n for n, name in enumerate(documents)}, counts

    def _check_text(self, sums: Float64[Tensor, "document span"]) -> None:
        """Refuses a text that is too short for the error asked for; warns of one that was scored on."""
        assert self.counts is not None
        short = tuple(int(name[:15], 16) for name in self.documents)
        known = {name: {*scored.tolist()} for name, scored in self.scored.items() if scored is not None}
        both = {name: len(known[name].intersection(short)) for name in known}
        if any(both.values()):
            warnings.warn(
                f"{max(both.values())} of {len(short)} documents were also measured for the scores "
                f"{', '.join(name for name, n in both.items() if n)}: what these chose may fit them alone",
                stacklevel=4,
            )
        if self.stderr is None:
            return
        curve = AblationCurve((Point("", "", 0.0),), sums[None], self.counts, self.edges, (), self.mode, {})
        loss, error = curve.baseline
        if not error <= self.stderr:
            n = len(self.documents)
            needed = "at least 2" if n < 2 else f"about {round(n * (error / self.stderr) ** 2 + 0.5):,}"
            raise ValueError(
                f"expected a loss with a standard error of at most {self.stderr:g} nats a token, got "
                f"{loss:.3f} with {error:.3g} from {n} documents: it takes {needed} of them"
            )


_IDENTITY = ("model", "data", "shard", "n_windows", "dtype", "host")


def _whole(host: Host) -> Bool[Tensor, "layer head band"]:
    return host.bands.exists[:, None].expand(-1, host.certificate.layers[0].n_heads, -1)


def _group(host: Host) -> int:
    sizes = {spec.n_heads // spec.n_kv_heads for spec in host.certificate.layers}
    if len(sizes) > 1:
        raise ValueError(f"expected as many query heads a key head in every layer, got {sorted(sizes)}")
    return sizes.pop()


def _lowest(
    scores: BandScores, fraction: float, scope: str, normalize: str, group: int
) -> Bool[Tensor, "layer head band"]:
    """Returns `scores.lowest`, the heads of each group together."""
    if group == 1:
        return scores.lowest(fraction, scope, normalize)
    shared = scores.importance(normalize).unflatten(1, (-1, group)).mean(2)
    together = replace(
        scores,
        values=shared,
        rest=torch.zeros(shared.shape[:2], dtype=torch.float64),
        squares=shared.square(),
        **dict.fromkeys(_BY_HEAD, None),
    )
    return together.lowest(fraction, scope, normalize="model").repeat_interleave(group, 1)


_BY_HEAD = ("residual", "bound", "rest_squares", "sampling_variance", "first", "first_rest")
_BY_HEAD += ("later_squares", "later_rest_squares", "by_position", "span_queries")


def _checked_fractions(fractions: Sequence[float | int]) -> list[float]:
    found = [float(f) for f in fractions]
    if not found or not all(0 <= f <= 1 for f in found) or any(b <= a for a, b in pairwise(found)):
        raise ValueError(f"expected ascending fractions from 0 to 1, each once, got {list(fractions)}")
    return found if found[0] == 0 else [0.0, *found]


def _check_scores(host: Host, name: str, scores: Any) -> None:
    if not isinstance(scores, BandScores):
        raise ValueError(f"expected BandScores as score {name!r}, got {type(scores).__name__}")
    if tuple(scores.values.shape) != tuple(_whole(host).shape):
        raise ValueError(
            f"expected score {name!r} of {list(_whole(host).shape)} [layer, head, band], got "
            f"{list(scores.values.shape)}: it is another model's"
        )
    if scores.model and (why := same_model(scores.model, host.fingerprint)):
        raise ValueError(f"expected score {name!r} of this model, got another's ({why}): measure it again")
    if scores.values[scores.exists].isnan().any():
        raise ValueError(f"expected score {name!r} without NaN: measure it again")


def _digest(scores: BandScores) -> str:
    return hashlib.sha256(scores.values.numpy().tobytes()).hexdigest()[:32]
