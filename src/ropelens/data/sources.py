"""Where documents come from: texts in memory, local files, a hub dataset; numbered by shard and row."""

from __future__ import annotations

import glob
import gzip
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
ENDINGS = "*.txt, *.json, *.jsonl (each also with .gz) or *.parquet"
SAMPLE = 1 << 20  # bytes hashed at either end of a file
HUB_NAME = re.compile(r"^(?P<name>[\w.-]+(/[\w.-]+)?)(:(?P<config>[\w.-]+))?(@(?P<revision>[\w./-]+))?$")


@dataclass(frozen=True)
class Document:
    """One text, and whether some of its bytes were no UTF-8 (U+FFFD stands in for them)."""

    text: str
    replaced: bool = False


class Texts:
    """Strings in memory: one shard.

    This and the other sources have a `name` for messages, `n_shards`, an `identity()` that changes with
    the documents, and `rows(shard, start)`: the documents of a shard from row `start` on.
    """

    n_shards = 1

    def __init__(self, texts: list[Any]):
        if not texts:
            raise ValueError("expected at least one document, got an empty list")
        wrong = next((text for text in texts if not isinstance(text, str)), None)
        if wrong is not None:
            raise ValueError(f"expected a list of strings, got a {type(wrong).__name__} in it")
        self.texts: list[str] = texts
        self.name = f"{len(texts):,} texts"

    def identity(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for text in self.texts:
            data = text.encode("utf-8", "surrogatepass")
            digest.update(f"{len(data)}:".encode() + data)
        return {"texts": len(self.texts), "sha256": digest.hexdigest()[:32]}

    def rows(self, shard: int, start: int) -> Iterator[Document]:
        return map(_clean, itertools.islice(self.texts, start, None))


class Files:
    """Local files in the order of their names: each is a shard; a text file is one document."""

    def __init__(self, name: str, paths: list[Path], text_column: str):
        self.paths = paths
        self.text_column = text_column
        self.name = name if len(paths) == 1 else f"{name} ({len(paths):,} files)"

    @property
    def n_shards(self) -> int:
        return len(self.paths)

    def identity(self) -> dict[str, Any]:
        files = [[path.name, path.stat().st_size, _sample_hash(path)] for path in self.paths]
        return {"files": files, "column": self.text_column}

    def rows(self, shard: int, start: int) -> Iterator[Document]:
        path = self.paths[shard]
        kind = kind_of(path)
        if kind == "text":
            # Not through `datasets`: it says nothing of bytes that it replaces.
            return iter([_decode(_read(path))] if start == 0 else [])
        if kind == "parquet":
            return self._parquet(path, start)
        return itertools.islice(self._json(path), start, None)

    def _parquet(self, path: Path, start: int) -> Iterator[Document]:
        from datasets import load_dataset

        # Glob characters in a path are meant literally here.
        dataset: Any = load_dataset(
            "parquet", data_files=[glob.escape(str(path))], split="train", streaming=True
        )
        _has_column(dataset.column_names, self.text_column, str(path))
        for row in dataset.select_columns([self.text_column]).skip(start):
            yield _text_of(row[self.text_column], self.text_column, str(path))

    def _json(self, path: Path) -> Iterator[Document]:
        """Objects one a line, or one list of them.

        Not through `datasets`: it fails on bytes that are no UTF-8, whatever `encoding_errors` says, and
        on an empty file.
        """
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            first = next((line for line in file if line.strip()), b"")
            lines = enumerate(itertools.chain([first], file), 1)
            if first.lstrip().startswith(b"["):
                whole = _decode(first + file.read())
                rows = _parse(whole.text, f"{path}")
                parsed = ((row, whole.replaced) for row in rows)
            else:
                decoded = ((number, _decode(line)) for number, line in lines if line.strip())
                parsed = ((_parse(line.text, f"{path}, line {n}"), line.replaced) for n, line in decoded)
            for row, replaced in parsed:
                if not isinstance(row, dict):
                    raise ValueError(f"expected JSON objects in {path}, got a {type(row).__name__}")
                _has_column(list(row), self.text_column, str(path))
                document = _text_of(row[self.text_column], self.text_column, str(path))
                yield Document(document.text, document.replaced or replaced)


class Hub:
    """A dataset on the hub, streamed: its own shards (files, as a rule) and the rows within each."""

    def __init__(self, name: str, split: str, text_column: str):
        from datasets import load_dataset
        from huggingface_hub import HfApi

        found = HUB_NAME.match(name)
        assert found, name
        repository, config = found["name"], found["config"]
        try:
            self.revision = HfApi().dataset_info(repository, revision=found["revision"]).sha
            self.dataset: Any = load_dataset(
                repository, config, split=split, streaming=True, revision=self.revision
            )
        except Exception as error:  # whatever the hub, its file formats and the network may raise
            raise ValueError(
                f"{name!r} is neither a file, folder or glob here nor a dataset that the hub gives: "
                f"{_one_line(error)}"
            ) from error
        if self.dataset.column_names is not None:  # unknown before the first row, for some formats
            _has_column(self.dataset.column_names, text_column, name)
            self.dataset = self.dataset.select_columns([text_column])
        self.name = name
        self.split = split
        self.text_column = text_column

    @property
    def n_shards(self) -> int:
        return self.dataset.num_shards

    def identity(self) -> dict[str, Any]:
        name = self.name.partition("@")[0]
        return {
            "hub": name,
            "revision": self.revision,
            "split": self.split,
            "column": self.text_column,
            "shards": self.n_shards,
        }

    def rows(self, shard: int, start: int) -> Iterator[Document]:
        for row in self.dataset.shard(num_shards=self.n_shards, index=shard).skip(start):
            _has_column(list(row), self.text_column, self.name)
            yield _text_of(row[self.text_column], self.text_column, self.name)


Source = Texts | Files | Hub  # documents in a fixed order: rows within shards


def source_of(source: Any, *, split: str, text_column: str) -> Source:
    """Returns the documents that a user's `source` names: see `windows`."""
    if isinstance(source, Source):
        return source
    if isinstance(source, str):
        paths = _paths(source)
        if paths is not None:
            return Files(source, paths, text_column)
        if HUB_NAME.match(source):
            return Hub(source, split, text_column)
        raise ValueError(
            f"expected a file, folder, glob or hub dataset, and found none called {_short(source, 80)!r}: "
            "check the path, or put a text into a list"
        )
    try:
        items: list[Any] = [source] if isinstance(source, os.PathLike) else list(source)
    except TypeError:
        raise ValueError(
            f"expected a path, a hub dataset, strings or a tensor of token ids, got {type(source).__name__}"
        ) from None
    if items and all(isinstance(item, os.PathLike) for item in items):
        names = [os.fspath(item) for item in items]
        found = [(name, _paths(name)) for name in names]
        missing = next((name for name, paths in found if paths is None), None)
        if missing is not None:
            raise ValueError(f"there is no file or folder {missing}")
        return Files(", ".join(names[:3]), [path for _, paths in found for path in paths or ()], text_column)
    return Texts(items)


def kind_of(path: Path) -> str | None:
    """Returns "text", "json", "parquet", or None for another kind of file."""
    kind = KINDS.get(Path(path.stem if path.suffix == ".gz" else path.name).suffix)
    return None if kind == "parquet" and path.suffix == ".gz" else kind


def _paths(name: str) -> list[Path] | None:
    """Returns the files that a name stands for, sorted, or None if it is no name of a local thing."""
    path = Path(name).expanduser()
    if path.is_dir():
        inside = (p for p in path.rglob("*") if p.is_file() and kind_of(p))
        found = sorted(p for p in inside if not any(s.startswith(".") for s in p.relative_to(path).parts))
        if not found:
            raise ValueError(f"expected files in {path}, {ENDINGS}, found none")
        return found
    if path.is_file():
        if kind_of(path) is None:
            raise ValueError(f"expected {ENDINGS}, got {path}")
        return [path]
    if glob.has_magic(name):
        found = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
        if not found:
            raise ValueError(f"no file matches {name}")
        odd = next((p for p in found if kind_of(p) is None), None)
        if odd is not None:
            raise ValueError(f"expected {ENDINGS}, but {name} matches {odd}")
        return found
    if kind_of(path) or name.startswith(("/", "./", "../", "~")):
        raise ValueError(f"there is no file or folder {name}")
    return None


def _read(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def _decode(data: bytes) -> Document:
    """The text of bytes, lines ended by \\n, as Python's own text files are read."""
    try:
        text, replaced = data.decode("utf-8-sig"), False
    except UnicodeDecodeError:
        text, replaced = data.decode("utf-8-sig", "replace"), True
    return Document(text.replace("\r\n", "\n").replace("\r", "\n"), replaced)


def _clean(text: str) -> Document:
    """A string without lone surrogates, which JSON can hold and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return Document(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), True)
    return Document(text)


def _text_of(value: Any, column: str, where: str) -> Document:
    if value is None:
        return Document("")
    if not isinstance(value, str):
        raise ValueError(f"expected text in column {column!r} of {where}, got {type(value).__name__}")
    return _clean(value)


def _has_column(columns: list[str], column: str, where: str) -> None:
    if column not in columns:
        raise ValueError(
            f"there is no column {column!r} in {where}: choose text_column= among {', '.join(columns)}"
        )


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"expected JSON in {where}: {error}") from None


def _sample_hash(path: Path) -> str:
    """A hash of the first and the last megabyte of a file."""
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(SAMPLE))
        rest = path.stat().st_size - SAMPLE
        if rest > 0:
            file.seek(-min(rest, SAMPLE), os.SEEK_END)
            digest.update(file.read())
    return digest.hexdigest()[:32]


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _one_line(error: Exception) -> str:
    return _short(" ".join(str(error).split()), 200) or type(error).__name__
