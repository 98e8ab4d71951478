"""`ropelens ablate`: the loss as ever more bands are taken away."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ropelens.cli.sentence import UsageError, one_sentence
from ropelens.cli.values import MODELS, SCOPES, AnyHost, listed, numbers, one_of, some_of


def ablate(
    scores: Annotated[
        list[Path], typer.Argument(help="Score files (.safetensors), or folders of ropelens collect.")
    ],
    data: Annotated[str, typer.Option(help="Text for the loss: other documents than were scored.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder; an interrupted run goes on there.")],
    model: Annotated[
        str, typer.Option(help="smollm2-135m, a folder, or a hub id.", autocompletion=one_of(MODELS))
    ] = "smollm2-135m",
    host: Annotated[AnyHost, typer.Option(help="What runs the model.")] = "transformers",
    fractions: Annotated[str, typer.Option(help="Shares of bands to remove.")] = "0.1,0.25,0.4,0.55,0.7,0.9",
    scopes: Annotated[
        str, typer.Option(help="Where bands compete: model, layer, head.", autocompletion=some_of(SCOPES))
    ] = "model",
    seeds: Annotated[int, typer.Option(min=0, help="How many random controls.")] = 3,
    mode: Annotated[Literal["zero", "derotate", "keys"], typer.Option(help="How bands go.")] = "zero",
    normalize: Annotated[Literal["head", "layer", "model"], typer.Option(help="Of importances.")] = "head",
    context: Annotated[int, typer.Option(min=2, help="Tokens a window.")] = 512,
    tokens: Annotated[int | None, typer.Option(min=1, help="Stop after so many.")] = None,
    column: Annotated[str, typer.Option(help="Text column of tables.")] = "text",
    stderr: Annotated[float | None, typer.Option(help="Largest standard error of the whole model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the curve as JSON.")] = False,
) -> None:
    """Remove the bands with the lowest scores, and measure the loss.

    A row for every score, scope and share of bands: nats a token, with the standard error over
    documents. The folder holds the curve as MODE.csv and MODE.safetensors, and each point by itself, so
    that the same command goes on where it stopped, and a later one may add scores, scopes and shares.

    \b
    Example:
      ropelens collect --data 'speeches/*.txt' --metrics entropy,activation -o runs/speeches
      ropelens ablate runs/speeches --data 'novels/*.txt' --tokens 16384 -o runs/ablation
    """
    with one_sentence():
        shares = numbers(fractions, "--fractions", "0.1,0.5,0.9")
        within = tuple(listed(scopes, "--scopes", SCOPES))
        found = _files(scores)
        from ropelens.data import windows
        from ropelens.hosts.load import load
        from ropelens.interventions import ablation_curve
        from ropelens.scores import BandScores, random_scores

        chosen = {name: BandScores.load(path) for name, path in found.items()}
        first = next(iter(chosen.values()))
        chosen |= {f"random {seed}": random_scores(first, seed) for seed in range(seeds)}
        loaded = load(model, host=host)
        read = windows(data, loaded.tokenizer, context=context, limit=tokens, text_column=column)
        curve = ablation_curve(
            loaded,
            chosen,
            read,
            shares,
            within,
            out,
            mode=mode,
            normalize=normalize,
            stderr=stderr,
        )
        frame = curve.to_frame()
        if as_json:
            typer.echo(frame.to_json(orient="records"))
            return
        typer.echo(frame.to_string(index=False, float_format=lambda x: f"{x:.3f}"))
        typer.echo(
            f"The curve is {out / f'{mode}.csv'}; in Python, AblationCurve.load of the file beside it."
        )


def _files(paths: list[Path]) -> dict[str, Path]:
    """Returns the score files by the names that the curve calls them."""
    found: dict[str, Path] = {}
    for path in paths:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise ValueError(f"expected scores in {path}, found no .safetensors file: run ropelens collect")
        for file in files:
            if file.stem in found:
                raise UsageError(
                    f"expected score files of different names, got {found[file.stem]} and {file}"
                )
            found[file.stem] = file
    return found
