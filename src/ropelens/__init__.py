"""ropelens: which RoPE frequencies does this head use, and what for?

The public names load on first use, so that `import ropelens` stays instant.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING

from ropelens.lazy import lazily

if TYPE_CHECKING:
    from ropelens import circuits as circuits
    from ropelens.bands import Bands
    from ropelens.data import windows
    from ropelens.hooks import activation_hooks, entropy_hooks, observe
    from ropelens.hosts.inspection import inspect
    from ropelens.hosts.load import load
    from ropelens.interventions import (
        Ablation,
        AblationCurve,
        Areas,
        BandMeans,
        ablate,
        ablation_curve,
        ablation_losses,
        agreement,
        area_losses,
        areas,
        band_effects,
        band_means,
        bands_where,
        derotation_curve,
        effect_ranks,
        frequencies,
        lesion,
        patch_bands,
        resample_frequencies,
        set_frequencies,
        share_groups,
    )
    from ropelens.lesions import LesionResults, lesion_sweep
    from ropelens.measure import band_activation, band_attribution, band_entropy, band_fisher, band_taylor
    from ropelens.metrics import ActivationAccumulator, EntropyAccumulator
    from ropelens.scores import BandAttribution, BandScores, random_scores
    from ropelens.streaming import collect

__version__ = version("ropelens")

__all__ = [
    "Ablation",
    "AblationCurve",
    "ActivationAccumulator",
    "Areas",
    "BandAttribution",
    "BandMeans",
    "BandScores",
    "Bands",
    "EntropyAccumulator",
    "LesionResults",
    "ablate",
    "ablation_curve",
    "ablation_losses",
    "activation_hooks",
    "agreement",
    "area_losses",
    "areas",
    "band_activation",
    "band_attribution",
    "band_effects",
    "band_entropy",
    "band_fisher",
    "band_means",
    "band_taylor",
    "bands_where",
    "collect",
    "derotation_curve",
    "effect_ranks",
    "entropy_hooks",
    "frequencies",
    "inspect",
    "lesion",
    "lesion_sweep",
    "load",
    "observe",
    "patch_bands",
    "random_scores",
    "resample_frequencies",
    "set_frequencies",
    "share_groups",
    "windows",
]

__getattr__, __dir__ = lazily(
    __name__,
    {
        "Ablation": "interventions",
        "AblationCurve": "interventions",
        "ActivationAccumulator": "metrics",
        "Areas": "interventions",
        "BandAttribution": "scores",
        "BandMeans": "interventions",
        "BandScores": "scores",
        "Bands": "bands",
        "EntropyAccumulator": "metrics",
        "LesionResults": "lesions",
        "ablate": "interventions",
        "ablation_curve": "interventions",
        "ablation_losses": "interventions",
        "activation_hooks": "hooks",
        "agreement": "interventions",
        "area_losses": "interventions",
        "areas": "interventions",
        "band_activation": "measure",
        "band_attribution": "measure",
        "band_effects": "interventions",
        "band_entropy": "measure",
        "band_fisher": "measure",
        "band_means": "interventions",
        "band_taylor": "measure",
        "bands_where": "interventions",
        "circuits": "",
        "collect": "streaming",
        "derotation_curve": "interventions",
        "effect_ranks": "interventions",
        "entropy_hooks": "hooks",
        "frequencies": "interventions",
        "inspect": "hosts.inspection",
        "lesion": "interventions.lesion",
        "lesion_sweep": "lesions",
        "load": "hosts.load",
        "observe": "hooks",
        "patch_bands": "interventions",
        "random_scores": "scores",
        "resample_frequencies": "interventions",
        "set_frequencies": "interventions",
        "share_groups": "interventions",
        "windows": "data",
    },
)
