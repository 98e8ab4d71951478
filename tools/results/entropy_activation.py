"""Where SmolLM2-135M attends by frequency, on 300,000 tokens of speeches.

The data come from `python tools/results/entropy_activation.py`, which takes them from the folders that
the commands on the page fill.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
from common import DOCS, RANGES, by_range, table
from plotly.graph_objects import Figure
from scipy import stats
from torch import Tensor

import ropelens as rl
from ropelens.plots import band_heatmap, layer_profiles, shares_by_position
from ropelens.scores.profile import shares

PAGE = DOCS / "results" / "entropy_activation.md"
DATA = DOCS / "data" / "entropy_activation"
METRICS = ("entropy", "activation")
LAYERS = {f"{first} to {min(first + 4, 28)}": range(first, min(first + 5, 29)) for first in range(0, 29, 5)}
LAYERS |= {"29": range(29, 30)}
OCTAVES = {
    "under 512": (0, 512),
    "512 to 1,024": (512, 1024),
    "1,024 to 2,048": (1024, 2048),
    "2,048 to 4,096": (2048, 4096),
    "4,096 to 8,192": (4096, 8192),
    "above 8,192": (8192, float("inf")),
}


def load(name: str) -> rl.BandScores:
    return rl.BandScores.load(DATA / f"{name}.safetensors")


def layer_statistics(scores: rl.BandScores) -> pd.DataFrame:
    """Returns a row a group of layers: shares of the ranges (mean over heads), medians over heads."""
    parts = by_range(shares(scores.values), scores.bands.wavelength[0])
    profile = scores.profile()
    rows = []
    for name, layers in LAYERS.items():
        heads = profile[profile["layer"].isin(layers)]
        share = dict(zip(RANGES, parts[list(layers)].mean((0, 1)).tolist(), strict=True))
        rows.append({"layers": name, **share, **heads[["centroid", "effective_bands"]].median()})
    return pd.DataFrame(rows)


def thirds(frame: pd.DataFrame, column: str) -> list[pd.Series]:
    return [frame[frame["layer"].isin(range(first, first + 10))][column] for first in (0, 10, 20)]


def claims() -> str:
    rows = []
    for metric in METRICS:
        scores = load(metric)
        frame = scores.profile()
        frame["slow"] = by_range(shares(scores.values), scores.bands.wavelength[0])[..., -1].flatten().numpy()
        for column, what in (("effective_bands", "effective bands"), ("slow", "share above 8,192")):
            cells = []
            for part in thirds(frame, column):
                cells.append(f"{part.mean():.2f} ± {part.sem():.2f}")
            last = frame[frame["layer"] == 29][column]
            rows.append([f"{metric}: {what}", *cells, f"{last.mean():.2f} ± {last.sem():.2f}"])
        top = [*thirds(frame, "top_share"), frame[frame["layer"] == 29]["top_share"]]
        dominated = [f"{(share > 0.5).mean():.0%}" for share in top]
        rows.append([f"{metric}: heads whose top band has over half", *dominated])
        total = scores.mean("query" if metric == "entropy" else "pair").sum(-1)
        size = [total[a:b].mean().item() for a, b in ((0, 10), (10, 20), (20, 30), (29, 30))]
        unit = "nats a query" if metric == "entropy" else "logits a pair"
        rows.append([f"{metric}: {unit}", *(f"{x:.2f}" for x in size)])
    return table(["", "layers 0 to 9", "10 to 19", "20 to 29", "layer 29"], rows)


def layer_table(metric: str) -> str:
    frame = layer_statistics(load(metric))
    rows = [
        [
            row["layers"],
            *(f"{row[name]:.1%}" for name in RANGES),
            f"{row['centroid']:,.0f}",
            f"{row['effective_bands']:.1f}",
        ]
        for row in frame.to_dict("records")
    ]
    return table(["layers", *RANGES, "centroid (tokens)", "effective bands"], rows)


def halves() -> str:
    frame = pd.read_csv(DATA / "halves.csv")
    rows = []
    for metric, part in frame.groupby("metric", sort=False):
        one, two = (half.reset_index(drop=True) for _, half in part.groupby("shard"))
        share = (one[list(RANGES)] - two[list(RANGES)]).abs().max().max()
        ratio = (one["centroid"] / two["centroid"]).apply(lambda x: max(x, 1 / x)).max() - 1
        spread = (one["effective_bands"] - two["effective_bands"]).abs().max()
        rows.append([metric, f"{100 * share:.2f} points", f"{ratio:.1%}", f"{spread:.2f}"])
    return table(["metric", "share of a range", "centroid", "effective bands"], rows)


def first_key() -> str:
    """Returns the part of the first key, and what the bands of a head share without it."""
    entropy, activation = load("entropy"), load("activation")
    assert entropy.first is not None
    assert activation.first is not None
    later = entropy.without_first()
    parts = by_range(shares(later.values), later.bands.wavelength[0])
    spread = later.profile()
    whole = entropy.mean("query").sum(-1)
    first = entropy.first.sum(-1) / entropy.n_queries
    pair = activation.mean("pair").sum(-1)
    first_pair = activation.first.sum(-1) / activation.n_queries
    rows = []
    for name, layers in LAYERS.items():
        chosen = list(layers)
        heads = spread[spread["layer"].isin(layers)]
        rows.append(
            [
                name,
                f"{whole[chosen].mean():.2f}",
                f"{first[chosen].mean():+.2f}",
                f"{parts[chosen][..., -1].mean():.1%}",
                f"{heads['effective_bands'].median():.1f}",
                f"{(first_pair[chosen].sum() / pair[chosen].sum()).item():.2f}",
            ]
        )
    header = ["layers", "drop", "first key or not", "above 8,192 without it", "effective bands without it"]
    return table([*header, "first key's pair, activation"], rows)


def position_shares(scores: rl.BandScores) -> tuple[Tensor, list[int]]:
    """Returns the shares of the ranges at each span of positions, mean over heads, and the spans' edges."""
    assert scores.by_position is not None
    parts = by_range(shares(scores.by_position), scores.bands.wavelength[0]).mean((1, 2))
    parts[parts.sum(-1) < 0.5] = torch.nan  # a span without queries
    return parts, list(scores.settings["edges"])


