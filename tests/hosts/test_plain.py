"""Plain transformers models: the bridge's numbers, the user's model as it was, or a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import tiny
import torch
from double import Double
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

import ropelens as rl
from ropelens.hosts import host_of

ALL = [*tiny.FAMILIES, *tiny.MORE_FAMILIES]
EAGER_ONLY = ("gemma2", "gpt_oss")  # softcap, sinks
WITH_ATTENTION = [(family, "eager") for family in ALL]
WITH_ATTENTION += [(family, "sdpa") for family in ALL if family not in EAGER_ONLY]
NOT_SEEN = "the model's scores are not those of its queries and keys under the certified mask"


@pytest.fixture(autouse=True)
def _nothing_stays_registered() -> Iterator[None]:
    yield
    for interface in (AttentionInterface, AttentionMaskInterface):
        assert [name for name in interface._global_mapping if name.startswith("ropelens")] == []


@pytest.fixture
def model() -> Any:
    return tiny.plain("llama", attention="sdpa")


# The same numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_same_as_on_the_bridge(family: str):
    plain, ids = tiny.plain(family), tiny.ids()
    with Double():
        mine = [
            rl.band_entropy(plain, ids, tol=1e-10),
            rl.band_activation(plain, ids),
            rl.band_fisher(plain, ids[:, :10], n_samples=2, seed=3),
        ]
        pattern = rl.band_attribution(plain, ids[:1], layer=1, head=4, query=20)
        bridge = tiny.bridge(tiny.plain(family))
        theirs = [
            rl.band_entropy(bridge, ids, tol=1e-10),
            rl.band_activation(bridge, ids),
            rl.band_fisher(bridge, ids[:, :10], n_samples=2, seed=3),
        ]
        expected = rl.band_attribution(bridge, ids[:1], layer=1, head=4, query=20)
    bands, its = rl.Bands.of(plain), rl.Bands.of(bridge)
    for name in ("inv_freq", "pairs", "n_rest", "amplitude"):
        assert torch.equal(getattr(bands, name), getattr(its, name)), name
    for a, b in zip(mine, theirs, strict=True):
        # Two orders of summing float64 numbers, through two layers: 1e-11 of the largest band.
        largest = float(b.values.abs().max())
        assert largest > 0.01
        torch.testing.assert_close(a.values, b.values, rtol=0, atol=1e-11 * largest)
        torch.testing.assert_close(a.rest, b.rest, rtol=0, atol=1e-11 * largest)
        assert torch.equal(a.n_pairs, b.n_pairs)
        assert a.merge(b).n_documents == 4  # the same model, by fingerprint
    torch.testing.assert_close(pattern.values, expected.values, rtol=0, atol=1e-11)
    assert torch.equal(pattern.visible, expected.visible)


@tiny.needs_hooked
def test_results_merge_with_those_of_a_hooked_transformer(model: Any):
    from ropelens.hosts.load import hooked_from

    hooked = hooked_from(tiny.plain("llama"), None)
    assert rl.band_entropy(model, tiny.ids()).merge(rl.band_entropy(hooked, tiny.ids())).n_documents == 4


@pytest.mark.parametrize("family", ALL)
def test_bands_add_up_to_the_attention_that_the_model_pays(family: str):
    plain, ids = tiny.plain(family), tiny.ids(1)
    with Double(), torch.no_grad():
        shown = plain(ids, output_attentions=True)
        assert shown.logits.max() - shown.logits.min() > 2
        for layer, pattern in enumerate(shown.attentions):
            for head in (0, 5):
                found = rl.band_attribution(plain, ids, layer=layer, head=head, tol=1e-11)
                torch.testing.assert_close(found.pattern, pattern[0, head, -1], rtol=0, atol=1e-10)
                paid = float(pattern[0, head, -1].sum())
                assert (found.sink is None) == (abs(paid - 1) < 1e-6)
                if found.sink is not None:
                    assert found.sink == pytest.approx(1 - paid, abs=1e-10)


@pytest.mark.parametrize(("family", "attention"), WITH_ATTENTION)
def test_logits_are_bit_identical_while_observed(family: str, attention: str):
    plain = tiny.plain(family, attention=attention)
    with torch.no_grad():
        bare = plain(tiny.ids()).logits
        with rl.observe(plain) as seen:
            assert torch.equal(plain(tiny.ids()).logits, bare)
        assert torch.equal(plain(tiny.ids()).logits, bare)
    assert plain.config._attn_implementation == attention
    assert seen.scores["entropy"].values.nan_to_num().abs().max() > 1


@pytest.mark.parametrize(("family", "attention"), WITH_ATTENTION)
@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_change_nothing(family: str, attention: str, side: str):
    plain, ids = tiny.plain(family, attention=attention), tiny.ids(batch=1, pos=14)
    pads, ones = torch.zeros(1, 5, dtype=torch.int64), torch.ones(1, 14, dtype=torch.int64)
    order = 1 if side == "right" else -1
    padded, mask = (torch.cat([x, pads][::order], 1) for x in (ids, ones))
    with Double():
        for measure in (rl.band_entropy, rl.band_activation):
            alone = measure(plain, ids, tol=1e-11)
            both = measure(plain, padded, attention_mask=mask, tol=1e-11)
            torch.testing.assert_close(both.values, alone.values, rtol=1e-9, atol=1e-9, equal_nan=True)
            assert (both.n_queries, both.data) == (14, alone.data)
            assert torch.equal(both.n_pairs, alone.n_pairs)


def test_sdpa_and_eager_attention_give_the_same_bands(model: Any):
    eager = rl.band_entropy(tiny.plain("llama"), tiny.ids(), tol=1e-9)
    # Eager attention takes its softmax in float32.
    torch.testing.assert_close(
        rl.band_entropy(model, tiny.ids(), tol=1e-9).values, eager.values, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_half_precision(attention: str):
    full, plain = tiny.plain("llama"), tiny.plain("llama", dtype=torch.bfloat16, attention=attention)
    plain.model.rotary_emb = full.model.rotary_emb  # as when loaded so: its angles stay exact
    found, expected = rl.band_entropy(plain, tiny.ids()), rl.band_entropy(full, tiny.ids())
    found.merge(expected)  # the same model
    largest = expected.values.abs().amax(-1, keepdim=True)
    # 8 bits, through two layers with sharp attention
    assert ((found.values - expected.values).abs() / largest).max() < 0.1


# What the user has stays --------------------------------------------------------------------------


def hook_counts(model: Any) -> list[tuple[int, int]]:
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_everything_is_restored_after_an_error_of_the_users(attention: str):
    plain = tiny.plain("llama", attention=attention).train()
    plain.model.layers[0].mlp.eval()
    plain.model.layers[0].register_forward_hook(lambda *_: None)
    before = (hook_counts(plain), [m.training for m in plain.modules()])

    def measure() -> None:
        with rl.observe(plain):
            assert plain.config._attn_implementation != attention
            plain(tiny.ids())
            raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        measure()
    assert plain.config._attn_implementation == attention
    assert (hook_counts(plain), [m.training for m in plain.modules()]) == before


def test_an_error_inside_the_model_restores_it_too(model: Any):
    rl.Bands.of(model)

    def poison(module: Any, args: Any, out: Tensor) -> Tensor:
        return out * torch.nan

    model.model.layers[1].self_attn.q_proj.register_forward_hook(poison)
    with pytest.raises(ValueError, match=r"^layer 1: .*NaN"):
        rl.band_entropy(model, tiny.ids())
    with pytest.raises(RuntimeError, match="nan"):  # no label can be drawn
        rl.band_fisher(model, tiny.ids(1, 6))
    assert model.config._attn_implementation == "sdpa"
    assert all(p.requires_grad for p in model.parameters())


def test_observations_nest(model: Any):
    once = rl.band_entropy(model, tiny.ids())
    with torch.no_grad(), rl.observe(model) as outer:
        model(tiny.ids())
        with rl.observe(model, metrics=("entropy",)) as inner:
            model(tiny.ids())
    assert torch.equal(inner.scores["entropy"].values, once.values)
    assert torch.equal(outer.scores["entropy"].values, 2 * once.values)
    assert model.config._attn_implementation == "sdpa"


def test_observations_may_end_in_any_order(model: Any):
    first, second = ExitStack(), ExitStack()
    with torch.no_grad():
        a = first.enter_context(rl.observe(model))
        b = second.enter_context(rl.observe(model))
        first.close()
        model(tiny.ids())
        second.close()
    assert model.config._attn_implementation == "sdpa"
    assert b.scores["entropy"].n_documents == 2
    with pytest.raises(ValueError, match="no entropy was measured"):
        _ = a.scores


def test_an_implementation_that_was_changed_meanwhile_is_missed(model: Any):
    def watch_and_change() -> int:
        with rl.observe(model) as seen:
            model(tiny.ids())
            model.set_attn_implementation("eager")
            model(tiny.ids())
        return seen.scores["entropy"].n_documents

    with pytest.warns(UserWarning, match="attention implementation was changed before ropelens's block"):
        assert watch_and_change() == 2
    assert model.config._attn_implementation == "eager"


def test_certifying_inside_an_observation_is_not_observed(model: Any):
    with torch.no_grad(), rl.observe(model) as seen:
        model(tiny.ids())
        model.lm_head.weight.mul_(2)
        rl.Bands.of(model)
    assert seen.scores["entropy"].n_documents == 2


def test_users_hooks_sleep_during_certification(model: Any):
    calls = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
    rl.Bands.of(model)
    assert calls == []
    model(tiny.ids())
    assert calls == [1]


def test_dropout_is_off_during_certification():
    plain = tiny.plain("llama", attention="sdpa")
    for layer in plain.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert max(spec.error for spec in host_of(plain.train()).certificate.layers) < 1e-12
    assert plain.training


# What is edited -----------------------------------------------------------------------------------


def test_the_users_edits_are_measured_as_edited(model: Any):
    bare = rl.band_activation(model, tiny.ids())
    model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda module, args, out: 2 * out)
    edited = rl.band_activation(model, tiny.ids())
    assert torch.equal(edited.values[0], bare.values[0])
    torch.testing.assert_close(edited.values[1], 2 * bare.values[1], rtol=1e-12, atol=0)


def test_edits_before_an_observation_are_measured_and_those_after_are_refused(model: Any):
    host, ids = host_of(model), tiny.ids()
    bare = rl.band_activation(model, ids)
    with host.editing(queries={1: lambda q, at: 2 * q}, keys={1: lambda k, at: 3 * k}):
        edited = rl.band_activation(model, ids)
    torch.testing.assert_close(edited.values[1], 6 * bare.values[1], rtol=1e-12, atol=0)
    assert torch.equal(rl.band_activation(model, ids).values, bare.values)
    with rl.observe(model) as seen, host.editing(keys={1: lambda k, at: 3 * k}):
        model(ids)
    with pytest.raises(ValueError, match=f"layer 1: {NOT_SEEN}"):
        _ = seen.scores


@pytest.mark.parametrize(
    ("family", "attention"), [("llama", "sdpa"), ("llama", "eager"), ("gemma2", "eager")]
)
def test_an_edit_is_the_bridges(family: str, attention: str):
    ids = tiny.ids(1)
    plain, bridge = tiny.plain(family, attention=attention), tiny.bridge(tiny.plain(family))
    turn = torch.linspace(0.5, 1.5, 8).double()
    with Double(), torch.no_grad():
        logits = []
        for host in (host_of(plain), host_of(bridge)):
            edits = {1: lambda x, at: x * turn}
            with host.editing(queries=edits, keys=edits):
                logits.append(host.run(ids, None))
        bare = host_of(plain).run(ids, None)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-11)
    assert (logits[0] - bare).abs().max() > 0.01


def test_edits_hold_in_generation_with_a_cache(model: Any):
    ids, turn = tiny.ids(1, 10), torch.linspace(0.2, 3, 8).double()
    edits = {0: lambda x, at: x * turn}
    settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with Double(), host_of(model).editing(queries=edits, keys=edits):
        cached = model.generate(ids, use_cache=True, **settings)
        assert torch.equal(model.generate(ids, use_cache=False, **settings), cached)
    assert not torch.equal(model.generate(ids, **settings), cached)


# The fast way -------------------------------------------------------------------------------------


def test_the_fast_way_is_sdpa_without_logits():
    plain, calls = tiny.plain("llama"), []
    plain.lm_head.register_forward_hook(lambda *_: calls.append(plain.config._attn_implementation))
    host = host_of(plain)
    with host.fast():
        assert plain.config._attn_implementation == "sdpa"
        assert host.run(tiny.ids(), None, logits=False) is None
    assert plain.config._attn_implementation == "eager"
    assert calls == []
    with rl.observe(plain), pytest.raises(ValueError, match="choose the fast attention before"), host.fast():
        pass


@pytest.mark.parametrize("family", EAGER_ONLY)
def test_sdpa_knows_no_softcap_and_no_sinks(family: str):
    plain = tiny.plain(family)
    with host_of(plain).fast():
        assert plain.config._attn_implementation == "eager"


def test_positions_follow_the_mask(model: Any):
    ids, mask = tiny.ids(1, 8), torch.ones(1, 8) > 0
    mask[:, :3] = False
    seen = []
    model.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_ids"].tolist()), with_kwargs=True
    )
    host = host_of(model)
    host.run(ids, mask)
    assert seen == [[[0, 0, 0, 0, 1, 2, 3, 4]]]


def test_a_model_without_a_head_has_bands_and_no_fisher(model: Any):
    expected = rl.band_entropy(model, tiny.ids())
    assert torch.equal(rl.band_entropy(model.model, tiny.ids()).values, expected.values)
    with pytest.raises(ValueError, match="LlamaModel, which has no language-model head"):
        rl.band_fisher(model.model, tiny.ids())


# What is refused ----------------------------------------------------------------------------------


def test_hooks_are_for_transformer_lens(model: Any):
    with pytest.raises(ValueError, match=r"LlamaForCausalLM: measure it inside `with ropelens.observe"):
        rl.entropy_hooks(model, into=rl.EntropyAccumulator())
    with pytest.raises(ValueError, match=r"LlamaForCausalLM: measure it inside `with ropelens.observe"):
        rl.activation_hooks(model, into=rl.ActivationAccumulator())


def test_a_layer_that_never_reaches_the_interface_is_refused(model: Any):
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ValueError, match="layer 1 never reaches transformers' AttentionInterface"):
        rl.band_entropy(model, tiny.ids())


def register(name: str, attention: Any) -> None:
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, AttentionMaskInterface._global_mapping["sdpa"])


@pytest.fixture
def crooked(request: pytest.FixtureRequest) -> Iterator[str]:
    """An attention function that does another thing than it was told."""
    sdpa = AttentionInterface._global_mapping["sdpa"]
    what = request.param

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        if module.layer_idx == 0:
            return sdpa(module, q, k, v, mask, **options)
        if what == "scale":
            options["scaling"] *= 1.01
        elif what == "norm":  # after the rotation
            q = q / q.norm(dim=-1, keepdim=True)
        elif what == "heads":  # tiled instead of repeated
            k, v = k.flip(1), v.flip(1)
        elif what == "mask":
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(-1)
            mask[0, 0] = True
        return sdpa(module, q, k, v, mask, **options)

    register("crooked", attention)
    AttentionMaskInterface.register(
        "crooked", lambda **kwargs: AttentionMaskInterface._global_mapping["eager"](**kwargs)
    )
    yield what
    del AttentionInterface._global_mapping["crooked"]
    del AttentionMaskInterface._global_mapping["crooked"]


@pytest.mark.parametrize("crooked", ["scale", "norm", "heads", "mask"], indirect=True)
def test_outputs_that_cannot_be_rebuilt_are_refused_by_layer(crooked: str, model: Any):
    model.set_attn_implementation("crooked")
    with pytest.raises(
        ValueError, match=r"layer 1: the outputs rebuilt .* differ from the model's own by .*e-0"
    ):
        rl.Bands.of(model)
    model.set_attn_implementation("sdpa")
    rl.Bands.of(model)


def test_an_implementation_without_a_mask_is_refused(model: Any):
    AttentionInterface.register("maskless", AttentionInterface._global_mapping["sdpa"])
    model.set_attn_implementation("maskless")
    try:
        with pytest.raises(
            ValueError, match="implementation 'maskless' makes no mask that can be checked: call"
        ):
            rl.Bands.of(model)
    finally:
        del AttentionInterface._global_mapping["maskless"]


def test_other_position_schemes_are_refused(model: Any):
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda *args, **kwargs: tuple(
        table * (1 + torch.arange(table.shape[1])[:, None] / 9 + table.shape[0])
        for table in forward(*args, **kwargs)
    )
    attention = model.model.layers[0].self_attn
    inner = attention.forward

    def bent(hidden_states: Tensor, position_embeddings: Any, **kwargs: Any) -> Any:
        cos, sin = position_embeddings
        return inner(hidden_states, position_embeddings=(cos.square(), sin), **kwargs)

    attention.forward = bent
    with pytest.raises(ValueError, match="layer 0: its queries do not turn with position as RoPE would"):
        rl.Bands.of(model)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("change", ["gap", "hidden key", "bias", "packed"])
def test_another_mask_than_the_certified_one_is_refused(attention: str, change: str):
    plain, ids = tiny.plain("llama", attention=attention), tiny.ids()
    causal = torch.ones(24, 24, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    if change == "gap":
        extra = {"attention_mask": torch.ones_like(ids).index_fill(1, torch.tensor([7]), 0)}
    elif change == "packed":
        extra = {"position_ids": torch.arange(12).repeat(2).expand(2, 24), "use_cache": False}
    elif change == "hidden key":
        causal[:, :, 10:, 4] = False
        extra = {"attention_mask": torch.zeros(2, 1, 24, 24).double().masked_fill(~causal, -torch.inf)}
    else:
        bias = torch.zeros(2, 1, 24, 24).double().masked_fill(~causal, -torch.inf)
        bias[0, 0, 10, 4] = -1.0
        extra = {"attention_mask": bias}
    with torch.no_grad(), rl.observe(plain) as seen:
        plain(ids, **extra)
    with pytest.raises(ValueError, match=f"layer 0: {NOT_SEEN}"):
        _ = seen.scores


def test_settings_that_change_after_certification_are_certified_anew(model: Any):
    first = host_of(model).certificate
    assert host_of(model).certificate is first
    model.model.layers[1].self_attn.scaling = 0.5
    assert [spec.scale for spec in host_of(model).certificate.layers] == [8**-0.5, 0.5]
    with torch.no_grad(), rl.observe(model) as seen:
        model.model.layers[1].self_attn.scaling = 0.25
        model(tiny.ids())
    with pytest.raises(ValueError, match=f"layer 1: {NOT_SEEN}"):
        _ = seen.scores


def test_a_host_says_what_it_is(model: Any):
    assert host_of(model).kind == "transformers"
    with pytest.raises(ValueError, match="a transformers model, got str"):
        rl.Bands.of("gpt2")
