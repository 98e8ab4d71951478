"""Hosts: the only code that knows a model library."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ropelens.hosts.base import Consumer, Edit, Host
from ropelens.hosts.bridge import BridgeHost
from ropelens.hosts.certify import certify, state_of
from ropelens.hosts.hooked import HookedHost
from ropelens.hosts.layer import Certificate, LayerSpec
from ropelens.hosts.lens import Hook, LensHost
from ropelens.hosts.plain import PlainHost

__all__ = [
    "Certificate",
    "Consumer",
    "Edit",
    "Hook",
    "Host",
    "LayerSpec",
    "LensHost",
    "changing_weights",
    "host_of",
    "uncertified",
]

# A certificate lives as long as its model and holds no reference to it.
_certificates: weakref.WeakKeyDictionary[Any, tuple[int, Certificate]] = weakref.WeakKeyDictionary()


def host_of(model: Any) -> Host:
    """Returns the certified host of a model.

    The first call runs two short forward passes to check what the model claims; later calls reuse
    the certificate until weights or settings change.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.

    Raises:
        ValueError: If the model is of another kind, or one of its layers cannot be rebuilt.
    """
    host = uncertified(model)
    if host.asked is not None and host.turning_now() is None:
        raise ValueError(
            "this model's config names frequencies (ropelens_inv_freq) that it does not turn with: load it "
            "with ropelens.load, or give it a config without them"
        )
    state = state_of(host)
    known = _certificates.get(model)
    if known is None or known[0] != state:
        known = (state, certify(host))
        _certificates[model] = known
    host.certificate, host.certified_turning = known[1], host.turning_now()
    return host


@contextmanager
def changing_weights(host: Host) -> Iterator[None]:
    """Lets weights change inside the block that the block puts back, bit for bit.

    Inside, the model is certified anew when it is asked for; afterwards the old certificate holds again.
    """
    _certificates.pop(host.model, None)
    try:
        yield
    finally:
        _certificates[host.model] = (state_of(host), host.certificate)


def uncertified(model: Any) -> Host:
    """Returns the host of a model, with nothing checked yet.

    Raises:
        ValueError: If the model is of another kind, or on a device that cannot be measured on.
    """
    host = _kind_of(model)(model)
    if (device := host.device.type) == "mps":
        raise ValueError(
            "expected a model on the CPU or a CUDA GPU, got one on mps, which has no float64 to add up in: "
            'load it with device="cpu"'
        )
    if device == "meta":
        raise ValueError(
            "expected a model whose embedding is in memory, got one on the meta device: load its weights "
            "onto the CPU or a GPU"
        )
    if (default := torch.get_default_device().type) != "cpu":
        raise ValueError(
            f"expected torch's default device to be the CPU, where results are made, got {default}: call "
            'torch.set_default_device("cpu"), and load the model with device='
        )
    return host


def _kind_of(model: Any) -> type[Host]:
    # By name: transformer-lens 4 has no HookedTransformer to compare with, and importing them is slow.
    kinds = {base.__name__ for base in type(model).__mro__}
    if "HookedTransformer" in kinds:
        return HookedHost
    if "TransformerBridge" in kinds:
        return BridgeHost
    if "PreTrainedModel" in kinds:
        return PlainHost
    raise ValueError(
        "expected a HookedTransformer, a TransformerBridge or a transformers model, got "
        f"{type(model).__name__}: load one with ropelens.load"
    )
