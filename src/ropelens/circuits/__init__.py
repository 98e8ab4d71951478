"""Circuits of attention heads, resolved by rotary band where they read positions.

The names load on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ropelens.circuits.bands import HeadBands, head_bands
    from ropelens.circuits.eigenvalues import (
        copying_score,
        eigenvalue_score,
        k_composition,
        ov_eigenvalues,
        qk_eigenvalues,
    )
    from ropelens.circuits.heads import HeadScores, head_scores, prefix_matching
    from ropelens.circuits.kernel import PositionalKernel, positional_kernel
    from ropelens.circuits.texts import repeated_tokens, shuffled_chunks
    from ropelens.circuits.view import HeadView, head_view, no_op_report

__all__ = [
    "HeadBands",
    "HeadScores",
    "HeadView",
    "PositionalKernel",
    "copying_score",
    "eigenvalue_score",
    "head_bands",
    "head_scores",
    "head_view",
    "k_composition",
    "no_op_report",
    "ov_eigenvalues",
    "positional_kernel",
    "prefix_matching",
    "qk_eigenvalues",
    "repeated_tokens",
    "shuffled_chunks",
]

_HOME = {
    "HeadBands": "bands",
    "HeadScores": "heads",
    "HeadView": "view",
    "PositionalKernel": "kernel",
    "copying_score": "eigenvalues",
    "eigenvalue_score": "eigenvalues",
    "head_bands": "bands",
    "head_scores": "heads",
    "head_view": "view",
    "k_composition": "eigenvalues",
    "no_op_report": "view",
    "ov_eigenvalues": "eigenvalues",
    "positional_kernel": "kernel",
    "prefix_matching": "heads",
    "qk_eigenvalues": "eigenvalues",
    "repeated_tokens": "texts",
    "shuffled_chunks": "texts",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ropelens.circuits' has no attribute {name!r}")
    value = getattr(import_module(f"ropelens.circuits.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
