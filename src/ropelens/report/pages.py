"""The pages of a report, from the results that there are."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from ropelens.plots import band_heatmap, band_spectrum
from ropelens.plots.circuits import kernel_heatmap, kernel_lines
from ropelens.plots.style import tokens_label
from ropelens.report import more
from ropelens.report.attending import attention_page
from ropelens.report.finding import Results
from ropelens.report.lesions import lesions_page
from ropelens.report.packing import floats, packed
from ropelens.report.site import (
    Page,
    figure_json,
    figure_place,
    head_link,
    part,
    replacing,
    section,
    table,
    write_site,
)
from ropelens.report.summary import HeadSummary, lowest_heads
from ropelens.scores import BandScores
from ropelens.scores.profile import centroid, shares

KINDS = {
    "previous_token": "looks at the token before",
    "duplicate_token": "looks at the same token, earlier",
    "induction": "looks at what followed the same token, earlier (induction)",
    "first_key": "rests on the first token",
    "copying": "writes what it reads: copying score of its OV circuit, -1 to 1",
}


def write_report(
    out: str | os.PathLike[str],
    results: Results,
    *,
    facts: Mapping[str, str] | None = None,
    command: str = "",
    keep: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the explorer: a folder of pages that need no network, whole or not at all.

    Args:
        out: The folder: a new one, an empty one, or a report, which is replaced.
        results: Of `find_results`, or put together.
        facts: What to say about where the numbers come from, before what the results say themselves.
        command: The command that makes this report, written into every figure.
        keep: Results to save beside the pages, by file name: whatever has `save`, or tables.

    Returns:
        The path of the first page.

    Raises:
        ValueError: If `out` is something else than a report, or there is nothing to show.
        OSError: If it cannot be written.
    """
    out = Path(out)
    if not results.found():
        raise ValueError("expected results to show, got none: measure some, or name a folder that has some")
    shown = {
        f"scores-{i}": _scores_data(scores, name, command)
        for i, (name, scores) in enumerate(results.scores.items())
    }
    pages: list[Page] = [_overview(results, shown)]
    data: dict[str, Any] = {}
    if results.scores:
        page, kernels = _head(results, shown, command)
        pages.append(page)
        data |= kernels
    if results.grid is not None or results.attributions:
        page, rows = attention_page(results, command)
        pages.append(page)
        data |= rows
    pages += more.pages(results)
    if results.lesions is not None:
        pages.append(lesions_page(results.lesions))
    about = {**(facts or {}), **_facts(results)}
    if command:
        about["Command of this report"] = command
    title = f"Rotary bands of {results.name}"
    with replacing(out) as folder:
        for name, result in (keep or {}).items():
            if isinstance(result, pd.DataFrame):
                result.to_csv(folder / name, index=False)
            else:
                result.save(folder / name)
        write_site(folder, title, pages, about, data, command)
    return out / pages[0].file


# Overview -----------------------------------------------------------------------------------------------


def _overview(results: Results, shown: dict[str, Any]) -> Page:
    heading = f"Which rotary frequencies does each head of {html.escape(results.name)} use?"
    contents = _contents(results)
    if not results.scores:
        return Page("index.html", "Overview", heading, f"<section>{contents}</section>")
    first = next(iter(results.scores.values()))
    bands = first.bands
    entropy = next((s for s in results.scores.values() if s.metric == "entropy"), None)
    names = list(results.scores)
    body = Template(part("overview.html")).substitute(
        name=html.escape(results.name),
        n_layers=bands.n_layers,
        n_heads=first.values.shape[1],
        n_bands=bands.n_bands,
        n_tokens=f"{first.n_tokens:,}",
        fastest=tokens_label(bands.wavelength.nan_to_num(float("inf")).min().item()),
        slowest=tokens_label(_turning(bands.wavelength).max().item()),
        findings="" if entropy is None else _findings(entropy),
        maps="\n".join(
            figure_place(f"map-{i}", html.escape(_caption(name, results.scores[name])))
            for i, name in enumerate(names)
        ),
        contents=contents,
    )
    data = shown | {"overview": {"n": len(names), **_common(results)}}
    return Page("index.html", "Overview", heading, body, data, "overview.js")


