"""Metrics: accumulators over forward passes, and Fisher information, which needs the model itself."""

from ropelens.metrics.accumulate import (
    ActivationAccumulator,
    BandAccumulator,
    EntropyAccumulator,
    NormProductAccumulator,
)
from ropelens.metrics.fisher import FisherAccumulator, TaylorAccumulator, fisher, taylor

__all__ = [
    "ActivationAccumulator",
    "BandAccumulator",
    "EntropyAccumulator",
    "FisherAccumulator",
    "NormProductAccumulator",
    "TaylorAccumulator",
    "fisher",
    "taylor",
]
