"""The tables in the docs are what `make results` makes of the committed scores."""

import runpy
from pathlib import Path

import ropelens as rl

ROOT = Path(__file__).resolve().parent.parent


def test_the_tables_are_those_of_the_data():
    tool = runpy.run_path(str(ROOT / "tools" / "results.py"))
    page = (ROOT / "docs" / "results.md").read_text()
    scores = rl.BandScores.load(ROOT / "docs" / "data" / "entropy.safetensors")
    assert tool["filled"](page, tool["tables"](scores)) == page


def test_every_picture_is_small_and_used():
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    for picture in (ROOT / "docs" / "assets").iterdir():
        assert picture.stat().st_size < 500_000, picture.name
        assert picture.name in pages, picture.name
