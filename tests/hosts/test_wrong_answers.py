"""What other tools got wrong, one test each: the rows of the last table of the design's maths.

Each holds against a definition written here, or against the model's own attention, and fails where the
guard that it names is taken away.
"""

from __future__ import annotations

import math
from typing import Any

import families
import pytest
import tiny
import torch
from double import Double
from torch import Tensor
from transformers import LlamaForCausalLM

import ropelens as rl
import ropelens_kernels as kernels
from ropelens.bands import pair_dims
from ropelens.hosts import host_of
from ropelens.hosts.layer import Rotation
from ropelens.hosts.load import hooked_from
from ropelens.hosts.plain import PlainHost


def attention_of(model: Any, ids: Tensor) -> list[Tensor]:
    """What the model pays, by its own account: `[head, query, key]` a layer."""
    with Double(), torch.no_grad():
        return [pattern[0] for pattern in model(ids, output_attentions=True).attentions]


def entropy_drops(pattern: Tensor, window: int | None, sink: Tensor | None = None) -> Tensor:
    """`H(attention) - H(uniform)` summed over queries, `[head]`; a sink is one more outcome."""
    total = torch.zeros(len(pattern), dtype=torch.float64)
    for query in range(1, pattern.shape[1]):
        first = 0 if window is None else max(0, query - window + 1)
        seen = pattern[:, query, first : query + 1]
        start = torch.zeros_like(seen)
        if sink is not None:
            seen = torch.cat([seen, 1 - seen.sum(-1, keepdim=True)], -1)
            start = torch.cat([start, sink[:, None]], -1)
        start = start.softmax(-1)
        total += torch.special.entr(seen).sum(-1) - torch.special.entr(start).sum(-1)
    return total


def measured_drops(scores: rl.BandScores, layer: int) -> Tensor:
    return scores.values[layer].nansum(-1) + scores.rest[layer]


@pytest.mark.parametrize("family", ["llama", "glm"])
def test_pair_layouts_are_not_confused(family: str, monkeypatch: pytest.MonkeyPatch):
    """Guard: the rotation that is claimed must be the one that queries went through."""
    found = host_of(tiny.plain(family)).certificate.layers[0].rotation
    adjacent = family == "glm"
    assert found.pairs.tolist() == pair_dims(2 * len(found.pairs), adjacent).tolist()
    wrong = Rotation(found.inv_freq, pair_dims(2 * len(found.pairs), not adjacent), found.amplitude)
    monkeypatch.setattr(PlainHost, "rotations", lambda self, layer, view: [wrong])
    with pytest.raises(ValueError, match="layer 0: its queries do not turn with position as RoPE would"):
        rl.Bands.of(tiny.plain(family))


@pytest.mark.parametrize("family", ["llama3", "linear", "yarn", "longrope"])
def test_scalings_are_not_ignored(family: str):
    """Guard: frequencies and amplitude come from the cos and sin that the model makes."""
    expected, bands = families.FAMILIES[family], rl.Bands.of(tiny.plain(family))
    assert bands.inv_freq[1].tolist() == pytest.approx(expected.ladders[1], rel=2**-22)
    assert float(bands.amplitude[1]) == pytest.approx(expected.amplitude, rel=1e-6)
    assert bands.inv_freq[1].tolist() != pytest.approx(families.ladder(), rel=1e-3)


def test_partial_rotary_pairs_the_rotated_dims_only():
    """Guard: pairs are those of the rotated width. 16 dims of which 4 rotate: 2 bands and 12 dims of rest."""
    from transformers import PhiConfig, PhiForCausalLM

    torch.manual_seed(0)
    settings = {"num_attention_heads": 3, "num_key_value_heads": 3, "partial_rotary_factor": 0.25}
    model = PhiForCausalLM(PhiConfig(**(families.SMALL | settings))).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    bands = rl.Bands.of(model)
    assert bands.pairs.tolist() == [[[0, 2], [1, 3]]] * 2
    assert bands.n_rest.tolist() == [12, 12]
    with Double():
        scores = rl.band_entropy(model, tiny.ids(1), tol=1e-8)
    for layer, pattern in enumerate(attention_of(model, tiny.ids(1))):
        torch.testing.assert_close(
            measured_drops(scores, layer), entropy_drops(pattern, None), rtol=0, atol=1e-7
        )
        assert scores.rest[layer].abs().max() > 0.1


