"""The code blocks of README and docs run as they stand, and their links lead somewhere."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def by_name(page: Path) -> str:
    return page.name


@pytest.mark.real
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=by_name)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build").mkdir()
    names = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page)):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_readme_is_one_screen_with_two_commands():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 60
    shell = "".join(re.findall(r"^```sh\n(.*?)^```", readme, flags=re.DOTALL | re.MULTILINE))
    assert [line.split("#")[0].strip() for line in shell.splitlines()] == ["make demo", "make test"]


def test_every_target_that_a_page_names_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), flags=re.MULTILINE))
        assert named <= targets, page.name


def test_the_support_table_is_that_of_the_families_under_test():
    page = (ROOT / "docs" / "hosts.md").read_text()
    support = runpy.run_path(str(ROOT / "tools" / "support.py"))
    assert support["page_with_table"](page) == page, "run `python tools/support.py`"
