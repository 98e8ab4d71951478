"""The pages that are figures and tables: entropy, ablation, circuits."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go
import torch

from ropelens.interventions import AblationCurve
from ropelens.plots import ablation_curves, layer_profiles, shares_by_position
from ropelens.plots.circuits import corner_plot, head_bands_bars, head_score_map
from ropelens.plots.profiles import first_key_by_layer
from ropelens.report.finding import Results
from ropelens.report.site import Page, figure_place, head_link, section, table
from ropelens.scores import BandScores
from ropelens.scores.profile import shares

RANGES = {  # wavelengths in tokens
    "under 32": (0.0, 32.0),
    "32 to 512": (32.0, 512.0),
    "512 to 8,192": (512.0, 8192.0),
    "above 8,192": (8192.0, float("inf")),
}
HOW = {"zero": "set to zero", "derotate": "no longer rotated", "keys": "taken from the keys"}
SHOWN = 10

Parts = tuple[list[str], dict[str, go.Figure]]


def pages(results: Results) -> list[Page]:
    """Returns those of these pages that there are results for."""
    made = []
    if results.scores:
        metrics = {scores.metric for scores in results.scores.values()}
        label = "Entropy" if "entropy" in metrics else "Profiles"
        made.append(
            _page("profiles.html", label, f"{label} by layer and along the context", _profiles(results))
        )
    if results.curves:
        made.append(_page("ablation.html", "Ablation", "What goes without some bands?", _ablation(results)))
    if results.heads is not None or results.head_bands is not None:
        made.append(_page("circuits.html", "Circuits", "What do the heads do?", _circuits(results)))
    return made


def _page(file: str, label: str, heading: str, parts: Parts) -> Page:
    sections, figures = parts
    return Page(file, label, heading, "\n".join(sections), figures=figures)


def _profiles(results: Results) -> Parts:
    first = {name: scores for name, scores in results.scores.items() if name == scores.metric}
    first = first or results.scores
    figures = {
        "profiles": layer_profiles(
            {name.replace("_", " "): scores.profile() for name, scores in first.items()}
        )
    }
    sections = [
        section(
            "by-layer",
            "By layer",
            "Where a layer's heads have each metric: the centroid is the mean wavelength, geometric, "
            "weighted by "
            "each band's share; the effective number of bands says over how many it is spread. Lines are "
            "medians "
            "over heads, the shade holds the middle half.",
            figure_place("profiles", "Centroid and effective number of bands, by layer"),
        )
    ]
    entropy = [
        (name, s) for name, s in results.scores.items() if s.metric == "entropy" and s.first is not None
    ]
    if entropy:
        name, scores = entropy[0]
        figures["first-key"] = first_key_by_layer(scores)
        sections.append(
            section(
                "sink",
                "The first key, and the others",
                "Many heads rest on the first token. The entropy drop of a query, split into whether it "
                "looks "
                "at the first key or not, and the choice among all other keys. Below 0, attention is "
                "sharper than "
                "even; above 0, the first key takes a share that is itself uncertain.",
                figure_place("first-key", f"{html.escape(name)}: mean over heads, nats a query"),
            )
        )
    places = []
    for i, (name, scores) in enumerate(results.scores.items()):
        found = _by_position(scores)
        if found is not None:
            figures[f"along-{i}"] = found
            places.append(figure_place(f"along-{i}", f"{html.escape(name)}, by wavelength in tokens"))
    if places:
        sections.append(
            section(
                "along",
                "Along the context",
                "The same queries by how many tokens they have before them: do slow bands take over as the "
                "context grows? Shares of each metric, a line a range of wavelengths, mean over all heads.",
                f'<div class="pair">{"".join(places)}</div>',
            )
        )
    return sections, figures


def _by_position(scores: BandScores) -> go.Figure | None:
    wavelength = scores.bands.wavelength
    if scores.by_position is None or not bool((wavelength == wavelength[:1]).all()):
        return None
    by_head = shares(scores.mean_by_position().nan_to_num(0.0))
    inside = [(wavelength[0] >= low) & (wavelength[0] < high) for low, high in RANGES.values()]
    found = torch.stack([by_head[..., chosen].sum(-1).mean((1, 2)) for chosen in inside], -1)
    found[scores.span_queries == 0] = torch.nan
    return shares_by_position(found, scores.settings["edges"], list(RANGES), source=scores)


def _ablation(results: Results) -> Parts:
    figures = {f"curve-{i}": ablation_curves(c.to_frame()) for i, c in enumerate(results.curves.values())}
    return [_curve_section(i, name, curve) for i, (name, curve) in enumerate(results.curves.items())], figures


def _curve_section(i: int, name: str, curve: AblationCurve) -> str:
    loss, error = curve.baseline
    ranked = any(point.scope != "mask" for point in curve.points)
    which = "The bands that score lowest" if ranked else "Bands"
    rises: Any = curve.rises()
    rows = [
        [
            html.escape(f"{row.score}, {row.scope}"),
            f"{row.fraction:.0%}",
            f"{row.rise:+.3f} ± {row.stderr:.3f}",
        ]
        for row in rises.itertuples()
    ]
    numbers = table(["bands chosen by", "removed", "rise (nats a token)"], rows)
    return section(
        f"ablation-{i}",
        html.escape(name),
        f"{which} are {HOW.get(curve.mode, html.escape(curve.mode))}, ever more of them. "
        f"{len(curve.documents):,} documents, {int(curve.counts.sum()):,} predicted tokens; with nothing "
        f"removed "
        f"the loss is {loss:.3f} ± {error:.3f} nats a token.",
        figure_place(f"curve-{i}", "Loss by the share of bands removed; bars are one standard error"),
        f"<details><summary>The numbers</summary>{numbers}</details>",
    )


def _circuits(results: Results) -> Parts:
    sections: list[str] = []
    figures: dict[str, go.Figure] = {}
    for found in (_kinds(results.heads), _bands(results.head_bands)):
        sections += found[0]
        figures |= found[1]
    return sections, figures


def _kinds(heads: Any) -> Parts:
    if heads is None:
        return [], {}
    wanted = ("induction", "previous_token", "duplicate_token", "first_key", "copying")
    names = [name for name in wanted if name in heads and not all(value != value for value in heads[name])]
    figures = {f"heads-{name}": head_score_map(heads, name) for name in names}
    places = "".join(figure_place(f"heads-{n}", n.replace("_", " ").capitalize()) for n in names)
    sections = [
        section(
            "kinds",
            "What heads attend to",
            "On random tokens that come twice: mean attention to the token before, to the same token in "
            "the first "
            "copy, to the token that followed it there (induction), and to the first token. Copying is "
            "read from "
            "the weights: whether what a head reads is what it writes.",
            f'<div class="pair">{places}</div>',
        )
    ]
    if {"copying", "qk_through", "induction"} <= set(heads):
        figures["corner"] = _corner(heads)
        caption = "Each head by its OV and its QK eigenvalue score; the colour is its induction score"
        sections.append(
            section(
                "corner-of",
                "Induction heads, from the weights",
                "Heads that copy, and that match through a previous-token head, lie in the upper right.",
                figure_place("corner", caption),
            )
        )
    return [*sections, _strongest(heads, names)], figures


def _bands(bands: Any) -> Parts:
    if bands is None:
        return [], {}
    sections, figures = [], {}
    for kind in bands["kind"].unique().tolist() if "kind" in bands else [""]:
        mine = bands[bands["kind"] == kind] if kind else bands
        best = mine.drop_duplicates(["layer", "head"]).nlargest(3, "score")
        label = html.escape(str(kind).replace("_", " ")) or "the score"
        place = f"bands-{len(figures)}"
        figures[place] = head_bands_bars(mine.merge(best[["layer", "head"]], on=["layer", "head"]))
        sections.append(
            section(
                f"{place}-of",
                f"Which bands carry {label}",
                "How much of the head's score each band carries, and how the score changes when the head "
                "loses "
                "that band.",
                figure_place(place, "The three strongest heads"),
            )
        )
    return sections, figures


def _strongest(heads: Any, names: list[str]) -> str:
    columns = [heads.nlargest(SHOWN, name)[["layer", "head", name]].to_numpy().tolist() for name in names]
    rows = [
        [str(rank + 1)]
        + [f"{head_link(int(a), int(b), f'{int(a)}.{int(b)}')} {value:.2f}" for a, b, value in row]
        for rank, row in enumerate(zip(*columns, strict=False))
    ]
    listed = table(["rank", *(name.replace("_", " ") for name in names)], rows)
    return section(
        "strongest", "The strongest heads", "Layer.head and score; choose one to see its bands.", listed
    )


def _corner(heads: Any) -> go.Figure:
    rows = heads.sort_values(["layer", "head"])
    shape = int(rows["layer"].max()) + 1, int(rows["head"].max()) + 1
    ov, qk, induction = (
        torch.tensor(rows[name].to_numpy(), dtype=torch.float64).reshape(*shape)
        for name in ("copying", "qk_through", "induction")
    )
    best = heads.nlargest(6, "induction")
    named = list(zip(best["layer"].tolist(), best["head"].tolist(), strict=True))
    return corner_plot(ov, qk, induction, named=named, source=heads)
