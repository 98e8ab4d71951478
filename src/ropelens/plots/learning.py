"""Figures of learning: loss by position, the loss surface and its derivatives, the phase change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float64, Int64
from plotly.subplots import make_subplots
from torch import Tensor

from ropelens.plots.provenance import stamped
from ropelens.plots.style import BLUE, DIVERGING, ORANGE, SEQUENTIAL, TEMPLATE

if TYPE_CHECKING:
    import pandas as pd

COLOURS = (BLUE, ORANGE, "#009e73", "#cc79a7", "#e69f00")


@stamped
def position_figure(frames: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Returns the loss at each position, a line a model, with a band of one standard error.

    Args:
        frames: By name, columns position, loss and stderr.
    """
    figure = go.Figure()
    for number, (name, frame) in enumerate(frames.items()):
        colour = COLOURS[number % len(COLOURS)]
        high, low = frame["loss"] + frame["stderr"], frame["loss"] - frame["stderr"]
        figure.add_scatter(
            x=[*frame["position"], *frame["position"][::-1]],
            y=[*high, *low[::-1]],
            fill="toself",
            fillcolor=colour,
            opacity=0.25,
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
        )
        figure.add_scatter(
            x=frame["position"],
            y=frame["loss"],
            name=name,
            line={"color": colour, "width": 2},
            hovertemplate="position %{x}<br>%{y:.3f} nats<extra></extra>",
        )
    figure.update_layout(
        template=TEMPLATE,
        xaxis={"type": "log", "dtick": 1, "title": {"text": "position (tokens before)"}},
        yaxis={"title": {"text": "loss (nats a token)"}},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        height=360,
    )
    return figure


@stamped
def learning_figure(frames: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Returns what changes over training, a colour a model: loss, in-context learning, heads, copies.

    Args:
        frames: By name, what `LearningCurve.to_frame` gives.
    """
    titles = ("loss", "in-context-learning score", "strongest heads", "random tokens that come twice")
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles, shared_xaxes=True, vertical_spacing=0.12)
    lines = (
        ("loss", 1, 1, "solid", ""),
        ("score", 1, 2, "solid", ""),
        ("induction", 2, 1, "solid", "induction"),
        ("previous_token", 2, 1, "dot", "previous token"),
        ("second_copy", 2, 2, "solid", "second copy"),
        ("first_copy", 2, 2, "dot", "first copy"),
    )
    for number, (name, frame) in enumerate(frames.items()):
        colour = COLOURS[number % len(COLOURS)]
        for column, row, col, dash, what in lines:
            error = None
            if column == "score":
                error = {"array": frame["score_stderr"], "thickness": 1, "width": 0}
            label = ", ".join(filter(None, (name, what)))
            figure.add_scatter(
                x=frame["step"],
                y=frame[column],
                mode="lines",
                error_y=error,
                name=label,
                legendgroup=name,
                showlegend=bool(what) or (bool(name) and column == "loss"),
                line={"color": colour, "dash": dash, "width": 2},
                hovertemplate=label + "<br>step %{x}<br>%{y:.3f}<extra></extra>",
                row=row,
                col=col,
            )
    figure.update_xaxes(title_text="training step", row=2)
    for row, col, text in (
        (1, 1, "nats a token"),
        (1, 2, "nats"),
        (2, 1, "attention"),
        (2, 2, "nats a token"),
    ):
        figure.update_yaxes(title_text=text, row=row, col=col)
    figure.update_layout(template=TEMPLATE, height=680, legend={"orientation": "h", "y": -0.2})
    return figure


@stamped
def surface_figure(
    steps: Int64[Tensor, " step"],
    positions: Float64[Tensor, " bin"],
    loss: Float64[Tensor, "step bin"],
    by_position: Float64[Tensor, "step bin"],
    by_training: Float64[Tensor, "step bin"],
    mixed: Float64[Tensor, "step bin"],
) -> go.Figure:
    """Returns the loss over training step x position, and its derivatives by their logarithms, as heatmaps.

    Blue is negative: the loss falls with more context, or with more training; in the mixed derivative, the
    fall with context is growing.
    """
    names = ("loss", "by log position", "by log step", "mixed")
    figure = make_subplots(rows=2, cols=2, subplot_titles=names, shared_xaxes=True, shared_yaxes=True)
    for number, values in enumerate((loss, by_position, by_training, mixed)):
        row, col = divmod(number, 2)
        z = values.numpy().T
        end = float(np.nanquantile(np.abs(z), 0.98)) or 1.0
        scale: dict[str, Any] = (
            {"colorscale": SEQUENTIAL}
            if number == 0
            else {"colorscale": DIVERGING, "zmin": -end, "zmax": end}
        )
        figure.add_heatmap(
            x=steps.numpy(),
            y=positions.numpy(),
            z=z.astype(np.float32),
            colorbar={
                "x": 0.45 if col == 0 else 1.0,
                "y": 0.79 if row == 0 else 0.21,
                "len": 0.45,
                "thickness": 10,
                "outlinewidth": 0,
            },
            hovertemplate="step %{x}, position %{y:.0f}<br>%{z:.3f} nats<extra></extra>",
            row=row + 1,
            col=col + 1,
            **scale,
        )
    figure.update_xaxes(type="log", dtick=1, showgrid=False)
    figure.update_yaxes(type="log", dtick=1, showgrid=False)
    figure.update_xaxes(title_text="training step", row=2)
    figure.update_yaxes(title_text="position", col=1)
    figure.update_xaxes(domain=[0, 0.43], col=1)
    figure.update_xaxes(domain=[0.55, 0.98], col=2)
    figure.update_layout(template=TEMPLATE, height=620)
    return figure