def _scores_data(scores: BandScores, name: str, command: str) -> dict[str, Any]:
    per = _per(scores)
    mean = scores.mean(per)
    profile = scores.profile()
    spread = shares(mean.mean(1))
    bands = scores.bands
    return {
        "name": name,
        "metric": scores.metric,
        "caption": _caption(name, scores),
        "values": floats(mean),
        "rest": floats(scores.rest / scores.count(per)[:, None]),
        "has_rest": [bool(n) for n in bands.n_rest.tolist()],
        "wavelengths": [[tokens_label(w) for w in row] for row in bands.wavelength.tolist()],
        "order": {
            "layers": {
                "centroid": floats(torch.stack([centroid(s, bands, i) for i, s in enumerate(spread)])),
                "effective": floats(torch.special.entr(spread).sum(-1).exp()),
            },
            "heads": {
                "centroid": floats(torch.tensor(profile["centroid"].to_numpy())),
                "effective": floats(torch.tensor(profile["effective_bands"].to_numpy())),
                "top": [tokens_label(w) for w in profile["top_wavelength"]],
                "share": floats(torch.tensor(profile["top_share"].to_numpy())),
            },
        },
        "figures": {
            "map": figure_json(band_heatmap(scores, head=0, per=per), command),
            "spectrum": figure_json(band_spectrum(scores, 0, 0, per=per), command),
        },
    }


def _findings(entropy: BandScores) -> str:
    rows = [_finding(summary) for summary in lowest_heads(entropy, 8)]
    header = ("head", "entropy drop", "sharpened by")
    return section(
        "findings",
        "The sharpest heads",
        "How far a head's attention is from looking at all visible tokens evenly, in nats a query, and the "
        "wavelengths (in tokens) of the bands that sharpen it most, with their share of all sharpening.",
        table(header, rows),
    )


def _finding(summary: HeadSummary) -> list[str]:
    carriers = " ".join(
        f"<span>{tokens_label(w)} <small>({share:.0%})</small></span>" for w, share in summary.carriers
    )
    return [head_link(summary.layer, summary.head), f"{summary.drop:.2f}", carriers]


def _contents(results: Results) -> str:
    found = "".join(f"<li>{html.escape(phrase)}</li>" for phrase in results.found())
    missing = "".join(
        f"<li>{html.escape(name)}: <code>{html.escape(command)}</code></li>"
        for name, command in results.missing().items()
    )
    lacking = f"<h3>What is missing, and how to make it</h3><ul>{missing}</ul>" if missing else ""
    return f"<ul>{found}</ul>{lacking}"


# One head -----------------------------------------------------------------------------------------------


def _head(results: Results, shown: dict[str, Any], command: str) -> tuple[Page, dict[str, Any]]:
    names = list(results.scores)
    kernels = _kernels(results, command)
    body = Template(part("head.html")).substitute(
        spectra="\n".join(
            figure_place(f"spectrum-{i}", html.escape(_caption(name, results.scores[name])))
            for i, name in enumerate(names)
        ),
        what='<div id="kinds"></div>' if results.heads is not None else _absent(results, "scores of heads"),
        examples=(
            "<p>On a short text, the queries of this head that look most at one token, the first token and "
            'themselves aside.</p><ol id="examples" class="keys"></ol>'
            if results.grid is not None
            else _absent(results, "attention by token")
        ),
        kernel=_kernel_text(results) if kernels else _absent(results, "positional kernels"),
    )
    head = {"n": len(names), "start": _start(results), **_common(results), **_examples(results)}
    data = shown | {"head": head | {"kinds": _kinds(results)}}
    return Page("head.html", "Heads", "One head, band by band", body, data, "head.js"), kernels


def _start(results: Results) -> list[int]:
    """The head to begin with: the sharpest."""
    entropy = next((s for s in results.scores.values() if s.metric == "entropy"), None)
    if entropy is None:
        return [0, 0]
    sharpest = lowest_heads(entropy, 1)[0]
    return [sharpest.layer, sharpest.head]


def _kinds(results: Results) -> list[dict[str, Any]]:
    frame = results.heads
    if frame is None:
        return []
    rows = frame.sort_values(["layer", "head"])
    return [
        {"name": name.replace("_", " "), "says": says, "values": floats(torch.tensor(rows[name].to_numpy()))}
        for name, says in KINDS.items()
        if name in rows
    ]


def _examples(results: Results) -> dict[str, Any]:
    if results.grid is None:
        return {"examples": [], "tokens": [], "shown": []}
    return {
        "examples": results.grid.examples,
        "tokens": list(results.grid.tokens),
        "shown": [f"{layer}.{head}" for layer, head in results.grid.heads],
    }


