"""`rl.inspect`: what a person reads before trusting anything, refusals included."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tiny
import torch
from families import FAMILIES
from typer.testing import CliRunner

import ropelens as rl
from ropelens.cli import app


def test_every_layer_says_what_it_does():
    found = rl.inspect(tiny.plain("gemma3"))
    assert found.index.tolist() == [0, 1]
    assert set(found["host"]) == {"transformers"}
    assert found["window"].tolist() == [6, pd.NA]
    assert found["layout"].tolist() == ["half", "half"]
    assert found["first_wavelength"].tolist() == pytest.approx([2 * math.pi] * 2)
    assert found["last_frequency"].tolist() == pytest.approx([1e-3, 1e6**-0.75])
    assert found["last_wavelength"].tolist() == pytest.approx([2 * math.pi * 1e3, 2 * math.pi * 1e6**0.75])
    assert found["scale"].tolist() == pytest.approx([20**-0.5] * 2)
    assert (found["error"] < 1e-6).all()
    assert (found["refused"] == "").all()


def test_hook_points_sinks_and_amplitudes_of_a_bridge():
    found = rl.inspect(tiny.bridge(tiny.plain("gpt_oss")))
    assert found["queries"].tolist() == [f"blocks.{layer}.attn.hook_rot_q" for layer in (0, 1)]
    assert found["keys"].tolist() == [f"blocks.{layer}.attn.hook_rot_k" for layer in (0, 1)]
    assert found["sinks"].tolist() == [True, True]
    assert found["amplitude"].tolist() == pytest.approx([FAMILIES["gpt_oss"].amplitude] * 2)
    assert (found[["heads", "kv_heads", "d_head"]] == [6, 2, 8]).all(axis=None)


def test_a_layer_without_rotation_has_no_frequencies():
    found = rl.inspect(tiny.plain("smollm3"))
    assert found["layout"].tolist() == ["half", "none"]
    assert found["rest_dims"].tolist() == [0, 8]
    assert found["last_frequency"].isna().tolist() == [False, True]


def test_only_the_layer_that_is_refused_says_why():
    model = tiny.bridge(tiny.plain("llama"))
    model.hook_dict["blocks.1.attn.hook_attn_scores"].forward = lambda scores: scores * 1.01
    found = rl.inspect(model)
    assert found["refused"][0] == ""
    assert found["refused"][1].startswith("layer 1: the scores rebuilt from queries and keys differ")
    assert found["error"].isna().tolist() == [False, True]


def test_a_model_that_shows_nothing_says_why_in_every_layer():
    found = rl.inspect(tiny.plain("falcon"))
    assert set(found["refused"]) == {FAMILIES["falcon"].refused["transformers"]}
    assert len(found) == 2


@pytest.fixture
def folder(tmp_path: Path) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0} | {f"w{i}": i for i in range(1, 61)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    tiny.plain("gemma3", dtype=torch.float32).save_pretrained(tmp_path)
    return str(tmp_path)


def run(*arguments: str) -> Any:
    found = CliRunner().invoke(app, ["inspect", *arguments])
    assert found.exit_code == 0, found.output
    return found.stdout


def test_the_command_prints_a_table_or_json(folder: str):
    text = run(folder)
    assert "transformers, read at attention function, query and attention function, key; in all" in text
    assert "heads 6, kv heads 2, d head 8, scale 0.2236" in text
    assert "last wavelength" in " ".join(text.split())
    layers = json.loads(run(folder, "--host", "bridge", "--json"))
    assert [layer["window"] for layer in layers] == [6, None]
    assert layers[1]["last_frequency"] == pytest.approx(1e6**-0.75)
    assert layers[0]["queries"] == "blocks.0.attn.hook_rot_q"
