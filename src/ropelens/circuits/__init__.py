"""Circuits of attention heads, resolved by rotary band where they read positions.

The names load on first use.
"""

from typing import TYPE_CHECKING

from ropelens.lazy import lazily

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
    from ropelens.circuits.learning import PositionLosses, in_context_learning_score, loss_by_position
    from ropelens.circuits.paths import Bigrams, PathImportance, bigrams, path_importance
    from ropelens.circuits.texts import repeated_tokens, shuffled_chunks
    from ropelens.circuits.training import (
        LearningCurve,
        LossSurface,
        PhaseChange,
        learning_curve,
        loss_surface,
        phase_change,
    )
    from ropelens.circuits.trigrams import SkipTrigrams, copied_tokens, skip_trigrams
    from ropelens.circuits.view import HeadView, head_view, no_op_report

__all__ = [
    "Bigrams",
    "HeadBands",
    "HeadScores",
    "HeadView",
    "LearningCurve",
    "LossSurface",
    "PathImportance",
    "PhaseChange",
    "PositionLosses",
    "PositionalKernel",
    "SkipTrigrams",
    "bigrams",
    "copied_tokens",
    "copying_score",
    "eigenvalue_score",
    "head_bands",
    "head_scores",
    "head_view",
    "in_context_learning_score",
    "k_composition",
    "learning_curve",
    "loss_by_position",
    "loss_surface",
    "no_op_report",
    "ov_eigenvalues",
    "path_importance",
    "phase_change",
    "positional_kernel",
    "prefix_matching",
    "qk_eigenvalues",
    "repeated_tokens",
    "shuffled_chunks",
    "skip_trigrams",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Bigrams": "paths",
        "HeadBands": "bands",
        "HeadScores": "heads",
        "HeadView": "view",
        "LearningCurve": "training",
        "LossSurface": "training",
        "PathImportance": "paths",
        "PhaseChange": "training",
        "PositionLosses": "learning",
        "PositionalKernel": "kernel",
        "SkipTrigrams": "trigrams",
        "bigrams": "paths",
        "copied_tokens": "trigrams",
        "copying_score": "eigenvalues",
        "eigenvalue_score": "eigenvalues",
        "head_bands": "bands",
        "head_scores": "heads",
        "head_view": "view",
        "in_context_learning_score": "learning",
        "k_composition": "eigenvalues",
        "learning_curve": "training",
        "loss_by_position": "learning",
        "loss_surface": "training",
        "no_op_report": "view",
        "ov_eigenvalues": "eigenvalues",
        "path_importance": "paths",
        "phase_change": "training",
        "positional_kernel": "kernel",
        "prefix_matching": "heads",
        "qk_eigenvalues": "eigenvalues",
        "repeated_tokens": "texts",
        "shuffled_chunks": "texts",
        "skip_trigrams": "trigrams",
    },
)
