"""Small results, worked out by hand, and a report of them; the browser tests look at the same pages."""

from pathlib import Path

import pandas as pd
import torch

import lesion_example
from ropelens.bands import Bands
from ropelens.circuits import PositionalKernel
from ropelens.interventions.results import AblationCurve, Point
from ropelens.report import AttentionGrid, Results, write_report
from ropelens.report.packing import packed
from ropelens.scores import BandAttribution, BandScores

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
TOKENS = ("<s>", HOSTILE, " the\n", "</script>", " <b>end</b>")
N_LAYERS, N_HEADS, N_BANDS = 4, 3, 8
MODEL = {"shape": [N_LAYERS, N_HEADS, N_HEADS, 2 * N_BANDS], "embedding": "ab", "signature": [1.0] * N_LAYERS}
BANDS = Bands.uniform(N_LAYERS, 2 * N_BANDS, 10_000.0)  # wavelengths 6.3, 20, 63, 199, 628, 2k, 6.3k, 20k


def example_scores(metric: str, **changes) -> BandScores:
    """Entropy: -(100 layer + 10 head + band) over 100 queries; activation: its absolute value."""
    layer, head, band = (torch.arange(n).double() for n in (N_LAYERS, N_HEADS, N_BANDS))
    values = 100 * layer[:, None, None] + 10 * head[:, None] + band
    given = {
        "metric": metric,
        "bands": BANDS,
        "values": -values if metric == "entropy" else values,
        "rest": torch.zeros(N_LAYERS, N_HEADS).double(),
        "squares": values**2,
        "n_queries": 100,
        "n_pairs": torch.full((N_LAYERS,), 5050),
        "n_tokens": 100,
        "n_documents": 1,
        "residual": torch.full((N_LAYERS, N_HEADS), 2e-4).double() if metric == "entropy" else None,
        "bound": 1e-3 * values if metric == "activation" else None,
        "model": MODEL,
        "data": "c0ffee",
        "settings": {"tol": 0.001},
    }
    return BandScores(**{**given, **changes})


def example_attribution(tokens: tuple[str, ...] = TOKENS) -> BandAttribution:
    values = torch.zeros(len(tokens), N_BANDS).double()
    values[1] = 0.05
    values[2, :4], values[2, 4:] = 0.2, -0.1
    values[4, 0] = 0.2
    return BandAttribution(
        layer=2,
        head=1,
        query=len(tokens) - 1,
        inv_freq=BANDS.inv_freq[2],
        pairs=BANDS.pairs[2],
        values=values,
        rest=torch.zeros(len(tokens)).double(),
        visible=torch.ones(len(tokens), dtype=torch.bool),
        sink=None,
        tokens=tokens,
        residual=3e-6,
        model=MODEL,
        settings={"why": "A <phrase> ends here."},
    )


def example_rows(scale: float) -> torch.Tensor:
    """Query q pays key i (i + 1) parts of scale; the first half of the bands bring it, the others nothing."""
    rows = torch.zeros(len(TOKENS) * (len(TOKENS) + 1) // 2, N_BANDS + 1).double()
    keys = [key for query in range(len(TOKENS)) for key in range(query + 1)]
    rows[:, :4] = scale * (1.0 + torch.tensor(keys).double()[:, None]) / 4
    return rows


def example_grid() -> AttentionGrid:
    rows = {(2, 1): packed(example_rows(0.05)), (0, 0): packed(example_rows(0.02))}
    none: list[list[tuple[int, int, float]]] = [[] for _ in range(N_HEADS)]
    examples = [list(none) for _ in range(N_LAYERS)]
    examples[2][1] = [(4, 1, 0.5), (3, 2, 0.25)]
    return AttentionGrid(
        tokens=TOKENS,
        heads=((0, 0), (2, 1)),
        bands=BANDS,
        packed=rows,
        off=max(found.bound for found in rows.values()),
        residual=3e-6,
        examples=examples,
        made_from={"kind": "AttentionGrid", "model": MODEL, "data": "f00d", "settings": {}},
    )


def example_heads() -> pd.DataFrame:
    places = [(layer, head) for layer in range(N_LAYERS) for head in range(N_HEADS)]
    frame = pd.DataFrame(places, columns=["layer", "head"])
    for i, name in enumerate(("previous_token", "duplicate_token", "induction", "first_key", "copying")):
        frame[name] = [((5 * at + 7 * i) % 12) / 12 - (0.5 if name == "copying" else 0) for at in range(12)]
    return frame


def example_kernel() -> PositionalKernel:
    values = torch.arange(N_LAYERS * N_HEADS * 4 * N_BANDS).double().reshape(N_LAYERS, N_HEADS, 4, N_BANDS)
    rest = torch.zeros(N_LAYERS, N_HEADS).double()
    return PositionalKernel("text", BANDS, (0, 1, 2, 4), values / 100, rest, -values / 100)


def example_curve() -> AblationCurve:
    return AblationCurve(
        points=tuple(Point("activation", "model", fraction) for fraction in (0.0, 0.5)),
        sums=torch.tensor([[[20.0], [40.0]], [[25.0], [50.0]]]).double(),
        counts=torch.tensor([[10], [20]]),
        edges=(1,),
        documents=("a", "b"),
        mode="zero",
        facts={"model": MODEL, "data": {"source": "speeches"}},
    )


def example_results(**changes) -> Results:
    given = {
        "name": "tiny <model>",
        "scores": {metric: example_scores(metric) for metric in ("entropy", "activation")},
        "curves": {"zero": example_curve()},
        "attributions": [example_attribution()],
        "lesions": lesion_example.example(),
        "heads": example_heads(),
        "kernel": example_kernel(),
        "grid": example_grid(),
        "models": [("entropy.safetensors", MODEL)],
    }
    return Results(**{**given, **changes})


def write_example(out: Path, **changes) -> Path:
    return write_report(
        out,
        example_results(**changes),
        facts={"Model": "tiny & <b>random</b>"},
        command="ropelens report runs/tiny -o site",
    )
