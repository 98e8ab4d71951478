"""Measuring: hooks, `observe` and the one-call functions agree, and leave nothing behind."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from double import Double
from torch import Tensor

import ropelens as rl
from ropelens.hosts import host_of
from ropelens.hosts.load import hooked_from

IDS = tiny.ids(2, 24)
MASK = torch.ones(2, 24, dtype=torch.int64)
MASK[1, 15:] = 0
ONE_CALL = {"entropy": rl.band_entropy, "activation": rl.band_activation}
HOOKS = {"entropy": rl.entropy_hooks, "activation": rl.activation_hooks}
ACCUMULATORS = {"entropy": rl.EntropyAccumulator, "activation": rl.ActivationAccumulator}
METRICS = sorted(ONE_CALL)
HOSTS: list[Any] = ["bridge", pytest.param("hooked", marks=tiny.needs_hooked)]


def build(kind: str = "bridge", family: str = "llama", seed: int = 0) -> Any:
    plain = tiny.plain(family, seed)
    return tiny.bridge(plain) if kind == "bridge" else hooked_from(plain, None)


@pytest.fixture(scope="module", params=HOSTS)
def model(request: pytest.FixtureRequest) -> Any:
    """A model that the tests only read."""
    return build(request.param)


@pytest.fixture
def fresh() -> Any:
    """A model of a test's own, not yet certified."""
    return build()


def same(a: rl.BandScores, b: rl.BandScores) -> None:
    """Nothing may differ but the digest, which hooks cannot know."""
    for name in ("values", "rest", "squares", "rest_squares", "residual", "bound", "n_pairs"):
        mine, theirs = getattr(a, name), getattr(b, name)
        assert (mine is None) == (theirs is None), name
        assert mine is None or torch.equal(mine, theirs), name
    for name in ("metric", "n_queries", "n_tokens", "n_documents", "model"):
        assert getattr(a, name) == getattr(b, name), name


def hook_counts(model: Any) -> dict[str, tuple[int, int]]:
    return {n: (len(p.fwd_hooks), len(p._forward_hooks)) for n, p in model.hook_dict.items()}


def captured(model: Any, ids: Tensor, *names: str) -> list[Tensor]:
    seen: dict[str, Tensor] = {}

    def keep(value: Tensor, hook: Any) -> None:
        seen[hook.name] = value.detach().clone()

    with torch.no_grad():
        model.run_with_hooks(ids, fwd_hooks=[(name, keep) for name in names])
    return [seen[name] for name in names]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("padded", [False, True])
def test_hooks_observe_and_one_call_give_the_same_scores(model: Any, metric: str, padded: bool):
    extra = {"attention_mask": MASK} if padded else {}
    one_call = ONE_CALL[metric](model, IDS, **extra)
    acc = ACCUMULATORS[metric]()
    with torch.no_grad():
        model.run_with_hooks(IDS, fwd_hooks=HOOKS[metric](model, into=acc), **extra)
        with rl.observe(model, metrics=(metric,)) as seen:
            model(IDS, **extra)
    same(acc.result(), one_call)
    same(seen.scores[metric], one_call)
    assert one_call.n_tokens == (int(MASK.sum()) if padded else IDS.numel())
    assert (acc.result().data, len(one_call.data)) == ("", 32)


def test_observe_measures_both_metrics_in_one_pass(model: Any):
    with torch.no_grad(), rl.observe(model) as seen:
        model(IDS)
    assert sorted(seen.scores) == METRICS
    for metric in METRICS:
        same(seen.scores[metric], ONE_CALL[metric](model, IDS))


def test_padding_changes_rounding_only(model: Any):
    alone = [rl.band_entropy(model, ids) for ids in (IDS[:1], IDS[1:, :15])]
    both = rl.band_entropy(model, IDS, attention_mask=MASK)
    expected = alone[0].merge(alone[1])
    # The model itself works in float32 inside norms and softmax.
    torch.testing.assert_close(both.values, expected.values, rtol=1e-4, atol=1e-4)
    assert (both.n_queries, both.n_pairs.tolist()) == (expected.n_queries, expected.n_pairs.tolist())


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_are_bit_identical_while_observed(family: str):
    model = build(family=family)
    with torch.no_grad():
        bare = model(IDS)
        with rl.observe(model):
            observed = model(IDS)
    assert torch.equal(bare, observed)


