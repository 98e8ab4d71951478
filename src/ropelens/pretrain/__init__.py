"""Pretraining small Llamas: with their own frequencies, and with others. The names load on first use."""

from typing import TYPE_CHECKING

from ropelens.lazy import lazily

if TYPE_CHECKING:
    from ropelens.pretrain.analysis import Analysis, analyse
    from ropelens.pretrain.arms import ARMS
    from ropelens.pretrain.configs import CONFIGS, PretrainConfig
    from ropelens.pretrain.corpus import Corpus
    from ropelens.pretrain.preparation import train_on
    from ropelens.pretrain.rounds import experiment
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

__getattr__, __dir__ = lazily(
    __name__,
    {
        "ARMS": "arms",
        "Analysis": "analysis",
        "CONFIGS": "configs",
        "Corpus": "corpus",
        "PretrainConfig": "configs",
        "Trained": "training",
        "analyse": "analysis",
        "experiment": "rounds",
        "pretrain": "training",
        "train_on": "preparation",
    },
)
