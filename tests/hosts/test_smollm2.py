"""SmolLM2-135M, the real thing: every host against the plain transformers model."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import ropelens as rl
import ropelens_kernels as kernels
from ropelens.bands import pair_dims
from ropelens.hosts import host_of
from ropelens.hosts.load import has_hooked_transformer, smollm2_folder

pytestmark = pytest.mark.real
HOSTS = ["bridge", "hooked", "transformers"] if has_hooked_transformer() else ["bridge", "transformers"]
N_TOKENS = 160


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    text = "\n".join(topics[key] for key in sorted(topics))[:4000]
    return torch.tensor([AutoTokenizer.from_pretrained(smollm2_folder()).encode(text)[:N_TOKENS]])


@pytest.fixture(scope="module")
def plain(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The scores by the kernels' definition, from queries and keys caught in the plain transformers model."""
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.models.llama.modeling_llama import eager_attention_forward

    caught: list[tuple[torch.Tensor, torch.Tensor]] = []

    def catching(module: Any, q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        caught.append((q.transpose(1, 2), k.transpose(1, 2)))
        return eager_attention_forward(module, q, k, *args, **kwargs)

    AttentionInterface.register("catching", catching)
    model = AutoModelForCausalLM.from_pretrained(
        smollm2_folder(), dtype=torch.float32, attn_implementation="eager"
    )
    model.config._attn_implementation = "catching"
    causal = torch.full((N_TOKENS, N_TOKENS), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        logits = model(ids, attention_mask=causal).logits
    assert logits.max() - logits.min() > 2
    assert len(caught) == 30
    shared = {"pairs": pair_dims(64, adjacent=False), "scale": 64**-0.5}
    return {
        "entropy": torch.stack([kernels.entropy(q, k, **shared, tol=1e-6).values[0] for q, k in caught]),
        "activation": torch.stack(
            [kernels.activation(q, k, **shared, method="pairwise").values[0] for q, k in caught]
        ),
    }


@pytest.mark.parametrize("host", HOSTS)
def test_every_host_gives_the_scores_of_the_plain_model(
    host: str, ids: torch.Tensor, plain: dict[str, torch.Tensor]
):
    model = rl.load("smollm2-135m", host=host)
    if host == "transformers":
        assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        bare = model(ids)
        with rl.observe(model, tol=1e-6) as seen:
            watched = model(ids)
    assert torch.equal(getattr(bare, "logits", bare), getattr(watched, "logits", watched))
    for metric, expected in plain.items():
        found = seen.scores[metric].values
        largest = expected.abs().amax(-1, keepdim=True)  # relative to the head's strongest band
        assert ((found - expected).abs() / largest).max() < 1e-4, metric
    certificate = host_of(model).certificate
    assert max(spec.error for spec in certificate.layers) < 1e-4  # band sums rebuild the scores
    assert {(s.n_heads, s.n_kv_heads, s.layout, s.window) for s in certificate.layers} == {
        (9, 3, "half", None)
    }

    one = rl.band_entropy(model, ids, tol=1e-6)
    assert torch.equal(one.values, seen.scores["entropy"].values)

    expected_freq = 100_000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    assert ((certificate.bands.inv_freq - expected_freq).abs() / expected_freq).max() < 1e-6

    # Strings go through the model's own tokenizer, alike on every host.
    assert model.tokenizer.encode("The cat") == [504, 2644]
    assert rl.band_entropy(model, "The cat sat").n_tokens == 3


@pytest.mark.parametrize(
    ("family", "attention"), [("gemma2", "eager"), ("gpt_oss", "eager"), ("llama", "sdpa")]
)
def test_a_transformers_model_is_loaded_on_sdpa_where_that_is_exact(
    family: str, attention: str, tmp_path: Path
):
    from transformers import AutoTokenizer

    tiny.plain(family, dtype=torch.float32).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(smollm2_folder()).save_pretrained(tmp_path)
    model = rl.load(tmp_path, host="transformers", device="cpu")
    assert model.config._attn_implementation == attention
    assert model.tokenizer.encode("The cat") == [504, 2644]
    assert rl.Bands.of(model).n_bands == 4
    assert not model.training


def test_a_host_that_is_not_there_is_named():
    load = inspect.unwrap(rl.load)  # or else the tests' type checks speak first
    with pytest.raises(ValueError, match='expected host="bridge", "hooked" or "transformers", got \'eager\''):
        load("smollm2-135m", host="eager")
    if "hooked" not in HOSTS:
        with pytest.raises(ValueError, match="transformer-lens 4 has no HookedTransformer"):
            rl.load("smollm2-135m", host="hooked")
