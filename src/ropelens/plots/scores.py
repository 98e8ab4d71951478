"""Figures of BandScores: layers x bands, and the spectrum of one head."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float64
from torch import Tensor

from ropelens.plots.provenance import stamped
from ropelens.plots.style import (
    BLUE,
    DIVERGING,
    ORANGE,
    SEQUENTIAL,
    TEMPLATE,
    band_axis,
    metric_label,
    tokens_label,
)
from ropelens.scores import BandScores


def colour_range(values: Float64[Tensor, "*any"], share: float = 0.99) -> tuple[float, float]:
    """Returns the ends of a colour scale: the quantile `share`, symmetric about 0 if any value is negative.

    A few heads are far stronger than all others; the percentile keeps them from greying out the rest.
    """
    known = values[~values.isnan()]
    end = torch.quantile(known.abs(), share).item() if len(known) else 0.0
    end = end or (known.abs().max().item() if len(known) else 0.0) or 1.0
    return (-end if bool((known < 0).any()) else 0.0), end


@stamped
def band_heatmap(
    scores: BandScores, head: int | None = None, per: str = "query", normalize: str | None = None
) -> go.Figure:
    """Returns a heatmap of layers x bands, with a menu of heads.

    Entropy is blue where a band lowers the entropy (sharpens attention) and orange where it raises
    it. The colour scale of each view ends at its own 99th percentile.

    Args:
        head: Show this head alone, without a menu. By default the mean over heads comes first.
        per: The denominator, as in `BandScores.mean`.
        normalize: Show the importance with this normalisation instead of the mean.

    Raises:
        ValueError: If there is no such head, or `per` or `normalize` is unknown.
    """
    values = scores.mean(per) if normalize is None else scores.importance(normalize)
    label = metric_label(scores.metric, per) if normalize is None else f"importance within each {normalize}"
    n_heads = values.shape[1]
    check_index("head", head, n_heads)
    heads = range(n_heads) if head is None else [head]
    views = {f"head {h}": values[:, h] for h in heads}
    if head is None and n_heads > 1:
        views = {"all heads (mean)": values.mean(1), **views}
    updates = {name: _view(view) for name, view in views.items()}
    first = next(iter(updates))

    wavelength = scores.bands.wavelength
    signed = scores.metric == "entropy" and normalize is None
    figure = go.Figure(
        go.Heatmap(
            **{key: value[0] for key, value in updates[first].items()},
            customdata=[[tokens_label(w) for w in row] for row in wavelength.tolist()],
            colorscale=DIVERGING if signed else SEQUENTIAL,
            colorbar={"title": {"text": label, "side": "right"}, "thickness": 12, "outlinewidth": 0},
            hovertemplate="layer %{y}, band %{x}<br>%{customdata} tokens a turn<br>%{z:.4g}<extra></extra>",
            hoverongaps=False,
        )
    )
    layout: dict[str, Any] = {"title": {"text": first if head is not None else None}}
    if len(views) > 1:
        buttons = [{"label": name, "method": "restyle", "args": [update]} for name, update in updates.items()]
        menu = {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}
        layout = {"updatemenus": [menu]}
    figure.update_layout(
        template=TEMPLATE,
        xaxis=band_axis(wavelength),
        yaxis={"title": {"text": "layer"}, "showgrid": False, "zeroline": False},
        height=max(320, 120 + 13 * len(wavelength)),
        **layout,
    )
    return figure


@stamped
def band_spectrum(scores: BandScores, layer: int, head: int, per: str = "query") -> go.Figure:
    """Returns one head's value for each band as bars, fast to slow.

    With at least two documents the bars carry standard errors. The unrotated dims, where a layer
    has any, are one more bar at the end.

    Raises:
        ValueError: If there is no such layer or head, or `per` is unknown.
    """
    n_layers, n_heads, _ = scores.values.shape
    check_index("layer", layer, n_layers)
    check_index("head", head, n_heads)
    exists = scores.bands.exists[layer]
    values = scores.mean(per)[layer, head][exists]
    wavelength = scores.bands.wavelength[layer][exists]
    count = scores.count(per)[layer].item()
    labels = [tokens_label(w) for w in wavelength.tolist()]
    bars = values.tolist()
    if scores.bands.n_rest[layer] > 0:
        labels.append("rest")
        bars.append(scores.rest[layer, head].item() / count)
    error = None
    if scores.n_documents >= 2:
        spread = scores.stderr()[layer, head][exists] * scores.n_documents / count
        error = {"type": "data", "array": spread.tolist() + [0.0] * (len(bars) - len(values)), "thickness": 1}
    figure = go.Figure(
        go.Bar(
            x=list(range(len(bars))),
            y=bars,
            customdata=labels,
            error_y=error,
            marker={"color": [BLUE if v < 0 or scores.metric != "entropy" else ORANGE for v in bars]},
            hovertemplate="band %{x}<br>%{customdata} tokens a turn<br>%{y:.4g}<extra></extra>",
        )
    )
    axis = band_axis(wavelength[None])
    if len(bars) > len(values):
        axis = {**axis, "tickvals": [*axis["tickvals"], len(values)], "ticktext": [*axis["ticktext"], "rest"]}
    figure.update_layout(
        template=TEMPLATE,
        title={"text": f"layer {layer}, head {head}"},
        xaxis=axis,
        yaxis={"title": {"text": metric_label(scores.metric, per)}},
        height=340,
        bargap=0.15,
    )
    return figure


def check_index(name: str, index: int | None, n: int) -> None:
    """Raises a ValueError if there is no layer, head, ... of that number."""
    if index is not None and not 0 <= index < n:
        raise ValueError(f"expected a {name} from 0 to {n - 1}, got {index}")


def _view(values: Float64[Tensor, "layer band"]) -> dict[str, list[Any]]:
    low, high = colour_range(values)
    return {"z": [values.numpy().astype(np.float32)], "zmin": [low], "zmax": [high]}
