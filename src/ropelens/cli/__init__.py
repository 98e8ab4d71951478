"""The `ropelens` command. What is heavy is imported where it is used, so that `--help` is instant."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from ropelens.cli.ablate import ablate
from ropelens.cli.collect import collect, merge
from ropelens.cli.demo import demo
from ropelens.cli.inspect import inspect
from ropelens.cli.lesion import lesion
from ropelens.cli.pretrain import app as pretrain

__all__ = ["app"]

_HELP = """Which RoPE frequencies does each head of a language model use, and what for?

ropelens takes attention apart into rotary frequency bands: one rotated pair of dims = one band =
one frequency = one wavelength in tokens.

\b
Examples:
  ropelens demo                        all heads of SmolLM2-135M; a page in results/demo
  ropelens demo --layer 10 --head 1    the same, showing the attention of that head
  ropelens inspect smollm2-135m        what each layer's attention does: read it first
  ropelens collect --data 'plays/*.txt' --tokens 1000000 --out runs/plays
                                       a million tokens; stop it and start it as you like
  ropelens merge runs/a runs/b -o runs/ab
                                       the shards of a job array, added up
  ropelens pretrain experiment tiny-1m --data 'plays/*.txt' --out runs/exp
                                       other frequencies against the original ones
  ropelens ablate runs/plays --data 'novels/*.txt' --out runs/ablation
                                       the loss without the bands that score lowest
  ropelens lesion --layers 0,15,29 --out runs/lesions
                                       noise in the bands of some layers: what does the model say?

\b
Exit status:
  0    all went well
  2    an argument, a file or a model cannot be used; standard error says why
  130  interrupted

From Python: import ropelens; see help(ropelens.band_entropy).
"""

app = typer.Typer(
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"ropelens {version('ropelens')}")
        raise typer.Exit
    return wanted


@app.callback(help=_HELP)
def main(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Holds what stands before a command."""


app.command()(demo)
app.command()(inspect)
app.command()(collect)
app.command()(merge)
app.add_typer(pretrain, name="pretrain")
app.command()(ablate)
app.command()(lesion)
