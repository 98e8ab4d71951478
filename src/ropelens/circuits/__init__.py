"""Circuits of attention heads, resolved by rotary band where they read positions.

The names load on first use.
"""

from importlib import import_module
from typing import Any

_HOME: dict[str, str] = {}

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ropelens.circuits' has no attribute {name!r}")
    value = getattr(import_module(f"ropelens.circuits.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
