"""How results are kept: one safetensors file each, with what they are as JSON in its header."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

FORMAT = 1
_KEY = "ropelens"


def write(path: str | os.PathLike[str], kind: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Writes one result, whole or not at all: a file at `path` is never half written.

    Raises:
        OSError: If the folder cannot be made or written to.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"kind": kind, "format": FORMAT, **facts})
    content = safetensors.torch.save({k: t.contiguous() for k, t in tensors.items()}, {_KEY: header})
    write_bytes(path, content)


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all, into a folder that is there.

    Raises:
        OSError: If it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")  # the same folder: replace is atomic
    try:
        with open(partial, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name, too, is there after a power cut
    finally:
        os.close(folder)


def read(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the tensors and the facts that `write` put into a file.

    Raises:
        OSError: If there is no such file.
        ValueError: If the file is truncated, another format version, or holds something else.
    """
    tensors, facts = contents(path)
    if facts["format"] != FORMAT:
        raise ValueError(
            f"{path} has format version {facts['format']}, but this ropelens reads version {FORMAT}: "
            "measure again, or read it with the version that saved it"
        )
    if facts["kind"] != kind:
        raise ValueError(f"{path} holds a {facts['kind']}, not a {kind}: load it with {facts['kind']}.load")
    return tensors, facts


def contents(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns what `write` put into a file, of whatever kind and format, with both among the facts.

    Raises:
        OSError: If there is no such file.
        ValueError: If the file is truncated or not one of ropelens's.
    """
    content = Path(path).read_bytes()  # not mapped: a later change of the file must not reach the result
    try:
        tensors = safetensors.torch.load(content)
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or not a safetensors file ({error})") from error
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    if _KEY not in header:
        raise ValueError(f"{path} is a safetensors file, but ropelens did not save it")
    return tensors, json.loads(header[_KEY])


def same_model(a: dict[str, Any], b: dict[str, Any]) -> str | None:
    """Returns in a few words how two model fingerprints differ, or None if they are of one model.

    The signatures (one number a layer) may differ by 1%: the same weights in another dtype, or
    folded by TransformerLens, are still the same model.

    Example:
        >>> one = {"embedding": "ab", "signature": [1.0, 2.0], "shape": [2, 4, 4, 8]}
        >>> same_model(one, {**one, "signature": [1.0, 2.1]})
        'the weights of layer 1 differ'
    """
    if a.get("shape") != b.get("shape"):
        return f"{a.get('shape')} against {b.get('shape')} [layers, heads, key-value heads, dims of a head]"
    if a.get("embedding") != b.get("embedding"):
        return "the embeddings differ"
    signatures = zip(a.get("signature", []), b.get("signature", []), strict=True)
    for layer, (x, y) in enumerate(signatures):
        if not abs(x - y) <= 1e-2 * max(abs(x), abs(y)):
            return f"the weights of layer {layer} differ"
    return None


def as_json(value: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns `value` as it will be after saving and loading; a ValueError if JSON cannot hold it."""
    try:
        return json.loads(json.dumps(value))  # tuples become lists, as they will after loading
    except TypeError as error:
        raise ValueError(f"expected {name} that JSON can hold: {error}") from error


def check_model(path: str | os.PathLike[str], fingerprint: dict[str, Any], model: Any) -> None:
    """Raises a ValueError if `model` is given and the fingerprint in a file is not its own."""
    if model is None:
        return
    from ropelens.hosts import host_of  # only when a model is at hand

    if why := same_model(fingerprint, host_of(model).fingerprint):
        raise ValueError(f"{path} was measured on another model than the one given ({why})")
