"""What a result was made from, as facts that travel with tables and into figures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    import pandas as pd

KEY = "ropelens"  # in a table's attrs, and in a figure's meta


def facts(kind: str, model: Mapping[str, Any], data: Any, **more: Any) -> dict[str, Any]:
    """Returns the facts of a result: its kind, the fingerprints of its model and its data, and settings.

    Args:
        data: A digest, or what a data fingerprint says, which is hashed.
    """
    if not isinstance(data, str):
        data = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32] if data else ""
    return {"kind": kind, "model": dict(model), "data": data, **more}


def tagged(frame: pd.DataFrame, made_from: Mapping[str, Any]) -> pd.DataFrame:
    """Puts the facts of a result into its table, where selecting and sorting leave them."""
    if made_from:
        frame.attrs[KEY] = [dict(made_from)]
    return frame


def facts_of(value: Any) -> list[dict[str, Any]]:
    """Returns the facts that a result, a table, or a collection of them carries.

    Bare numbers have no facts; they are named by a hash, so that a figure of them can be told from others.

    Example:
        >>> import torch
        >>> facts_of({"a": torch.zeros(2, dtype=torch.float64), "b": 3})
        [{'kind': 'numbers', 'sha256': '374708fff7719dd5979ec875d56cd228'}]
    """
    if isinstance(value, Mapping):
        if "kind" in value:
            return [dict(value)]
        return _unique([fact for item in value.values() for fact in facts_of(item)])
    if isinstance(value, list | tuple):
        return _unique([fact for item in value for fact in facts_of(item)])
    if isinstance(value, Tensor):
        return [_numbers(value.detach().cpu().contiguous().numpy().tobytes())]
    if hasattr(value, "made_from"):
        return [value.made_from] if value.made_from else []
    if hasattr(value, "attrs") and hasattr(value, "to_csv"):
        return value.attrs.get(KEY) or [_numbers(value.to_csv(index=False).encode())]
    return []


def _numbers(content: bytes) -> dict[str, str]:
    return {"kind": "numbers", "sha256": hashlib.sha256(content).hexdigest()[:32]}


def _unique(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [fact for i, fact in enumerate(found) if fact not in found[:i]]
