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
from ropelens.cli.report import report

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
  ropelens report runs/plays -o site   pages to explore what was measured; or name a model

Each command has its own manual page: ropelens COMMAND --help.

\b
Files:
  demo, report            OUT/index.html for a browser, and the scores that were measured for it
  collect, merge          OUT/<metric>.safetensors, OUT/run.json (what was run), OUT/checkpoints
  ablate                  OUT/MODE.csv and OUT/MODE.safetensors, and each point by itself
  lesion                  OUT/lesions.jsonl, a line a run; OUT/page/index.html
  pretrain                OUT/model or OUT/manifest.json, with checkpoints
  ~/.cache/ropelens       models that were converted; below XDG_CACHE_HOME where that is set

\b
For scripts:
  --json prints what came out on standard output, as one JSON value; all else goes to standard error.
  ropelens --install-completion makes the shell complete commands, options and their values.

\b
Exit status:
  0    all went well
  1    a file, a model or the data cannot be used, or a result is there already; standard error says
       why in one sentence
  2    the command was not understood: an option that is unknown, missing, or has a value it cannot take
  130  interrupted; commands with OUT go on where they stopped when they are run again

From Python: import ropelens; see help(ropelens.band_entropy).
"""

app = typer.Typer(
    help=_HELP,
    no_args_is_help=True,
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
app.command()(report)
