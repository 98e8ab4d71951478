"""What a model learns over training: losses by position, head scores and bands, checkpoint by checkpoint."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float64, Int64
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ropelens.circuits.heads import head_scores
from ropelens.circuits.learning import (
    in_context_learning_score,
    loss_by_position,
    losses_of,
    single_documents,
)
from ropelens.circuits.texts import repeated_tokens
from ropelens.data import Windows
from ropelens.hosts import Host, host_of
from ropelens.hosts.load import TEACHING, teaching_folder
from ropelens.measure import band_entropy
from ropelens.scores.provenance import facts, tagged

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

FORMAT = 1
PARTS = ("loss", "stderr", "score", "score_stderr", "induction", "previous_token", "copies", "bands")


@dataclass(frozen=True, eq=False)
class LearningCurve:
    """What was measured of a model at each of its checkpoints; made by `learning_curve`.

    Attributes:
        steps: Training steps, ascending.
        loss: Loss at each position, in nats; NaN at position 0.
        stderr: Its standard error over documents.
        score: In-context-learning score, negative is good.
        score_stderr: Its standard error over documents.
        induction, previous_token: Head scores, 0 to 1, on repeated random tokens.
        copies: Loss on the first and on the second copy of random tokens that come twice.
        bands: Entropy drop of each band on the first windows, in nats per query.
        settings: Positions of the score, what was read, the command of the training.
    """

    steps: Int64[Tensor, " step"]
    loss: Float64[Tensor, "step pos"]
    stderr: Float64[Tensor, "step pos"]
    score: Float64[Tensor, " step"]
    score_stderr: Float64[Tensor, " step"]
    induction: Float64[Tensor, "step layer head"]
    previous_token: Float64[Tensor, "step layer head"]
    copies: Float64[Tensor, "step 2"]
    bands: Float64[Tensor, "step layer head band"]
    settings: dict[str, Any]

    def to_frame(self) -> pd.DataFrame:
        """One row a checkpoint: losses, the score, the strongest heads, and the copies, by their names."""
        import pandas as pd

        early, late, width = (self.settings[name] for name in ("early", "late", "width"))
        near = [self.loss[:, p - width : p + width + 1].mean(1) for p in (early, late)]
        frame = pd.DataFrame(
            {
                "step": self.steps,
                "loss": self.loss[:, 1:].mean(1),
                "loss_early": near[0],
                "loss_late": near[1],
                "score": self.score,
                "score_stderr": self.score_stderr,
                "induction": self.induction.flatten(1).amax(1),
                "previous_token": self.previous_token.flatten(1).amax(1),
                "first_copy": self.copies[:, 0],
                "second_copy": self.copies[:, 1],
            }
        )
        return tagged(frame, facts("LearningCurve", {}, "", settings=self.settings))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one safetensors file, losses in float32: whole, or not at all."""
        tensors = {name: getattr(self, name).to(torch.float32).contiguous() for name in PARTS}
        tensors["steps"] = self.steps
        unfinished = Path(path).with_name(f".{Path(path).name}.unfinished")
        header = {"format": FORMAT, "settings": self.settings}
        save_file(tensors, unfinished, metadata={"ropelens": json.dumps(header)})
        os.replace(unfinished, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LearningCurve:
        """Reads what `save` wrote.

        Args:
            path: A file; "attn-only-1l" or "attn-only-2l" for how that model was trained, its losses on
                prose that was held out; "attn-only-1l/repeated", ... for losses on the same windows, in
                which the first 64 tokens come again and again.

        Raises:
            ValueError: If the file is of another kind.
        """
        name, _, repeated = str(path).partition("/")
        if name in TEACHING and repeated in ("", "repeated"):
            path = teaching_folder(name) / f"{repeated or 'training'}.safetensors"
        with safe_open(str(path), "pt") as file:
            header = json.loads((file.metadata() or {}).get("ropelens", "{}"))
            if header.get("format") != FORMAT or "steps" not in file.keys():  # noqa: SIM118
                raise ValueError(f"expected a learning curve, got {path}: measure one with learning_curve")
            parts = {name: file.get_tensor(name).double() for name in PARTS}
            return cls(steps=file.get_tensor("steps"), settings=header["settings"], **parts)

    def surface(self, n_positions: int = 24) -> LossSurface:
        """The loss over training and position, and its derivatives."""
        return loss_surface(self.steps, self.loss, n_positions)

    def plot(self) -> go.Figure:
        """The phase change: in-context learning, head scores and loss over training."""
        from ropelens.plots.learning import learning_figure

        return learning_figure({"": self.to_frame()})


@dataclass(frozen=True, eq=False)
class LossSurface:
    """The loss over training steps and positions, and its derivatives by their logarithms, in nats.

    Attributes:
        steps: From 1 on.
        positions: Mean log position of each bin, as a position.
        loss: Mean over the positions of a bin.
        by_position: Derivative by log position: negative where more context helps.
        by_training: Derivative by log step.
        mixed: The mixed second derivative: negative where the use of context is being learned.
    """

    steps: Int64[Tensor, " step"]
    positions: Float64[Tensor, " bin"]
    loss: Float64[Tensor, "step bin"]
    by_position: Float64[Tensor, "step bin"]
    by_training: Float64[Tensor, "step bin"]
    mixed: Float64[Tensor, "step bin"]

    def plot(self) -> go.Figure:
        """Loss and derivatives as heatmaps, training step x position."""
        from ropelens.plots.learning import surface_figure

        return surface_figure(
            self.steps, self.positions, self.loss, self.by_position, self.by_training, self.mixed
        )


@dataclass(frozen=True)
class PhaseChange:
    """Where a quantity changes over training; see `phase_change`.

    Attributes:
        step: Where half of the change is done, for good.
        start, end: Where a tenth and nine tenths are.
        before, after: The quantity at the first checkpoint, and its mean over the last fifth of them.
        bump: By how much the mean loss fell between `start` and `end` beyond what its trend over the
            checkpoints before (from `start / 2` on, by log step) makes it fall, in nats.
        plateau: How much of the change is made after `end`, per doubling of the steps.
    """

    step: float
    start: float
    end: float
    before: float
    after: float
    bump: float
    plateau: float


def learning_curve(
    checkpoints: str | Path | Sequence[str | Path] | Mapping[int, Any],
    windows: Windows | Int64[Tensor, "batch pos"],
    *,
    early: int = 50,
    late: int = 500,
    width: int = 8,
    n_band_windows: int = 4,
    out: str | Path | None = None,
    progress: bool = True,
) -> LearningCurve:
    """Losses by position, in-context learning, head scores and bands of every checkpoint of a training.

    Args:
        checkpoints: A folder with a folder for each step in it; a list of such folders or of hub ids
            with a revision, "EleutherAI/pythia-70m@step512", the last number in each being the step; or
            {step: folder, hub id or model}.
        windows: From `rl.windows`, a document a window, or token ids: the same for every checkpoint.
        early: Position of the in-context-learning score.
        late: Position of the in-context-learning score.
        width: Average the losses of the score over so many positions on either side too.
        n_band_windows: How many of the windows the bands are measured on.
        out: A folder that keeps what has been measured of each checkpoint on this text: an interrupted
            call goes on from there.
        progress: Whether to show a bar that counts checkpoints.

    Returns:
        The curve: `.to_frame()`, `.surface()`, `.plot()`, and `phase_change` of it.

    Raises:
        ValueError: If no checkpoint is found, a step is not told by its name, or windows cannot be used.

    Example:
        ```python
        import torch

        small = rl.load("attn-only-1l", host="transformers")
        windows = torch.randint(512, (2, 64))
        curve = rl.circuits.learning_curve({3000: small}, windows, early=10, late=50)
        curve.to_frame()
        ```
    """
    from tqdm import tqdm

    found = steps_of(checkpoints)
    documents = list(single_documents(windows))
    ids = torch.stack([row for row, _ in documents])
    settings = {"early": early, "late": late, "width": width, "windows": list(ids.shape)}
    text = hashlib.sha256(ids.numpy().tobytes()).hexdigest()
    asked = [text, [name for _, name in documents], early, late, width, n_band_windows]
    rows = []
    for step, source in tqdm(found.items(), desc="checkpoints", disable=not progress):
        file = None if out is None else Path(out) / f"{step}.{_digest(source, asked)}.safetensors"
        if file is None or not file.exists():
            row = _measured(source, windows, ids[:n_band_windows], early, late, width)
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                save_file(row, file.with_suffix(".unfinished"))
                os.replace(file.with_suffix(".unfinished"), file)
        else:
            with safe_open(str(file), "pt") as kept:
                row = {name: kept.get_tensor(name) for name in PARTS}
        rows.append(row)
    parts = {name: torch.stack([row[name] for row in rows]) for name in PARTS}
    return LearningCurve(steps=torch.tensor(list(found)), settings=settings, **parts)


def steps_of(checkpoints: Any) -> dict[int, Any]:
    """Returns checkpoints by training step, ascending.

    Raises:
        ValueError: If there are none, or a step is not told or told twice.
    """
    if isinstance(checkpoints, Mapping):
        found = dict(checkpoints)
    else:
        if isinstance(checkpoints, str | Path):
            names = [p for p in Path(checkpoints).glob("*") if (p / "config.json").exists()]
        else:
            names = list(checkpoints)
        found = {}
        for name in names:
            numbers = re.findall(
                r"\d+", str(name).rpartition("@")[2] if "@" in str(name) else Path(name).name
            )
            if not numbers:
                raise ValueError(
                    f"expected a training step in the name {name}, got none: pass {{step: name}}"
                )
            if int(numbers[-1]) in found:
                raise ValueError(f"expected one checkpoint a step, got two of step {numbers[-1]}")
            found[int(numbers[-1])] = name
    if not found:
        raise ValueError(f"expected checkpoints, got none in {checkpoints}: name folders or hub revisions")
    return dict(sorted(found.items()))


def loss_surface(
    steps: Int64[Tensor, " step"], loss: Float64[Tensor, "step pos"], n_positions: int = 24
) -> LossSurface:
    """The loss over training and position, averaged in bins of log position, and its derivatives.

    Derivatives are central differences by `log(position)` and `log(step)` over uneven spacings; step 0,
    which has no logarithm, is left out. Source: Olsson et al. 2022, "Loss derivatives".

    Args:
        steps: Ascending.
        loss: NaN at position 0.
        n_positions: How many bins, at most.

    Returns:
        Losses and derivatives in nats, [step, bin].

    Raises:
        ValueError: If there are fewer than two steps above 0, or fewer than three positions.

    Example:
        ```python
        curve = rl.circuits.LearningCurve.load("attn-only-2l/repeated")
        rl.circuits.loss_surface(curve.steps, curve.loss).plot()
        ```
    """
    import numpy as np

    kept = steps > 0
    n = loss.shape[1]
    if int(kept.sum()) < 2 or n < 4:
        raise ValueError(
            f"expected at least 2 checkpoints after step 0 and 3 positions, got {int(kept.sum())} and "
            f"{n - 1}: differences need neighbours"
        )
    edges = np.unique(np.round(np.geomspace(1, n, min(n_positions, n - 1) + 1)).astype(int))
    bins = [slice(a, b) for a, b in itertools.pairwise(edges)]
    z = torch.stack([loss[kept, b].mean(1) for b in bins], 1).numpy()
    log_pos = np.array([np.log(np.arange(b.start, b.stop)).mean() for b in bins])
    log_step = np.log(steps[kept].numpy())
    by_position = np.gradient(z, log_pos, axis=1)
    return LossSurface(
        steps[kept],
        torch.from_numpy(np.exp(log_pos)),
        torch.from_numpy(z),
        torch.from_numpy(by_position),
        torch.from_numpy(np.gradient(z, log_step, axis=0)),
        torch.from_numpy(np.gradient(by_position, log_step, axis=0)),
    )


def phase_change(
    curve: LearningCurve, of: Literal["score", "induction", "second_copy"] = "score"
) -> PhaseChange:
    """The phase change: the step at which half of a quantity's change over training is done, for good.

    From the first checkpoint's value to the mean over the last fifth of the checkpoints: `step` is where
    the share of that change that is done last crosses a half, `start` where it last crosses a tenth
    before that, `end` where it first reaches nine tenths afterwards, all interpolated between
    checkpoints. `end / start` says how abrupt it is. Every curve has such a step: whether there was a
    change worth the name is for `before`, `after` and their standard errors to say.

    Args:
        curve: From `learning_curve`.
        of: "score" (in-context learning), "induction" (the strongest head's) or "second_copy" (the loss
            on the second copy of random tokens).

    Returns:
        Steps, and what `bump` and `plateau` say of the time around them.

    Raises:
        ValueError: If there are fewer than five checkpoints, or the quantity does not change.

    Example:
        ```python
        curve = rl.circuits.LearningCurve.load("attn-only-2l/repeated")
        rl.circuits.phase_change(curve, "induction").step
        ```
    """
    frame = curve.to_frame()
    steps, y = frame["step"].to_numpy(float), frame[of].to_numpy(float)
    if len(steps) < 5:
        raise ValueError(
            f"expected at least 5 checkpoints, got {len(steps)}: a change needs a before and after"
        )
    before, after = y[0], y[-max(1, len(y) // 5) :].mean()
    if before == after:
        raise ValueError(f"expected a {of} that changes over training, got {before} throughout")
    done = (y - before) / (after - before)
    middle = _crossings(steps, done, 0.5)[-1]
    start = [s for s in _crossings(steps, done, 0.1) if s <= middle][-1]
    end = next((s for s in _crossings(steps, done, 0.9) if s >= middle), steps[-1])
    bump, plateau = _bump(steps, frame["loss"].to_numpy(float), start, end), _slope(steps, done, end)
    return PhaseChange(middle, start, end, float(before), float(after), bump, plateau)


def _crossings(steps: Any, done: Any, level: float) -> list[float]:
    """Where a curve rises through a level, between checkpoints."""
    return [
        float(steps[i] + (level - done[i]) / (done[i + 1] - done[i]) * (steps[i + 1] - steps[i]))
        for i in range(len(steps) - 1)
        if done[i] < level <= done[i + 1]
    ]


def _bump(steps: Any, loss: Any, start: float, end: float) -> float:
    import numpy as np

    before = (steps >= start / 2) & (steps <= start) & (steps > 0)
    if before.sum() < 2:
        return float("nan")
    slope = np.polyfit(np.log(steps[before]), loss[before], 1)[0]
    first, last = np.interp([start, end], steps, loss)
    return float(first - last + slope * np.log(end / start))


def _slope(steps: Any, done: Any, end: float) -> float:
    import numpy as np

    after = steps >= end
    return float(np.polyfit(np.log2(steps[after]), done[after], 1)[0]) if after.sum() >= 2 else float("nan")


def _digest(source: Any, asked: list[Any]) -> str:
    """Returns what tells a measurement from those of other checkpoints, texts and settings."""
    if isinstance(source, str | Path):
        checkpoint: Any = str(Path(source).resolve()) if Path(source).exists() else str(source)
    else:
        checkpoint = host_of(source).fingerprint
    return hashlib.sha256(json.dumps([checkpoint, *asked]).encode()).hexdigest()[:24]


def _measured(
    source: Any, windows: Any, few: Int64[Tensor, "batch pos"], early: int, late: int, width: int
) -> dict[str, Tensor]:
    from ropelens.hosts.load import load

    model = load(source, host="transformers") if isinstance(source, str | Path) else source
    losses = loss_by_position(model, windows)
    score = in_context_learning_score(losses, early, late, width=width)
    host = host_of(model)
    length = min(512, host.context or 512)
    heads = head_scores(model, length=length, copying=False)
    text = repeated_tokens(model, length=length)
    return {
        "loss": losses.mean,
        "stderr": losses.stderr,
        "score": torch.tensor(score.score).double(),
        "score_stderr": torch.tensor(score.stderr).double(),
        "induction": heads["induction"],
        "previous_token": heads["previous_token"],
        "copies": _copies(host, text.ids, text.targets["duplicate_token"]),
        "bands": band_entropy(model, few).mean("query"),
    }


def _copies(
    host: Host, ids: Int64[Tensor, "batch pos"], seen: Int64[Tensor, "batch pos"]
) -> Float64[Tensor, " copy"]:
    """Returns the mean loss on tokens in the first copy, and in the second one that have been seen before."""
    losses, again = losses_of(host, ids).cpu(), (seen >= 0).cpu()
    again[:, :1] = False
    first = ~again
    first[:, 0] = False
    return torch.stack([losses[first].mean(), losses[again].mean()])
