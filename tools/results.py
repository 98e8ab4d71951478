"""Makes the pictures and tables of README and docs from the scores in docs/data.

The scores are those of `ropelens demo`: results/demo/*.safetensors. Pictures need a Chromium.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ropelens as rl
from ropelens.plots import band_heatmap, band_spectrum

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "results.md"
RANGES = [(0, 32), (32, 512), (512, 8192), (8192, float("inf"))]  # wavelengths in tokens


def tables(entropy: rl.BandScores) -> dict[str, str]:
    """Returns the tables of docs/results.md by name, as Markdown."""
    nats = entropy.mean("query")
    wavelength = entropy.bands.wavelength[0]
    columns = [(wavelength >= low) & (wavelength < high) for low, high in RANGES]
    names = ["under 32", "32 to 512", "512 to 8,192", "above 8,192"]
    header = f"| {' | '.join(names)} | all |\n"

    by_layer = "| layers | " + header[2:] + "| --- |" + " ---: |" * (len(names) + 1) + "\n"
    for first in range(0, nats.shape[0], 5):
        rows = nats[first : first + 5].mean((0, 1))
        parts = [rows[c].sum().item() for c in columns] + [rows.sum().item()]
        by_layer += f"| {first} to {first + 4} | " + " | ".join(f"{p:.2f}" for p in parts) + " |\n"

    total = nats.sum(-1)
    fast_share = nats[..., wavelength < 128].sum(-1) / total
    fast_share[total > -1] = 0  # heads that hardly sharpen have no share to speak of
    heads = "| head | " + header[2:] + "| --- |" + " ---: |" * (len(names) + 1) + "\n"
    for index in fast_share.flatten().topk(6).indices.tolist():
        layer, head = divmod(index, nats.shape[1])
        parts = [nats[layer, head, c].sum().item() for c in columns] + [total[layer, head].item()]
        heads += f"| {layer}.{head} | " + " | ".join(f"{p:.2f}" for p in parts) + " |\n"
    return {"layers": by_layer, "heads": heads}


def filled(page: str, new: dict[str, str]) -> str:
    """Returns a page with each table between its own marks replaced."""
    for name, table in new.items():
        before, mark, after = page.partition(f"<!-- {name} -->\n")
        _, end, after = after.partition("<!-- end -->")
        if not mark or not end:
            raise ValueError(f"the page has no place marked <!-- {name} --> ... <!-- end -->")
        page = f"{before}{mark}\n{table}\n{end}{after}"
    return page


def main() -> None:
    entropy = rl.BandScores.load(DOCS / "data" / "entropy.safetensors")
    activation = rl.BandScores.load(DOCS / "data" / "activation.safetensors")
    PAGE.write_text(filled(PAGE.read_text(), tables(entropy)))
    assets = DOCS / "assets"
    assets.mkdir(exist_ok=True)
    for name, figure in {
        "entropy": band_heatmap(entropy),
        "activation": band_heatmap(activation, normalize="head"),
        "spectrum": band_spectrum(entropy, layer=16, head=0),
    }.items():
        figure.layout.updatemenus = ()  # a picture has no menu to open
        figure.update_yaxes(title_standoff=12, automargin=True)
        figure.write_image(assets / f"{name}.png", width=900, scale=1.5)
        print(f"docs/assets/{name}.png")


if __name__ == "__main__":
    sys.exit(main())
