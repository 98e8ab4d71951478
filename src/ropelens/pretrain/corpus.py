"""Documents as blocks of token ids on disk, and the order in which a training takes them."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor
from tqdm.auto import tqdm

from ropelens.data import Cursor, Windows
from ropelens.scores import saving

PART = 4096  # blocks a file
HELD_OUT = 50  # one block in so many is held out, until there are enough


class Corpus:
    """Packed blocks of one length, tokenised once into a folder; a part of them is held out.

    Made by `Corpus.of`. Of the blocks with numbers 0, 50, 100, ... the first `n_held_out` are never
    trained on.
    """

    def __init__(self, parts: list[np.ndarray], n_held_out: int, facts: dict[str, Any]) -> None:
        self._parts, self._facts = parts, facts
        n = sum(len(part) for part in parts)
        self.n_held_out = min(n_held_out, -(-n // HELD_OUT))
        held = HELD_OUT * np.arange(self.n_held_out)
        self._train = np.setdiff1d(np.arange(n), held)
        self._held = held

    @classmethod
    def of(
        cls,
        windows: Windows,
        out: str | os.PathLike[str],
        *,
        blocks: int,
        held_out: int,
        progress: bool = True,
    ) -> Corpus:
        """Returns the blocks in a folder, writing those that are not there yet.

        Interrupted, the same call goes on with the file of 4,096 blocks that it was at.

        Args:
            windows: From `ropelens.windows` with `fit="pack"`.
            blocks: To train on; fewer if the windows end before.
            held_out: Blocks to measure the loss on.

        Raises:
            ValueError: If the folder holds other data.
        """
        folder, wanted = Path(out), blocks + held_out
        path = folder / "blocks.json"
        facts: dict[str, Any] = {"source": windows.fingerprint, "sizes": [], "after": None, "ended": False}
        if path.exists():
            known = json.loads(path.read_text())
            if known["source"] != saving.as_json(facts["source"], "the source"):
                raise ValueError(
                    f"{folder} holds blocks of other documents, another tokenizer or another length: choose "
                    "another folder"
                )
            facts = known
        folder.mkdir(parents=True, exist_ok=True)
        done = sum(facts["sizes"])
        bar = tqdm(total=wanted, initial=done, desc="tokenise", unit="block", disable=not progress)
        with bar:
            while done < wanted and not facts["ended"]:
                facts = _add_part(windows, folder, facts)
                saving.write_bytes(path, json.dumps(facts).encode())
                bar.update(sum(facts["sizes"]) - done)
                done = sum(facts["sizes"])
        names = [folder / f"blocks-{i:05}.npy" for i in range(len(facts["sizes"]))]
        parts, left = [], wanted  # no more than was asked for, however many there are
        for name in names:
            parts.append(np.load(name, mmap_mode="r")[:left])
            left -= len(parts[-1])
        return cls(parts, held_out, facts)

    @property
    def n_blocks(self) -> int:
        """Blocks to train on."""
        return len(self._train)

    @property
    def context(self) -> int:
        return self._parts[0].shape[1]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What decides the blocks: a hash of the documents and the tokenizer, and one of those held out."""
        source = json.dumps(self._facts["source"], sort_keys=True).encode()
        return {
            "source": hashlib.sha256(source).hexdigest()[:32],
            "blocks": self.n_blocks,
            "held_out": self.n_held_out,
            "sha256": hashlib.sha256(self.held_out().numpy().tobytes()).hexdigest()[:32],
        }

    def block(self, number: int) -> Int64[Tensor, " pos"]:
        return self._take(int(self._train[number]))

    def held_out(self) -> Int64[Tensor, "block pos"]:
        return torch.stack([self._take(int(i)) for i in self._held])

    def order(self, n: int, seed: int) -> np.ndarray:
        """Returns the numbers of the first `n` blocks of a training: epochs, each shuffled anew."""
        epochs = [
            np.random.default_rng([seed, epoch]).permutation(self.n_blocks)
            for epoch in range(-(-n // self.n_blocks))
        ]
        return np.concatenate(epochs)[:n]

    def _take(self, number: int) -> Int64[Tensor, " pos"]:
        part, row = divmod(number, PART)
        return torch.from_numpy(self._parts[part][row].astype(np.int64))


def _add_part(windows: Windows, folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Writes one more file of blocks and returns what is known then."""
    after = None if facts["after"] is None else Cursor(**facts["after"])
    rows: list[np.ndarray] = []
    for window in windows.read(after):
        rows.append(window.ids.numpy().astype(np.uint32))
        after = window.after
        if len(rows) == PART:
            break
    if rows:
        path = folder / f"blocks-{len(facts['sizes']):05}.npy"
        unfinished = path.with_suffix(".partial")
        with open(unfinished, "wb") as file:
            np.save(file, np.stack(rows))
        os.replace(unfinished, path)
    sizes = [*facts["sizes"], len(rows)] if rows else facts["sizes"]
    return facts | {
        "sizes": sizes,
        "after": None if after is None else asdict(after),
        "ended": len(rows) < PART,
    }
