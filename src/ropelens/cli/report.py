"""`ropelens report`: saved results, or a model, as offline pages."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropelens.cli.sentence import UsageError, one_sentence
from ropelens.cli.values import AnyHost

if TYPE_CHECKING:
    from ropelens.report import Results


def report(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_MODEL",
            help="A folder with results of collect, ablate or lesion; or a model: smollm2-135m, a folder "
            "that transformers reads, a hub id.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the pages; a report there is replaced.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="With a run: also measure what needs its model. 'run': the one that the run names."
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text file for the attention, 128 tokens of it; default: one of ours.")
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=64, help="With a model: tokens of Python's documentation to measure it on.")
    ] = 1024,
    host: Annotated[AnyHost, typer.Option(help="What runs the model.")] = "transformers",
    name: Annotated[str | None, typer.Option(help="What to call the model on the pages.")] = None,
) -> None:
    """Write the explorer: pages that show which bands each head uses, offline, in any browser.

    From a folder, everything in it that ropelens saved, of one model: maps of layers and bands, every head,
    ablation curves, circuits, lesions. With a model, also the attention of its strongest heads token by
    token, positional kernels, and what heads attend to. What is missing is named, with the command that
    makes it.

    \b
    Examples:
      ropelens report smollm2-135m -o site         measure a model, 3 to 6 minutes on two cores
      ropelens report runs/plays -o site           show what was collected
      ropelens report runs/plays --model run -o site
                                                   and the attention of its heads

    OUT/index.html opens from the disk. The folder is written whole or not at all.
    """
    with one_sentence():
        from ropelens.report.finding import Results, find_results, has_results
        from ropelens.report.site import check_replaceable

        check_replaceable(out)  # now, rather than after minutes of work
        folder = Path(source)
        given = text.read_text(encoding="utf-8") if text is not None else None
        if folder.is_dir() and ((folder / "config.json").is_file() and not has_results(folder)):
            results, loads = Results(), source
        elif folder.is_dir():
            results = find_results(folder)
            loads = results.load_as if model == "run" else model
            if model == "run" and not loads:
                raise ValueError(f"expected a run that names its model, got {folder}: name it with --model")
        elif model is not None:
            raise UsageError(f"expected a folder of results with --model, but there is no folder {folder}")
        else:
            results, loads = Results(), source
        command = _command(source, out, model, text, tokens, host, name)
        if loads:
            from ropelens.hosts.load import load

            _say(f"loading {loads}, and checking that its attention can be rebuilt")
            results = _completed(results, load(loads, host=host), given, tokens)
            results.load_as = results.load_as or loads
        results.name = name or results.load_as or results.name or "the model"

        from ropelens.report.pages import write_report

        _say("writing the pages")
        keep: dict[str, Any] = {}
        if not folder.is_dir() or loads == source:
            keep = {f"{metric}.safetensors": scores for metric, scores in results.scores.items()}
        if loads and results.heads is not None:
            keep["heads.csv"] = results.heads
        page = write_report(out, results, command=command, keep=keep)
        typer.echo(_sentence(results))
        typer.echo(f"The explorer is {page}: open it in a browser, it needs no network.")


def _completed(results: Results, model: object, text: str | None, n_tokens: int) -> Results:
    import torch

    from ropelens.cli.demo import documentation
    from ropelens.hosts import host_of
    from ropelens.report.attention import TEXT
    from ropelens.report.measuring import complete

    context = host_of(model).context or n_tokens
    ids = documentation(getattr(model, "tokenizer", None), min(n_tokens, context))
    return complete(results, model, torch.tensor([ids]), text=text or TEXT, say=_say, progress=True)


def _sentence(results: Results) -> str:
    said = f"Found {'; '.join(results.found())}."
    missing = results.missing()
    if missing:
        listed = "; ".join(f"{name} ({command})" for name, command in missing.items())
        said += f" Not there: {listed}."
    return said


def _command(
    source: str, out: Path, model: str | None, text: Path | None, tokens: int, host: str, name: str | None
) -> str:
    words = ["ropelens", "report", source]
    for option, value, default in (
        ("--model", model, None),
        ("--text", text, None),
        ("--tokens", tokens, 1024),
        ("--host", host, "transformers"),
        ("--name", name, None),
    ):
        words += [] if value == default else [option, str(value)]
    return shlex.join([*words, "-o", str(out)])


def _say(doing: str) -> None:
    typer.echo(doing, err=True)
