"""Figures of frequencies that were set, and of the experiment that trains with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import plotly.graph_objects as go
import torch
from jaxtyping import Float64
from torch import Tensor

from ropelens.plots.provenance import stamped
from ropelens.plots.style import BLUE, COLOURS, ORANGE, TEMPLATE

if TYPE_CHECKING:
    import pandas as pd

GREY = "#8c959f"


@stamped
def frequency_ladders(
    new: Float64[Tensor, "layer band"], original: Float64[Tensor, "layer band"], source: object = None
) -> go.Figure:
    """Returns the frequencies of each layer against those that it had, by wavelength.

    A tick is a frequency of the original ladder, a disc one of the new, its area the number of bands
    that have it. Pairs that are not rotated stand at the right edge.

    Args:
        source: The result that the numbers are of, or its facts, for `provenance`.
    """
    both = torch.stack([new, original])
    slowest = float(2 * math.pi / both[both > 0].min())
    edge = 3 * slowest
    figure = go.Figure()
    for freq, style in ((original, "tick"), (new, "disc")):
        xs, ys, sizes = [], [], []
        for layer, row in enumerate(freq):
            values, counts = row[~row.isnan()].unique(return_counts=True)
            xs += [edge if v == 0 else 2 * math.pi / v for v in values.tolist()]
            ys += [layer] * len(values)
            sizes += counts.tolist()
        tick = {"symbol": "line-ns", "size": 11, "line": {"width": 1, "color": GREY}}
        disc = {"size": [6 * math.sqrt(n) for n in sizes], "color": BLUE, "opacity": 0.75}
        figure.add_scatter(
            x=xs,
            y=ys,
            mode="markers",
            marker=tick if style == "tick" else disc,
            name="original" if style == "tick" else "new",
            customdata=sizes,
            hovertemplate="layer %{y}<br>%{x:.3g} tokens a turn<br>%{customdata} band(s)<extra></extra>",
        )
    shown = [10**k for k in range(math.ceil(math.log10(slowest)) + 1)]
    ticks = [float(v) for v in shown] + ([edge] if bool((both == 0).any()) else [])
    text = [f"{v:,}" for v in shown] + ["not rotated"]
    figure.update_layout(
        template=TEMPLATE,
        xaxis={
            "type": "log",
            "title": {"text": "wavelength (tokens)"},
            "tickvals": ticks,
            "ticktext": text[: len(ticks)],
        },
        yaxis={"title": {"text": "layer"}, "dtick": 1 if len(new) <= 16 else 5, "autorange": "reversed"},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        height=max(280, 130 + 30 * min(len(new), 16)),
    )
    return figure


@stamped
def loss_curves(curves: pd.DataFrame, against: str = "original") -> go.Figure:
    """Returns how far each arm's held-out loss lies from the original's, by tokens trained on.

    A thin line is a seed, a thick one the mean over seeds. Below 0 the arm is better.

    Args:
        curves: Columns seed, arm, tokens, loss.
        against: The arm that the others are compared with.
    """
    wide = curves.pivot(index=["seed", "tokens"], columns="arm", values="loss")
    figure = go.Figure()
    arms = [arm for arm in curves.arm.unique() if arm != against]
    for arm, colour in zip(arms, COLOURS * 2, strict=False):
        apart = wide[arm].sub(wide[against]).to_frame("difference").reset_index()
        for _, one in apart.groupby("seed"):
            figure.add_scatter(
                x=one.tokens,
                y=one.difference,
                mode="lines",
                line={"width": 1, "color": colour},
                opacity=0.35,
                showlegend=False,
                hoverinfo="skip",
            )
        mean = apart.groupby("tokens").difference.mean()
        figure.add_scatter(
            x=mean.index,
            y=mean,
            mode="lines",
            name=arm,
            line={"width": 3, "color": colour},
            hovertemplate="%{x:,} tokens<br>%{y:+.4f} nats<extra>" + arm + "</extra>",
        )
    figure.add_hline(y=0, line={"width": 1, "color": GREY})
    figure.update_layout(
        template=TEMPLATE,
        xaxis={"title": {"text": "tokens"}},
        yaxis={"title": {"text": f"loss minus {against}'s (nats)"}},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        height=380,
    )
    return figure


@stamped
def paired_differences(
    differences: Mapping[str, tuple[float, ...]],
    intervals: Mapping[str, tuple[float, float]],
    effect: float | None = None,
    source: object = None,
) -> go.Figure:
    """Returns the difference of every seed, and each arm's mean with its interval.

    Args:
        differences: By arm, one difference a seed (nats).
        intervals: By arm, the interval of the mean.
        effect: A size to mark on either side of 0.
        source: The result that the numbers are of, or its facts, for `provenance`.
    """
    figure = go.Figure()
    for arm, values in differences.items():
        figure.add_scatter(
            x=list(values),
            y=[arm] * len(values),
            mode="markers",
            marker={"color": GREY, "size": 7, "opacity": 0.7},
            showlegend=False,
            hovertemplate="%{x:+.4f} nats<extra>a seed</extra>",
        )
        mean, (low, high) = sum(values) / len(values), intervals[arm]
        bar = {"type": "data", "symmetric": False, "array": [high - mean], "arrayminus": [mean - low]}
        figure.add_scatter(
            x=[mean],
            y=[arm],
            mode="markers",
            marker={"color": BLUE, "size": 11, "symbol": "diamond"},
            error_x=bar if math.isfinite(high - low) else None,
            showlegend=False,
            hovertemplate="%{x:+.4f} nats<extra>mean</extra>",
        )
    figure.add_vline(x=0, line={"width": 1, "color": GREY})
    for side in () if effect is None else (-effect, effect):
        figure.add_vline(x=side, line={"width": 1, "color": ORANGE, "dash": "dot"})
    figure.update_layout(
        template=TEMPLATE,
        xaxis={"title": {"text": "loss minus the original's (nats); left is better"}},
        yaxis={"autorange": "reversed", "showgrid": False},
        height=150 + 60 * len(differences),
    )
    return figure


@stamped
def activation_shares(
    activation: Mapping[str, Float64[Tensor, "layer band"]], source: object = None
) -> go.Figure:
    """Returns each model's activation by band, fast to slow: its share of the layer, mean over layers.

    A model that uses all its bands alike is a level line at one over the number of bands.

    Args:
        activation: By name, activation summed over heads.
        source: The result that the numbers are of, or its facts, for `provenance`.
    """
    figure = go.Figure()
    n = 0
    for name, values in activation.items():
        share = (values / values.nansum(-1, keepdim=True)).nanmean(0)
        n = len(share)
        figure.add_scatter(
            x=list(range(n)),
            y=share.tolist(),
            name=name,
            mode="lines+markers",
            hovertemplate="band %{x}<br>%{y:.1%}<extra>" + name + "</extra>",
        )
    figure.add_hline(y=1 / n, line={"width": 1, "color": GREY, "dash": "dot"})
    figure.update_layout(
        template=TEMPLATE,
        xaxis={"title": {"text": "band, fast to slow"}},
        yaxis={
            "title": {"text": "share of the layer's activation"},
            "tickformat": ".0%",
            "rangemode": "tozero",
        },
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        height=380,
    )
    return figure
