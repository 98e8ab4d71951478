"""Pretraining small Llamas: with their own frequencies, and with others."""

from ropelens.pretrain.analysis import Analysis, analyse
from ropelens.pretrain.arms import ARMS
from ropelens.pretrain.configs import CONFIGS, PretrainConfig
from ropelens.pretrain.corpus import Corpus
from ropelens.pretrain.experiment import experiment
from ropelens.pretrain.preparation import train_on
from ropelens.pretrain.training import Trained, pretrain

__all__ = [
    "ARMS",
    "CONFIGS",
    "Analysis",
    "Corpus",
    "PretrainConfig",
    "Trained",
    "analyse",
    "experiment",
    "pretrain",
    "train_on",
]