def _kernels(results: Results, command: str) -> dict[str, Any]:
    """A file a layer, and one with the looks of the figures."""
    kernel = results.kernel
    if kernel is None:
        return {}
    frame = kernel.to_frame(0, 0)
    looks = {
        "heatmap": figure_json(kernel_heatmap(frame), command),
        "lines": figure_json(kernel_lines(frame), command),
    }
    found: dict[str, Any] = {"kernel": {"figures": looks, "distances": list(kernel.distances)}}
    for layer in range(kernel.values.shape[0]):
        own = int(kernel.bands.exists[layer].sum())
        both = {"kernel": kernel.values, "measured": kernel.measured}
        here: dict[str, Any] = {"n_bands": own}
        for name, values in both.items():
            if values is not None:
                rows = values[layer, :, :, :own].nan_to_num(0.0)
                here[name] = packed(rows.reshape(-1, own)).data()
                here[f"{name}_total"] = floats(rows.sum(-1))
        found[f"kernel-{layer}"] = here
    return found


def _kernel_text(results: Results) -> str:
    assert results.kernel is not None
    choice = (
        ""
        if results.kernel.measured is None
        else '<p class="controls"><label>Show <select id="which-kernel"><option value="kernel">mean query, '
        'mean key</option><option value="measured">measured</option></select></label></p>'
    )
    return (
        "<p>The score between the head's mean query and its mean key, band by band, as the distance between "
        "them grows: what position alone does. What was measured over all pairs at a distance has content in "
        "it too.</p>"
        f'{choice}<div class="pair">{figure_place("kernel-map", "Distance x band, logit units")}'
        f"{figure_place('kernel-lines', 'All bands together, logit units')}</div>"
    )


def _absent(results: Results, what: str) -> str:
    command = results.missing().get(what, "")
    return f"<p>This is not in the report: <code>{html.escape(command)}</code> makes it.</p>"


# Shared -------------------------------------------------------------------------------------------------


def _common(results: Results) -> dict[str, Any]:
    n_layers, n_heads = results.shape
    return {"n_layers": n_layers, "n_heads": n_heads}


def _per(scores: BandScores) -> str:
    return {"activation": "pair", "norm_product": "pair", "fisher": "document", "taylor": "document"}.get(
        scores.metric, "query"
    )


def _caption(name: str, scores: BandScores) -> str:
    what = {
        "entropy": "Entropy drop, nats a query",
        "activation": "Activation, logit units a query-key pair",
        "norm_product": "Norm product, logit units a query-key pair",
        "fisher": "Fisher information, squared nats a document",
        "taylor": "Loss change without the band, to first order, nats a document",
    }.get(scores.metric, name)
    of = f"{scores.n_tokens:,} tokens"
    return f"{what} ({of}{'' if name == scores.metric else ', ' + name.split(', ')[-1]})"


def _turning(wavelength: Float64[Tensor, "layer band"]) -> Tensor:
    return wavelength.where(wavelength.isfinite(), 0.0)


def _facts(results: Results) -> dict[str, str]:
    said: dict[str, str] = {}
    if results.models:
        fingerprint = results.models[0][1]
        n_layers, n_heads, n_kv, d_head = (*fingerprint.get("shape", []), *["?"] * 4)[:4]
        said["Model, fingerprint"] = (
            f"embedding {fingerprint.get('embedding', 'unknown')}; {n_layers} layers, {n_heads} heads, "
            f"{n_kv} key-value heads, {d_head} dims a head"
        )
    for name, scores in results.scores.items():
        settings = ", ".join(
            f"{k} {json.dumps(v) if isinstance(v, list) else v}" for k, v in scores.settings.items()
        )
        said[f"{name[:1].upper()}{name[1:]}"] = (
            f"{scores.n_tokens:,} tokens, {scores.n_documents:,} document{'s' * (scores.n_documents != 1)}; "
            f"data {scores.data or 'unknown'}; {settings or 'no settings'}"
        )
        said |= _residual(name, scores)
    for name, curve in results.curves.items():
        said[f"Ablation, {name}"] = (
            f"{curve.mode}; {len(curve.documents):,} documents, {int(curve.counts.sum()):,} predicted tokens"
        )
    if results.grid is not None:
        said["Attention, worst key"] = f"bands miss the attention by {results.grid.residual:.1e}"
    if results.commands:
        said["Commands of the results"] = "; ".join(dict.fromkeys(results.commands))
    return said


def _residual(name: str, scores: BandScores) -> dict[str, str]:
    title = f"{name[:1].upper()}{name[1:]}"
    if scores.residual is not None and scores.metric == "entropy":
        return {f"{title}, worst row": f"bands miss log N - H by {scores.residual.max():.1e} nats"}
    if scores.bound is not None:
        relative = (scores.bound.nansum(-1) / scores.values.nansum(-1)).nan_to_num(0.0).max().item()
        worst = f"{relative:.1e} of a head's sum" if relative else "exact"
        return {f"{title}, error bound": worst}
    return {}
