"""The maths of ropelens on plain tensors: band activation, entropy, attribution and norm product."""

from ropelens_kernels.dispatch import activation, attribution, entropy, norm_product
from ropelens_kernels.results import ActivationResult, AttributionResult, EntropyResult

__all__ = [
    "ActivationResult",
    "AttributionResult",
    "EntropyResult",
    "activation",
    "attribution",
    "entropy",
    "norm_product",
]
