"""A training so small that it takes a second, and a text for it."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

from ropelens.pretrain import Corpus, PretrainConfig
from ropelens.pretrain.preparation import Process, prepared

MINI = PretrainConfig(
    name="mini",
    vocab_size=300,
    layers=2,
    heads=2,
    width=32,
    mlp=64,
    context=32,
    tokens=12 * 8 * 32,
    batch=8,
    micro_batch=4,
    lr=1e-2,
)


HELD_OUT = 7  # blocks: no multiple of the micro-batch, nor of two processes


def write_text(folder: Path) -> Path:
    """Writes some documents and returns the pattern that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, topic in enumerate(("typesmapping", "operator-summary", "formatstrings")):
        (folder / f"{number}.txt").write_text(pydoc_data.topics.topics[topic][:6000])
    return folder / "*.txt"


def corpus_of(text: Path, out: Path) -> Corpus:
    """Returns the corpus of an experiment with `MINI` in `out`."""
    return prepared(MINI, str(text), out, None, "text", HELD_OUT, Process(), progress=False)[0]
