"""How the attention-only teaching models learned: the phase change of two layers, and one layer beside it."""

from __future__ import annotations

from math import isnan

import pandas as pd
from common import DOCS, TEACHING_NAMES, table
from plotly.graph_objects import Figure

from ropelens.circuits import LearningCurve, phase_change
from ropelens.plots.learning import learning_figure, position_figure, surface_figure

PAGE = DOCS / "results" / "phase_change.md"


def curves(of: str = "") -> dict[str, LearningCurve]:
    return {label: LearningCurve.load(name + of) for name, label in TEACHING_NAMES.items()}


def tables() -> dict[str, str]:
    models, changes = [], []
    repeated = curves("/repeated")
    for label, curve in curves().items():
        last, again = curve.to_frame().iloc[-1], repeated[label].to_frame().iloc[-1]
        models.append(
            [
                label,
                f"{last['loss']:.3f}",
                f"{last['score']:.2f} ± {last['score_stderr']:.2f}",
                f"{again['score']:.2f} ± {again['score_stderr']:.2f}",
                f"{last['induction']:.3f}",
                f"{last['previous_token']:.3f}",
                f"{last['first_copy']:.2f}",
                f"{last['second_copy']:.2f}",
            ]
        )
        for of, words in (("score", "in-context learning"), ("induction", "strongest induction head")):
            found = phase_change(repeated[label], of)
            steps = [
                f"{found.step:.0f}",
                f"{found.start:.0f} to {found.end:.0f}",
                "-" if isnan(found.bump) else f"{found.bump:.2f}",
                f"{found.plateau:.2f}",
            ]
            if abs(found.after - found.before) < 0.01:  # nothing that has a step
                steps = ["-"] * 4
            changes.append([label, words, f"{found.before:.3f}", f"{found.after:.3f}", *steps])
    header = [
        "",
        "loss",
        "in-context learning",
        "the same, repeated",
        "induction",
        "previous token",
        "first copy",
        "second copy",
    ]
    steps = ["", "of", "before", "after", "step", "10% to 90%", "bump", "plateau"]
    return {"models": table(header, models), "changes": table(steps, changes)}


def figures() -> dict[str, Figure]:
    found = curves("/repeated")
    two = found["2 layers"].surface()
    shown = {f"{label}, prose": curve for label, curve in curves().items()}
    shown |= {f"{label}, repeated": curve for label, curve in found.items()}
    frames = {
        label: pd.DataFrame(
            {
                "position": range(1, curve.loss.shape[1]),
                "loss": curve.loss[-1, 1:],
                "stderr": curve.stderr[-1, 1:],
            }
        )
        for label, curve in shown.items()
    }
    return {
        "phase_change": learning_figure({label: curve.to_frame() for label, curve in found.items()}),
        "loss_surface": surface_figure(
            two.steps, two.positions, two.loss, two.by_position, two.by_training, two.mixed
        ),
        "loss_by_position": position_figure(frames),
    }
