"""Small results, worked out by hand, and a page of them; the browser tests look at the same page."""

from pathlib import Path

import torch

from ropelens.bands import Bands
from ropelens.report import write_page
from ropelens.scores import BandAttribution, BandScores

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
TOKENS = ("<s>", HOSTILE, " the\n", "</script>", " <b>end</b>")
N_LAYERS, N_HEADS, N_BANDS = 4, 3, 8


def example_scores(metric: str) -> BandScores:
    """Entropy: -(100 layer + 10 head + band) over 100 queries; activation: its absolute value."""
    layer, head, band = (torch.arange(n).double() for n in (N_LAYERS, N_HEADS, N_BANDS))
    values = 100 * layer[:, None, None] + 10 * head[:, None] + band
    return BandScores(
        metric=metric,
        bands=Bands.uniform(N_LAYERS, 2 * N_BANDS, 10_000.0),
        values=-values if metric == "entropy" else values,
        rest=torch.zeros(N_LAYERS, N_HEADS).double(),
        squares=values**2,
        n_queries=100,
        n_pairs=torch.full((N_LAYERS,), 5050),
        n_tokens=100,
        n_documents=1,
        residual=torch.full((N_LAYERS, N_HEADS), 2e-4).double() if metric == "entropy" else None,
        bound=1e-3 * values if metric == "activation" else None,
    )


def example_attribution(tokens: tuple[str, ...] = TOKENS) -> BandAttribution:
    bands = Bands.uniform(N_LAYERS, 2 * N_BANDS, 10_000.0)
    values = torch.zeros(len(tokens), N_BANDS).double()
    values[1] = 0.05
    values[2, :4], values[2, 4:] = 0.2, -0.1
    values[4, 0] = 0.2
    return BandAttribution(
        layer=2,
        head=1,
        query=len(tokens) - 1,
        inv_freq=bands.inv_freq[2],
        pairs=bands.pairs[2],
        values=values,
        rest=torch.zeros(len(tokens)).double(),
        visible=torch.ones(len(tokens), dtype=torch.bool),
        sink=None,
        tokens=tokens,
        residual=3e-6,
    )


def write_example(out: Path, **changes) -> Path:
    given = {
        "out": out,
        "name": "tiny <model>",
        "entropy": example_scores("entropy"),
        "activation": example_scores("activation"),
        "attribution": example_attribution(),
        "provenance": {"Model": "tiny & <b>random</b>", "Command": "ropelens demo"},
    }
    return write_page(**{**given, **changes})
