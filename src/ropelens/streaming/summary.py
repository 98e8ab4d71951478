"""run.json: what a folder of scores is, in a form that people and `merge` read."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ropelens.scores import BandScores, same_model, saving

FORMAT = 1
NAME = "run.json"
_PACKAGES = ("ropelens", "torch", "transformers", "transformer-lens")


def write_summary(out: Path, facts: dict[str, Any]) -> None:
    """Writes `run.json`, which says that the scores beside it are complete."""
    versions = {name: version(name) for name in _PACKAGES}
    text = json.dumps({"format": FORMAT, **facts, "versions": versions}, indent=1)
    saving.write_bytes(out / NAME, (text + "\n").encode())


def differs(a: dict[str, Any], b: dict[str, Any], but: Sequence[str] = ()) -> str | None:
    """Returns in a few words how two runs differ, or None if they measure the same in the same way.

    Args:
        a: What lies in a folder.
        b: What was asked for.
        but: Settings that may differ.
    """
    if sorted(a["metrics"]) != sorted(b["metrics"]):
        return f"its metrics are {', '.join(a['metrics'])}, not {', '.join(b['metrics'])}"
    if why := same_model(a["model"], b["model"]):
        return f"it measures another model ({why})"
    for part, what in (("data", "data"), ("settings", "setting")):
        mine, theirs = _flat(a[part]), _flat(b[part])
        for key in sorted((mine.keys() | theirs.keys()) - {*but}):
            if mine.get(key) != theirs.get(key):
                return f"its {what} {key} is {_short(mine.get(key))}, not {_short(theirs.get(key))}"
    return None


def _flat(facts: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in facts.items():
        flat |= _flat(value, f"{prefix}{key} ") if isinstance(value, dict) else {prefix + key: value}
    return flat


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def merge_runs(outs: Sequence[str | os.PathLike[str]], into: str | os.PathLike[str]) -> dict[str, BandScores]:
    """Returns the scores of all shards of a run together, and writes them to a folder.

    Args:
        outs: The folders of all n shards, each complete.
        into: The folder to write to.

    Raises:
        ValueError: If a shard is missing, doubled, unfinished, or of another run.
        OSError: If a folder cannot be read or written to.
    """
    runs = [_finished(Path(out)) for out in outs]
    if len(runs) < 2:
        raise ValueError(f"expected the folders of at least 2 shards to merge, got {len(runs)}")
    first = runs[0]
    for out, run in zip(outs[1:], runs[1:], strict=True):
        if why := differs(run, first, but=("shard",)):
            raise ValueError(f"{out} is not of the same run as {outs[0]}: {why}")
        if run["tokens_asked"] != first["tokens_asked"]:
            raise ValueError(
                f"{out} is not of the same run as {outs[0]}: it was asked for {run['tokens_asked']} tokens, "
                f"not {first['tokens_asked']}"
            )
    shards = [tuple(run["settings"]["shard"]) for run in runs]
    n = shards[0][1]
    for at, (i, of) in enumerate(shards):
        if of != n:
            raise ValueError(f"{outs[at]} is shard {i}/{of}, but {outs[0]} is one of {n} shards")
        if (i, of) in shards[:at]:
            raise ValueError(f"{outs[shards.index((i, of))]} and {outs[at]} are both shard {i}/{n}")
    if missing := sorted({*range(n)} - {i for i, _ in shards}):
        raise ValueError(
            f"expected all {n} shards, but {', '.join(f'{i}/{n}' for i in missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing: name their folders too"
        )
    into = Path(into)
    if (into / NAME).exists() or (into / "checkpoints").exists():
        raise ValueError(f"{into} holds a run already: choose another folder to merge into")
    merged: dict[str, BandScores] = {}
    for metric in first["metrics"]:
        for _, out in sorted(zip(shards, outs, strict=True), key=lambda pair: pair[0]):
            scores = BandScores.load(Path(out) / f"{metric}.safetensors")
            merged[metric] = merged[metric].merge(scores) if metric in merged else scores
        merged[metric].save(into / f"{metric}.safetensors")
    totals = {name: sum(run[name] for run in runs) for name in ("tokens", "windows", "documents", "seconds")}
    whole = {**first["settings"], "shard": [0, 1]}
    digest = next(iter(merged.values())).data
    ended = any(run["ended_early"] for run in runs)
    facts = {name: first[name] for name in ("metrics", "model", "data", "tokens_asked")}
    write_summary(
        into,
        {**facts, "settings": whole, **totals, "ended_early": ended, "digest": digest, "merged_from": n},
    )
    return merged


def _finished(out: Path) -> dict[str, Any]:
    try:
        run = json.loads((out / NAME).read_bytes())
    except FileNotFoundError as error:
        why = "its run is not finished" if (out / "checkpoints").exists() else "there is no run"
        raise ValueError(f"{out} cannot be merged: {why}; run its ropelens collect to the end") from error
    except ValueError as error:
        raise ValueError(f"{out / NAME} is damaged ({error}): run its ropelens collect again") from error
    if run.get("format") != FORMAT:
        raise ValueError(
            f"{out / NAME} has format version {run.get('format')}, but this ropelens reads version {FORMAT}"
        )
    return run
