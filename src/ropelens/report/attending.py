"""The attention page: choose a token, and see what each band does to the keys before it."""

from __future__ import annotations

import html
from string import Template
from typing import Any

import torch
from torch import Tensor

from ropelens.plots.attribution import attribution_heatmap, attribution_parts
from ropelens.plots.style import tokens_label
from ropelens.report.finding import Results
from ropelens.report.packing import Packed, packed
from ropelens.report.site import Page, figure_json, part
from ropelens.scores import BandAttribution

RANGES = {  # wavelengths in tokens
    "fast": ("a turn within 32 tokens", 0.0, 32.0),
    "middle": ("a turn within 32 to 1,024 tokens", 32.0, 1024.0),
    "slow": ("a turn takes more than 1,024 tokens", 1024.0, float("inf")),
}
LARGEST = 350_000  # bytes of steps in one file


def attention_page(results: Results, command: str) -> tuple[Page, dict[str, Any]]:
    """Returns the page, and the files that it loads when a head is chosen."""
    entries: list[dict[str, Any]] = []
    files: dict[str, Any] = {}
    off, texts = 0.0, []
    looks: BandAttribution | None = None
    if (grid := results.grid) is not None:
        texts.append(list(grid.tokens))
        n = len(grid.tokens)
        off = max(off, grid.off)
        for layer, head in grid.heads:
            own = int(grid.bands.exists[layer].sum())
            where = {"text": len(texts) - 1, "first": 0, "last": n - 1}
            place = f"attention-{layer}-{head}"
            entries.append(
                _entry(layer, head, grid.bands.wavelength[layer, :own], where)
                | {"parts": _split(place, grid.packed[layer, head], list(range(n)), files), "name": ""}
            )
        looks = looks or grid.attribution(*grid.heads[0], n - 1)
    for attribution in results.attributions:
        looks = looks or attribution
        rows = packed(torch.cat([attribution.values, attribution.rest[:, None]], 1))
        off = max(off, rows.bound)
        texts.append(list(attribution.tokens))
        place = f"attention-query-{len(entries)}"
        where = {"text": len(texts) - 1, "first": attribution.query, "last": attribution.query}
        entries.append(
            _entry(attribution.layer, attribution.head, attribution.wavelength, where)
            | {"parts": _split(place, rows, [attribution.query], files)}
            | {
                "name": f"token {attribution.query:,} of a longer text",
                "why": attribution.settings.get("why", ""),
            }
        )
    assert looks is not None
    data = {
        "start": _start(results),
        "entries": entries,
        "texts": texts,
        "figures": {
            "bands": figure_json(attribution_heatmap(looks), command),
            "parts": figure_json(attribution_parts(looks), command),
        },
    }
    note = (
        "<p><small>Numbers are kept in steps of 1/126 of each key's largest band, or finer: no band, and no "
        f"sum of neighbouring bands, is off by more than {off:.1e} of attention.</small></p>"
    )
    body = Template(part("attention.html")).substitute(note=note)
    page = Page(
        "attention.html", "Attention", "Attention, token by token", body, {"attention": data}, "attention.js"
    )
    return page, files


def _start(results: Results) -> dict[str, int]:
    """The head and the query to begin with: the strongest look at a token that is not near."""
    grid = results.grid
    if grid is None:
        return {"entry": 0, "query": results.attributions[0].query}
    looks = [
        (value, place, query)
        for place, (layer, head) in enumerate(grid.heads)
        for query, key, value in grid.examples[layer][head]
        if query - key >= 8
    ]
    _, place, query = max(looks, default=(0.0, 0, len(grid.tokens) - 1))
    return {"entry": place, "query": query}


def _entry(layer: int, head: int, wavelength: Tensor, where: dict[str, int]) -> dict[str, Any]:
    named = [tokens_label(w) for w in wavelength.tolist()]
    ranges = []
    for name, (says, low, high) in RANGES.items():
        inside = [b for b, w in enumerate(wavelength.tolist()) if low <= w < high]
        if inside:
            ranges.append({"name": html.unescape(name), "says": says, "bands": [inside[0], inside[-1]]})
    return {"layer": layer, "head": head, "wavelengths": named, "ranges": ranges, **where}


def _split(place: str, rows: Packed, queries: list[int], files: dict[str, Any]) -> list[dict[str, Any]]:
    """Puts the rows into as many files as keep each small, whole queries in each."""
    width = rows.steps.shape[1]
    parts: list[dict[str, Any]] = []
    start = row = 0
    for i, query in enumerate(queries):
        row += query + 1
        last = i == len(queries) - 1
        if last or (row - start + queries[i + 1] + 1) * (width + 4) > LARGEST:
            file = f"{place}-{len(parts)}"
            files[file] = rows.data(start, row)
            first = parts[-1]["last"] + 1 if parts else queries[0]
            parts.append({"file": file, "first": first, "last": query})
            start = row
    return parts
