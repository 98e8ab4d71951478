"""The examples in the docstrings of both packages."""

import doctest
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import pytest
import torch

import ropelens as rl

ROOT = Path(__file__).resolve().parent.parent
NAMES = [*rl.__all__, *(f"circuits.{name}" for name in rl.circuits.__all__)]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules() -> list[str]:
    found = []
    for source_root in (ROOT / "src", ROOT / "kernels"):
        for path in sorted(source_root.rglob("*.py")):
            if ">>> " in path.read_text():
                parts = path.relative_to(source_root).with_suffix("").parts
                found.append(".".join(part for part in parts if part != "__init__"))
    return found


@pytest.mark.parametrize("name", modules())
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=OPTIONS)
    assert result.failed == 0


def block(name: str) -> str:
    """Returns the example of a public name that needs a model: a fenced block, not a doctest."""
    home, _, name = name.rpartition(".")
    doc = inspect.getdoc(getattr(rl.circuits if home else rl, name))
    found = re.findall(r"```python\n(.*?)```", doc or "", flags=re.DOTALL)
    return textwrap.dedent("".join(found))


@pytest.mark.real
@pytest.mark.parametrize("name", [name for name in NAMES if block(name)])
def test_examples_on_a_real_model(name, smollm2):
    names = {
        "rl": rl,
        "model": smollm2,
        "tokens": torch.tensor([[504, 2644, 2677, 335, 260, 3857, 30]]),
        "documents": ["The cat sat on the mat.", "The dog sat on the log."],
        "layer": 10,
        "head": 1,
    }
    exec(compile(block(name), name, "exec"), names)
