"""`ropelens inspect`: what each layer's attention does, and how well that was checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropelens.cli.sentence import one_sentence
from ropelens.cli.values import MODELS, AnyHost, one_of

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table


def inspect(
    model: Annotated[
        str, typer.Argument(help="smollm2-135m, a folder, or a hub id.", autocompletion=one_of(MODELS))
    ],
    host: Annotated[AnyHost, typer.Option(help="What runs the model.")] = "transformers",
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of layers as JSON.")] = False,
) -> None:
    """Say what each layer's attention does.

    A row a layer: heads, scale, softcap, window and sinks, which dims rotate and how fast, and how
    far the attention rebuilt from all this lies from the model's own. What is shown was measured, not
    copied from a config. A layer that cannot be read says why.

    \b
    Examples:
      ropelens inspect smollm2-135m
      ropelens inspect ./my-model --host bridge --json    a list of layers, for scripts
    """
    with one_sentence():
        from ropelens.hosts.inspection import inspect as table_of
        from ropelens.hosts.load import load

        found = table_of(load(model, host=host))
        if as_json:
            typer.echo(found.reset_index().to_json(orient="records", double_precision=15))
            return
        from rich.console import Console

        table, alike = inspect_table(found)
        Console().print(table)
        typer.echo(alike)
        for layer, why in enumerate(found["refused"].tolist()):
            if why:
                typer.echo(f"layer {layer} is refused: {why.removeprefix(f'layer {layer}: ')}")


def inspect_table(found: pd.DataFrame) -> tuple[Table, str]:
    """Returns the table that the terminal shows, and in words what is alike in all layers."""
    from rich import box
    from rich.table import Table

    shown = found.drop(columns=["refused", "host", "queries", "keys"])
    alike = [name for name in shown if len(shown[name].drop_duplicates()) == 1]
    words = [f"{name.replace('_', ' ')} {_cell(shown[name].iloc[0])}" for name in alike]
    words = [word for word in words if not word.endswith(" -")]
    at = f"{found['queries'].iloc[0]} and {found['keys'].iloc[0]}"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = [name for name in shown if name not in alike]
    for name in ("layer", *columns):
        table.add_column(name.replace("_", " "), justify="right")
    for layer, row in shown.iterrows():
        table.add_row(str(layer), *(_cell(value) for value in row[columns].tolist()))
    first = f"{found['host'].iloc[0]}, read at {at}"
    return table, first + (f"; in all layers: {', '.join(words)}" if words else "")


def _cell(value: Any) -> str:
    if str(value) in ("None", "nan", "<NA>"):
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
