"""Changing what a model does with its bands."""

from ropelens.interventions.ablate import Ablation, ablate
from ropelens.interventions.agreement import agreement, band_effects, effect_ranks
from ropelens.interventions.areas import Areas, area_losses, areas
from ropelens.interventions.curve import ablation_curve, ablation_losses, derotation_curve
from ropelens.interventions.frequencies import frequencies, set_frequencies
from ropelens.interventions.lesion import Lesion, lesion
from ropelens.interventions.means import BandMeans, band_means
from ropelens.interventions.patching import patch_bands
from ropelens.interventions.resample import resample_frequencies
from ropelens.interventions.results import AblationCurve
from ropelens.interventions.selecting import bands_where, share_groups

__all__ = [
    "Ablation",
    "AblationCurve",
    "Areas",
    "BandMeans",
    "Lesion",
    "ablate",
    "ablation_curve",
    "ablation_losses",
    "agreement",
    "area_losses",
    "areas",
    "band_effects",
    "band_means",
    "bands_where",
    "derotation_curve",
    "effect_ranks",
    "frequencies",
    "lesion",
    "patch_bands",
    "resample_frequencies",
    "set_frequencies",
    "share_groups",
]
