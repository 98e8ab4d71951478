"""Notebooks are small, free of outputs, in order, and run from top to bottom."""

import ast
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TOOL = ROOT / "tools" / "notebooks.py"


def run_tool(*args):
    return subprocess.run([sys.executable, TOOL, *map(str, args)], capture_output=True, text=True)


def test_there_are_notebooks_without_outputs():
    assert NOTEBOOKS
    checked = run_tool("check")
    assert checked.returncode == 0, checked.stdout


def test_outputs_and_size_are_caught_and_stripped(tmp_path):
    path = tmp_path / "dirty.ipynb"
    cell = nbformat.v4.new_code_cell("1 + 1", execution_count=1)
    cell.outputs = [nbformat.v4.new_output("stream", text="x" * 60_000)]
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    checked = run_tool("check", path)
    assert checked.returncode == 1
    assert "cell 0 holds outputs" in checked.stdout
    assert "more than 50000" in checked.stdout
    assert run_tool("strip", path).returncode == 0
    assert run_tool("check", path).returncode == 0


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_defines_nothing(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            defined = [
                n for n in ast.walk(ast.parse(cell.source)) if isinstance(n, ast.FunctionDef | ast.ClassDef)
            ]
            assert not defined, f"{path.name} defines {defined[0].name}: it belongs into the package"


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path):
    """Uses the run of `make notebooks` where nothing has changed since."""
    ran = run_tool("run", path)
    assert ran.returncode == 0, ran.stderr[-4000:]
    outputs = [
        output
        for cell in nbformat.read(ROOT / "build" / "notebooks" / path.name, as_version=4).cells
        for output in cell.get("outputs", [])
    ]
    assert any(output.output_type == "display_data" or "data" in output for output in outputs)
    assert not [
        output.text for output in outputs if output.get("name") == "stderr" and "Warning" in output.text
    ]
