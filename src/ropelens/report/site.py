"""A folder of pages that need no network: one skeleton, one style, one plotly.js, whole or not at all."""

from __future__ import annotations

import html
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from ropelens.plots.provenance import provenance
from ropelens.plots.style import BLUE, COLOURS, DIVERGING, DIVERGING_DARK, ORANGE

MARK = "report.json"
THEME = {
    "diverging": {"light": DIVERGING, "dark": DIVERGING_DARK},
    "above": ORANGE,
    "below": BLUE,
    "colours": COLOURS,
}


@dataclass(frozen=True)
class Page:
    """One page.

    Attributes:
        file: As "head.html".
        label: What links to it say.
        heading: The page's heading.
        body: HTML.
        data: What its scripts read, by name: a file each in data/.
        script: Its own script, beside those that all pages share; "" for none.
        figures: Figures that the page shows as they are, by the id of their place.
    """

    file: str
    label: str
    heading: str
    body: str
    data: Mapping[str, Any] = field(default_factory=dict)
    script: str = ""
    figures: Mapping[str, go.Figure] = field(default_factory=dict)


def write_site(
    out: Path,
    title: str,
    pages: Sequence[Page],
    facts: Mapping[str, str],
    data: Mapping[str, Any] | None = None,
    command: str = "",
) -> Path:
    """Writes pages into a folder that is there already.

    Args:
        out: The folder.
        title: Of all pages.
        pages: The first is index.html.
        facts: What to say about where the numbers come from, in this order.
        data: What pages load when it is asked for: a file each in data/.
        command: The command that made them, written into every figure.

    Returns:
        The path of the first page.
    """
    (out / "assets").mkdir()
    (out / "data").mkdir()
    (out / "assets" / "plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
    for name in ("page.css", "page.js", *(page.script for page in pages if page.script)):
        (out / "assets" / name).write_text(part(name), encoding="utf-8")
    _write_data(out, "theme", THEME)
    skeleton = Template(part("page.html"))
    for page in pages:
        own = dict(page.data)
        if page.figures:
            name = page.file.removesuffix(".html") + "-figures"
            own[name] = {place: figure_json(figure, command) for place, figure in page.figures.items()}
        for name, content in own.items():
            _write_data(out, name, content)
        scripts = ["assets/plotly.min.js", "assets/page.js", *(f"data/{name}.js" for name in ("theme", *own))]
        if page.script:
            scripts.append(f"assets/{page.script}")
        text = skeleton.substitute(
            title=html.escape(title if page is pages[0] else f"{page.label}: {title}"),
            heading=page.heading,
            navigation=_navigation(pages, page),
            body=page.body,
            open="open" if page is pages[0] else "",
            facts=definitions(facts),
            version=version("ropelens"),
            scripts="\n".join(f'<script src="{source}"></script>' for source in scripts),
        )
        (out / page.file).write_text(text, encoding="utf-8")
    for name, content in (data or {}).items():
        _write_data(out, name, content)
    about = {"format": 1, "title": title, "version": version("ropelens"), "command": command}
    about |= {"pages": [page.file for page in pages], "facts": dict(facts)}
    (out / MARK).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return out / pages[0].file


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Gives a folder to write to, which takes the place of `out` in the end; after an error, none does.

    Raises:
        ValueError: If `out` is something else than a report, and not empty.
        OSError: If it cannot be written.
    """
    check_replaceable(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    tag = uuid.uuid4().hex
    partial, old = (out.parent / f".{out.resolve().name}.{tag}.{what}" for what in ("partial", "old"))
    partial.mkdir()
    try:
        yield partial
        if out.exists():
            os.replace(out, old)
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists() and not out.exists():
            os.replace(old, out)
        shutil.rmtree(old, ignore_errors=True)


def check_replaceable(out: Path) -> None:
    """Raises a ValueError if something lies at `out` that is not a report: it must not be lost."""
    if out.is_dir() and ((out / MARK).is_file() or not any(out.iterdir())):
        return
    if out.is_file():
        raise ValueError(f"expected --out to be a folder, but {out} is a file: choose another")
    if out.is_symlink() or out.exists():
        raise ValueError(
            f"expected --out to be a new folder, an empty one or a report, got {out}, which is none of "
            "these: choose another"
        )
    for parent in out.parents:
        if parent.exists():
            if not parent.is_dir():
                raise ValueError(f"expected --out to be a folder, but {parent} is a file: choose another")
            return


def figure_json(figure: go.Figure, command: str = "") -> dict[str, Any]:
    """Returns a figure as a page holds it, with the command that made it in its provenance."""
    if command:
        provenance(figure, command)
    return json.loads(figure.to_json() or "")


def figure_place(name: str, caption: str) -> str:
    """Returns the HTML of a place for a figure; the caption is HTML and names the figure to all readers."""
    return (
        f'<figure><figcaption id="{name}-caption">{caption}</figcaption>'
        f'<div class="plot" id="{name}" role="group" aria-labelledby="{name}-caption"></div></figure>'
    )


def section(name: str, title: str, says: str, *content: str) -> str:
    """Returns a section of a page; all but its name is HTML."""
    inside = "\n".join(content)
    return (
        f'<section aria-labelledby="{name}"><h2 id="{name}">{title}</h2>\n<p>{says}</p>\n{inside}\n</section>'
    )


def definitions(facts: Mapping[str, str]) -> str:
    """Returns facts as the inside of an HTML description list."""
    return "\n".join(
        f"<div><dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd></div>" for key, value in facts.items()
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """Returns an HTML table; cells are HTML, the first of each row its heading."""
    named = f"<caption>{caption}</caption>" if caption else ""
    head = "".join(f'<th scope="col">{cell}</th>' for cell in header)
    body = "\n".join(
        f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in rest) + "</tr>"
        for first, *rest in rows
    )
    inside = f"{named}<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody>"
    return f'<div class="scroll"><table>{inside}</table></div>'


def head_link(layer: int, head: int, text: str | None = None) -> str:
    """Returns a link to the page of a head."""
    return f'<a href="head.html#{layer}.{head}">{text or f"layer {layer}, head {head}"}</a>'


def part(name: str) -> str:
    """Returns a file that lies beside this one."""
    return (files("ropelens.report") / name).read_text(encoding="utf-8")


def _navigation(pages: Sequence[Page], here: Page) -> str:
    if len(pages) < 2:
        return ""
    items = "".join(
        f'<li><a href="{page.file}"{" aria-current=page" if page is here else ""}>{page.label}</a></li>'
        for page in pages
    )
    return f'<nav aria-label="Pages"><ul>{items}</ul></nav>'


def _write_data(out: Path, name: str, content: Any) -> None:
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    (out / "data" / f"{name}.js").write_text(f"ropelens.put({json.dumps(name)},{text});\n", encoding="utf-8")
