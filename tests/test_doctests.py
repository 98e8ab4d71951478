"""The examples in the docstrings of both packages."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
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
