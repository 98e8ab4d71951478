"""Lesions of SmolLM2-135M-Instruct; the runs are those of the commands on the page."""

from __future__ import annotations

import pandas as pd
from common import DOCS, table
from plotly.graph_objects import Figure

from ropelens.lesions import LesionResults
from ropelens.plots import dose_responses, survival_map

PAGE = DOCS / "results" / "lesions.md"
DATA = DOCS / "data" / "lesions" / "lesions.jsonl.gz"


def tables() -> dict[str, str]:
    results = LesionResults.load(DATA)
    frame = results.to_frame()
    frame["state"] = frame["layers"].map(lambda layers: "hurt" if layers else "healthy")
    return {
        "survived": survived(results),
        "fidelity": fidelity(frame[frame["kind"] == "repetition"]),
        "claims": claims(results),
        "readings": readings(frame),
        "code": code(frame[frame["kind"] == "code"]),
        "answers": answers(frame),
        "corrected": corrected(results),
    }


def survived(results: LesionResults) -> str:
    frame = results.survived()
    frame["reach"] = [f"{'≥ ' if r.open else ''}{r.std:g}" for r in frame.itertuples()]
    wide = frame.pivot(index=["task", "layers"], columns="bands", values="reach").fillna("")
    rows = [[f"{task}, layer {layer}", *cells] for (task, layer), cells in in_order(wide)]
    return table(["text, layer", *wide.columns], rows)


def fidelity(frame: pd.DataFrame) -> str:
    """How much of the text is repeated, at each dose that was run."""
    wide = frame[frame["std"] > 0].pivot_table("fidelity", ["layers", "bands"], "std").map("{:.2f}".format)
    rows = [
        [f"layer {layer}, {bands}", *cells]
        for (layer, bands), cells in in_order(wide.replace("nan", "").astype(str))
    ]
    return table(["", *(f"{std:g}" for std in wide.columns)], rows)


def in_order(wide: pd.DataFrame) -> list[tuple[tuple[str, str], list[str]]]:
    """Rows by layer, as numbers."""
    level = wide.index.names.index("layers")
    rows = [(key, cells.tolist()) for key, cells in wide.iterrows()]
    tasks = list(dict.fromkeys(key[0] for key, _ in rows))
    return sorted(rows, key=lambda row: (level and tasks.index(row[0][0]), int(row[0][level])))


def claims(results: LesionResults) -> str:
    rows = [
        [
            r.claim,
            "-" if pd.isna(r.estimate) else f"{r.estimate:.2f}",
            "-" if pd.isna(r.low) else f"{r.low:.2f} to {r.high:.2f}",
            r.n,
            "not testable" if pd.isna(r.shown) else "shows" if r.shown else "does not show",
        ]
        for r in results.claims().itertuples()
    ]
    return table(["the study's observation", "estimate", "95% interval", "seeds", "here"], rows)


def readings(frame: pd.DataFrame) -> str:
    columns = {
        "n_tokens": "tokens",
        "repeats": "repeated 4-grams",
        "surprising": "surprising tokens",
        "sentence_words": "words a sentence",
        "list_items": "list items",
        "first_divergence": "first other token",
    }
    rows = [
        [f"{task}, {state}", len(part), *(number(part[name]) for name in columns)]
        for (task, state), part in frame.groupby(["task", "state"], sort=False)
    ]
    return table(["", "runs", *columns.values()], rows)


def code(frame: pd.DataFrame) -> str:
    """What becomes of the code, by layer and bands, all doses together."""
    kinds = ["passes", "wrong", "exception", "parse", "none"]
    fate = frame["failure"].fillna("").where(~frame["passes"].fillna(False).astype(bool), "passes")
    fate = fate.where(frame["found"].astype(bool), "none")
    counted = pd.crosstab([frame["layers"], frame["bands"]], fate)
    other = [kind for kind in counted.columns if kind not in kinds]
    columns = [kind for kind in (*kinds, *other) if kind in counted.columns]
    rows = [
        [f"layer {layer}, {bands}" if layer else "healthy", int(cells.sum()), *cells[columns].tolist()]
        for (layer, bands), cells in sorted(counted.iterrows(), key=lambda row: int(row[0][0] or -1))
    ]
    words = {"passes": "right", "wrong": "wrong result", "parse": "does not parse", "none": "no code"}
    return table(["", "runs", *(words.get(kind, kind) for kind in columns)], rows)


def answers(frame: pd.DataFrame) -> str:
    kinds = ("yes", "no", "unclear")
    rows = [
        [f"{task}, {state}", len(part), *((part["introspection_verdict"] == kind).sum() for kind in kinds)]
        for (task, state), part in frame.groupby(["task", "state"], sort=False)
    ]
    return table(["", "runs", *kinds], rows)


def corrected(results: LesionResults) -> str:
    """The text and its correction against what is right: the reference, else the healthy model's text."""
    found = pd.DataFrame(
        {
            "task": run["task"],
            "state": "hurt" if run["layers"] else "healthy",
            "before": run["correction"]["before"],
            "after": run["correction"]["score"],
        }
        for run in results.runs
        if "score" in run.get("correction", {})
    )
    rows = [
        [
            f"{task}, {state}",
            len(part),
            *(number(part[name]) for name in ("before", "after")),
            (part["after"] > part["before"]).sum(),
        ]
        for (task, state), part in found.groupby(["task", "state"], sort=False)
    ]
    return table(["", "runs", "text", "correction", "better than before"], rows)


def number(values: pd.Series) -> str:
    mean = pd.to_numeric(values, errors="coerce").mean()
    return "-" if pd.isna(mean) else f"{mean:.2f}"


def figures() -> dict[str, Figure]:
    results = LesionResults.load(DATA)
    return {
        "lesion-doses": dose_responses(results.dose_response(), limit=results.limit),
        "lesion-map": survival_map(results.survived()),
    }
