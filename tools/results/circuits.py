"""The circuits of SmolLM2-135M: which heads are what, and with which bands. From tools/record_circuits.py."""

from __future__ import annotations

import pandas as pd
import torch
from common import DOCS, RANGES, table
from plotly.graph_objects import Figure
from scipy import stats

from ropelens.plots.circuits import corner_plot, head_bands_bars, score_histogram

PAGE = DOCS / "results" / "circuits.md"
DATA = DOCS / "data" / "circuits"
KINDS = {"induction": "induction", "previous_token": "previous-token"}
SHOWN = 6


def read(name: str) -> pd.DataFrame:
    return pd.read_csv(DATA / f"{name}.csv")


def tables() -> dict[str, str]:
    heads, bands, alone, together = (read(name) for name in ("heads", "bands", "ablation", "circuit"))
    return {
        "induction": induction(heads.nlargest(10, "induction")),
        "previous": previous(heads.nlargest(10, "previous_token")),
        "rest": resting(heads.nlargest(10, "first_key")),
        "bands": by_range(bands),
        "alone": ablated_alone(alone),
        "together": ablated_together(together),
    }


def induction(rows: pd.DataFrame) -> str:
    columns = ["matched_1", "matched_2", "matched_3", "matched_4", "copying", "qk_through", "k_composition"]
    header = [
        "head",
        "score",
        *(f"matched {m}" for m in (1, 2, 3, 4)),
        "OV",
        "QK through",
        "K-composition",
        "with",
    ]
    lines = [
        [f"{int(r['layer'])}.{int(r['head'])}", f"{r['induction']:.2f} ± {r['induction_stderr']:.2f}"]
        + [f"{r[column]:.2f}" for column in columns]
        + [r["k_sender"]]
        for _, r in rows.iterrows()
    ]
    return table(header, lines)


def previous(rows: pd.DataFrame) -> str:
    lines = [
        [
            f"{int(r['layer'])}.{int(r['head'])}",
            *(f"{r[c]:.2f}" for c in ("previous_token", "first_key", "copying")),
        ]
        for _, r in rows.iterrows()
    ]
    return table(["head", "score", "first key", "OV"], lines)


def resting(rows: pd.DataFrame) -> str:
    lines = [
        [f"{int(r['layer'])}.{int(r['head'])}", *(f"{r[c]:.2f}" for c in ("first_key", "first_value"))]
        for _, r in rows.iterrows()
    ]
    return table(["head", "first key", "its value"], lines)


def by_range(bands: pd.DataFrame) -> str:
    """What the bands of each range carry, and the band that the score falls most without."""
    lines = []
    for (kind, layer, head), rows in bands.groupby(["kind", "layer", "head"], sort=False):
        worst = rows.loc[rows["change"].idxmin()]
        carried = [
            rows["attribution"][(rows["wavelength"] >= low) & (rows["wavelength"] < high)].sum()
            for low, high in RANGES.values()
        ]
        lines.append(
            [
                f"{layer}.{head}, {KINDS[str(kind)]}",
                f"{rows['score'].iloc[0]:.2f}",
                *(f"{c:.2f}" for c in carried),
                f"{worst['wavelength']:,.0f}",
                f"{worst['score']:.2f} → {worst['without']:.2f}",
            ]
        )
    return table(["head", "score", *RANGES, "falls most without (tokens)", "to"], lines)


def interval(differences: pd.Series) -> str:
    """Mean and 95% interval of paired differences, by Student's t."""
    found = torch.tensor(differences.tolist(), dtype=torch.float64)
    half = stats.t.ppf(0.975, len(found) - 1) * float(found.std()) / len(found) ** 0.5
    return f"{float(found.mean()):.3f} [{float(found.mean()) - half:.3f}, {float(found.mean()) + half:.3f}]"


def ablated_alone(rows: pd.DataFrame) -> str:
    lines = []
    for (kind, n), group in rows.groupby(["kind", "n_bands"], sort=False):
        by_sequence = group.groupby("sequence")[["intact", "without_own", "without_others"]].mean()
        heads = group.groupby(["layer", "head"])[["without_own", "without_others"]].mean()
        difference = by_sequence["without_others"] - by_sequence["without_own"]
        lines.append(
            [
                f"{KINDS[str(kind)]}, {n} bands",
                *(f"{by_sequence[c].mean():.3f}" for c in ("intact", "without_own", "without_others")),
                interval(difference),
                f"{int((heads['without_own'] < heads['without_others']).sum())} of {len(heads)}",
            ]
        )
    header = [
        "heads",
        "score",
        "without theirs",
        "without others",
        "difference, 95% interval",
        "heads it holds for",
    ]
    return table(header, lines)


def ablated_together(rows: pd.DataFrame) -> str:
    intact = rows[rows["choice"] == "none"].set_index("sequence")
    lines = [["nothing", *(f"{intact[c].mean():.2f}" for c in ("induction", "loss_second_copy")), "", ""]]
    for kind in KINDS:
        own = rows[(rows["ablated_in"] == kind) & (rows["choice"] == "own")].set_index("sequence")
        other = rows[(rows["ablated_in"] == kind) & rows["choice"].str.startswith("others")]
        mean = other.groupby("sequence")[["induction", "loss_second_copy"]].mean()
        lines.append(
            [f"8 bands of each {KINDS[kind]} head: theirs"]
            + [f"{own[c].mean():.2f}" for c in ("induction", "loss_second_copy")]
            + [interval(mean["induction"] - own["induction"])]
            + [interval(own["loss_second_copy"] - mean["loss_second_copy"])]
        )
        lines.append(
            [f"8 bands of each {KINDS[kind]} head: others", *(f"{mean[c].mean():.2f}" for c in mean), "", ""]
        )
    header = ["ablated", "induction score", "loss, second copy (nats)", "score lost more", "loss raised more"]
    return table(header, lines)


def figures() -> dict[str, Figure]:
    heads, bands = read("heads"), read("bands")
    shape = heads["layer"].max() + 1, heads["head"].max() + 1

    def grid(column: str) -> torch.Tensor:
        return torch.tensor(heads[column].to_numpy(), dtype=torch.float64).reshape(*shape)

    strongest = heads.nlargest(SHOWN, "induction")
    named = list(zip(strongest["layer"].tolist(), strongest["head"].tolist(), strict=True))
    shown = []
    for kind in KINDS:
        best = heads.nlargest(3, kind)
        for layer, head in zip(best["layer"], best["head"], strict=True):
            mine = (bands["kind"] == kind) & (bands["layer"] == layer) & (bands["head"] == head)
            shown.append(bands[mine])
    return {
        "circuits-corner": corner_plot(grid("copying"), grid("qk_through"), grid("induction"), named=named),
        "circuits-eigenvalues": score_histogram({"OV": grid("copying"), "QK": grid("qk_direct")}),
        "circuits-bands": head_bands_bars(pd.concat(shown)),
    }
