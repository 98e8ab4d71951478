"""What is found out about a model once, for as long as its certificate holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from ropelens.hosts.base import Host
from ropelens.hosts.layer import Certificate

R = TypeVar("R")


def once(measure: Callable[[Host], R]) -> Callable[[Host], R]:
    """Keeps what a function returns for a model, until the model is certified anew; holds no model."""
    kept: weakref.WeakKeyDictionary[Any, tuple[Certificate, R]] = weakref.WeakKeyDictionary()

    @wraps(measure)
    def found(host: Host) -> R:
        known = kept.get(host.model)
        if known is None or known[0] is not host.certificate:
            known = kept[host.model] = host.certificate, measure(host)
        return known[1]

    return found
