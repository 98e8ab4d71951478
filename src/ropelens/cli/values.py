"""Values that options take: completed by the shell, and read. No library is loaded for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from ropelens.cli.sentence import UsageError

AnyHost = Literal["transformers", "bridge", "hooked"]

MODELS = ("smollm2-135m", "attn-only-1l", "attn-only-2l")
METRICS = ("entropy", "activation", "norm_product", "fisher", "taylor")
SCOPES = ("model", "layer", "head")
CONFIGS = ("study-100m", "small-10m", "tiny-1m")
ARMS = (
    "original",
    "resampled",
    "quantile",
    "shuffled",
    "one-set",
    "partial-10",
    "partial-75",
    "learned",
    "learned-shared",
)
BANDS = ("slowest:20%", "fastest:20%")


def one_of(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Completes one name; where none fits, shells complete files."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def some_of(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Completes the last of names with commas between, without those that stand there already."""

    def complete(incomplete: str) -> list[str]:
        done, comma, last = incomplete.rpartition(",")
        left = [name for name in names if name not in done.split(",")]
        return [f"{done}{comma}{name}" for name in left if name.startswith(last)]

    return complete


def listed(text: str, option: str, known: Iterable[str] | None = None) -> list[str]:
    """Returns the parts of "a, b" and refuses those that are not known."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [] if known is None else [part for part in parts if part not in known]
    if unknown or not parts:
        names = "names with commas between" if known is None else f"names from {', '.join(known)}"
        raise UsageError(f"expected {option} with {names}, got {unknown[0] if unknown else text}")
    return parts


def numbers(text: str, option: str, example: str) -> list[float | int]:
    """Returns the numbers of "0.1, 0.5"."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"expected {option} as {example}, got {text!r}") from error
