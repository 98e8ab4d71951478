"""Changing what a model does with its bands."""

from ropelens.interventions.frequencies import frequencies, set_frequencies
from ropelens.interventions.resample import resample_frequencies

__all__ = ["frequencies", "resample_frequencies", "set_frequencies"]
