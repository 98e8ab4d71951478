"""Other frequencies on every host: exact where nothing changes, and everywhere where something does."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from double import Double

import ropelens as rl
from ropelens.hosts import host_of
from ropelens.hosts.load import hooked_from

RENAMED = "ignore:`past_key_values` is deprecated:FutureWarning"  # by the bridge itself
LONG = {"max_position_embeddings": 8192}


def on(host: str, plain: Any) -> Any:
    if host == "bridge":
        return tiny.bridge(plain)
    return hooked_from(plain, None) if host == "hooked" else plain


def made(family: str, host: str, dtype: torch.dtype = torch.float32) -> Any:
    return on(host, tiny.plain(family, dtype=dtype))


def run(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = host_of(model).run(ids, None)
    assert logits is not None
    return logits


def any_frequencies(bands: rl.Bands, seed: int = 0) -> torch.Tensor:
    """Frequencies from 0 to pi in no order, float32 numbers, another row for each layer."""
    generator = torch.Generator().manual_seed(seed)
    new = math.pi * torch.rand(bands.inv_freq.shape, generator=generator)
    new[:, -1] = 0
    return torch.where(bands.exists, new.double(), math.nan)


@pytest.mark.parametrize(
    ("family", "host"), tiny.carried("llama", "yarn", "gemma3", "phi", "gptj", "smollm3")
)
def test_the_original_frequencies_change_no_bit_and_others_are_those_that_it_turns_with(
    family: str, host: str
):
    """What is inside is measured from the queries, by the certificate: one per layer, in any order."""
    model, ids = made(family, host), tiny.ids()
    bands = rl.Bands.of(model)
    new = any_frequencies(bands)
    with torch.no_grad():
        before = run(model, ids)
        with rl.frequencies(model, bands.inv_freq):
            assert torch.equal(run(model, ids), before)
        with rl.frequencies(model, new):
            inside, found = run(model, ids), rl.Bands.of(model)
        assert torch.equal(run(model, ids), before)
    assert not torch.allclose(inside, before, atol=1e-2)
    torch.testing.assert_close(found.inv_freq, new, rtol=2**-23, atol=0, equal_nan=True)
    assert torch.equal(found.pairs, bands.pairs)
    assert torch.equal(rl.Bands.of(model).inv_freq.nan_to_num(-1), bands.inv_freq.nan_to_num(-1))


def test_all_hosts_turn_alike_beyond_2048_positions():
    """Float32 angles differ by half an epsilon of 2,200 pi: 4e-4; logits follow to a few times that."""
    config = families.FAMILIES["llama"].config(**(families.SMALL | LONG))
    torch.manual_seed(0)
    plain = families.FAMILIES["llama"].model_class(config).eval()
    with torch.no_grad():
        for weight in plain.parameters():
            weight.mul_(5 if weight.ndim > 1 else 1)
    ids, logits = tiny.ids(1, 2200), []
    for host in tiny.HOSTS:
        model = on(host, copy.deepcopy(plain))
        bands = rl.Bands.of(model)
        with torch.no_grad(), rl.frequencies(model, any_frequencies(bands)):
            logits.append(run(model, ids))
            if host == "hooked":
                torch.testing.assert_close(
                    rl.Bands.of(model).inv_freq, any_frequencies(bands), rtol=1e-7, atol=0
                )
        with torch.no_grad():
            bare = run(model, ids)
        assert (bare - logits[-1]).abs().max() > 0.02
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=0, atol=1e-3)


@pytest.mark.parametrize(("family", "host"), tiny.carried("llama", "gpt_neox"))
@pytest.mark.filterwarnings(RENAMED)
def test_generation_with_a_cache_is_that_without(host: str, family: str):
    model: Any = made(family, host, dtype=torch.float64)
    ids, new = tiny.ids(1, 10), any_frequencies(rl.Bands.of(model))
    texts = []
    for cached in (True, False):
        with Double(), rl.frequencies(model, new):
            if host == "transformers":
                settings = {"attention_mask": torch.ones_like(ids), "do_sample": False}
                texts.append(model.generate(ids, max_new_tokens=12, use_cache=cached, **settings))
            else:
                settings = {"do_sample": False, "stop_at_eos": False, "verbose": False}
                texts.append(model.generate(ids, max_new_tokens=12, use_past_kv_cache=cached, **settings))
    assert torch.equal(*texts)


def test_a_cache_is_used_with_the_frequencies_that_filled_it():
    model, ids = tiny.plain("llama"), tiny.ids(1, 10)
    new = any_frequencies(rl.Bands.of(model))
    with torch.no_grad():
        outside = model(ids, use_cache=True).cache
        with rl.frequencies(model, new):
            inside = model(ids, use_cache=True).cache
            with pytest.raises(ValueError, match="layer 0: expected a key-value cache that was filled under"):
                model(ids[:, :1], cache=outside)
            with rl.frequencies(model, new / 2), pytest.raises(ValueError, match="turned otherwise"):
                model(ids[:, :1], cache=inside)
            model(ids[:, :1], cache=inside)
        with pytest.raises(ValueError, match="under frequencies that are no longer set"):
            model(ids[:, :1], cache=inside)


def test_training_goes_the_same_way_to_the_last_bit():
    losses = []
    for explicit in (False, True):
        model = tiny.plain("llama", dtype=torch.float32).train()
        bands, steps = rl.Bands.of(model), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        block = rl.frequencies(model, bands.inv_freq) if explicit else torch.enable_grad()
        with block:
            for step in range(5):
                ids = tiny.ids(4, 24, seed=step)
                loss = model(ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                steps.append(loss.detach())
        losses.append(torch.stack([*steps, *(p.detach().sum() for p in model.parameters())]))
    assert torch.equal(*losses)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_gradients_pass_with_checkpointed_layers():
    """They run again in the backward pass, when other positions may have been seen since."""
    gradients = []
    for checkpointed in (False, True):
        model = tiny.plain("llama", dtype=torch.float32).train()
        new = any_frequencies(rl.Bands.of(model))
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with rl.frequencies(model, new):
            loss = model(tiny.ids(), labels=tiny.ids(), use_cache=False).loss
            model(tiny.ids(1, 7), use_cache=False)
            loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def hooks_on(model: Any) -> int:
    modules = host_of(model).module.modules()
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)


@pytest.mark.parametrize("host", tiny.HOSTS)
def test_blocks_nest_and_end_after_an_error(host: str):
    model, ids = made("llama", host), tiny.ids()
    bands, hooks = rl.Bands.of(model), hooks_on(model)
    one, two = any_frequencies(bands, 1), any_frequencies(bands, 2)
    with torch.no_grad():
        before = run(model, ids)
        with rl.frequencies(model, one):
            outer = run(model, ids)
            with rl.frequencies(model, two):
                inner = run(model, ids)
                with rl.frequencies(model, one):
                    assert torch.equal(run(model, ids), outer)
                assert torch.equal(run(model, ids), inner)
            with pytest.raises(RuntimeError, match="stop"), rl.frequencies(model, two):
                raise RuntimeError("stop")
            assert torch.equal(run(model, ids), outer)
        assert torch.equal(run(model, ids), before)
    assert not torch.equal(inner, outer)
    assert hooks_on(model) == hooks


@pytest.mark.parametrize("host", tiny.HOSTS)
def test_scores_inside_are_of_the_new_bands(host: str):
    model, ids = made("llama", host), tiny.ids()
    bands = rl.Bands.of(model)
    new = any_frequencies(bands)
    with rl.frequencies(model, new):
        inside = rl.band_entropy(model, ids, tol=1e-9)
    torch.testing.assert_close(inside.bands.inv_freq, new, rtol=2**-23, atol=0)
    assert inside.residual is not None
    assert inside.residual.max() < 1e-5
    with pytest.raises(ValueError, match="their bands differ"):
        inside.merge(rl.band_entropy(model, ids, tol=1e-9))


@pytest.mark.parametrize("host", tiny.HOSTS)
def test_a_measurement_that_began_outside_is_refused(host: str):
    model, ids = made("llama", host), tiny.ids()
    new = any_frequencies(rl.Bands.of(model))
    with rl.observe(model), rl.frequencies(model, new), pytest.raises(ValueError, match="begin it inside"):
        run_quietly(model, ids)


def run_quietly(model: Any, ids: torch.Tensor) -> None:
    with torch.no_grad():
        model(ids)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f[:1], "expected frequencies of shape [2, 4] [layer, band], as Bands.of(model).inv_freq,"),
        (lambda f: -f, "the frequency of layer 0, band 0: expected at least 0, got -1"),
        (lambda f: f * 4, "layer 0, band 0: expected at most pi radians per token, half a turn, got 4"),
        (lambda f: f / 0, "layer 0, band 0: expected at most pi radians per token, half a turn, got inf"),
        (lambda f: f.where(f < 1, math.nan), "the frequency of layer 0, band 0: expected a number, got NaN"),
    ],
)
def test_what_cannot_be_set(change: Any, message: str):
    model = tiny.plain("llama")
    new = change(rl.Bands.of(model).inv_freq)
    with pytest.raises(ValueError, match=re.escape(message)), rl.frequencies(model, new):
        pass


def test_bands_that_a_layer_does_not_have_cannot_be_set():
    model = tiny.plain("smollm3")
    new = rl.Bands.of(model).inv_freq.nan_to_num(0.5)
    message = "layer 1, band 0: expected NaN, since the layer has no such band, got 0.5"
    with pytest.raises(ValueError, match=message), rl.frequencies(model, new):
        pass


def test_half_a_turn_a_token_is_the_fastest():
    model = tiny.plain("llama", dtype=torch.float32)
    fastest = torch.full((2, 4), math.pi)
    with rl.frequencies(model, fastest):
        torch.testing.assert_close(rl.Bands.of(model).inv_freq, fastest.double(), rtol=0, atol=0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """A folder with a model whose frequencies were set, these, and its logits."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("saved") / "model"
    model = tiny.plain("llama", dtype=torch.float32)
    new = any_frequencies(rl.Bands.of(model))
    rl.set_frequencies(model, new)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    model.save_pretrained(folder)
    with torch.no_grad():
        return folder, new, run(model, tiny.ids())


@pytest.mark.parametrize("host", tiny.HOSTS)
def test_frequencies_set_for_good_come_back_with_the_model(saved: Any, host: str):
    folder, new, logits = saved
    assert json.loads((folder / "config.json").read_text())["ropelens_inv_freq"] == new.tolist()
    model = rl.load(folder, host=host)
    assert torch.equal(rl.Bands.of(model).inv_freq, new)
    with torch.no_grad():
        torch.testing.assert_close(run(model, tiny.ids()), logits, rtol=0, atol=1e-4)


def test_a_model_that_was_read_without_them_is_refused(saved: Any):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(saved[0])
    with pytest.raises(ValueError, match=r"names frequencies \(ropelens_inv_freq\) that it does not turn"):
        rl.Bands.of(model)


def test_a_copy_of_a_model_keeps_them(saved: Any):
    folder, new, _ = saved
    model = copy.deepcopy(rl.load(folder, host="transformers"))
    assert torch.equal(rl.Bands.of(model).inv_freq, new)
