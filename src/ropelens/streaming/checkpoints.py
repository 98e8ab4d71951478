"""The folder of a run: one writer at a time, and checkpoints that are whole or are not used."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ropelens.scores import saving

FORMAT = 1
KIND = "Checkpoint"
_KEPT = 2
_PROBE_BYTES = 2**20


@dataclass(frozen=True)
class Checkpoint:
    """What a run had added up when it was written.

    Attributes:
        facts: How far the run was and what it is, JSON-able.
        states: The state of each accumulator, by the name of the metric.
    """

    facts: dict[str, Any]
    states: dict[str, dict[str, Tensor]]


class RunFolder:
    """The folder that `collect` writes to, held by this process until `held` ends.

    Args:
        out: The folder of the run.
        rank: Which of the processes of the run this is; each keeps checkpoints of its own.
    """

    def __init__(self, out: str | os.PathLike[str], rank: int = 0) -> None:
        self.out = Path(out)
        self.checkpoints = self.out / "checkpoints" / f"rank{rank}"
        self._damaged: set[Path] = set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Makes the folder and keeps other runs out of it.

        Raises:
            ValueError: If another run works there.
            OSError: If it cannot be made or written to.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ValueError(
                f"expected a folder to write to, but {error.filename} is a file or lies below one"
            ) from error
        with open(self.checkpoints / "lock", "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system frees it when we die
            except BlockingIOError as error:
                raise ValueError(
                    f"another run is writing to {self.out}: wait until it ends, or choose another folder"
                ) from error
            for folder in (self.checkpoints, self.out):
                for partial in folder.glob(".*.partial"):  # of a run that was killed while writing
                    partial.unlink(missing_ok=True)
            try:
                check_room(self.checkpoints)
            except OSError as error:
                raise OSError(
                    f"{self.out} cannot be written to ({error.strerror or error}): free space there, or "
                    "choose another folder"
                ) from error
            yield

    def paths(self) -> list[Path]:
        """The checkpoints, the oldest first."""
        return sorted(self.checkpoints.glob("*.safetensors"))

    def save(self, n_windows: int, checkpoint: Checkpoint) -> None:
        """Writes a checkpoint and keeps the one before it.

        Raises:
            OSError: If it cannot be written; earlier ones are still there.
        """
        tensors = {f"{m}:{name}": t for m, state in checkpoint.states.items() for name, t in state.items()}
        facts = {"checkpoint": FORMAT, "metrics": list(checkpoint.states), **checkpoint.facts}
        path = self.checkpoints / f"{n_windows:012d}.safetensors"
        try:
            saving.write(path, KIND, tensors, {**facts, "sha256": _checksum(tensors, facts)})
        except OSError as error:
            raise OSError(
                f"no checkpoint could be written to {self.out} ({error.strerror or error}): free space there "
                "and run the same again, it goes on from the last one"
            ) from error
        self._damaged.discard(path)
        paths = self.paths()
        whole = [other for other in paths if other.name <= path.name and other not in self._damaged]
        for other in {*paths} - {*whole[-_KEPT:]}:
            other.unlink(missing_ok=True)

    def latest(self) -> Checkpoint | None:
        """Returns the newest checkpoint that is whole, None if there is none yet.

        Warns about each that is damaged.

        Raises:
            ValueError: If all are damaged, or the format is another one.
        """
        paths = self.paths()
        for path in reversed(paths):
            try:
                return _read(path)
            except _DamagedError as error:
                self._damaged.add(path)
                warnings.warn(
                    f"{path} is damaged ({error}): going on from the checkpoint before it", stacklevel=4
                )
        if paths:
            raise ValueError(
                f"every checkpoint in {self.checkpoints} is damaged: delete {self.out} to start again"
            )
        return None


class _DamagedError(Exception):
    pass


def check_room(folder: Path) -> None:
    """Raises an OSError unless a file of a megabyte can be written to the folder."""
    probe = folder / f".{uuid.uuid4().hex}.partial"
    try:
        with open(probe, "xb") as file:
            file.write(b"\1" * _PROBE_BYTES)
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)


def _read(path: Path) -> Checkpoint:
    try:
        tensors, facts = saving.contents(path)
        digest, kind, version = facts.pop("sha256"), facts.pop("kind"), facts.pop("format")
        whole = digest == _checksum(tensors, facts) and kind == KIND
        metrics = list(facts["metrics"])
        version = (version, facts["checkpoint"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _DamagedError(" ".join(str(error).split())) from error
    if not whole:
        raise _DamagedError("its checksum is wrong")
    if version != (saving.FORMAT, FORMAT):
        raise ValueError(
            f"{path} has checkpoint format {version[0]}.{version[1]}, but this ropelens goes on from "
            f"{saving.FORMAT}.{FORMAT}: finish the run with the version that began it, or choose another "
            "folder"
        )
    states: dict[str, dict[str, Tensor]] = {metric: {} for metric in metrics}
    for name, tensor in tensors.items():
        metric, entry = name.split(":", 1)
        states[metric][entry] = tensor
    return Checkpoint(facts, states)


def _checksum(tensors: dict[str, Tensor], facts: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
