"""`ropelens pretrain`: small Llamas with their own frequencies and with others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ropelens.cli.sentence import UsageError, one_sentence, only_json
from ropelens.cli.values import ARMS, CONFIGS, listed, one_of, some_of

if TYPE_CHECKING:
    from ropelens.pretrain import PretrainConfig

app = typer.Typer(
    help="""Pretrain small Llamas, with their own rotary frequencies and with others.

\b
Examples:
  ropelens pretrain run tiny-1m --data 'plays/*.txt' --out runs/tiny
  ropelens pretrain experiment tiny-1m --data 'plays/*.txt' --out runs/exp --seeds 4
  torchrun --nproc-per-node 8 -m ropelens pretrain experiment study-100m \\
      --data HuggingFaceFW/fineweb:sample-10BT --tokenizer gpt2 --out runs/study --compile
""",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_Data = Annotated[
    str, typer.Option(help="Files (a glob, quoted), or the name of a data set on the Hugging Face hub.")
]
_Out = Annotated[Path, typer.Option("--out", "-o", help="Folder; the same command goes on with it.")]
_Config = Annotated[
    str, typer.Argument(help="study-100m, small-10m or tiny-1m.", autocompletion=one_of(CONFIGS))
]
_Tokens = Annotated[int | None, typer.Option(min=1, help="Training tokens; default: the configuration's.")]
_Tokenizer = Annotated[
    str | None, typer.Option(help="A tokenizer that transformers loads; default: one is trained on the data.")
]
_Column = Annotated[str, typer.Option(help="The column with the text, in all but .txt files.")]
_Repeat = Annotated[bool, typer.Option("--repeat", help="Go on if the data must be repeated.")]
_Compile = Annotated[bool, typer.Option("--compile", help="Compile the training step.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")]
_HeldOut = Annotated[int, typer.Option(min=1, help="Sequences that the loss is measured on.")]


@app.command()
def run(
    config: _Config,
    data: _Data,
    out: _Out,
    seed: Annotated[int, typer.Option(help="Of the weights and the order of the data.")] = 0,
    tokens: _Tokens = None,
    tokenizer: _Tokenizer = None,
    column: _Column = "text",
    held_out: _HeldOut = 128,
    repeat: _Repeat = False,
    compile: _Compile = False,
    as_json: _Json = False,
) -> None:
    """Train one model, with the original frequencies; see `experiment` for others.

    Stopped at any point, the same command goes on from the last checkpoint to the same loss. The folder
    holds the model (OUT/model, which transformers and ropelens.load read).

    \b
    Example:
      ropelens pretrain run tiny-1m --data 'plays/*.txt' --out runs/tiny
    """
    with one_sentence():
        chosen = _config(config, tokens)
        from ropelens.pretrain import train_on
        from ropelens.pretrain.preparation import Process

        with only_json(as_json):
            trained = train_on(
                chosen,
                data,
                out,
                seed=seed,
                tokenizer=tokenizer,
                text_column=column,
                held_out=held_out,
                repeat=repeat,
                compile=compile,
            )
        if not Process().last():
            return
        if as_json:
            facts = {"loss": trained.loss, "tokens": trained.tokens, "seconds": trained.seconds}
            typer.echo(json.dumps(facts | {"model": str(out / "model")}))
            return
        typer.echo(
            f"{trained.loss:.4f} nats a token on what was held out, after {trained.tokens:,} tokens and "
            f"{trained.seconds:,.0f} s. The model: {out / 'model'}"
        )


@app.command()
def experiment(
    config: _Config,
    data: _Data,
    out: _Out,
    arms: Annotated[
        str,
        typer.Option(
            help="With commas between, 'original' among them; see ropelens.pretrain.ARMS.",
            autocompletion=some_of(ARMS),
        ),
    ] = "original,resampled,shuffled",
    seeds: Annotated[int, typer.Option(min=1, help="How many; more can be asked for later.")] = 4,
    tokens: _Tokens = None,
    tokenizer: _Tokenizer = None,
    column: _Column = "text",
    held_out: _HeldOut = 128,
    repeat: _Repeat = False,
    compile: _Compile = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No bars.")] = False,
    as_json: _Json = False,
) -> None:
    """Train all arms with the same weights and the same data, seed by seed, and compare them.

    Stopped at any point, the same command goes on from the last checkpoint to the same losses. Other
    data, arms or settings in the same folder are refused; more seeds are not. OUT/manifest.json holds
    every run, and --json prints a row an arm.

    \b
    Example:
      ropelens pretrain experiment tiny-1m --data 'plays/*.txt' --out runs/exp --arms original,shuffled
    """
    with one_sentence():
        chosen, wanted = _config(config, tokens), listed(arms, "--arms", ARMS)
        from ropelens.pretrain import analyse
        from ropelens.pretrain import experiment as start
        from ropelens.pretrain.preparation import Process

        with only_json(as_json):
            manifest = start(
                chosen,
                data,
                out,
                arms=wanted,
                seeds=seeds,
                tokenizer=tokenizer,
                text_column=column,
                held_out=held_out,
                repeat=repeat,
                compile=compile,
                progress=not quiet,
                say=typer.echo,
            )
        if not Process().last():
            return
        table = analyse(manifest).table()
        if as_json:
            typer.echo(table.reset_index().to_json(orient="records"))
            return
        for arm, row in table.iterrows():
            typer.echo(
                f"{arm}: {row.difference:+.4f} nats against the original (95%: {row.low:+.4f} to "
                f"{row.high:+.4f}), {row.verdict}"
            )


def _config(name: str, tokens: int | None) -> PretrainConfig:
    if name not in CONFIGS:
        raise UsageError(f"expected a configuration out of {', '.join(CONFIGS)}, got {name}")
    from dataclasses import replace

    from ropelens.pretrain.configs import config_of

    found = config_of(name)
    return found if tokens is None else replace(found, tokens=tokens)
