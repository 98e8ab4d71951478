"""The bands of SmolLM2-135M on a small text. The scores are those of `ropelens demo`."""

from __future__ import annotations

from common import DOCS, RANGES, by_range, table
from plotly.graph_objects import Figure

import ropelens as rl
from ropelens.plots import band_heatmap, band_spectrum

PAGE = DOCS / "results" / "demo.md"
DATA = DOCS / "data" / "demo"


def tables() -> dict[str, str]:
    entropy = rl.BandScores.load(DATA / "entropy.safetensors")
    nats = entropy.mean("query")
    wavelength = entropy.bands.wavelength[0]
    header = [*RANGES, "all"]

    def row(name: str, bands) -> list[str]:
        parts = [*by_range(bands, wavelength).tolist(), bands.sum().item()]
        return [name, *(f"{part:.2f}" for part in parts)]

    layers = range(0, nats.shape[0], 5)
    by_layer = [row(f"{first} to {first + 4}", nats[first : first + 5].mean((0, 1))) for first in layers]

    total = nats.sum(-1)
    fast_share = nats[..., wavelength < 128].sum(-1) / total
    fast_share[total > -1] = 0  # heads that hardly sharpen have no share to speak of
    best = [divmod(index, nats.shape[1]) for index in fast_share.flatten().topk(6).indices.tolist()]
    heads = [row(f"{layer}.{head}", nats[layer, head]) for layer, head in best]
    return {"layers": table(["layers", *header], by_layer), "heads": table(["head", *header], heads)}


def figures() -> dict[str, Figure]:
    entropy = rl.BandScores.load(DATA / "entropy.safetensors")
    activation = rl.BandScores.load(DATA / "activation.safetensors")
    return {
        "entropy": band_heatmap(entropy),
        "activation": band_heatmap(activation, normalize="head"),
        "spectrum": band_spectrum(entropy, layer=16, head=0),
    }
