"""From documents to a tokenizer and blocks, once, whatever number of processes train on them."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ropelens.data import windows
from ropelens.pretrain.configs import PretrainConfig, config_of
from ropelens.pretrain.corpus import Corpus
from ropelens.pretrain.cost import projected
from ropelens.pretrain.tokenizer import tokenizer_for
from ropelens.pretrain.training import Trained, pretrain, require_enough


class Process:
    """This process among those that `torchrun` started.

    Attributes:
        main: Whether it is the one that writes and prints.
        device: What it trains and measures on.
    """

    def __init__(self) -> None:
        from accelerate import PartialState

        # The others wait while one reads the data, and that may take hours.
        self._state = PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(days=30))
        self.main, self.device = self._state.is_main_process, self._state.device

    def first(self) -> Any:
        """A block that the main process runs before the others."""
        return self._state.main_process_first()

    def wait(self) -> None:
        self._state.wait_for_everyone()

    def last(self) -> bool:
        """Ends the group, once all its processes are here; True in the one that goes on and prints."""
        self.wait()
        self._state.destroy_process_group()
        return self.main


def prepared(
    config: PretrainConfig,
    source: Any,
    out: Path,
    tokenizer: str | os.PathLike[str] | None,
    text_column: str,
    held_out: int,
    process: Process,
    progress: bool,
) -> tuple[Corpus, Any]:
    """Returns the blocks and the tokenizer of a folder, made there if need be."""
    with process.first():
        tok = tokenizer_for(tokenizer, source, config.vocab_size, out / "tokenizer", text_column)
        read = windows(source, tok, context=config.context, fit="pack", text_column=text_column)
        blocks = config.steps * config.batch
        bar = progress and process.main
        corpus = Corpus.of(read, out / "data", blocks=blocks, held_out=held_out, progress=bar)
    return corpus, tok


def train_on(
    config: str | PretrainConfig,
    source: Any,
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    tokenizer: str | os.PathLike[str] | None = None,
    text_column: str = "text",
    held_out: int = 128,
    repeat: bool = False,
    compile: bool = False,
    progress: bool = True,
) -> Trained:
    """Trains one model on documents, after reporting what it will take; see `pretrain`."""
    config, out, process = config_of(config), Path(out), Process()
    corpus, tok = prepared(config, source, out, tokenizer, text_column, held_out, process, progress)
    require_enough(config, corpus, repeat)
    if process.main:
        print(projected(config, 1))
    options: dict[str, Any] = {"repeat": repeat, "compile": compile, "progress": progress and process.main}
    return pretrain(config, corpus, out, seed=seed, tokenizer=tok, **options)
