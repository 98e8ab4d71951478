"""Puts the notebooks, as they last ran, among the pages of the docs, which must need no network."""

import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

BUILT = Path(__file__).resolve().parent.parent / "build"
FETCHED = re.compile(
    r"""<(?:script|img|iframe)[^>]*\ssrc=["']?https?:[^>]*>|<link[^>]*stylesheet[^>]*https?:[^>]*>"""
)
TO_PAGE = re.compile(r"""(<a[^>]*\shref="(?!https?:)[^"#]+)\.(?:md|ipynb)(?=["#])""")


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Files, config) -> Files:
    notebooks = sorted((BUILT / "notebooks").glob("*.ipynb"))
    if not notebooks:
        raise PluginError("no notebook has run yet: `make notebooks` first")
    for path in notebooks:
        name = path.relative_to(BUILT).as_posix()
        files.append(File(name, str(BUILT), config.site_dir, config.use_directory_urls))
    return files


def on_post_page(output: str, page, config) -> str:
    if fetched := FETCHED.search(output):
        raise PluginError(f"{page.url} would load something from a network: {fetched[0][:200]}")
    if page.file.src_uri.endswith(".ipynb"):  # MkDocs makes only the links of Markdown pages links to HTML
        return TO_PAGE.sub(r"\1.html", output)
    return output
