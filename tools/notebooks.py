"""Keep notebooks/ clean and run them: `python tools/notebooks.py check | strip | run [NOTEBOOK ...]`."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
BUILT = ROOT / "build" / "notebooks"
MAX_BYTES = 50_000
TIMEOUT_S = 600  # of one cell: a stuck kernel fails instead of hanging


def faults(path: Path) -> list[str]:
    """Returns what keeps a notebook out of the repository: outputs, counters, size."""
    found = []
    for number, cell in enumerate(nbformat.read(path, as_version=4).cells):
        if cell.cell_type == "code" and (cell.outputs or cell.execution_count is not None):
            found.append(f"{path.name}: cell {number} holds outputs")
    if path.stat().st_size > MAX_BYTES:
        found.append(f"{path.name}: {path.stat().st_size} bytes, more than {MAX_BYTES}")
    return found


def strip(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k == "tags"})
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    nbformat.write(notebook, path)


def is_fresh(path: Path) -> bool:
    """Returns whether the last run of a notebook is newer than the notebook and all of the code."""
    built = BUILT / path.name
    if not built.exists():
        return False
    sources = [path, *(ROOT / "src").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    return built.stat().st_mtime > max(source.stat().st_mtime for source in sources)


def run(path: Path) -> None:
    """Runs a notebook in this Python's own kernel and writes it, with its outputs, to build/notebooks."""
    from nbclient import NotebookClient

    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ["PLOTLY_RENDERER"] = "notebook"  # figures with their script, for pages without a network
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # tqdm would like to have ipywidgets
    notebook = nbformat.read(path, as_version=4)
    start = time.monotonic()
    NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": str(path.parent)}}).execute()
    for output in (o for cell in notebook.cells for o in cell.get("outputs", []) if "data" in o):
        if "text/html" in output.data:  # plotly asks a network for MathJax, which no figure here needs
            output.data["text/html"] = re.sub(
                r'<script src="https://[^"]*mathjax[^"]*"></script>', "", output.data["text/html"]
            )
    BUILT.mkdir(parents=True, exist_ok=True)
    unfinished = BUILT / f".{path.name}"
    nbformat.write(notebook, unfinished)
    unfinished.replace(BUILT / path.name)
    print(f"{path.name}: ran in {time.monotonic() - start:.0f} s")


def main(command: str, *names: str) -> int:
    paths = [Path(name).resolve() for name in names] or sorted((ROOT / "notebooks").glob("*.ipynb"))
    if command == "check":
        found = [fault for path in paths for fault in faults(path)]
        print("\n".join(found), end="\n" if found else "")
        return bool(found)
    for path in paths:
        if command == "strip":
            strip(path)
        elif is_fresh(path):
            print(f"{path.name}: nothing changed since its last run")
        else:
            run(path)
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in ("check", "strip", "run"):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
