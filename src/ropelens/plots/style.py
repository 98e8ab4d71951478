"""What all figures share: one template, colours that colour-blind readers can tell apart, band axes."""

from __future__ import annotations

import math
from typing import Any

import plotly.graph_objects as go
from jaxtyping import Float64
from torch import Tensor

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
BLUE, ORANGE = "#2f7fc1", "#d9730d"
COLOURS = [BLUE, ORANGE, "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c"]

# Blue is below 0, orange above; the middle is the page, so that nothing shows where nothing is.
DIVERGING = [[0, "#08447e"], [0.25, "#5b9bd0"], [0.5, "#f7f7f5"], [0.75, "#efa45c"], [1, "#9c4204"]]
DIVERGING_DARK = [[0, "#8accff"], [0.25, "#2f6f9f"], [0.5, "#1b1f24"], [0.75, "#a3622a"], [1, "#ffb973"]]
SEQUENTIAL = "Cividis"

TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": FONT, "size": 13, "color": "#24292f"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "colorway": COLOURS,
        "colorscale": {"diverging": DIVERGING, "sequential": SEQUENTIAL},
        "margin": {"l": 56, "r": 16, "t": 48, "b": 56},
        "hoverlabel": {"align": "left"},
        "xaxis": {"ticks": "outside", "showgrid": False, "zeroline": False, "linecolor": "#8c959f"},
        "yaxis": {"ticks": "outside", "gridcolor": "rgba(140,149,159,.3)", "zerolinecolor": "#8c959f"},
    }
)

_LABELS = {
    "entropy": "entropy drop (nats)",
    "activation": "activation (logit units)",
    "norm_product": "norm product (logit units)",
    "fisher": "Fisher information",
    "taylor": "loss change (nats)",
    "random": "random",
}


def metric_label(metric: str, per: str) -> str:
    """Returns a metric's name, unit and denominator, as an axis says it."""
    return f"{_LABELS.get(metric, metric)} per {per}"


def tokens_label(wavelength: float) -> str:
    """Returns a wavelength in tokens as short text: two or three digits.

    Example:
        >>> [tokens_label(w) for w in (6.283, 62.8, 628.3, 62832.0, float("inf"), float("nan"))]
        ['6.3', '63', '628', '63k', '∞', '-']
    """
    if math.isnan(wavelength):
        return "-"
    if math.isinf(wavelength):
        return "∞"
    for size, suffix in ((1e6, "M"), (1e3, "k"), (1.0, "")):
        if wavelength >= 0.9995 * size:
            scaled = wavelength / size
            return (
                f"{scaled:.0f}{suffix}"
                if scaled >= 9.95
                else f"{scaled:.1f}".rstrip("0").rstrip(".") + suffix
            )
    return f"{wavelength:.2g}"


def band_axis(wavelength: Float64[Tensor, "layer band"], n_ticks: int = 9) -> dict[str, Any]:
    """Returns a Plotly axis over bands, fast to slow, labelled with their wavelengths in tokens.

    Where layers rotate at different speeds a column has no single wavelength, and the axis counts
    bands instead.
    """
    longest = wavelength[(~wavelength.isnan()).sum(1).argmax()]
    same = wavelength.isnan() | (wavelength / longest - 1).nan_to_num(0.0).abs().lt(1e-3)
    if not same.all():
        return {"title": {"text": "band, fast to slow"}}
    n_bands = len(longest)
    step = max(1, math.ceil((n_bands - 1) / (n_ticks - 1)))
    shown = list(range(0, n_bands, step))
    return {
        "title": {"text": "wavelength (tokens), fast to slow"},
        "tickmode": "array",
        "tickvals": shown,
        "ticktext": [tokens_label(longest[b].item()) for b in shown],
        "tickangle": 0,
    }
