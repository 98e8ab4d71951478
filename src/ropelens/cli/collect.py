"""`ropelens collect` and `ropelens merge`: scores over any amount of text, stopped and resumed."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ropelens.cli.sentence import UsageError, one_sentence
from ropelens.cli.values import METRICS, MODELS, AnyHost, listed, one_of, some_of

if TYPE_CHECKING:
    from ropelens.scores import BandScores

Dtype = Literal["float32", "float64", "bfloat16", "float16"]


def collect(
    data: Annotated[
        str, typer.Option(help="Files (a glob, quoted), or the name of a data set on the Hugging Face hub.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder of this run; the same folder goes on with it.")
    ],
    model: Annotated[
        str,
        typer.Option(
            help="smollm2-135m, a folder that transformers reads, or a hub id.", autocompletion=one_of(MODELS)
        ),
    ] = "smollm2-135m",
    metrics: Annotated[
        str,
        typer.Option(
            help="Of entropy, activation, norm_product, fisher and taylor, with commas between.",
            autocompletion=some_of(METRICS),
        ),
    ] = "entropy,activation",
    context: Annotated[int, typer.Option(min=2, help="Tokens a window.")] = 2048,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many tokens, over all shards; default: all.")
    ] = None,
    pack: Annotated[
        bool, typer.Option("--pack", help="Fill windows with several documents, each measured alone.")
    ] = False,
    split: Annotated[
        bool, typer.Option("--split", help="Cut documents into as many windows as they fill.")
    ] = False,
    column: Annotated[str, typer.Option(help="The column with the text, in all but .txt files.")] = "text",
    bos: Annotated[
        bool | None,
        typer.Option(
            "--bos/--no-bos", help="Whether documents begin with BOS; default: as the tokenizer does."
        ),
    ] = None,
    host: Annotated[AnyHost, typer.Option(help="What runs the model.")] = "transformers",
    device: Annotated[str | None, typer.Option(help="As cpu or cuda:1; default: a GPU, if any.")] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Default: float32 on a CPU, as published on a GPU.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Windows a forward pass.")] = 1,
    tol: Annotated[float, typer.Option(help="Entropy: nats a query. Activation: relative.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of fisher's sampled labels.")] = 0,
    n_samples: Annotated[int, typer.Option(min=1, help="Fisher's label samples a document.")] = 1,
    compile: Annotated[
        bool, typer.Option("--compile", help="Entropy at twice the speed on a CPU; needs a C++ compiler.")
    ] = False,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Only part I, from 0, of N; add up with merge.")
    ] = None,
    checkpoint_every: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Time between checkpoints.")
    ] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Measure the bands of a model over many tokens.

    Documents that are shorter than the context are dropped and longer ones clipped to it, unless
    --pack or --split. Their windows run through the model, the metrics are added up, and in the end
    they lie in OUT/<metric>.safetensors (read with ropelens.BandScores.load), with what was run in
    OUT/run.json.

    Ctrl-C finishes the window, writes a checkpoint and ends with status 130; kill -9 or a power cut
    lose at most the last SECONDS. The same command goes on from there, and with a larger --tokens a
    run that is complete goes on too. Another model, data, context or setting is refused.

    \b
    On several GPUs or machines:
      torchrun --nproc-per-node 8 -m ropelens collect ...     share the windows out, add up in the end
      ropelens collect --shard $I/64 --out runs/$I ...        jobs that know nothing of each other ...
      ropelens merge runs/* -o runs/all                       ... and their sum
    """
    with one_sentence():
        part = _shard(shard)
        if pack and split:
            raise UsageError("expected --pack or --split, not both")
        names = listed(metrics, "--metrics", METRICS)
        rank = int(os.environ.get("RANK", "0"))

        from ropelens.streaming.checkpoints import RunFolder

        with RunFolder(out, rank).held():  # now, rather than after the model is loaded
            pass

        from ropelens.data.sources import source_of

        documents = source_of(data, split="train", text_column=column)  # for the same reason

        import torch

        from ropelens.data import windows
        from ropelens.hosts.load import load
        from ropelens.streaming import collect as run

        if device is None and torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
            device = f"cuda:{os.environ['LOCAL_RANK']}"
        found = load(model, host=host, device=device, dtype=None if dtype is None else getattr(torch, dtype))
        read = windows(
            documents,
            found.tokenizer,
            context=context,
            fit="pack" if pack else "split" if split else "clip",
            bos=bos,
            shard=part,
            text_column=column,
        )
        scores = run(
            found,
            read,
            names,
            out,
            tokens=tokens,
            tol=tol,
            n_samples=n_samples,
            compile=compile,
            seed=seed,
            batch=batch,
            checkpoint_every=checkpoint_every,
        )
        if rank == 0:
            command = shlex.join(["ropelens", *sys.argv[1:]])
            _report(out, scores, as_json, model_name=model, command=command)


def merge(
    shards: Annotated[list[Path], typer.Argument(help="The folders of all shards.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the sums; a new one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Add up the shards of a run.

    Takes the folders that `ropelens collect --shard I/N` wrote, all N of them, in any order. The
    scores are those of one run over all the windows. A shard that is missing, named twice,
    unfinished, or of other settings is refused.
    """
    with one_sentence():
        from ropelens.streaming import merge_runs

        _report(out, merge_runs(shards, out), as_json)


def _shard(text: str | None) -> tuple[int, int]:
    if text is None:
        return 0, 1
    part, _, of = text.partition("/")
    if not (part.isdecimal() and of.isdecimal() and int(part) < int(of)):
        raise UsageError(f"expected --shard I/N with I from 0 to N - 1, as 0/4, got {text!r}")
    return int(part), int(of)


def _report(out: Path, scores: dict[str, BandScores], as_json: bool, **more: str) -> None:
    from ropelens.scores import saving

    facts = json.loads((out / "run.json").read_text())
    if more:  # what a report says of the run
        facts |= more
        saving.write_bytes(out / "run.json", (json.dumps(facts, indent=1) + "\n").encode())
    if as_json:
        typer.echo(json.dumps(facts))
        return
    typer.echo(
        f"{facts['tokens']:,} tokens in {facts['windows']:,} windows, {facts['seconds']:,.0f} s. The scores:"
    )
    for metric in scores:
        typer.echo(f"  {out / metric}.safetensors")
