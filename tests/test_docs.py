"""The code blocks of README and docs run as they stand, and their links lead somewhere."""

import json
import re
import runpy
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

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


def prose(page: Path) -> str:
    """Returns the text of a page, or of a notebook's cells, without code."""
    text = page.read_text()
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.sub(r"^ *```.*?^ *```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as the site makes them, and those of the API."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading) for heading in headings]
    return {slugify(heading, "-") for heading in plain} | set(re.findall(r"^::: (.+)$", text, re.MULTILINE))


def target_of(page: Path, link: str) -> Path:
    """Returns the file that a link leads to; the site has the notebooks beside its pages."""
    folder = ROOT / "docs" / "notebooks" if page.suffix == ".ipynb" else page.parent
    found = (folder / link).resolve() if link else page
    if found.is_relative_to(ROOT / "docs" / "notebooks"):
        return ROOT / found.relative_to(ROOT / "docs")
    return found


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "notebooks").glob("*.ipynb"))], ids=by_name)
def test_links_lead_to_files_and_headings(page):
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?[^)]*\)", prose(page)):
        if not link.startswith(("http:", "https:", "mailto:")):
            target = target_of(page, link)
            assert target.exists(), f"{page.name} links to {link}"
            if anchor:
                assert anchor in anchors(target), f"{page.name} links to {link}#{anchor}"


def test_a_link_that_leads_nowhere_is_caught(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A *title*: two\n\n[a](#a-title-two) [b](#nothing) [c](gone.md)\n\n`[d](code.md)`\n")
    assert anchors(page) == {"a-title-two"}
    assert "code.md" not in prose(page)
    with pytest.raises(AssertionError, match="#nothing"):
        test_links_lead_to_files_and_headings(page)


def test_every_page_is_in_the_site():
    site = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert f": {page.relative_to(ROOT / 'docs').as_posix()}\n" in site, page.name
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        assert f": notebooks/{notebook.name}\n" in site, notebook.name


def test_readme_is_one_screen_with_two_commands():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 60
    shell = "".join(re.findall(r"^```sh\n(.*?)^```", readme, flags=re.DOTALL | re.MULTILINE))
    assert [line.split("#")[0].strip() for line in shell.splitlines()] == ["make demo", "make test"]


def test_the_readme_has_ten_lines_of_python():
    code = "".join(blocks(ROOT / "README.md")).splitlines()
    assert 8 <= len([line for line in code if line.strip()]) <= 12


def test_every_target_that_a_page_names_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), flags=re.MULTILINE))
        assert named <= targets, page.name


def test_the_support_table_is_that_of_the_families_under_test():
    page = (ROOT / "docs" / "hosts.md").read_text()
    support = runpy.run_path(str(ROOT / "tools" / "support.py"))
    assert support["page_with_table"](page) == page, "run `python tools/support.py`"
