"""Figures of how heads spread a metric over their bands: by layer, and along the context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float64
from plotly.subplots import make_subplots
from torch import Tensor

from ropelens.plots.provenance import stamped
from ropelens.plots.style import COLOURS, TEMPLATE, metric_label, tokens_label
from ropelens.scores import BandScores


@stamped
def layer_profiles(profiles: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Returns the centroid and the effective number of bands by layer, one line a metric.

    Lines are the median over the heads of a layer, the shade holds the middle half of them.

    Args:
        profiles: What `BandScores.profile` returned, by the name to show.

    Raises:
        ValueError: If there is none.
    """
    if not profiles:
        raise ValueError("expected at least one profile to show, got none")
    figure = make_subplots(1, 2, horizontal_spacing=0.12)
    for i, (name, frame) in enumerate(profiles.items()):
        colour = COLOURS[i % len(COLOURS)]
        for column, value in enumerate(("centroid", "effective_bands"), start=1):
            by_layer = frame.groupby("layer")[value]
            low, middle, high = (by_layer.quantile(q).tolist() for q in (0.25, 0.5, 0.75))
            layers = sorted(frame["layer"].unique().tolist())
            figure.add_scatter(
                x=[*layers, *layers[::-1]],
                y=[*high, *low[::-1]],
                fill="toself",
                fillcolor=colour,
                opacity=0.18,
                line={"width": 0},
                hoverinfo="skip",
                showlegend=False,
                row=1,
                col=column,
            )
            figure.add_scatter(
                x=layers,
                y=middle,
                name=name,
                line={"color": colour, "width": 2},
                showlegend=column == 1,
                hovertemplate="layer %{x}<br>%{y:.4g}<extra>" + name + "</extra>",
                row=1,
                col=column,
            )
    figure.update_layout(
        template=TEMPLATE,
        height=360,
        yaxis={"title": {"text": "centroid (tokens)"}, "type": "log", "dtick": 1},
        yaxis2={"title": {"text": "effective number of bands"}, "rangemode": "tozero"},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    )
    figure.update_xaxes(title_text="layer")
    return figure


@stamped
def first_key_by_layer(scores: BandScores) -> go.Figure:
    """Returns how much of each layer's entropy drop is "first visible key or not", the usual sink.

    Means over the heads of a layer, all bands and the dims that do not rotate, per query.

    Args:
        scores: Entropy whose first key's part was kept apart, as `collect` does.

    Raises:
        ValueError: If it was not.
    """
    later = scores.without_first()
    count = scores.count()
    both = [(s.values.nansum(-1) + s.rest).mean(1) / count for s in (scores, later)]
    layers = list(range(len(count)))
    figure = go.Figure()
    parts = (("first key or not", both[0] - both[1]), ("among the other keys", both[1]))
    for name, values in parts:
        hover = "layer %{x}<br>%{y:.3f} nats<extra>" + name + "</extra>"
        figure.add_bar(x=layers, y=values.tolist(), name=name, hovertemplate=hover)
    figure.update_layout(
        template=TEMPLATE,
        barmode="relative",
        bargap=0.15,
        height=340,
        xaxis={"title": {"text": "layer"}},
        yaxis={"title": {"text": metric_label(scores.metric, "query")}},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
    )
    return figure


@stamped
def shares_by_position(
    shares: Float64[Tensor, "span range"],
    edges: Sequence[int],
    names: Sequence[str],
    source: object = None,
) -> go.Figure:
    """Returns how the shares of ranges of wavelengths change along the context, one line a range.

    Args:
        shares: A share for each span of positions and each range; NaN where a span counts nothing.
        edges: The first position of the second span, of the third, and so on.
        names: The ranges.
        source: The result that the numbers are of, or its facts, for `provenance`.

    Raises:
        ValueError: If shapes do not agree.
    """
    if shares.shape != (len(edges) + 1, len(names)):
        raise ValueError(
            f"expected shares of {len(edges) + 1} spans and {len(names)} ranges, got {list(shares.shape)}"
        )
    starts = [0.0, *map(float, edges)]
    known = [i for i in range(len(starts)) if not shares[i].isnan().any()]
    labels = [f"{tokens_label(starts[i]) if i else 0}+" for i in known]
    figure = go.Figure(
        [
            go.Scatter(
                x=labels,
                y=shares[known, column].tolist(),
                name=name,
                mode="lines+markers",
                hovertemplate="from %{x}<br>%{y:.3f}<extra>" + name + "</extra>",
            )
            for column, name in enumerate(names)
        ]
    )
    figure.update_layout(
        template=TEMPLATE,
        height=340,
        xaxis={"title": {"text": "position of the query (tokens)"}, "type": "category"},
        yaxis={"title": {"text": "share"}, "rangemode": "tozero"},
        legend={"title": {"text": "wavelength"}},
    )
    return figure
