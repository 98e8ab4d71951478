"""Collection at scale: metrics over any amount of text, interrupted, resumed, sharded, distributed."""

from ropelens.streaming.entry import collect
from ropelens.streaming.summary import merge_runs

__all__ = ["collect", "merge_runs"]
