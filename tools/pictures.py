"""Draws the pictures of docs/concepts.md, as a part of `make results`. Needs a Chromium.

The first two are drawn from formulas, on bands and logits chosen to be seen; the third shows two heads
of SmolLM2-135M, from the scores in docs/data/demo.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from plotly.graph_objects import Figure
from plotly.subplots import make_subplots

import ropelens as rl
from ropelens.plots.style import BLUE, COLOURS, ORANGE, TEMPLATE, band_axis
from ropelens_kernels import entropy

DOCS = Path(__file__).resolve().parent.parent / "docs"
GREY = COLOURS[-1]
CLOCKS = {"fast": (8.0, COLOURS[1]), "middle": (64.0, COLOURS[2]), "slow": (4096.0, COLOURS[0])}


def clocks() -> Figure:
    """Three bands: how far each turns from token to token, and what it makes of a distance."""
    figure = make_subplots(3, 2, column_widths=[0.2, 0.8], horizontal_spacing=0.09, vertical_spacing=0.09)
    distance = torch.arange(0, 128.25, 0.25)
    circle = torch.linspace(0, 2 * math.pi, 121)
    for row, (name, (wavelength, colour)) in enumerate(CLOCKS.items(), start=1):
        turn = 2 * math.pi / wavelength
        figure.add_scatter(
            x=circle.cos(), y=circle.sin(), mode="lines", line={"color": GREY, "width": 1}, row=row, col=1
        )
        for token in range(5):
            tip = (math.sin(token * turn), math.cos(token * turn))
            line = {"color": colour, "width": 3}
            ends = {"x": [0, tip[0]], "y": [0, tip[1]], "mode": "lines"}
            figure.add_scatter(**ends, line=line, opacity=0.2 + 0.2 * token, row=row, col=1)
        curve = {"x": distance, "y": (turn * distance).cos(), "mode": "lines"}
        figure.add_scatter(**curve, line={"color": colour, "width": 2, "simplify": False}, row=row, col=2)
        figure.update_xaxes(visible=False, range=[-1.15, 1.15], row=row, col=1)
        figure.update_yaxes(visible=False, range=[-1.15, 1.15], scaleanchor=f"x{2 * row - 1}", row=row, col=1)
        figure.update_yaxes(tickvals=[-1, 0, 1], range=[-1.15, 1.15], row=row, col=2)
        figure.update_xaxes(showticklabels=row == 3, row=row, col=2)
        label = f"{name}: one turn in {wavelength:,.0f} tokens"
        place = {"x": 128, "y": 1.12, "xanchor": "right", "yanchor": "bottom", "showarrow": False}
        figure.add_annotation(text=label, font={"color": colour}, row=row, col=2, **place)
    figure.update_xaxes(title_text="distance between query and key (tokens)", row=3, col=2)
    figure.update_yaxes(title_text="part of the score", row=2, col=2)
    heading = {"xref": "paper", "yref": "paper", "yanchor": "bottom", "showarrow": False, "y": 1.07}
    figure.add_annotation(text="tokens 0 to 4", x=0.1, xanchor="center", **heading)
    figure.update_layout(template=TEMPLATE, height=470, showlegend=False, margin={"t": 60})
    return figure


def path() -> Figure:
    """One query, eight keys, three bands: attention from even to sharp, and which band sharpens it."""
    logits = torch.tensor(  # [band, key]
        [
            [0.0, 0.2, -0.2, 0.1, 0.0, -0.3, 0.4, 1.6],
            [0.3, -0.2, 0.2, 0.0, 0.3, 0.5, -0.1, 0.3],
            [-0.5, 0.1, 2.1, -0.4, 0.0, -0.2, -0.3, 0.2],
        ],
        dtype=torch.float64,
    )
    times = torch.linspace(0, 1, 21, dtype=torch.float64)
    k = torch.stack([logits, torch.zeros_like(logits)], -1).permute(1, 0, 2).reshape(1, 8, 1, 6)
    query = torch.tensor([1.0, 0.0] * 3, dtype=torch.float64)
    pairs = torch.arange(6).view(3, 2)
    parts = torch.stack(
        [
            entropy((t * query).view(1, 1, 1, 6), k, pairs=pairs, scale=1.0, tol=1e-9).values[0, 0]
            for t in times
        ]
    )
    figure = make_subplots(
        1,
        4,
        column_widths=[0.16, 0.16, 0.16, 0.52],
        horizontal_spacing=0.06,
        subplot_titles=[
            "scores at zero",
            "at one half",
            "the real scores",
            "entropy drop on the way, by band",
        ],
    )
    for column, t in enumerate((0.0, 0.5, 1.0), start=1):
        bars = {"x": list(range(8)), "y": (t * logits.sum(0)).softmax(0), "marker": {"color": BLUE}}
        figure.add_bar(**bars, showlegend=False, row=1, col=column)
        figure.update_yaxes(range=[0, 0.6], showticklabels=column == 1, tickformat=".0%", row=1, col=column)
        figure.update_xaxes(tickvals=[0, 7], ticktext=["first", "last"], row=1, col=column)
    figure.update_yaxes(title_text="attention", row=1, col=1)
    figure.update_xaxes(title_text="key", row=1, col=2)
    for band, (name, (_, colour)) in enumerate(CLOCKS.items()):
        area = {"x": times, "y": parts[:, band], "stackgroup": "bands", "line": {"color": colour}}
        figure.add_scatter(**area, name=f"{name} band", mode="lines", row=1, col=4)
    figure.update_xaxes(title_text="share of the scores", tickformat=".0%", row=1, col=4)
    figure.update_yaxes(ticksuffix=" nats", side="right", row=1, col=4)
    figure.update_layout(template=TEMPLATE, height=320, bargap=0.15, legend={"x": 0.62, "y": 0.05})
    figure.update_layout(margin={"r": 84})
    return figure


def heads() -> Figure:
    """What two heads of SmolLM2-135M sharpen with: one looks one token back, the other for content."""
    scores = rl.BandScores.load(DOCS / "data" / "demo" / "entropy.safetensors")
    chosen = {"head 11.1, which looks one token back": (11, 1), "head 18.6, an induction head": (18, 6)}
    nats = scores.mean("query")
    axis = band_axis(scores.bands.wavelength[:1], n_ticks=6)
    figure = make_subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.05, subplot_titles=list(chosen))
    for column, (layer, head) in enumerate(chosen.values(), start=1):
        values = nats[layer, head].tolist()
        colours = [BLUE if value < 0 else ORANGE for value in values]
        figure.add_bar(x=list(range(32)), y=values, marker={"color": colours}, row=1, col=column)
        figure.update_xaxes(**axis, row=1, col=column)
    figure.update_yaxes(title_text="entropy drop per query (nats)", row=1, col=1)
    figure.update_layout(template=TEMPLATE, height=320, bargap=0.15, showlegend=False)
    return figure


PICTURES = {"band-clocks": clocks, "band-path": path, "band-heads": heads}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        figure = draw().update_layout(paper_bgcolor="white", plot_bgcolor="white")
        figure.write_image(DOCS / "assets" / f"{name}.png", width=900, scale=1.5)
        print(f"docs/assets/{name}.png")
