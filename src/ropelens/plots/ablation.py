"""Figures of ablation: loss against the fraction removed, and scores against each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from torch import Tensor

from ropelens.plots.provenance import stamped
from ropelens.plots.style import COLOURS, ORANGE, SEQUENTIAL, TEMPLATE
from ropelens.scores import BandScores

_DASHES = {"model": "solid", "layer": "dash", "head": "dot"}


@stamped
def ablation_curves(frame: Any, top: float | int | None = None) -> go.Figure:
    """Returns the loss against the fraction of bands removed: a colour a score, a dash a scope.

    Bars are one standard error. Scores whose names differ only in a number at the end ("random 0",
    "random 1") share a colour.

    Args:
        frame: Columns score, scope, fraction, loss, stderr; of `AblationCurve.to_frame`.
        top: The largest loss to show; losses above it leave the picture.
    """
    figure = go.Figure()
    families = list(dict.fromkeys(_family(score) for score in frame["score"]))
    shown: set[tuple[str, str]] = set()
    for (score, scope), rows in frame.groupby(["score", "scope"], sort=False):
        family = _family(str(score))
        colour = COLOURS[families.index(family) % len(COLOURS)]
        name = family if frame["scope"].nunique() == 1 else f"{family}, {scope}"
        figure.add_scatter(
            x=rows["fraction"],
            y=rows["loss"],
            error_y={"array": rows["stderr"], "thickness": 1, "width": 3},
            mode="lines+markers",
            name=name,
            legendgroup=name,
            showlegend=(family, str(scope)) not in shown,
            line={"color": colour, "dash": _DASHES.get(str(scope), "solid")},
            customdata=[str(score)] * len(rows),
            hovertemplate="%{customdata}<br>%{x:.0%} removed: %{y:.3f} nats<extra></extra>",
        )
        shown.add((family, str(scope)))
    ranked = (frame["scope"] != "mask").all()
    title = "Loss as the lowest-ranked bands are removed" if ranked else "Loss without bands"
    figure.update_layout(template=TEMPLATE, title=title)
    figure.update_xaxes(title="fraction of bands removed", tickformat=".0%")
    low = float(frame["loss"].min())
    figure.update_yaxes(
        title="loss (nats a token)", range=None if top is None else [low - 0.05 * (top - low), top]
    )
    return figure


@stamped
def importance_scatter(
    a: BandScores, b: BandScores, normalize: str = "head", names: tuple[str, str] | None = None
) -> go.Figure:
    """Returns the importance of every band under one score against another's, with the least-squares line.

    Args:
        a: On the horizontal axis.
        b: On the vertical one; of the same bands.
        normalize: As in `BandScores.importance`.
        names: What to call them; their metrics by default.
    """
    names = names or (a.metric, b.metric)
    return scatter_of(a.importance(normalize), b.importance(normalize), names)


@stamped
def scatter_of(
    a: Float[Tensor, "layer head band"], b: Float[Tensor, "layer head band"], names: tuple[str, str]
) -> go.Figure:
    """As `importance_scatter`, of importances."""
    exists = ~a.isnan()
    x, y = (importance[exists].double().numpy() for importance in (a, b))
    layer, head, band = exists.nonzero().T.numpy()
    fit = np.polyfit(x, y, 1)
    r2 = np.corrcoef(x, y)[0, 1] ** 2
    figure = go.Figure()
    figure.add_scattergl(
        x=x,
        y=y,
        mode="markers",
        marker={"size": 3, "opacity": 0.35, "color": layer, "colorscale": SEQUENTIAL, "showscale": True}
        | {"colorbar": {"title": "layer"}},
        customdata=np.stack([layer, head, band], 1),
        hovertemplate="layer %{customdata[0]}, head %{customdata[1]}, band %{customdata[2]}<br>"
        "%{x:.3f}, %{y:.3f}<extra></extra>",
    )
    ends = np.array([0.0, 1.0])
    figure.add_scatter(x=ends, y=np.polyval(fit, ends), mode="lines", line={"color": ORANGE})
    figure.update_layout(
        template=TEMPLATE, showlegend=False, title=f"Importance of every band: R² {r2:.3f} of a straight line"
    )
    figure.update_xaxes(title=names[0], range=[0, 1.02])
    figure.update_yaxes(title=names[1], range=[0, 1.02])
    return figure


def _family(score: str) -> str:
    return score.rstrip("0123456789").rstrip(" -_") or score
