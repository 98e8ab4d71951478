"""`ropelens lesion`: noise in the bands of some layers, and what the model then says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ropelens.cli.sentence import UsageError, one_sentence
from ropelens.cli.values import BANDS, MODELS, AnyHost, listed, numbers, one_of, some_of

Target = Literal["weights", "queries", "keys", "both"]


def lesion(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder of this sweep; the same folder goes on with it.")
    ],
    layers: Annotated[
        str, typer.Option(help="With commas between; 0-3 hurts four at once, 0..3 one after the other.")
    ],
    model: Annotated[
        str,
        typer.Option(
            help="smollm2-135m, a folder that transformers reads, or a hub id.", autocompletion=one_of(MODELS)
        ),
    ] = "smollm2-135m",
    tasks: Annotated[
        Path | None, typer.Option(help="YAML or JSON file of tasks; default: three of our own.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Names of tasks, with commas between; default: all.")
    ] = None,
    bands: Annotated[
        str,
        typer.Option(
            help="Groups of bands, as slowest:12 or fastest:20%, with commas between.",
            autocompletion=some_of(BANDS),
        ),
    ] = "slowest:20%,fastest:20%",
    stds: Annotated[
        str, typer.Option(help="Noise in units of each band's RMS, with commas between.")
    ] = "1,2,4,8,16",
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds, from 0 up.")] = 3,
    target: Annotated[Target, typer.Option(help="Where the noise is.")] = "weights",
    limit: Annotated[
        float, typer.Option(help="Stop raising the noise beyond so many nats a token (healthy model).")
    ] = 4.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of a text and of its correction.")] = 250,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Of the answer about the text.")] = 160,
    temperature: Annotated[float, typer.Option(min=0, help="0: the likeliest token.")] = 0.0,
    introspect: Annotated[
        bool, typer.Option("--introspect/--no-introspect", help="Ask whether the text made sense.")
    ] = True,
    correct: Annotated[bool, typer.Option("--correct/--no-correct", help="Ask for a correction.")] = True,
    lift: Annotated[bool, typer.Option("--lift", help="Lift the lesion before these questions.")] = False,
    run_code: Annotated[
        bool,
        typer.Option("--run-code/--no-run-code", help="Run code that the model writes, with its check."),
    ] = True,
    batch: Annotated[int, typer.Option(min=1, help="Runs that are made at a time.")] = 16,
    host: Annotated[AnyHost, typer.Option(help="What runs the model.")] = "transformers",
    device: Annotated[str | None, typer.Option(help="As cpu or cuda:1; default: a GPU, if any.")] = None,
    page: Annotated[bool, typer.Option("--page/--no-page", help="Write OUT/page/index.html.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was survived as JSON.")] = False,
) -> None:
    """Hurt bands of a model's layers, let it talk, and ask it about that.

    For each task, layer and group of bands, noise rises step by step until the healthy model finds the text
    too unlikely, or the text loops; many are made at a time. Each run is written to OUT/lesions.jsonl as it
    ends (read it with ropelens.LesionResults.load); stopped at any time, the same command goes on from there.
    In the end OUT/page/index.html shows every run.

    \b
    Examples:
      ropelens lesion --layers 0,15,29 --out runs/lesions
      ropelens lesion --layers 25..28 --bands slowest:12 --tasks mine.yaml --out runs/mine

    Code that the model writes is run in a subprocess with little time and memory and no files, processes or
    sockets: that stops accidents and is no sandbox; --no-run-code runs none.
    """
    with one_sentence():
        groups = _layers(layers)
        doses = numbers(stds, "--stds", "0.5,1,2")
        groups_of_bands = listed(bands, "--bands")

        from ropelens.hosts.load import load
        from ropelens.lesions import default_tasks, lesion_sweep, read_tasks
        from ropelens.report.lesions import write_lesions

        asked = default_tasks() if tasks is None else read_tasks(tasks)
        if only is not None:
            known = {task.name: task for task in asked}
            asked = tuple(known[name] for name in listed(only, "--only", known))
        found = load(model, host=host, device=device)
        results = lesion_sweep(
            found,
            asked,
            layers=groups,
            out=out,
            bands=groups_of_bands,
            stds=doses,
            seeds=range(seeds),
            target=target,
            limit=limit,
            max_tokens=max_tokens,
            answer_tokens=answer_tokens,
            temperature=temperature,
            introspect=introspect,
            correct=correct,
            lift=lift,
            run_code=run_code,
            batch=batch,
        )
        survived = results.survived()
        if as_json:
            typer.echo(survived.to_json(orient="records"))
        else:
            typer.echo(survived.to_string(index=False))
        if page:
            path = write_lesions(out / "page", results)
            typer.echo(str(path), err=as_json)


def _layers(text: str) -> list[int | tuple[int, ...]]:
    """ "0,4-6,9..11" is 0, then 4 to 6 at once, then 9, 10 and 11."""
    found: list[int | tuple[int, ...]] = []
    for part in (p.strip() for p in text.split(",")):
        for mark in ("..", "-"):
            first, sign, last = part.partition(mark)
            if sign and first.isdecimal() and last.isdecimal() and int(first) <= int(last):
                span = range(int(first), int(last) + 1)
                found.extend(span if mark == ".." else [tuple(span)])
                break
        else:
            if not part.isdecimal():
                raise UsageError(f'expected --layers as "0,15,29", "0-3" or "0..3", got {text!r}')
            found.append(int(part))
    return found
