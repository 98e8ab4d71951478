"""Makes the tables and pictures of README and docs/results from the data in docs/data.

`python tools/results` makes all pages, `python tools/results demo` one. A page is a module here with
PAGE, tables() and figures(). Pictures need a Chromium.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from common import ASSETS, filled

NAMES = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in ("__main__", "common"))


def make(name: str) -> None:
    page = import_module(name)
    page.PAGE.write_text(filled(page.PAGE.read_text(), page.tables()))
    ASSETS.mkdir(exist_ok=True)
    for picture, figure in page.figures().items():
        figure.layout.updatemenus = ()  # a picture has no menu to open
        figure.update_layout(paper_bgcolor="white", plot_bgcolor="white")  # dark pages show pictures too
        figure.update_yaxes(title_standoff=12, automargin=True)
        figure.write_image(ASSETS / f"{picture}.png", width=figure.layout.width or 900, scale=1.5)
        print(f"docs/assets/{picture}.png")


if __name__ == "__main__":
    asked = sys.argv[1:] or NAMES
    if unknown := set(asked) - set(NAMES):
        sys.exit(f"expected pages from {', '.join(NAMES)}, got {', '.join(sorted(unknown))}")
    for name in asked:
        make(name)
