"""What a figure was made from: written into its layout, and read back."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from inspect import signature
from typing import Any, ParamSpec

import plotly.graph_objects as go

from ropelens.scores.provenance import KEY, facts_of

P = ParamSpec("P")


def stamped(draw: Callable[P, go.Figure]) -> Callable[P, go.Figure]:
    """Makes a function that draws write into each figure what it was made from, for `provenance`."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> go.Figure:
        figure = draw(*args, **kwargs)
        given = signature(draw).bind(*args, **kwargs).arguments
        made_from = facts_of(given.get("source")) or facts_of(list(given.values()))
        about = {"figure": draw.__name__, "version": version("ropelens"), "made_from": made_from}
        figure.update_layout(meta={KEY: about})
        return figure

    return drawn


def provenance(figure: go.Figure | dict[str, Any], command: str | None = None) -> dict[str, Any]:
    """Returns what a figure was made from: a figure of `ropelens.plots`, or its JSON read back.

    Args:
        figure: The figure, or a mapping with its layout, as `json.loads(figure.to_json())` gives.
        command: If given, it is written into the figure as the command that made it.

    Returns:
        figure (the function that drew it), version (of ropelens), made_from (for each result that went in:
        its kind, the fingerprint of its model, the digest of its data, and how it was measured; where bare
        numbers went in, their hash), and command, if one is known.

    Raises:
        ValueError: If the figure says nothing of its making.

    Example:
        >>> import torch
        >>> from ropelens.plots.frequencies import frequency_ladders
        >>> figure = frequency_ladders(torch.ones(1, 2).double(), torch.ones(1, 2).double())
        >>> provenance(figure)["figure"]
        'frequency_ladders'
    """
    layout: Any = figure.layout if isinstance(figure, go.Figure) else figure.get("layout", {})
    meta = layout.meta if isinstance(figure, go.Figure) else layout.get("meta")
    if not isinstance(meta, dict) or KEY not in meta:
        raise ValueError("expected a figure made by ropelens.plots, got one that says nothing of its making")
    if command is not None:
        meta = {**meta, KEY: {**meta[KEY], "command": command}}
        if isinstance(figure, go.Figure):
            figure.update_layout(meta=meta)
        else:
            figure["layout"]["meta"] = meta
    return meta[KEY]
