"""Results: BandScores for a model, BandAttribution for one query; each is one safetensors file."""

from ropelens.scores.attribution import BandAttribution
from ropelens.scores.band_scores import BandScores, random_scores
from ropelens.scores.saving import same_model

__all__ = ["BandAttribution", "BandScores", "random_scores", "same_model"]
