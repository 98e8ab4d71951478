"""`ropelens lesion`: a sweep from the shell, its page, and sentences for what cannot be done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from typer.testing import CliRunner

from lesion_example import tokenizer
from ropelens.cli import app
from ropelens.cli.lesion import _layers
from ropelens.lesions import LesionResults


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("model")
    tiny.plain("llama", dtype=torch.float32).save_pretrained(out)
    tokenizer().save_pretrained(out)
    return out


def call(*args: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["lesion", *map(str, args)])
    return done.exit_code, done.stdout, done.stderr


def test_a_sweep_with_tasks_of_ones_own(folder: Path, tmp_path: Path):
    tasks = tmp_path / "tasks.yaml"
    tasks.write_text(
        "- {name: tell, kind: continuation, prompt: w5 w6}\n- {name: more, kind: continuation, prompt: w7}\n"
    )
    out = tmp_path / "out"
    args = ["--model", folder, "--tasks", tasks, "--only", "tell", "--layers", "0..1", "--stds", "0.5"]
    args += ["--seeds", 2, "--max-tokens", 4, "--answer-tokens", 3, "--bands", "slowest:2,fastest:1"]
    status, said, _ = call(*args, "--limit", 1000, "--out", out, "--json")
    assert status == 0
    assert {(row["layers"], row["bands"]) for row in json.loads(said)} == {
        (layer, bands) for layer in ("0", "1") for bands in ("slowest:2", "fastest:1")
    }
    results = LesionResults.load(out)
    assert len(results.runs) == 1 + 2 * 2 * 2
    assert {run["task"] for run in results.runs} == {"tell"}
    assert (out / "page" / "index.html").exists()
    status, said, _ = call(*args, "--limit", 1000, "--out", out)  # again: nothing is left to do
    assert status == 0
    assert "slowest:2" in said
    assert len(LesionResults.load(out).runs) == 9


@pytest.mark.parametrize(
    ("expected", "args", "message"),
    [
        (2, ["--layers", "a"], 'expected --layers as "0,15,29", "0-3" or "0..3", got'),
        (2, ["--layers", "0", "--stds", "a"], "expected --stds as 0.5,1,2, got 'a'"),
        (1, ["--layers", "0", "--stds=-1"], "expected a std of 0 or more"),
        (1, ["--layers", "0", "--bands", "middle:2"], "expected bands as"),
        (1, ["--layers", "7"], "expected layers from 0 to 1, got 7"),
        (2, ["--layers", "0", "--only", "nothing"], "expected --only with names from repetition"),
        (1, ["--layers", "0", "--tasks", "no-such.yaml"], "no-such.yaml"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(folder: Path, tmp_path: Path, expected, args, message):
    status, _, said = call("--model", folder, "--out", tmp_path / "o", *args)
    assert status == expected
    last = said.splitlines()[-1]  # above it, transformers shows how it loads the model
    assert last.startswith("ropelens: ")
    assert message in last


def test_layers_are_read():
    assert _layers("0,4-6,9..11") == [0, (4, 5, 6), 9, 10, 11]
