"""What a model's attention is made of: its weights as plain tensors, one contract for every host.

Everything is in the convention `x @ W`. The tensors are the model's own, in its dtype; of a model that is
spread over several devices, what is elsewhere comes as a copy on the embedding's. `folded` makes float64
copies in which the norms' gains are multiplied in, equal on every host.
"""

from ropelens.hosts.weights.checking import ends, layer_weights
from ropelens.hosts.weights.stream import watching, watching_attention
from ropelens.hosts.weights.tensors import Ends, LayerWeights, Norm, require_qk

__all__ = [
    "Ends",
    "LayerWeights",
    "Norm",
    "ends",
    "layer_weights",
    "require_qk",
    "watching",
    "watching_attention",
]