def test_observing_keeps_the_users_graph(model: Any):
    with rl.observe(model, metrics=("entropy",)) as seen:
        logits = model(IDS)
    assert logits.requires_grad
    assert not seen.scores["entropy"].values.requires_grad


@pytest.mark.parametrize("measure", [rl.band_entropy, rl.band_activation])
def test_hooks_are_gone_afterwards(model: Any, measure: Callable[..., Any]):
    before = hook_counts(model)
    measure(model, IDS)
    rl.band_attribution(model, IDS[:1], layer=1, head=3)
    assert hook_counts(model) == before


def test_hooks_are_gone_after_an_error_of_the_users(model: Any):
    host_of(model)
    before = hook_counts(model)

    def measure() -> None:
        with rl.observe(model):
            assert hook_counts(model) != before
            model(IDS)
            raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        measure()
    assert hook_counts(model) == before


def test_the_users_hooks_stay_and_see_only_the_users_runs(fresh: Any):
    calls = []

    def count(value: Tensor, hook: Any) -> None:
        calls.append(tuple(value.shape[:2]))

    fresh.hook_dict["blocks.0.attn.hook_rot_q"].add_hook(count)
    host_of(fresh)
    assert calls == []  # certification looks at the bare model
    rl.band_entropy(fresh, IDS)
    assert calls == [(2, 24)]
    fresh(IDS)
    assert calls == [(2, 24)] * 2


