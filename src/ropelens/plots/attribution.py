"""Figures of BandAttribution: keys x bands, and the text coloured by what each key receives."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from ropelens.plots.provenance import stamped
from ropelens.plots.scores import colour_range
from ropelens.plots.style import BLUE, DIVERGING, ORANGE, TEMPLATE, band_axis, tokens_label
from ropelens.scores import BandAttribution


@stamped
def attribution_heatmap(attribution: BandAttribution, n_keys: int = 32) -> go.Figure:
    """Returns a heatmap of the keys that receive most attention x bands.

    Orange: the band moves attention to the key; blue: away from it. The column at the right is
    the attention that the key receives in the end, 0 to 1.

    Args:
        n_keys: How many keys to show, in the order of the text.
    """
    keys, labels = _strongest(attribution, n_keys)
    values = attribution.values[keys]
    low, high = colour_range(values, 0.975)  # one key, often the first, may take nearly everything
    high = max(high, -low)
    wavelength = [tokens_label(w) for w in attribution.wavelength.tolist()]
    rows = list(range(len(keys)))
    figure = go.Figure(
        go.Heatmap(
            z=values.numpy().astype("float32"),
            y=rows,
            zmin=-high,
            zmax=high,
            colorscale=DIVERGING,
            customdata=[wavelength] * len(rows),
            text=[[label] * len(wavelength) for label in labels],
            colorbar={
                "title": {"text": "attention moved", "side": "right"},
                "thickness": 12,
                "outlinewidth": 0,
            },
            hovertemplate="key %{text}<br>%{customdata} tokens a turn<br>%{z:.4g}<extra></extra>",
        )
    )
    figure.add_bar(
        x=attribution.pattern[keys].numpy().astype("float32"),
        y=rows,
        orientation="h",
        xaxis="x2",
        marker={"color": "#8c959f"},
        text=labels,
        textposition="none",
        hovertemplate="key %{text}<br>attention %{x:.4g}<extra></extra>",
        showlegend=False,
    )
    figure.update_layout(
        template=TEMPLATE,
        xaxis={**band_axis(attribution.wavelength[None]), "domain": [0, 0.8]},
        xaxis2={"domain": [0.83, 1], "title": {"text": "attention"}, "rangemode": "tozero", "nticks": 3},
        yaxis={**_key_axis(labels), "title": {"text": "key token, position"}},
        height=140 + 17 * len(rows),
    )
    return figure


@stamped
def attribution_parts(attribution: BandAttribution, n_keys: int = 32) -> go.Figure:
    """Returns what bands bring to the keys with most attention, and what they take away.

    A bar to the right is the sum of the bands that move attention to the key, one to the left of those
    that move it away; the mark between is the attention left.

    Args:
        n_keys: How many keys to show, in the order of the text.
    """
    keys, labels = _strongest(attribution, n_keys)
    entries = torch.cat([attribution.values[keys], attribution.rest[keys, None]], 1)
    rows = list(range(len(keys)))
    figure = go.Figure()
    for part, name, colour in (
        (entries.clamp(min=0), "bands that bring", ORANGE),
        (entries.clamp(max=0), "bands that take", BLUE),
    ):
        figure.add_bar(
            x=part.sum(1).numpy().astype("float32"),
            y=rows,
            orientation="h",
            name=name,
            marker={"color": colour},
            text=labels,
            textposition="none",
            hovertemplate="key %{text}<br>%{x:.4g}<extra>" + name + "</extra>",
        )
    figure.add_scatter(
        x=attribution.pattern[keys].numpy().astype("float32"),
        y=rows,
        mode="markers",
        name="attention",
        marker={"symbol": "line-ns", "size": 11, "line": {"width": 2, "color": "#8c959f"}},
        text=labels,
        hovertemplate="key %{text}<br>attention %{x:.4g}<extra></extra>",
    )
    figure.update_layout(
        template=TEMPLATE,
        barmode="relative",
        bargap=0.2,
        height=140 + 17 * len(rows),
        xaxis={"title": {"text": "attention"}, "zeroline": True},
        yaxis=_key_axis(labels),
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
    )
    return figure


def _strongest(attribution: BandAttribution, n: int) -> tuple[Int64[Tensor, " key"], list[str]]:
    """Returns the keys with most attention, in the order of the text, and what to call them."""
    pattern = attribution.pattern
    keys = pattern.topk(min(n, len(pattern))).indices.sort().values
    return keys, [f"{_one_line(attribution.tokens[k])} {k}" for k in keys.tolist()]


def _key_axis(labels: list[str]) -> dict[str, Any]:
    return {
        "autorange": "reversed",
        "tickmode": "array",
        "tickvals": list(range(len(labels))),
        "ticktext": labels,
        "showgrid": False,
        "automargin": True,
    }


def tokens_html(attribution: BandAttribution, values: Float64[Tensor, " key"] | None = None) -> str:
    """Returns the text up to the query as HTML, each token shaded by a number of its own.

    Orange is above 0, blue below, the strongest token full; the number shows on hover. Tokens are
    escaped: markup in the text stays text.

    Args:
        values: One number a key; by default the attention to it.

    Example:
        >>> import torch
        >>> from ropelens.bands import pair_dims
        >>> attribution = BandAttribution(
        ...     layer=0, head=0, query=0, inv_freq=torch.ones(1).double(), pairs=pair_dims(2, False),
        ...     values=torch.ones(1, 1).double(), rest=torch.zeros(1).double(),
        ...     visible=torch.ones(1, dtype=torch.bool), sink=None, tokens=("<b>",), residual=0.0,
        ... )
        >>> "<b>" in tokens_html(attribution)
        False
    """
    values = attribution.pattern if values is None else values
    largest = values.abs().max().item() or 1.0
    spans = []
    for position, (token, value) in enumerate(zip(attribution.tokens, values.tolist(), strict=True)):
        # the square root lets weak tokens show beside one that takes nearly everything
        alpha = (abs(value) / largest) ** 0.5
        colour = ORANGE if value >= 0 else BLUE
        shade = f"background:{colour}{round(255 * alpha):02x}" if alpha >= 0.03 else ""
        outline = ";outline:2px solid currentColor" if position == attribution.query else ""
        style = f' style="{shade}{outline}"' if shade or outline else ""
        title = f"{position}: {value:.3g}"
        spans.append(f'<span title="{title}"{style}>{html.escape(_line_break(token))}</span>')
    return f'<div class="ropelens-tokens" style="white-space:pre-wrap;line-height:1.7">{"".join(spans)}</div>'


def _one_line(token: str) -> str:
    """The token as a label: no line breaks, and no markup that Plotly would take for its own."""
    shown = token.strip().replace("\n", "⏎") or token.replace("\n", "⏎").replace(" ", "␣")
    return html.escape(shown if len(shown) <= 16 else shown[:15] + "…", quote=False)


def _line_break(token: str) -> str:
    return token.replace("\n", "⏎\n")
