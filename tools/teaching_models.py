"""Makes the attention-only teaching models, step by step; `make teaching-models` takes all steps.

train    trains them on corpora/ (from `make corpora`), or goes on where that was interrupted
measure  loss by position, in-context learning, head scores and bands of every checkpoint
ship     puts the models and what was measured into the package
paths    path expansion of the models in the package, into docs/data/paths
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated

import pandas as pd
import torch
import typer

import ropelens as rl
from ropelens.circuits import LearningCurve, learning_curve
from ropelens.hosts.load import TEACHING, teaching_folder
from ropelens.pretrain.teaching import (
    TEACHING_MODELS,
    repeated,
    split_documents,
    tokenizer_in,
    train_teaching_model,
)

EARLY, LATE, WIDTH = 30, 240, 8  # positions of the in-context-learning score
EVERY = 40  # of the held-out windows, one in so many is measured
STEPS = {"attn-only-1l": 300, "attn-only-2l": 100}  # between the checkpoints that are measured
PATHS = Path(__file__).resolve().parent.parent / "docs" / "data" / "paths"
PERIOD = 64  # tokens that come again and again, in the repeated windows

app = typer.Typer(add_completion=False, help=__doc__)
Names = Annotated[list[str] | None, typer.Argument(help="Both by default.")]
Corpora = Annotated[Path, typer.Option(help="Folder of .txt files.")]
Out = Annotated[Path, typer.Option(help="Where checkpoints and measurements are.")]


@app.command()
def train(names: Names = None, corpora: Corpora = Path("corpora"), out: Out = Path("build/teaching")) -> None:
    for name in names or TEACHING:
        print(train_teaching_model(TEACHING_MODELS[name], corpora, out / name))


@app.command()
def measure(
    names: Names = None, corpora: Corpora = Path("corpora"), out: Out = Path("build/teaching")
) -> None:
    _, held_out = split_documents(corpora)
    for name in names or TEACHING:
        recipe = TEACHING_MODELS[name]
        tokenizer = tokenizer_in(out / name / "tokenizer", [], recipe.n_vocab)
        windows = rl.windows(list(held_out), tokenizer, context=recipe.context, fit="split", shard=(0, EVERY))
        again = torch.stack([repeated(window.ids, (PERIOD, PERIOD), seed=0) for window in windows])
        folder = out / name / "checkpoints"
        kept = {step: folder / str(step) for step in range(0, recipe.steps + 1, STEPS[name])}
        for file, what in (("training", windows), ("repeated", again)):
            options = {"early": EARLY, "late": LATE, "width": WIDTH, "out": out / name / file}
            learning_curve(kept, what, **options).save(out / name / f"{file}.safetensors")


@app.command()
def ship(names: Names = None, out: Out = Path("build/teaching")) -> None:
    for name in names or TEACHING:
        target = teaching_folder(name)
        unfinished = target.with_name(f".{name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(out / name / "checkpoints" / str(TEACHING_MODELS[name].steps), unfinished)
        (unfinished / "generation_config.json").unlink(missing_ok=True)
        for file in ("training", "repeated"):
            curve = LearningCurve.load(out / name / f"{file}.safetensors")
            curve.save(unfinished / f"{file}.safetensors")
            curve.to_frame().round(5).to_csv(unfinished / f"{file}.csv", index=False)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(unfinished, target)
        print(target)


@app.command()
def paths(names: Names = None, corpora: Corpora = Path("corpora")) -> None:
    _, held_out = split_documents(corpora)
    texts = list(held_out)
    found: dict[str, list[pd.DataFrame]] = {}
    for name in names or TEACHING:
        model = rl.load(name, host="transformers")
        context = TEACHING_MODELS[name].context
        windows = rl.windows(texts, model.tokenizer, context=context, fit="split", shard=(0, EVERY))
        again = torch.stack([repeated(window.ids, (PERIOD, PERIOD), seed=0) for window in windows])
        for of, what in (("prose", windows), ("repeated", again)):
            expanded = rl.circuits.path_importance(model, what, progress=True)
            measured = {kind: expanded.to_frame(kind) for kind in ("orders", "layers", "heads", "virtual")}
            measured["sums"] = pd.DataFrame(
                {
                    "loss": [float(expanded.total.mean())],
                    "residual": [expanded.residual],
                    "other": [expanded.other],
                    "positional": [expanded.n_positional()],
                    "windows": [len(expanded.total)],
                }
            )
            for kind, frame in measured.items():
                frame.insert(0, "text", of)
                frame.insert(0, "model", name)
                found.setdefault(kind, []).append(frame)
        everything = rl.windows(texts, model.tokenizer, context=context, fit="split")
        frame = pd.DataFrame([vars(rl.circuits.bigrams(model, everything))])
        frame.insert(0, "model", name)
        found.setdefault("bigrams", []).append(frame)
    PATHS.mkdir(parents=True, exist_ok=True)
    for kind, frames in found.items():
        unfinished = PATHS / f".{kind}.csv"
        pd.concat(frames).to_csv(unfinished, index=False, float_format="%.6g")
        unfinished.replace(PATHS / f"{kind}.csv")
    print(PATHS)


if __name__ == "__main__":
    app()