def test_the_users_edits_are_measured(fresh: Any):
    plain = rl.band_activation(fresh, IDS)

    def double(q: Tensor, hook: Any) -> Tensor:
        return 2 * q

    fresh.hook_dict["blocks.1.attn.hook_rot_q"].add_hook(double)
    edited = rl.band_activation(fresh, IDS)
    assert torch.equal(edited.values[0], plain.values[0])
    torch.testing.assert_close(edited.values[1], 2 * plain.values[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("metric", METRICS)
def test_forward_passes_add_up(model: Any, metric: str):
    acc, other = ACCUMULATORS[metric](), tiny.ids(1, 17, seed=9)
    hooks = HOOKS[metric](model, into=acc)
    with torch.no_grad():
        for ids in (IDS, other):
            model.run_with_hooks(ids, fwd_hooks=hooks)
    merged = ONE_CALL[metric](model, IDS).merge(ONE_CALL[metric](model, other))
    same(acc.result(), merged)
    assert merged.n_documents == 3


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_entropy_of_all_bands_is_the_drop_from_uniform_attention(family: str):
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(2)]
    with Double():
        model = build(family=family)
        scores = rl.band_entropy(model, IDS, tol=1e-10)
        patterns = captured(model, IDS, *names)
    for layer, pattern in enumerate(patterns):
        # A masked key has a pattern of exactly 0, and -0 log 0 = 0.
        entropy = -torch.xlogy(pattern, pattern).sum(-1)
        window = host_of(model).certificate.layers[layer].window or 24
        uniform = torch.arange(1, 25).clamp(max=window).double().log()
        drop = (entropy - uniform).sum((0, 2))
        total = scores.values[layer].sum(-1) + scores.rest[layer]
        # 48 rows, each to 1e-10 or better; float64 keeps up with that.
        torch.testing.assert_close(total, drop, rtol=0, atol=48e-10)
        assert bool((drop < -0.05 * 48).any())  # attention is far from uniform
    assert scores.residual is not None
    assert float(scores.residual.max()) <= 1e-10


@pytest.mark.parametrize("family", ["llama", "mistral", "glm"])
def test_activation_is_the_sum_over_pairs(family: str):
    model = build(family=family)
    scores, layer = rl.band_activation(model, IDS), 1
    spec = host_of(model).certificate.layers[layer]
    q, k = captured(model, IDS, *(f"blocks.{layer}.attn.hook_rot_{x}" for x in "qk"))
    rotated = spec.rotation.pairs.flatten().tolist()
    rest = [dim for dim in range(spec.d_head) if dim not in rotated]
    for head in (0, 2, 5):
        keys = k[:, :, head // 3]  # 6 query heads on 2 key heads
        expected, expected_rest = torch.zeros(len(spec.rotation.pairs)).double(), 0.0
        for row in range(2):
            for p in range(24):
                first = 0 if spec.window is None else max(0, p - spec.window + 1)
                for i in range(first, p + 1):
                    x = spec.scale * q[row, p, head] * keys[row, i]
                    expected += x[spec.rotation.pairs].sum(-1).abs()
                    expected_rest += abs(float(x[rest].sum()))
        torch.testing.assert_close(scores.values[layer, head], expected, rtol=1e-9, atol=0)
        assert float(scores.rest[layer, head]) == pytest.approx(expected_rest, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("query", [0, 13, -1])
def test_attribution_adds_up_to_the_attention_paid(family: str, query: int):
    with Double():
        model = build(family=family)
        (pattern,) = captured(model, IDS[:1], "blocks.1.attn.hook_pattern")
        found = rl.band_attribution(model, IDS[:1], layer=1, head=4, query=query)
    place = query % 24
    paid = pattern[0, 4, place, : place + 1]
    torch.testing.assert_close(found.values.sum(-1) + found.rest, paid, rtol=0, atol=1e-9)
    assert torch.equal(found.visible, paid > 0)
    # Over keys, every band gets the share of the dims that it has.
    assert float(found.values.sum() + found.rest.sum()) == pytest.approx(1, abs=1e-9)
    torch.testing.assert_close(found.values.sum(0), torch.full((found.values.shape[1],), 2 / 8).double())
    assert (found.layer, found.head, found.query) == (1, 4, place)
    assert found.tokens == tuple(str(i) for i in IDS[0, : place + 1].tolist())


def test_attribution_counts_real_tokens_only(model: Any):
    padded, mask = torch.zeros(1, 30, dtype=torch.int64), torch.zeros(1, 30, dtype=torch.int64)
    padded[0, 6:], mask[0, 6:] = IDS[0], 1
    found = rl.band_attribution(model, padded, layer=0, head=1, query=3, attention_mask=mask)
    assert torch.equal(found.values, rl.band_attribution(model, IDS[:1], layer=0, head=1, query=3).values)


def test_negative_layers_heads_and_queries_count_from_the_end(model: Any):
    a = rl.band_attribution(model, IDS[:1], layer=-1, head=-2, query=-5)
    b = rl.band_attribution(model, IDS[:1], layer=1, head=4, query=19)
    assert (a.layer, a.head, a.query) == (1, 4, 19)
    assert torch.equal(a.values, b.values)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"layer": 2}, r"^expected a layer from 0 to 1 \(or from the end, -1 to -2\), got 2$"),
        ({"layer": -3}, r"^expected a layer from 0 to 1 \(or from the end, -1 to -2\), got -3$"),
        ({"head": 6}, r"^expected a head from 0 to 5 \(or from the end, -1 to -6\), got 6$"),
        ({"query": 24}, r"^expected a query from 0 to 23 \(or from the end, -1 to -24\), got 24$"),
        ({"query": -25}, r"^expected a query from 0 to 23 \(or from the end, -1 to -24\), got -25$"),
    ],
)
def test_attribution_out_of_range(model: Any, place: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        rl.band_attribution(model, IDS[:1], **({"layer": 0, "head": 0} | place))


def test_attribution_takes_one_text(model: Any):
    with pytest.raises(ValueError, match=r"^expected one text to attribute, got 2: pass them one by one$"):
        rl.band_attribution(model, IDS, layer=0, head=0)


@pytest.mark.parametrize("measure", [rl.band_entropy, rl.band_activation])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_name_their_layer(fresh: Any, measure: Callable[..., Any], value: float):
    def poison(x: Tensor, hook: Any) -> Tensor:
        x = x.clone()
        x[0, 3, 1, 2] = value
        return x

    fresh.hook_dict["blocks.1.attn.hook_rot_q"].add_hook(poison)
    with pytest.raises(ValueError, match=r"^layer 1: .*(NaN|infinity)"):
        measure(fresh, IDS)


def test_weights_that_are_not_finite_name_their_layer(fresh: Any):
    host_of(fresh)
    with torch.no_grad():
        fresh.original_model.model.layers[1].self_attn.q_proj.original_component.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"^layer 1: "):
        rl.band_entropy(fresh, IDS)


