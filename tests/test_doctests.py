"""The examples in the docstrings of both packages."""

import doctest
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import pandas as pd
import pytest
import torch

import ropelens as rl

ROOT = Path(__file__).resolve().parent.parent
NAMES = [*rl.__all__, *(f"circuits.{name}" for name in rl.circuits.__all__)]
NOT_RUN = {"lesion_sweep", "set_frequencies"}  # it takes hours; it changes the shared model for good
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


@pytest.fixture(scope="module")
def measured(smollm2):
    """What examples that begin after a measurement have at hand."""
    windows = torch.tensor([[504, 2644, 2677, 335, 260, 3857, 30], [504, 3857, 2677, 335, 260, 2644, 30]])
    activation, entropy = (measure(smollm2, windows) for measure in (rl.band_activation, rl.band_entropy))
    effects = pd.DataFrame({"layer": 1, "head": 0, "band": range(32), "rise": range(32)})
    found = {"windows": windows, "activation": activation, "entropy": entropy, "effects": effects}
    return found | {"mask": rl.bands_where(smollm2, "fastest:25%")}


@pytest.mark.real
@pytest.mark.parametrize("name", [name for name in NAMES if block(name) and name not in NOT_RUN])
def test_examples_on_a_real_model(name, smollm2, measured):
    names = measured | {
        "rl": rl,
        "model": smollm2,
        "tokens": torch.tensor([[504, 2644, 2677, 335, 260, 3857, 30]]),
        "text": "The cat sat on the mat.",
        "documents": ["The cat sat on the mat.", "The dog sat on the log."],
        "layer": 10,
        "head": 1,
    }
    exec(compile(block(name), name, "exec"), names)