def test_key_heads_are_repeated_and_not_tiled():
    """Guard: query head h reads key head h // group. 6 query heads, 2 key heads."""
    model, ids = tiny.plain("llama"), tiny.ids(1)
    pattern = attention_of(model, ids)[0]
    with Double():
        for head in range(6):
            found = rl.band_attribution(model, ids, layer=0, head=head, tol=1e-8)
            torch.testing.assert_close(found.pattern, pattern[head, -1], rtol=0, atol=1e-8)
        scores = rl.band_entropy(model, ids, tol=1e-8)
    torch.testing.assert_close(measured_drops(scores, 0), entropy_drops(pattern, None), rtol=0, atol=1e-7)


def test_future_keys_have_no_effect_and_are_not_averaged_in():
    """Guard: only visible pairs are summed, and counted."""
    model, ids = tiny.plain("llama"), tiny.ids(1)
    changed = ids.clone()
    changed[:, 12:] = 5
    with Double():
        a, b = (rl.band_attribution(model, x, layer=1, head=3, query=11) for x in (ids, changed))
        activation = rl.band_activation(model, ids)
    assert torch.equal(a.values, b.values)
    assert activation.n_pairs.unique().tolist() == [24 * 25 // 2]
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 24, 2, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    later = k.clone()
    later[:, 12:] += 3
    options = {"pairs": pair_dims(4, adjacent=False), "scale": 1.0}
    for kernel in (kernels.entropy, kernels.activation, kernels.norm_product):
        a, b = (kernel(q, x, **options, tol=1e-8, edges=(12,)).by_position for x in (k, later))
        torch.testing.assert_close(a[:, 0], b[:, 0], rtol=0, atol=1e-7)
        assert (a[:, 1] - b[:, 1]).abs().max() > 0.1
    a, b = (kernels.attribution(q, x, **options, queries=torch.tensor([11])).values for x in (k, later))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("n_pad", [0, 1, 5])
def test_pads_are_not_in_the_statistics(side: str, n_pad: int):
    """Guard: pads are masked, and positions follow the mask."""
    model, ids = tiny.plain("mistral"), tiny.ids(1, 14)
    pads, real = torch.zeros(1, n_pad, dtype=torch.int64), torch.ones(1, 14, dtype=torch.int64)
    order = 1 if side == "right" else -1
    padded, mask = (torch.cat([x, pads][::order], 1) for x in (ids, real))
    with Double():
        for measure in (rl.band_entropy, rl.band_activation):
            alone = measure(model, ids, tol=1e-8)
            both = measure(model, padded, attention_mask=mask, tol=1e-8)
            torch.testing.assert_close(both.values, alone.values, rtol=0, atol=1e-7)
            assert (both.n_queries, both.data) == (14, alone.data)
            assert torch.equal(both.n_pairs, alone.n_pairs)


@pytest.mark.parametrize("host", ["transformers", "bridge"])
def test_the_scale_is_read_and_not_assumed(host: str):
    """Guard: the multiplier of q.k is the model's. Gemma 2 has 20**-0.5 with heads of 8."""
    model = tiny.plain("gemma2")
    model = model if host == "transformers" else tiny.bridge(model)
    assert [spec.scale for spec in host_of(model).certificate.layers] == pytest.approx([20**-0.5] * 2)


def test_the_window_is_not_off_by_one():
    """Guard: a query at p sees i with p - i < window, and N counts just these."""
    model, ids = tiny.plain("mistral"), tiny.ids(1)
    pattern = attention_of(model, ids)[1]
    assert int((pattern[0, -1] > 0).sum()) == families.WINDOW < ids.shape[1]
    with Double():
        found = rl.band_attribution(model, ids, layer=1, head=2)
        scores = rl.band_entropy(model, ids, tol=1e-8)
    assert int(found.visible.sum()) == families.WINDOW
    expected = entropy_drops(pattern, families.WINDOW)
    torch.testing.assert_close(measured_drops(scores, 1), expected, rtol=0, atol=1e-7)
    assert scores.n_pairs[1] == sum(min(p + 1, families.WINDOW) for p in range(ids.shape[1]))


def test_the_softcap_is_in_the_path():
    """Guard: bands add up to the drop of the capped attention."""
    model, ids = tiny.plain("gemma2"), tiny.ids(1)
    with Double():
        scores = rl.band_entropy(model, ids, tol=1e-8)
    assert scores.residual is not None
    assert scores.residual.max() < 1e-6
    for layer, pattern in enumerate(attention_of(model, ids)):
        expected = entropy_drops(pattern, (families.WINDOW, None)[layer])
        torch.testing.assert_close(measured_drops(scores, layer), expected, rtol=0, atol=1e-6)


def test_a_learned_sink_is_one_more_outcome():
    """Guard: rows of gpt-oss sum to less than 1, and what is missing has a fixed logit and no band."""
    model, ids = tiny.plain("gpt_oss"), tiny.ids(1)
    with Double():
        scores = rl.band_entropy(model, ids, tol=1e-8)
        found = rl.band_attribution(model, ids, layer=1, head=4)
    patterns = attention_of(model, ids)
    assert found.sink == pytest.approx(1 - float(patterns[1][4, -1].sum()), abs=1e-9)
    assert found.sink > 1e-5
    for layer, pattern in enumerate(patterns):
        sink = model.model.layers[layer].self_attn.sinks.detach()
        expected = entropy_drops(pattern, (families.WINDOW, None)[layer], sink)
        # The first query sees one key and the sink, which is a choice too.
        first = torch.stack([pattern[:, 0, 0], 1 - pattern[:, 0, 0]], -1)
        start = torch.stack([torch.zeros_like(sink), sink], -1).softmax(-1)
        expected = expected + torch.special.entr(first).sum(-1) - torch.special.entr(start).sum(-1)
        torch.testing.assert_close(measured_drops(scores, layer), expected, rtol=0, atol=1e-6)


def test_running_sums_do_not_stall():
    """Guard: sums are float64 whatever the model is. A hundred times 1e-6 on top of 1e6."""
    model = tiny.plain("llama", dtype=torch.float32)
    acc = rl.ActivationAccumulator()
    acc.bind(host_of(model).certificate)
    mask = torch.ones(1, 1, dtype=torch.bool)
    one, many = torch.ones(1, 1, 6, 8), torch.ones(1, 1, 2, 8)
    of_ones = 2 * 8**-0.5  # both dims of a band, times the scale
    for layer in (0, 1):
        acc.update(layer, one * (1e6 / of_ones), many, mask)
    start = acc.result().values
    for _ in range(100):
        for layer in (0, 1):
            acc.update(layer, one * (1e-6 / of_ones), many, mask)
    assert start.min() > 9e5
    values = acc.result().values - start
    torch.testing.assert_close(values, torch.full_like(values, 1e-4), rtol=1e-3, atol=0)


def test_masks_are_not_beaten_by_large_scores():
    """Guard: hidden keys are hidden whatever their score. -2e5 added to a row changes nothing."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 9, 2, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    q[..., 5], k[..., 5] = 1, 0
    low = k.clone()
    low[..., 5] = -2e5
    options = {"pairs": pair_dims(4, adjacent=False), "scale": 1.0, "window": 4}
    for shifted in (low, -low * 1.0):
        shifted[..., :5] = k[..., :5]
        a, b = (kernels.entropy(q, x, **options, tol=1e-7).values for x in (k, shifted))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        a, b = (kernels.attribution(q, x, **options, tol=1e-9) for x in (k, shifted))
        torch.testing.assert_close(a.values.sum(-1) + a.rest, b.values.sum(-1) + b.rest, rtol=0, atol=1e-8)


@pytest.mark.parametrize("host", ["transformers", "bridge"])
def test_no_hooks_are_left_behind_after_an_error(host: str):
    """Guard: what a context adds it removes in `finally`."""
    model = tiny.plain("llama")
    model = model if host == "transformers" else tiny.bridge(model)
    rl.Bands.of(model)

    def hooks() -> tuple[int, ...]:
        points = [len(p.fwd_hooks) for p in getattr(model, "hook_dict", {}).values()]
        modules = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        return (*points, *modules)

    implementation = getattr(model, "original_model", model).config._attn_implementation
    before = hooks()

    def measure() -> None:
        with rl.observe(model):
            raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        measure()
    assert hooks() == before
    assert getattr(model, "original_model", model).config._attn_implementation == implementation
    assert not math.isnan(float(rl.band_activation(model, tiny.ids(1)).values.sum()))


@tiny.needs_hooked
@pytest.mark.parametrize("bias", ["v_proj.bias", "o_proj.bias", "up_proj.bias"])
def test_biases_without_a_place_in_a_hooked_transformer_are_not_lost(bias: str):
    """None of them changes a score of the first layer; the first two only what it hands on."""
    config = families.FAMILIES["llama"].config(
        **families.SMALL | {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 1}
    )
    model = LlamaForCausalLM(config).double().eval()
    assert hooked_from(model, None).cfg.n_layers == 1  # biases of zero are no loss
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(bias):
                weight.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"gives other logits than it, by .* use host=\"bridge\"$"):
        hooked_from(model, None)