def test_a_forward_pass_cut_short_gives_no_result(fresh: Any):
    acc = rl.EntropyAccumulator()

    def interrupt(value: Tensor, hook: Any) -> None:
        raise KeyboardInterrupt

    hooks = [*rl.entropy_hooks(fresh, into=acc), ("blocks.1.hook_in", interrupt)]
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        fresh.run_with_hooks(IDS, fwd_hooks=hooks)
    message = r"^layer 1 measured 0 texts and others 2: a forward pass was cut short"
    with pytest.raises(ValueError, match=message):
        acc.result()


def test_scores_that_hooks_have_masked_give_no_result(fresh: Any):
    def blind(scores: Tensor, hook: Any) -> Tensor:
        scores = scores.clone()
        scores[..., 5:, 0] = torch.finfo(scores.dtype).min
        return scores

    fresh.hook_dict["blocks.1.attn.hook_attn_scores"].add_hook(blind)
    with pytest.raises(
        ValueError, match=r"^layer 1: the model's scores are not those of its queries and keys"
    ):
        rl.band_entropy(fresh, IDS)
    with pytest.raises(
        ValueError, match=r"^layer 1: the model's scores are not those of its queries and keys"
    ):
        rl.band_attribution(fresh, IDS[:1], layer=1, head=0)


def test_a_mask_with_gaps_gives_no_result(model: Any):
    gapped = torch.ones(2, 24, dtype=torch.int64)
    gapped[1, 7:9] = 0
    with torch.no_grad(), rl.observe(model, metrics=("entropy",)) as seen:
        model(IDS, attention_mask=gapped)
    with pytest.raises(
        ValueError, match=r"^layer 0: the model's scores are not those of its queries and keys"
    ):
        seen.scores["entropy"].values.sum()


def test_a_hook_needs_an_accumulator_of_its_metric(model: Any):
    expects: Any = inspect.unwrap(rl.entropy_hooks)
    with pytest.raises(
        ValueError, match=r"^expected into=EntropyAccumulator\(\), got ActivationAccumulator$"
    ):
        expects(model, into=rl.ActivationAccumulator())


def test_an_accumulator_holds_one_models_sums(model: Any):
    acc = rl.EntropyAccumulator()
    rl.entropy_hooks(model, into=acc)
    rl.entropy_hooks(model, into=acc)
    message = r"^this accumulator already holds another model's entropy \(.+\): use a new one$"
    with pytest.raises(ValueError, match=message):
        rl.entropy_hooks(build(seed=1), into=acc)


def test_an_accumulator_needs_a_model(model: Any):
    with pytest.raises(ValueError, match=r"^an accumulator belongs to a model: pass it to entropy_hooks"):
        rl.EntropyAccumulator().update(
            0, torch.zeros(1, 2, 6, 8), torch.zeros(1, 2, 2, 8), torch.ones(1, 2) > 0
        )
    acc = rl.ActivationAccumulator()
    rl.activation_hooks(model, into=acc)
    with pytest.raises(ValueError, match=r"^no activation was measured: run the model with the hooks"):
        acc.result()


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (
            ("entropy", "fisher"),
            r"^expected metrics from entropy, activation, norm_product, got \['entropy', 'fisher'\]$",
        ),
        ((), r"^expected metrics from entropy, activation, norm_product, got \[\]$"),
    ],
)
def test_unknown_metrics(model: Any, metrics: tuple[str, ...], message: str):
    with pytest.raises(ValueError, match=message), rl.observe(model, metrics=metrics):
        pass


def test_progress_counts_layers(model: Any, capsys: pytest.CaptureFixture[str]):
    rl.band_entropy(model, IDS, progress=True)
    assert "2/2" in capsys.readouterr().err
    rl.band_entropy(model, IDS)
    assert capsys.readouterr().err == ""
