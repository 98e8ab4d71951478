"""The tables in docs/results are what `make results` makes of the committed data."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "results"
PAGES = sorted(path.stem for path in TOOL.glob("*.py") if path.stem not in ("__main__", "common"))


@pytest.fixture(params=PAGES)
def page(request, monkeypatch):
    monkeypatch.syspath_prepend(TOOL)
    yield import_module(request.param)
    for name in ("common", *PAGES):
        sys.modules.pop(name, None)


def test_the_tables_are_those_of_the_data(page):
    filled = import_module("common").filled
    text = page.PAGE.read_text()
    assert page.tables()
    assert filled(text, page.tables()) == text, "run `make results`"


def test_the_page_shows_every_figure_that_is_made(page):
    for name in page.figures():
        assert (ROOT / "docs" / "assets" / f"{name}.png").exists(), "run `make results`"
        assert f"(../assets/{name}.png)" in page.PAGE.read_text(), name


def test_every_picture_is_small_and_used():
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    for picture in (ROOT / "docs" / "assets").iterdir():
        assert picture.stat().st_size < 500_000, picture.name
        assert picture.name in pages, picture.name


def test_every_page_of_results_is_made():
    assert {path.stem for path in (ROOT / "docs" / "results").glob("*.md")} == set(PAGES)
