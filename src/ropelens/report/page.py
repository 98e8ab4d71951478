"""The explorer: entropy, activation and one attribution as a page that needs no network."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import torch
from jaxtyping import Float64
from plotly.offline import get_plotlyjs
from torch import Tensor

from ropelens.plots import attribution_heatmap, band_heatmap, band_spectrum, tokens_html
from ropelens.plots.scores import colour_range
from ropelens.plots.style import BLUE, DIVERGING, DIVERGING_DARK, ORANGE, tokens_label
from ropelens.report.summary import HeadSummary, lowest_heads
from ropelens.scores import BandAttribution, BandScores

_RANGES = ((0.0, 10.0), (10.0, 100.0), (100.0, 1000.0), (1000.0, float("inf")))


def write_page(
    out: Path,
    name: str,
    entropy: BandScores,
    activation: BandScores,
    attribution: BandAttribution,
    provenance: Mapping[str, str],
    why: str = "",
) -> Path:
    """Writes `index.html` into a folder, and `plotly.min.js` beside it.

    Args:
        out: The folder; it is made if needed.
        name: The model's name.
        provenance: What to say about where the numbers come from, in this order. The residuals are
            added at the end.
        why: Why this query and head are shown, in a sentence.

    Returns:
        The path of the page.
    """
    provenance = {**provenance, **_residuals(entropy, activation, attribution)}
    page = Template(part("page.html")).substitute(
        name=html.escape(name),
        css=part("page.css"),
        js=part("page.js"),
        n_layers=entropy.bands.n_layers,
        n_heads=entropy.values.shape[1],
        n_bands=entropy.bands.n_bands,
        n_tokens=f"{entropy.n_tokens:,}",
        fastest=tokens_label(entropy.bands.wavelength.nan_to_num(float("inf")).min().item()),
        slowest=tokens_label(entropy.bands.wavelength.nan_to_num(0.0).max().item()),
        findings="\n".join(_finding(summary) for summary in lowest_heads(entropy, 8)),
        query=_query(attribution, why),
        tokens=tokens_html(attribution),
        provenance="\n".join(
            f"<div><dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd></div>"
            for key, value in provenance.items()
        ),
        data=script_json(_data(entropy, activation, attribution)),
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
    path = out / "index.html"
    path.write_text(page, encoding="utf-8")
    return path


def _data(entropy: BandScores, activation: BandScores, attribution: BandAttribution) -> dict[str, Any]:
    """What the page's script draws: three figures' looks, and the numbers for every head."""
    layer, head = attribution.layer, attribution.head
    figures = {"attribution": attribution_heatmap(attribution)}
    views = {}
    for scores, per in ((entropy, "query"), (activation, "pair")):
        figures[f"heat-{scores.metric}"] = band_heatmap(scores, head=head, per=per)
        figures[f"spectrum-{scores.metric}"] = band_spectrum(scores, layer, head, per=per)
        mean = scores.mean(per)
        views[scores.metric] = [_view(mean.mean(1)), *(_view(mean[:, h]) for h in range(mean.shape[1]))]
    return {
        "figures": {name: json.loads(figure.to_json() or "") for name, figure in figures.items()},
        "views": views,
        "diverging": {"light": DIVERGING, "dark": DIVERGING_DARK},
        "colours": {"below": BLUE, "above": ORANGE},
        "layer": layer,
        "head": head,
        "n_layers": entropy.bands.n_layers,
        "n_heads": entropy.values.shape[1],
        "groups": _groups(attribution),
    }


def _view(values: Float64[Tensor, "layer band"]) -> dict[str, Any]:
    return {"z": [_numbers(row) for row in values], "range": colour_range(values)}


def _groups(attribution: BandAttribution) -> list[dict[str, Any]]:
    """The keys' attention, and how much of it bands of each range of wavelengths brought."""
    groups = [{"name": "all bands: the attention itself", "values": _numbers(attribution.pattern)}]
    for low, high in _RANGES:
        inside = (attribution.wavelength >= low) & (attribution.wavelength < high)
        if inside.any():
            limits = f"{low:,.0f} to {high:,.0f}" if high < float("inf") else f"{low:,.0f} and more"
            n_bands = int(inside.sum())
            name = f"{n_bands} band{'s' * (n_bands > 1)} of {limits} tokens a turn"
            groups.append({"name": name, "values": _numbers(attribution.values[:, inside].sum(1))})
    return groups


def _query(attribution: BandAttribution, why: str) -> str:
    pattern = attribution.pattern
    strongest = [
        f"<li><q>{_one_line(attribution.tokens[key])}</q> at {key}: {value:.0%}</li>"
        for value, key in zip(*(t.tolist() for t in pattern.topk(min(5, len(pattern)))), strict=True)
        if value >= 0.005  # less would read 0%
    ]
    return (
        f"<p>Layer {attribution.layer}, head {attribution.head}; the query is the token "
        f"<q>{_one_line(attribution.tokens[-1])}</q> at position {attribution.query:,} (outlined). "
        f"{html.escape(why)} The keys that receive most of its attention:</p>"
        f"<ol class='keys'>{''.join(strongest)}</ol>"
    )


def _finding(summary: HeadSummary) -> str:
    carriers = " ".join(
        f"<span>{tokens_label(w)} <small>({share:.0%})</small></span>" for w, share in summary.carriers
    )
    return (
        f'<tr><th scope="row"><button type="button" data-layer="{summary.layer}" data-head="{summary.head}">'
        f"layer {summary.layer}, head {summary.head}</button></th>"
        f"<td>{summary.drop:.2f}</td><td>{carriers}</td></tr>"
    )


def _one_line(token: str) -> str:
    return html.escape(token.replace("\n", "⏎"))


def _residuals(entropy: BandScores, activation: BandScores, attribution: BandAttribution) -> dict[str, str]:
    said = {}
    if entropy.residual is not None:
        said["Entropy, worst row"] = f"bands miss log N - H by {entropy.residual.max():.1e} nats"
    if activation.bound is not None:
        relative = (activation.bound.nansum(-1) / activation.values.nansum(-1)).nan_to_num(0.0).max().item()
        said["Activation, error bound"] = f"{relative:.1e} of a head's sum" if relative else "exact"
    said["Attribution, worst key"] = f"bands miss the attention by {attribution.residual:.1e}"
    return said


def _numbers(values: Float64[Tensor, "*any"]) -> list[float | None]:
    """Four digits are more than a colour or a hover text can show."""
    return [None if value.isnan() else float(f"{value.item():.4g}") for value in torch.unbind(values)]


def script_json(data: dict[str, Any]) -> str:
    """JSON that can stand inside a script element: no `</script>` nor `<!--` can appear in it."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def part(name: str) -> str:
    """Returns a file that lies beside this one."""
    return (files("ropelens.report") / name).read_text(encoding="utf-8")
