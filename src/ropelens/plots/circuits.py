"""Figures of circuits: eigenvalues, scores of heads, kernels, and one head on one text."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Complex128, Float64
from torch import Tensor

from ropelens.plots.provenance import stamped
from ropelens.plots.scores import colour_range
from ropelens.plots.style import BLUE, DIVERGING, ORANGE, SEQUENTIAL, TEMPLATE, tokens_label


@stamped
def eigenvalue_polar(values: Mapping[str, Complex128[Tensor, " value"]], source: object = None) -> go.Figure:
    """Returns eigenvalues in the plane, the angle theirs, the radius logarithmic: one colour a head.

    Positive eigenvalues, which copy, lie at the right; negative ones at the left. What is smaller than a
    millionth of the largest is left out.

    Args:
        values: The eigenvalues of each head, by the name to show.
        source: The result that the numbers are of, or its facts, for `provenance`.
    """
    figure = go.Figure()
    largest = 0.0
    for name, tensor in values.items():
        found = tensor[~tensor.real.isnan()].numpy()
        size = np.abs(found)
        found = found[size > 1e-6 * size.max(initial=0)]
        largest = max(largest, float(np.abs(found).max(initial=0)))
        figure.add_scatterpolar(
            r=np.abs(found),
            theta=np.degrees(np.angle(found)),
            mode="markers",
            name=name,
            marker={"size": 6, "opacity": 0.75},
            hovertemplate="|λ| %{r:.3g}<br>angle %{theta:.0f}°<extra>" + name + "</extra>",
        )
    figure.update_layout(
        template=TEMPLATE,
        height=440,
        polar={
            "radialaxis": {
                "type": "log",
                "tickfont": {"size": 10},
                "angle": 90,
                "tickangle": 90,
                "dtick": 2,
                "exponentformat": "power",
            },
            "angularaxis": {"tickvals": [0, 90, 180, 270], "ticktext": ["+", "i", "-", "-i"]},
        },
        legend={"orientation": "h", "y": -0.1},
    )
    return figure


@stamped
def score_histogram(
    scores: Mapping[str, Float64[Tensor, "layer head"]], n_bins: int = 40, source: object = None
) -> go.Figure:
    """Returns how many heads have which score, one outline a kind of score.

    Args:
        scores: A score from -1 to 1 of each head, by the name to show; NaN is left out.
        source: The result that the numbers are of, or its facts, for `provenance`.
    """
    figure = go.Figure()
    for name, tensor in scores.items():
        figure.add_histogram(
            x=tensor[~tensor.isnan()].flatten().numpy(),
            xbins={"start": -1, "end": 1 + 2 / n_bins, "size": 2 / n_bins},
            name=name,
            opacity=0.7,
            hovertemplate="%{x}<br>%{y} heads<extra>" + name + "</extra>",
        )
    figure.update_layout(
        template=TEMPLATE,
        barmode="overlay",
        height=320,
        xaxis={
            "title": {"text": "sum of eigenvalues / sum of their absolute values"},
            "range": [-1.03, 1.03],
        },
        yaxis={"title": {"text": "heads"}},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    )
    return figure


@stamped
def corner_plot(
    ov: Float64[Tensor, "layer head"],
    qk: Float64[Tensor, "layer head"],
    colour: Float64[Tensor, "layer head"],
    *,
    named: Sequence[tuple[int, int]] = (),
    colour_label: str = "induction score",
    source: object = None,
) -> go.Figure:
    """Returns each head by its OV and its QK eigenvalue score: induction heads lie in the upper right corner.

    Args:
        ov: Copying scores, -1 to 1.
        qk: QK eigenvalue scores, best through previous-token heads; heads with NaN are left out.
        colour: What shades the points.
        named: The (layer, head) to write beside their points.
        source: The result that the numbers are of, or its facts, for `provenance`.
    """
    layers, heads = (~(ov.isnan() | qk.isnan())).nonzero().unbind(1)
    order = colour[layers, heads].argsort()  # the strongest last, on top
    layers, heads = layers[order], heads[order]
    labels = [f"{layer}.{head}" for layer, head in zip(layers.tolist(), heads.tolist(), strict=True)]
    wanted = {f"{layer}.{head}" for layer, head in named}
    figure = go.Figure(
        go.Scatter(
            x=ov[layers, heads].numpy(),
            y=qk[layers, heads].numpy(),
            mode="markers+text",
            text=[label if label in wanted else "" for label in labels],
            textposition="bottom center",
            customdata=np.stack([np.array(labels), colour[layers, heads].numpy().round(4).astype(str)], 1),
            marker={
                "size": 9,
                "color": colour[layers, heads].numpy(),
                "colorscale": SEQUENTIAL,
                "line": {"width": 0.5, "color": "#8c959f"},
                "colorbar": {
                    "title": {"text": colour_label, "side": "right"},
                    "thickness": 12,
                    "outlinewidth": 0,
                },
            },
            hovertemplate="head %{customdata[0]}<br>OV %{x:.2f}, QK %{y:.2f}<br>"
            + colour_label
            + " %{customdata[1]}<extra></extra>",
        )
    )
    figure.update_layout(
        template=TEMPLATE,
        height=440,
        xaxis={"title": {"text": "OV eigenvalue score"}, "range": [-1.08, 1.08], "zeroline": True},
        yaxis={"title": {"text": "QK eigenvalue score"}, "range": [-1.08, 1.08]},
    )
    return figure


@stamped
def head_bands_bars(frame: pd.DataFrame) -> go.Figure:
    """Returns what each band carries of each head's score, and what ablating it changes, one row a head.

    Args:
        frame: Of `HeadBands.to_frame`, the heads to show only.
    """
    from plotly.subplots import make_subplots

    groups = list(frame.groupby(["layer", "head"], sort=False))
    titles = [
        f"head {part['layer'].iloc[0]}.{part['head'].iloc[0]}, score {part['score'].iloc[0]:.2f}"
        for _, part in groups
    ]
    figure = make_subplots(
        len(groups), 1, shared_xaxes=True, vertical_spacing=0.28 / len(groups), subplot_titles=titles
    )
    for row, (_, part) in enumerate(groups, start=1):
        labels = [tokens_label(w) for w in part["wavelength"]]
        for column, name, colour in (
            ("attribution", "carried", BLUE),
            ("change", "change when ablated", ORANGE),
        ):
            figure.add_bar(
                x=part["band"],
                y=part[column],
                name=name,
                marker={"color": colour},
                showlegend=row == 1,
                customdata=labels,
                hovertemplate="%{customdata} tokens a turn<br>%{y:.3f}<extra>" + name + "</extra>",
                row=row,
                col=1,
            )
    last = groups[-1][1]
    ticks = list(range(0, len(last), max(1, len(last) // 8)))
    figure.update_layout(
        template=TEMPLATE,
        height=90 + 170 * len(groups),
        barmode="group",
        bargap=0.15,
        legend={"orientation": "h", "y": 1.0 + 0.22 / len(groups), "yanchor": "bottom", "x": 0},
    )
    figure.update_xaxes(
        tickmode="array",
        tickvals=last["band"].iloc[ticks],
        ticktext=[tokens_label(w) for w in last["wavelength"].iloc[ticks]],
    )
    figure.update_xaxes(title_text="wavelength (tokens), fast to slow", row=len(groups), col=1)
    figure.update_yaxes(title_text="attention")
    return figure


@stamped
def kernel_heatmap(frame: pd.DataFrame, value: str = "kernel") -> go.Figure:
    """Returns a head's positional kernel: distance x band, orange above 0.

    Args:
        frame: Of `PositionalKernel.to_frame`.
        value: "kernel" or "measured".
    """
    table = frame.pivot(index="band", columns="distance", values=value)
    names = {band: tokens_label(float(w)) for band, w in zip(frame["band"], frame["wavelength"], strict=True)}
    high = max(float(np.abs(table.to_numpy()).max()), 1e-12)
    figure = go.Figure(
        go.Heatmap(
            z=table.to_numpy().astype("float32"),
            y=table.index,
            zmin=-high,
            zmax=high,
            colorscale=DIVERGING,
            customdata=[[names[band]] * table.shape[1] for band in table.index],
            text=[[str(distance) for distance in table.columns]] * len(table),
            colorbar={"title": {"text": "logit units", "side": "right"}, "thickness": 12, "outlinewidth": 0},
            hovertemplate="distance %{text}<br>%{customdata} tokens a turn<br>%{z:.3g}<extra></extra>",
        )
    )
    shown = list(table.index)[:: max(1, len(table) // 8)]
    figure.update_layout(
        template=TEMPLATE,
        height=380,
        xaxis=_distances(table.columns.tolist()),
        yaxis={
            "title": {"text": "wavelength (tokens)"},
            "autorange": "reversed",
            "tickmode": "array",
            "tickvals": shown,
            "ticktext": [names[band] for band in shown],
            "showgrid": False,
        },
    )
    return figure


@stamped
def kernel_lines(frame: pd.DataFrame) -> go.Figure:
    """Returns a head's positional kernel over all bands: what its score owes to the distance alone.

    Args:
        frame: Of `PositionalKernel.to_frame`; with "measured", a second line shows the mean score at each
            distance, content included.
    """
    rows: Any = frame
    by_distance = rows.groupby("distance")
    distances = [int(distance) for distance in by_distance.groups]
    figure = go.Figure()
    for column, name, colour in (("kernel", "mean query, mean key", BLUE), ("measured", "measured", ORANGE)):
        if column in frame:
            total = by_distance[column].sum()
            figure.add_scatter(
                x=list(range(len(distances))),
                y=total.to_numpy(),
                name=name,
                mode="lines",
                line={"color": colour, "width": 2},
                customdata=[str(distance) for distance in distances],
                hovertemplate="distance %{customdata}<br>%{y:.3g}<extra>" + name + "</extra>",
            )
    figure.update_layout(
        template=TEMPLATE,
        height=340,
        xaxis=_distances(distances),
        yaxis={"title": {"text": "score, all bands (logit units)"}},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    )
    return figure


def _distances(distances: Sequence[int]) -> dict[str, object]:
    """An axis on which every distance has the same room, however far apart they are."""
    wanted = [d for d in (0, 4, 16, 64, 256, 1024, 4096) if d in distances]
    if list(distances) == list(range(distances[0], distances[0] + len(distances))):
        wanted = list(distances[:: max(1, len(distances) // 8)])
    return {
        "title": {"text": "distance (tokens)"},
        "tickmode": "array",
        "tickvals": [distances.index(d) for d in wanted],
        "ticktext": [str(d) for d in wanted],
        "tickangle": 0,
    }


@stamped
def head_score_map(frame: pd.DataFrame, score: str) -> go.Figure:
    """Returns a map of layers x heads, shaded by one score.

    Args:
        frame: Of `HeadScores.to_frame`: columns layer, head, and the scores.
        score: The column to show.
    """
    table = frame.pivot(index="layer", columns="head", values=score)
    values = table.to_numpy()
    signed = bool((values < 0).any())
    high = float(np.nanmax(np.abs(values))) or 1.0
    figure = go.Figure(
        go.Heatmap(
            z=values.astype("float32"),
            x=table.columns,
            y=table.index,
            zmin=-high if signed else 0.0,
            zmax=high,
            colorscale=DIVERGING if signed else SEQUENTIAL,
            colorbar={"title": {"text": score.replace("_", " "), "side": "right"}}
            | {"thickness": 12, "outlinewidth": 0},
            hovertemplate="layer %{y}, head %{x}<br>%{z:.3f}<extra></extra>",
            hoverongaps=False,
        )
    )
    figure.update_layout(
        template=TEMPLATE,
        xaxis={"title": {"text": "head"}, "dtick": max(1, table.shape[1] // 16)},
        yaxis={"title": {"text": "layer"}, "showgrid": False, "zeroline": False},
        height=max(320, 120 + 13 * len(table)),
    )
    return figure


@stamped
def head_on_text(
    tokens: Sequence[str],
    pattern: Float64[Tensor, "query key"],
    effect: Float64[Tensor, " query"],
    title: str,
    source: object = None,
) -> go.Figure:
    """Returns a head's attention pattern, and beside it what it does to the logit of each next token.

    Args:
        source: The result that the numbers are of, or its facts, for `provenance`.
    """
    from plotly.subplots import make_subplots

    labels = [_label(token) for token in tokens]
    places = list(range(len(tokens)))
    shown = pattern.numpy().astype("float32").copy()
    shown[np.triu_indices(len(shown), 1)] = np.nan
    figure = make_subplots(1, 2, column_widths=[0.8, 0.2], shared_yaxes=True, horizontal_spacing=0.02)
    figure.add_heatmap(
        z=shown,
        colorscale=SEQUENTIAL,
        zmin=0,
        zmax=max(float(pattern.max()), 1e-12),
        customdata=[[f"{query} → {key}" for key in labels] for query in labels],
        colorbar={"title": {"text": "attention", "side": "right"}, "thickness": 12, "outlinewidth": 0},
        hovertemplate="%{customdata}<br>%{z:.3f}<extra></extra>",
        row=1,
        col=1,
    )
    following = [f"{a} then {b}" for a, b in pairwise(labels)]
    values = effect[:-1].numpy()
    figure.add_bar(
        x=values,
        y=places[:-1],
        orientation="h",
        marker={"color": [ORANGE if v >= 0 else BLUE for v in values]},
        text=following,
        textposition="none",
        hovertemplate="%{text}<br>%{x:.3g} logit units<extra></extra>",
        showlegend=False,
        row=1,
        col=2,
    )
    step = max(1, math.ceil(len(places) / 48))
    ticks = {"tickmode": "array", "tickvals": places[::step], "ticktext": labels[::step], "showgrid": False}
    figure.update_layout(
        template=TEMPLATE,
        title={"text": html.escape(title, quote=False)},
        height=min(1400, 190 + 15 * len(places[::step])),
        xaxis={**ticks, "tickangle": -60, "title": {"text": "key"}},
        yaxis={**ticks, "autorange": "reversed", "title": {"text": "query"}, "automargin": True},
        xaxis2={"title": {"text": "effect on the next token"}, "nticks": 4},
    )
    return figure


def effects_html(
    tokens: Sequence[str], pattern: Float64[Tensor, "query key"], effect: Float64[Tensor, " query"]
) -> str:
    """Returns a text as HTML, each token shaded by the effect on its logit, made one position earlier.

    Orange: the head raised it; blue: lowered. On hover: the effect, and the three keys that the query
    before it attended to most. Tokens are escaped: markup in the text stays text.

    Example:
        >>> import torch
        >>> "<b>" in effects_html(["a", "<b>"], torch.eye(2).double(), torch.tensor([1.0, 0]).double())
        False
    """
    known = effect[:-1]
    low, high = colour_range(known[None]) if len(known) else (0.0, 0.0)
    largest = max(high, -low) or 1.0
    spans = []
    for position, token in enumerate(tokens):
        style, title = "", f"{position}"
        if position:
            value, row = float(known[position - 1]), pattern[position - 1, :position]
            alpha = min(1.0, abs(value) / largest) ** 0.5
            colour = ORANGE if value >= 0 else BLUE
            style = f' style="background:{colour}{round(255 * alpha):02x}"' if alpha >= 0.03 else ""
            best = row.topk(min(3, len(row)))
            keys = ", ".join(
                f"{tokens[int(i)].strip() or '␣'} ({i}) {a:.2f}"
                for i, a in zip(best.indices.tolist(), best.values.tolist(), strict=True)
            )
            title = f"{position}: {value:+.3g}; from {position - 1} to {keys}"
        shown = html.escape(token.replace("\n", "⏎\n"))
        spans.append(f'<span title="{html.escape(title)}"{style}>{shown}</span>')
    return f'<div class="ropelens-tokens" style="white-space:pre-wrap;line-height:1.7">{"".join(spans)}</div>'


def _label(token: str) -> str:
    """The token as a label: no line breaks, and no markup that Plotly would take for its own."""
    shown = token.strip().replace("\n", "⏎") or token.replace("\n", "⏎").replace(" ", "␣")
    return html.escape(shown if len(shown) <= 16 else shown[:15] + "…", quote=False)
