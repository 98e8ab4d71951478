"""The direction of the imports, and what `from ropelens import ...` costs."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# From left to right: a module imports from its own column and from those to the right of it.
COLUMNS = [
    {"__main__"},
    {"cli", "report"},
    {"pretrain"},
    {"circuits", "lesions"},
    {"interventions"},
    {"streaming", "measure"},
    {"metrics", "hooks"},
    {"hosts"},
    {"data"},
    {"bands", "scores", "plots"},
    {"ropelens_kernels", "lazy"},
]
# Imports against the direction; each must stay inside a function.
LAZY = {("bands", "hosts"), ("scores", "hosts"), ("scores", "plots")}
HEAVY = {"transformer_lens", "transformers", "plotly", "pandas", "datasets", "scipy", "IPython", "typer"}


def modules():
    for source_root in (ROOT / "src", ROOT / "kernels"):
        for path in sorted(source_root.rglob("*.py")):
            parts = path.relative_to(source_root).with_suffix("").parts
            yield path, parts


def part_of(name: str) -> str | None:
    """Returns the column entry that a dotted module name belongs to, None for other packages."""
    parts = name.split(".")
    if parts[0] == "ropelens_kernels":
        return "ropelens_kernels"
    if parts[0] == "ropelens":
        return parts[1] if len(parts) > 1 else "ropelens"
    return None


def imports(path: Path, parts: tuple[str, ...]):
    """Yields (imported module, whether the import waits inside a function) of one file."""
    package = parts if parts[-1] == "__init__" else parts[:-1]
    package = tuple(p for p in package if p != "__init__")

    def visit(node, inside):
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name, inside
            elif isinstance(child, ast.ImportFrom):
                base = ".".join(package[: len(package) - child.level + 1]) if child.level else ""
                module = ".".join(filter(None, (base, child.module)))
                # `from ropelens import bands` names a module, `from ropelens.bands import Bands` a class
                if module == "ropelens":
                    yield from ((f"ropelens.{alias.name}", inside) for alias in child.names)
                else:
                    yield module, inside
            else:
                yield from visit(child, inside or is_function)

    yield from visit(ast.parse(path.read_text()), False)


def test_every_module_has_a_place():
    known = set().union(*COLUMNS)
    found = {part_of(".".join(p for p in parts if p != "__init__")) for _, parts in modules()}
    assert found - known - {"ropelens"} == set()


@pytest.mark.parametrize(
    ("path", "parts"), [pytest.param(path, parts, id=".".join(parts)) for path, parts in modules()]
)
def test_imports_point_to_the_right(path, parts):
    column = {name: i for i, names in enumerate(COLUMNS) for name in names}
    here = part_of(".".join(p for p in parts if p != "__init__"))
    for module, inside_function in imports(path, parts):
        there = part_of(module)
        if here == "ropelens" or there is None or there == here:
            continue  # ropelens/__init__.py names everything
        if (here, there) in LAZY:
            assert inside_function, f"{path}: {here} may import {there} inside a function only"
        else:
            assert there in column, f"{path}: imports {module}; name the module that defines it"
            assert column[here] <= column[there], f"{path}: {here} imports {there}"


def test_kernels_see_plain_tensors():
    for path, parts in modules():
        if parts[0] != "ropelens_kernels":
            continue
        tops = {module.split(".")[0] for module, _ in imports(path, parts)}
        assert not tops & {"ropelens", "transformer_lens", "pandas", "plotly"}, path
        if not path.stem.startswith("bench"):  # a benchmark may take its inputs from a model
            assert "transformers" not in tops, path


def test_importing_is_quick_and_touches_no_device():
    code = """
import json, sys, time
import torch
start = time.perf_counter()
from ropelens import band_entropy
print(json.dumps({
    "seconds": time.perf_counter() - start,
    "modules": sorted({name.split(".")[0] for name in sys.modules}),
    "cuda": torch.cuda.is_initialized(),
}))
"""
    # torch alone takes 1 to 3 s; the rest must be quick. The fastest of three leaves out a busy machine.
    command = [sys.executable, "-c", code]
    runs = [json.loads(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(3)]
    assert min(run["seconds"] for run in runs) < 1, runs
    assert not HEAVY & set(runs[0]["modules"])
    assert runs[0]["cuda"] is False
