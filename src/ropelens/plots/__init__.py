"""Plotly figures of results; they know no model."""

from ropelens.plots.ablation import ablation_curves, importance_scatter
from ropelens.plots.attribution import attribution_heatmap, tokens_html
from ropelens.plots.frequencies import (
    activation_shares,
    frequency_ladders,
    loss_curves,
    paired_differences,
)
from ropelens.plots.lesions import dose_responses, survival_map
from ropelens.plots.profiles import layer_profiles, shares_by_position
from ropelens.plots.provenance import provenance
from ropelens.plots.scores import band_heatmap, band_spectrum
from ropelens.plots.style import TEMPLATE

__all__ = [
    "TEMPLATE",
    "ablation_curves",
    "activation_shares",
    "attribution_heatmap",
    "band_heatmap",
    "band_spectrum",
    "dose_responses",
    "frequency_ladders",
    "importance_scatter",
    "layer_profiles",
    "loss_curves",
    "paired_differences",
    "provenance",
    "shares_by_position",
    "survival_map",
    "tokens_html",
]
