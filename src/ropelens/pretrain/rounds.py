"""Do other frequencies help? The same training with each set of them, seed by seed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ropelens.data.sources import source_of
from ropelens.hosts.load import load
from ropelens.pretrain.analysis import evenness
from ropelens.pretrain.arms import LEARNED, ORIGINAL, check_arms, frequencies_of
from ropelens.pretrain.configs import PretrainConfig, config_of
from ropelens.pretrain.corpus import Corpus
from ropelens.pretrain.cost import projected
from ropelens.pretrain.manifest import Manifest
from ropelens.pretrain.preparation import Process, prepared
from ropelens.pretrain.training import pretrain, require_enough
from ropelens.scores import BandScores
from ropelens.streaming import collect

BOOTSTRAP = "bootstrap"


def experiment(
    config: str | PretrainConfig,
    source: Any,
    out: str | os.PathLike[str],
    *,
    arms: Sequence[str] = (ORIGINAL, "resampled", "shuffled"),
    seeds: int = 4,
    tokenizer: str | os.PathLike[str] | None = None,
    text_column: str = "text",
    held_out: int = 128,
    repeat: bool = False,
    checkpoints: int = 10,
    compile: bool = False,
    progress: bool = True,
    say: Callable[[str], None] = print,
) -> Manifest:
    """Trains every arm with the same weights and data order, seed after seed; goes on where it stopped.

    A bootstrap model is trained with the original frequencies and its band activation measured on the
    blocks held out. For each seed the arms' frequencies are drawn from it, all arms are trained from the
    same initial weights on the same blocks in the same order, each model's activation is measured, and
    the model with the original frequencies is the next seed's bootstrap. Two arms of a seed differ in
    their frequencies and in nothing else; the manifest asserts it by hashes.

    Args:
        config: A configuration, or the name of one in `CONFIGS`.
        source: Documents, as `ropelens.windows` takes them.
        out: Folder of the experiment; `manifest.json` says how far it is.
        arms: Out of `ARMS`, "original" among them.
        seeds: How many; more may be asked for later.
        tokenizer: One that transformers loads; by default a byte-level BPE is trained on the documents.
        held_out: Blocks that losses and activations are measured on.
        repeat: Whether blocks may be trained on more than once, where there are too few.
        checkpoints: How many each training writes.
        compile: Whether torch.compile makes the training step.
        say: Takes the lines that report parameters, speed and projected time.

    Raises:
        ValueError: If an argument is not usable, the data are too few, or `out` holds another experiment.

    Example:
        ```python
        manifest = experiment("tiny-1m", "plays/*.txt", "runs/tiny", seeds=4)
        analyse(manifest).table()
        ```
    """
    config, out, arms = config_of(config), Path(out), list(arms)
    check_arms(arms)
    if seeds < 1:
        raise ValueError(f"expected at least 1 seed, got {seeds}")
    process = Process()
    out.mkdir(parents=True, exist_ok=True)
    asked = {"config": config.facts, "arms": arms, "held_out": held_out}
    documents = source_of(source, split="train", text_column=text_column)
    identity = json.dumps(documents.identity(), sort_keys=True).encode()
    asked["documents"] = {"name": documents.name, "sha256": hashlib.sha256(identity).hexdigest()[:32]}
    manifest = Manifest.open(out, asked)
    corpus, tok = prepared(config, source, out, tokenizer, text_column, held_out, process, progress=progress)
    require_enough(config, corpus, repeat)
    manifest.require_data(corpus.fingerprint)
    plan = [(BOOTSTRAP, ORIGINAL, 0)] + [
        (f"seed-{seed}/{arm}", arm, seed) for seed in range(1, seeds + 1) for arm in arms
    ]
    left = [name for name, *_ in plan if name not in manifest.runs]
    if left and process.main:
        say(projected(config, len(left)))
    for number, (name, arm, seed) in enumerate(plan):
        if name in manifest.runs:
            continue
        inv_freq = drawn_from = None
        if name != BOOTSTRAP:
            before = BOOTSTRAP if seed == 1 else f"seed-{seed - 1}/{ORIGINAL}"
            measured = out / before / "activation.safetensors"
            inv_freq = frequencies_of(arm, config, BandScores.load(measured), seed)
            drawn_from = {"run": before, "sha256": _hash(measured)}
        if process.main:
            say(f"{number + 1}/{len(plan)} {name}")
        trained = pretrain(
            config,
            corpus,
            out / name,
            seed=seed,
            inv_freq=inv_freq,
            learn=LEARNED.get(arm) if name != BOOTSTRAP else None,
            repeat=repeat,
            checkpoints=checkpoints,
            compile=compile,
            tokenizer=tok,
            progress=progress and process.main,
        )
        scores = _measure(out / name, corpus, process)
        if process.main:
            facts = {"arm": arm, "seed": seed, "inv_freq": scores.bands.inv_freq.tolist()}
            by_layer = [[float(f"{x:.6g}") for x in row] for row in scores.values.sum(1).tolist()]
            facts |= {"activation": by_layer, "drawn_from": drawn_from}
            facts |= {"evenness": float(evenness(scores).nanmean())}
            manifest.add(name, facts | vars(trained))
        process.wait()
        manifest = Manifest.open(out, asked)
    return manifest


def _measure(folder: Path, corpus: Corpus, process: Process) -> BandScores:
    """Writes the activation of a trained model on the blocks held out beside it, and returns it.

    Every process takes its share of the blocks.
    """
    model = load(folder / "model", host="transformers", device=process.device)
    scores = collect(model, corpus.held_out(), ("activation",), progress=False)["activation"]
    if process.main:
        scores.save(folder / "activation.safetensors")
    return scores


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]