def positions() -> str:
    rows = []
    for metric in METRICS:
        parts, edges = position_shares(load(metric))
        starts = [0, *edges]
        for start, part in zip(starts, parts.tolist(), strict=True):
            if part[0] == part[0]:
                rows.append([f"{metric}, from {start:,}", *(f"{share:.1%}" for share in part)])
    return table(["query at", *RANGES], rows)


def long() -> str:
    rows = []
    for metric in METRICS:
        scores = load(f"long_{metric}")
        assert scores.by_position is not None
        early = [start < 2048 for start in (0, *scores.settings["edges"])]
        late = [not is_early for is_early in early]
        wavelength = scores.bands.wavelength[0]
        for name, spans in (("below 2,048", early), ("2,048 to 8,191", late)):
            share = shares(scores.by_position[spans].sum(0)).mean((0, 1))
            chosen = [(wavelength >= low) & (wavelength < high) for low, high in OCTAVES.values()]
            rows.append([f"{metric}, queries {name}", *(f"{share[c].sum():.1%}" for c in chosen)])
    return table(["", *OCTAVES], rows)


def fisher() -> str:
    scores = load("fisher")
    part = by_range(shares(scores.values), scores.bands.wavelength[0])
    rows = [
        [name, *(f"{share:.1%}" for share in part[list(layers)].mean((0, 1)).tolist())]
        for name, layers in LAYERS.items()
    ]
    return table(["layers", *RANGES], rows)


def agreement() -> str:
    """Returns how Fisher information ranks bands beside the other metrics, all importances by head."""
    mine = load("fisher").importance("head").flatten().numpy()
    rows = []
    for metric in (*METRICS, "norm_product"):
        theirs = load(metric).importance("head").flatten().numpy()
        rank = stats.spearmanr(mine, theirs).statistic
        rows.append([metric, f"{rank:.2f}", f"{stats.pearsonr(mine, theirs).statistic ** 2:.2f}"])
    return table(["Fisher against", "Spearman", "R² of a line"], rows)


def runs() -> str:
    rows = []
    for name, what in (("run", "speeches"), ("long_run", "long windows"), ("fisher_run", "Fisher")):
        facts = json.loads((DATA / f"{name}.json").read_text())
        rows.append([what, f"{facts['tokens']:,}", facts["windows"], ", ".join(facts["metrics"])])
    return table(["run", "tokens", "windows", "metrics"], rows)


def tables() -> dict[str, str]:
    return {
        "runs": runs(),
        "claims": claims(),
        "entropy": layer_table("entropy"),
        "activation": layer_table("activation"),
        "halves": halves(),
        "first": first_key(),
        "positions": positions(),
        "long": long(),
        "fisher": fisher(),
        "agreement": agreement(),
    }


def figures() -> dict[str, Figure]:
    entropy, activation = load("entropy"), load("activation")
    parts, edges = position_shares(entropy)
    return {
        "speeches_entropy": band_heatmap(entropy),
        "speeches_activation": band_heatmap(activation, normalize="head"),
        "speeches_layers": layer_profiles({m: load(m).profile() for m in METRICS}),
        "speeches_positions": shares_by_position(parts, edges, list(RANGES)),
    }


def gather(root: Path) -> None:
    """Copies what the page needs from the folders of the runs."""
    DATA.mkdir(parents=True, exist_ok=True)
    for folder, prefix, metrics in (
        ("sotu", "", ("entropy", "activation", "norm_product")),
        ("sotu-long", "long_", METRICS),
        ("sotu-fisher", "", ("fisher",)),
    ):
        for metric in metrics:
            source, target = root / folder / f"{metric}.safetensors", DATA / f"{prefix}{metric}.safetensors"
            if prefix:  # of long windows the page shows positions only
                dropped = dict.fromkeys(("first", "first_rest", "later_squares", "later_rest_squares"))
                replace(rl.BandScores.load(source), **dropped).save(target)
            else:
                shutil.copy(source, target)
        name = {"sotu": "run", "sotu-long": "long_run", "sotu-fisher": "fisher_run"}[folder]
        shutil.copy(root / folder / "run.json", DATA / f"{name}.json")
    parts = []
    for shard in (0, 1):
        for metric in METRICS:
            scores = rl.BandScores.load(root / f"sotu-{shard}" / f"{metric}.safetensors")
            parts.append(layer_statistics(scores).assign(metric=metric, shard=shard))
    pd.concat(parts).to_csv(DATA / "halves.csv", index=False, float_format="%.8g")


if __name__ == "__main__":
    gather(Path("runs"))
