"""The lesion browser: every run of a sweep as a page that needs no network."""

from __future__ import annotations

import html
import math
from difflib import SequenceMatcher
from pathlib import Path
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from ropelens.lesions.results import LesionResults, layers_label
from ropelens.report.page import part, script_json

SHOWN = (
    ("surprising", "tokens that surprise the healthy model"),
    ("repeats", "4-grams that were there before"),
    ("fidelity", "of the reference repeated"),
    ("names_verdict", "names"),
    ("failure", "code fails by"),
    ("passes", "code passes its check"),
    ("recursive", "code calls itself"),
    ("first_divergence", "first token that differs from the healthy text"),
    ("headers", "headers"),
    ("list_items", "list items"),
    ("sentence_words", "words a sentence"),
)


def write_lesions(out: Path, results: LesionResults) -> Path:
    """Writes `index.html` into a folder, and `plotly.min.js` beside it.

    Args:
        out: The folder; it is made if needed.
        results: What `lesion_sweep` returned, or `LesionResults.load`.

    Returns:
        The path of the page.

    Raises:
        ValueError: If no run has a lesion.
    """
    if all(not run["layers"] for run in results.runs):
        raise ValueError("expected runs with a lesion to show, got none")
    name = str(results.header.get("name") or "the model")
    page = Template(part("lesions.html")).substitute(
        name=html.escape(name),
        css=part("page.css") + part("lesions.css"),
        js=part("lesions.js"),
        n_runs=f"{len(results.runs):,}",
        provenance="\n".join(
            f"<div><dt>{html.escape(key)}</dt><dd>{html.escape(str(value))}</dd></div>"
            for key, value in _provenance(results).items()
        ),
        data=script_json(_data(results)),
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
    path = out / "index.html"
    path.write_text(page, encoding="utf-8")
    return path


def _data(results: LesionResults) -> dict[str, Any]:
    curves = results.dose_response()
    return {
        "runs": [_run(results, run) for run in results.runs if run["layers"]],
        "healthy": {f"{run['task']}|{run['seed']}": _texts(run) for run in results.runs if not run["layers"]},
        "prompts": {task["name"]: task["prompt"] for task in results.header["tasks"]},
        "curves": [
            {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
            for row in curves.to_dict("records")
        ],
        "limit": results.limit,
        "shown": SHOWN,
    }


def _texts(run: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokens": run["tokens"],
        "losses": run["losses"],
        "loss": run["loss"],
        "introspection": run.get("introspection"),
        "correction": run.get("correction"),
    }


def _run(results: LesionResults, run: dict[str, Any]) -> dict[str, Any]:
    controls = results.healthy(run["task"])
    control = next((c for c in controls if c["seed"] == run["seed"]), controls[0])
    ours, its = _differences(run["tokens"], control["tokens"])
    return {
        "task": run["task"],
        "layers": layers_label(run["layers"]),
        "bands": run["bands"],
        "std": run["std"],
        "seed": run["seed"],
        "control": f"{control['task']}|{control['seed']}",
        "differs": ours,
        "control_differs": its,
        "readings": {name: run["readings"].get(name) for name, _ in SHOWN},
        **_texts(run),
    }


def _differences(a: list[str], b: list[str]) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the spans of tokens of each text that the other has not: [start, end) each."""
    spans = [op for op in SequenceMatcher(None, a, b, autojunk=False).get_opcodes() if op[0] != "equal"]
    return (
        [[i1, i2] for _, i1, i2, _, _ in spans if i2 > i1],
        [[j1, j2] for _, _, _, j1, j2 in spans if j2 > j1],
    )


def _provenance(results: LesionResults) -> dict[str, str]:
    settings = results.header["settings"]
    chosen = "the likeliest token" if not settings["temperature"] else f"drawn at {settings['temperature']}"
    return {
        "Model": f"{results.header.get('name', '')} ({results.header['host']}, {results.header['dtype']})",
        "Noise on": settings["target"],
        "Tokens": f"{chosen}; at most {settings['max_tokens']} a text, {settings['answer_tokens']} an answer",
        "Doses end": f"beyond {settings['limit']} nats a token, or {settings['max_repeats']:.0%} repeats",
        "Turns": "after the lesion was lifted" if settings["lift"] else "with the lesion on",
        "Versions": ", ".join(f"{k} {v}" for k, v in results.header["versions"].items()),
    }
