"""ropelens: which RoPE frequencies does this head use, and what for?

The public names load on first use, so that `import ropelens` stays instant.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ropelens import circuits as circuits
    from ropelens.bands import Bands
    from ropelens.data import windows
    from ropelens.hooks import activation_hooks, entropy_hooks, observe
    from ropelens.hosts.inspection import inspect
    from ropelens.hosts.load import load
    from ropelens.interventions import frequencies, resample_frequencies, set_frequencies
    from ropelens.measure import band_activation, band_attribution, band_entropy, band_fisher
    from ropelens.metrics import ActivationAccumulator, EntropyAccumulator
    from ropelens.scores import BandAttribution, BandScores, random_scores
    from ropelens.streaming import collect

__version__ = version("ropelens")

__all__ = [
    "ActivationAccumulator",
    "BandAttribution",
    "BandScores",
    "Bands",
    "EntropyAccumulator",
    "activation_hooks",
    "band_activation",
    "band_attribution",
    "band_entropy",
    "band_fisher",
    "collect",
    "entropy_hooks",
    "frequencies",
    "inspect",
    "load",
    "observe",
    "random_scores",
    "resample_frequencies",
    "set_frequencies",
    "windows",
]

_HOME = {
    "ActivationAccumulator": "metrics",
    "BandAttribution": "scores",
    "BandScores": "scores",
    "Bands": "bands",
    "EntropyAccumulator": "metrics",
    "activation_hooks": "hooks",
    "band_activation": "measure",
    "band_attribution": "measure",
    "band_entropy": "measure",
    "band_fisher": "measure",
    "collect": "streaming",
    "entropy_hooks": "hooks",
    "frequencies": "interventions",
    "inspect": "hosts.inspection",
    "load": "hosts.load",
    "observe": "hooks",
    "random_scores": "scores",
    "resample_frequencies": "interventions",
    "set_frequencies": "interventions",
    "windows": "data",
}


_PACKAGES = {"circuits"}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"ropelens.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'ropelens' has no attribute {name!r}")
    value = getattr(import_module(f"ropelens.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
