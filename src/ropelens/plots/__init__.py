"""Plotly figures of results; they know no model."""

from ropelens.plots.attribution import attribution_heatmap, tokens_html
from ropelens.plots.profiles import layer_profiles, shares_by_position
from ropelens.plots.scores import band_heatmap, band_spectrum
from ropelens.plots.style import TEMPLATE

__all__ = [
    "TEMPLATE",
    "attribution_heatmap",
    "band_heatmap",
    "band_spectrum",
    "layer_profiles",
    "shares_by_position",
    "tokens_html",
]
