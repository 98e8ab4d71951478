"""Figures of lesions: doses and responses, and what dose each layer survives."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ropelens.plots.provenance import stamped
from ropelens.plots.style import COLOURS, SEQUENTIAL, TEMPLATE

DASHES = ("solid", "dash", "dot", "dashdot")


@stamped
def dose_responses(
    frame: pd.DataFrame, limit: float | None = None, label: str = "healthy loss (nats a token)"
) -> go.Figure:
    """Returns a curve for each layer over the doses, a column of panels a task, a row a group of bands.

    Whiskers are the intervals over seeds; the grey line is the healthy model, the dotted one the limit. A
    cross is a dose that was not survived; one on the limit left no text at all.

    Args:
        frame: What `LesionResults.dose_response` returned.
        limit: The loss from which on a text counts as that of a broken model.
        label: Of what was measured.

    Raises:
        ValueError: If there is nothing to show.
    """
    if not len(frame):
        raise ValueError("expected doses and responses to show, got none")
    tasks, bands, layers = (list(dict.fromkeys(frame[name])) for name in ("task", "bands", "layers"))
    doses = sorted(std for std in frame["std"].unique() if std > 0)
    figure = make_subplots(
        len(bands),
        len(tasks),
        shared_xaxes=True,
        shared_yaxes=True,
        horizontal_spacing=0.04,
        vertical_spacing=0.09 if len(bands) > 1 else None,
        subplot_titles=[f"{task}, {which}" for which in bands for task in tasks],
    )
    seen: set[str] = set()
    panels: Any = frame.groupby(["task", "bands"], sort=False)
    for (task, which), panel in panels:
        place = {"row": bands.index(which) + 1, "col": tasks.index(task) + 1}
        own = float(panel.loc[panel["std"] == 0, "mean"].iloc[0])
        for where, curve in panel[panel["std"] > 0].groupby("layers", sort=False):
            shown, number = curve.sort_values("std"), layers.index(where)
            apart = (number - (len(layers) - 1) / 2) * 0.5 / len(layers)  # whiskers beside each other
            figure.add_scatter(
                x=[doses.index(std) + apart for std in shown["std"]],
                y=shown["mean"] if limit is None else shown["mean"].fillna(limit),
                error_y={
                    "array": (shown["high"] - shown["mean"]).tolist(),
                    "arrayminus": (shown["mean"] - shown["low"]).tolist(),
                    "thickness": 1,
                },
                name=f"layer {where}",
                legendgroup=where,
                showlegend=where not in seen,
                mode="lines+markers",
                line={"color": COLOURS[number % len(COLOURS)], "dash": DASHES[number // len(COLOURS) % 4]},
                marker={"symbol": ["circle" if alive else "x" for alive in shown["survived"]], "size": 7},
                customdata=shown["std"],
                hovertemplate="noise %{customdata:g}<br>%{y:.3f}<extra>%{fullData.name}</extra>",
                **place,
            )
            seen.add(where)
        for level, dash in ((own, "solid"), *(() if limit is None else ((limit, "dot"),))):
            line = {"color": "#8c8c8c", "width": 1, "dash": dash}
            ends = {"x0": -0.5, "x1": len(doses) - 0.5, "y0": level, "y1": level}
            figure.add_shape(type="line", line=line, **ends, **place)
    figure.update_xaxes(tickvals=list(range(len(doses))), ticktext=[f"{std:g}" for std in doses])
    figure.update_xaxes(title_text="noise, in units of the band's RMS", row=len(bands))
    figure.update_yaxes(title_text=label, col=1)
    found: list[float] = frame["mean"].dropna().tolist()
    if found and min(found) >= 0:  # of few seeds, whiskers can be longer than all that matters
        figure.update_yaxes(range=[0, 1.25 * max(*found, limit or 0.0)])
    width, height = max(700, 380 * len(tasks)), 160 + 300 * len(bands)
    return figure.update_layout(template=TEMPLATE, width=width, height=height)


@stamped
def survival_map(frame: pd.DataFrame) -> go.Figure:
    """Returns a map of layers x groups of bands: the largest noise that the text survives, a panel a task.

    A dose with "≥" was the highest that was tried.

    Args:
        frame: What `LesionResults.survived` returned.

    Raises:
        ValueError: If there is nothing to show.
    """
    if not len(frame):
        raise ValueError("expected doses that were survived to show, got none")
    tasks = list(dict.fromkeys(frame["task"]))
    layers: list[str] = list(dict.fromkeys(frame["layers"]))
    bands = list(dict.fromkeys(frame["bands"]))
    layers.sort(key=lambda text: [int(part) for part in text.replace("-", ", ").split(", ")])
    tried: Any = frame["highest"]
    figure = make_subplots(
        1, len(tasks), shared_yaxes=True, horizontal_spacing=0.04, subplot_titles=[str(t) for t in tasks]
    )
    for column, task in enumerate(tasks, start=1):
        of_task: Any = frame[frame["task"] == task]
        cells: dict[Any, Any] = {(r.layers, r.bands): r for r in of_task.itertuples()}
        z: list[list[float]] = []
        text: list[list[str]] = []
        for where in layers:
            found = [cells.get((where, which)) for which in bands]
            z.append([math.nan if cell is None else float(cell.std) for cell in found])
            text.append(["" if c is None else f"{'≥ ' if c.open else ''}{c.std:g}" for c in found])
        figure.add_heatmap(
            z=z,
            x=bands,
            y=[f"layer {where}" for where in layers],
            text=text,
            texttemplate="%{text}",
            hovertemplate="%{y}, %{x}: survives %{text}<extra></extra>",
            zmin=0,
            zmax=float(tried.max()),
            colorscale=SEQUENTIAL,
            showscale=column == len(tasks),
            colorbar={"title": {"text": "noise survived"}},
            row=1,
            col=column,
        )
    figure.update_yaxes(autorange="reversed", ticks="")
    return figure.update_layout(
        template=TEMPLATE, width=max(520, 300 * len(tasks) + 160), height=140 + 44 * len(layers)
    )
