"""The lesion browser: every run of a sweep as a page that needs no network."""

from __future__ import annotations

import html
import math
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from string import Template
from typing import Any

from ropelens.lesions.results import LesionResults, layers_label
from ropelens.plots.lesions import survival_map
from ropelens.report.site import Page, figure_place, part, replacing, section, write_site

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


def write_lesions(out: Path, results: LesionResults, command: str = "") -> Path:
    """Writes the lesion browser alone: `index.html` in a folder, whole or not at all.

    Args:
        out: The folder: a new one, an empty one, or one that this wrote, which is replaced.
        results: What `lesion_sweep` returned, or `LesionResults.load`.
        command: The command that made them, written into the figures.

    Returns:
        The path of the page.

    Raises:
        ValueError: If no run has a lesion, or `out` is something else.
    """
    page = replace(lesions_page(results), file="index.html")
    with replacing(out) as folder:
        write_site(folder, f"Lesions of {_name(results)}", [page], _provenance(results), command=command)
    return out / page.file


def lesions_page(results: LesionResults) -> Page:
    """Returns the page on which one chooses a run, reads its text, and sees its dose.

    Raises:
        ValueError: If no run has a lesion.
    """
    if all(not run["layers"] for run in results.runs):
        raise ValueError("expected runs with a lesion to show, got none")
    survival = section(
        "survived",
        "What each layer survives",
        "The largest noise, in units of a band's own root mean square, after which the text is still that "
        "of a "
        "working model. Where it says ≥, no larger one was tried.",
        figure_place("survival", "Noise survived, by layer and group of bands"),
    )
    return Page(
        "lesions.html",
        "Lesions",
        f"What does {html.escape(_name(results))} say when some of its rotary bands are hurt?",
        Template(part("lesions.html")).substitute(n_runs=f"{len(results.runs):,}", survival=survival),
        {"lesions": _data(results)},
        "lesions.js",
        {"survival": survival_map(results.survived())},
    )


def _name(results: LesionResults) -> str:
    return str(results.header.get("name") or "the model")


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
