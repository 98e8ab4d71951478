"""Trains the teaching models: `python tools/teaching_models.py train [NAME] [--corpora DIR] [--out DIR]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropelens.pretrain.teaching import TEACHING_MODELS, train_teaching_model

app = typer.Typer(add_completion=False)


@app.command()
def train(
    names: Annotated[list[str] | None, typer.Argument()] = None,
    corpora: Path = Path("corpora"),
    out: Path = Path("build/teaching"),
) -> None:
    """Trains teaching models, both by default; what was begun is gone on with."""
    for name in names or list(TEACHING_MODELS):
        print(train_teaching_model(TEACHING_MODELS[name], corpora, out / name))


if __name__ == "__main__":
    app()
