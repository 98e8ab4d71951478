"""What a model's attention does, layer by layer: the table to read before trusting anything."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ropelens.hosts import LensHost, uncertified
from ropelens.hosts.certify import certify_each
from ropelens.hosts.layer import LayerSpec

if TYPE_CHECKING:
    import pandas as pd

    from ropelens.hosts import Host

COLUMNS = {
    "heads": "Int64",
    "kv_heads": "Int64",
    "d_head": "Int64",
    "scale": "float64",
    "softcap": "float64",
    "window": "Int64",
    "sinks": "boolean",
    "rotary_dims": "Int64",
    "rest_dims": "Int64",
    "layout": "string",
    "first_frequency": "float64",
    "last_frequency": "float64",
    "first_wavelength": "float64",
    "last_wavelength": "float64",
    "amplitude": "float64",
    "error": "float64",
}


def inspect(model: Any) -> pd.DataFrame:
    """What each layer's attention was found to do: rotation, heads, scale, window, certification error.

    Nothing here is copied from a config: rotations are those that queries were seen to go through, and
    scale, softcap, window and sinks those with which the model's own scores (on a plain transformers
    model, its attention outputs) could be rebuilt. Two short forward passes are run each time.

    Args:
        model: A HookedTransformer, a TransformerBridge or a transformers model.

    Returns:
        One row a layer: host; queries, keys (where they are read); heads, kv_heads, d_head; scale,
        softcap, window (tokens), sinks; rotary_dims, rest_dims; layout ("half", "adjacent" or "none");
        first_frequency, last_frequency (radians per token); first_wavelength, last_wavelength (tokens);
        amplitude; error (of the rebuilt, as a share of the range); refused (why a layer cannot be read,
        the other columns being empty then, or "").

    Raises:
        ValueError: If the model is of a kind that ropelens does not know.

    Example:
        ```python
        rl.inspect(model)[["layout", "rotary_dims", "last_wavelength", "window", "error"]]
        ```
    """
    import pandas as pd

    host = uncertified(model)
    rows = [
        {"layer": layer, "host": host.kind, **_points(host, layer), **_facts(found)}
        for layer, found in enumerate(certify_each(host))
    ]
    return pd.DataFrame(rows).set_index("layer").astype(COLUMNS)


def _points(host: Host, layer: int) -> dict[str, str]:
    if isinstance(host, LensHost):
        q, k, _ = host.points(layer)
        return {"queries": q, "keys": k}
    return {"queries": "attention function, query", "keys": "attention function, key"}


def _facts(found: LayerSpec | ValueError) -> dict[str, Any]:
    if isinstance(found, ValueError):
        return dict.fromkeys(COLUMNS) | {"refused": str(found)}
    turn = found.rotation.inv_freq.tolist()
    ends = (turn[0], turn[-1]) if turn else (None, None)
    values = (
        found.n_heads,
        found.n_kv_heads,
        found.d_head,
        found.scale,
        found.softcap,
        found.window,
        found.sinks is not None,
        2 * len(turn),
        found.d_head - 2 * len(turn),
        found.layout,
        *ends,
        *(None if turn is None else math.inf if turn == 0 else 2 * math.pi / turn for turn in ends),
        found.rotation.amplitude,
        found.error,
    )
    return dict(zip(COLUMNS, values, strict=True)) | {"refused": ""}
