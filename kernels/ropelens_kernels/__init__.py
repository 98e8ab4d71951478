"""The maths of ropelens on plain tensors: band activation, band entropy and band attribution."""

from ropelens_kernels.dispatch import activation, attribution, entropy
from ropelens_kernels.results import ActivationResult, AttributionResult, EntropyResult

__all__ = [
    "ActivationResult",
    "AttributionResult",
    "EntropyResult",
    "activation",
    "attribution",
    "entropy",
]
