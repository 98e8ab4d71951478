"""What the pages of results share: where things lie, ranges of wavelengths, tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ropelens.hosts.load import TEACHING

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
ASSETS = DOCS / "assets"

RANGES = {  # wavelengths in tokens
    "under 32": (0.0, 32.0),
    "32 to 512": (32.0, 512.0),
    "512 to 8,192": (512.0, 8192.0),
    "above 8,192": (8192.0, float("inf")),
}

TEACHING_NAMES = {name: f"{name.split('-')[-1][0]} layer{'s' if '2l' in name else ''}" for name in TEACHING}


def columns(wavelength: Tensor) -> dict[str, Tensor]:
    """Returns which bands lie in each of the ranges, by the wavelength of each band."""
    return {name: (wavelength >= low) & (wavelength < high) for name, (low, high) in RANGES.items()}


def by_range(values: Tensor, wavelength: Tensor) -> Tensor:
    """Returns the sums of `values [..., band]` over the bands of each range, `[..., range]`."""
    return torch.stack([values[..., chosen].sum(-1) for chosen in columns(wavelength).values()], -1)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a Markdown table whose first column is text and whose others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def filled(page: str, new: dict[str, str]) -> str:
    """Returns a page with each table between its own marks replaced."""
    for name, content in new.items():
        before, mark, after = page.partition(f"<!-- {name} -->\n")
        _, end, after = after.partition("<!-- end -->")
        if not mark or not end:
            raise ValueError(f"the page has no place marked <!-- {name} --> ... <!-- end -->")
        page = f"{before}{mark}\n{content}\n{end}{after}"
    return page
