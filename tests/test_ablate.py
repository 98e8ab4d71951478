"""ablate: each mode by its definition, on every host, with pads, caches and other blocks around it."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from double import Double

import ropelens as rl
from ropelens.hosts import host_of
from ropelens.hosts.load import hooked_from
from ropelens.interventions.ablate import MODES
from ropelens.interventions.selecting import checked_mask

HEADS, GROUP, BANDS = 6, 3, 4
# HookedTransformer keeps its tables of cos and sin in single precision, whatever Double does.
ATOL = {"transformers": 1e-9, "bridge": 1e-9, "hooked": 1e-5}
CACHE = "ignore:`past_key_values` is deprecated:FutureWarning"  # by the bridge itself


def make(host: str, family: str = "llama") -> Any:
    model = tiny.plain(family)
    if host == "transformers":
        return model
    return tiny.bridge(model) if host == "bridge" else hooked_from(model, None)


def some(groups: bool = False, seed: int = 0) -> torch.Tensor:
    """A mask of about half of all bands; with `groups`, the same for heads that share a key head."""
    n_heads = HEADS // GROUP if groups else HEADS
    mask = torch.rand(2, n_heads, BANDS, generator=torch.Generator().manual_seed(seed)) < 0.5
    return mask.repeat_interleave(GROUP, 1) if groups else mask


def logits(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    found = host_of(model).run(ids, None if mask is None else mask > 0)
    assert found is not None
    return found.detach()


def dims(model: Any, layer: int, mask: torch.Tensor) -> torch.Tensor:
    """The dims of a mask's bands in one layer, Bool [head, d_head]."""
    found = torch.zeros(HEADS, 8, dtype=torch.bool)
    for head, band in mask[layer].nonzero().tolist():
        found[head, host_of(model).certificate.layers[layer].rotation.pairs[band]] = True
    return found


def by_hand(model: Any, mask: torch.Tensor, point: str, value: Any) -> list[tuple[str, Any]]:
    """TransformerLens hooks that put `value(layer)` into the mask's dims at a hook point of the queries."""

    def hook_of(layer: int) -> Any:
        where = dims(model, layer, mask)

        def hook(q: torch.Tensor, hook: Any) -> torch.Tensor:
            heads = q.unflatten(-1, (HEADS, 8)) if q.ndim == 3 else q
            return torch.where(where, value(layer), heads).reshape(q.shape)

        return hook

    return [(f"blocks.{layer}.attn.{point}", hook_of(layer)) for layer in range(2)]


# Modes, by their definitions -------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "host"), tiny.carried("llama", "glm"))
def test_zero_is_zeros_in_the_post_rotary_queries(host: str, family: str):
    model, bridge, ids, mask = make(host, family), make("bridge", family), tiny.ids(), some()[..., :BANDS]
    mask = mask[..., : rl.Bands.of(model).n_bands]
    with Double(), torch.no_grad():
        with bridge.hooks(fwd_hooks=by_hand(bridge, mask, "hook_rot_q", lambda _: torch.zeros(()).double())):
            expected = logits(bridge, ids)
        with rl.ablate(model, mask) as ablation:
            found = logits(model, ids)
        bare = logits(model, ids)
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=ATOL[host])
    assert (found - bare).abs().max() > 0.01
    assert ablation.n_bands == mask.sum()
    assert ablation.bytes_per_token == 0


def test_a_head_without_bands_attends_evenly():
    model = make("bridge")
    mask = rl.bands_where(model, heads=[(0, 2), (1, 5)])
    with rl.ablate(model, mask):
        cache = model.run_with_cache(tiny.ids())[1]
    bare = model.run_with_cache(tiny.ids())[1]
    for layer, head in ((0, 2), (1, 5)):
        scores = cache[f"blocks.{layer}.attn.hook_attn_scores"][:, head]
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][:, head]
        for query in range(24):
            assert (scores[:, query, : query + 1] == 0).all()
            # Every weight is the same bits, and one over their number as exactly as division can be.
            assert (pattern[:, query, : query + 1] == pattern[:, query, :1]).all()
            even = torch.tensor(1 / (query + 1), dtype=torch.float32)
            assert (pattern[:, query, 0] - even).abs().max() <= torch.finfo(torch.float32).eps / 2
            assert (pattern[:, query, query + 1 :] == 0).all()
    others = [head for head in range(HEADS) if head != 2]
    first = "blocks.0.attn.hook_pattern"
    assert torch.equal(cache[first][:, others], bare[first][:, others])


@pytest.mark.parametrize("mode", ["zero", "derotate", "keys"])
@pytest.mark.parametrize("host", tiny.HOSTS)
def test_nothing_taken_away_changes_no_bit(host: str, mode: Any):
    model, ids = make(host), tiny.ids()
    bare = logits(model, ids)
    with rl.ablate(model, torch.zeros(2, HEADS, BANDS, dtype=torch.bool), mode):
        assert torch.equal(logits(model, ids), bare)
    with rl.ablate(model, some(groups=True), mode):
        assert not torch.equal(logits(model, ids), bare)
    assert torch.equal(logits(model, ids), bare)


@pytest.mark.parametrize("family", ["llama", "yarn"])
def test_derotated_bands_score_what_they_hold(family: str):
    """In the first layer: unrotated content of the mask's bands, rotated content of the others."""
    model, ids, mask = make("bridge", family), tiny.ids(1), some(groups=True)
    mask[1] = False
    with Double(), torch.no_grad():
        bare = model.run_with_cache(ids)[1]
        with rl.ablate(model, mask, "derotate"):
            found = model.run_with_cache(ids)[1]["blocks.0.attn.hook_attn_scores"]
    spec = host_of(model).certificate.layers[0]
    where = dims(model, 0, mask)

    def content(name: str, n: int) -> torch.Tensor:
        value = bare[f"blocks.0.attn.{name}"].reshape(1, 24, n, 8)
        return value.repeat_interleave(HEADS // n, 2)

    def contribution(q: torch.Tensor, k: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return spec.scale * torch.einsum("bqhd,bkhd,hd->bhqk", q, k, kept.double())

    expected = contribution(content("hook_rot_q", HEADS), content("hook_rot_k", 2), ~where)
    expected += contribution(content("hook_q", HEADS), content("hook_k", 2), where)
    visible = torch.ones(24, 24).tril().bool()
    torch.testing.assert_close(found[..., visible], expected[..., visible], rtol=0, atol=1e-9)
    assert (found - bare["blocks.0.attn.hook_attn_scores"])[..., visible].abs().max() > 0.1


@pytest.mark.parametrize("host", tiny.HOSTS)
def test_mean_is_the_mean_before_the_rotation(host: str):
    model, bridge, mask = make(host), make("bridge"), some()
    texts, ids = tiny.ids(3, 20, seed=5), tiny.ids()
    with Double(), torch.no_grad():
        queries = bridge.run_with_cache(texts)[1]
        means = rl.band_means(model, texts)
        expected_means = [
            queries[f"blocks.{layer}.attn.hook_q"].reshape(-1, HEADS, 8).mean(0) for layer in range(2)
        ]
        with bridge.hooks(fwd_hooks=by_hand(bridge, mask, "hook_q", lambda layer: expected_means[layer])):
            expected = logits(bridge, ids)
        with rl.ablate(model, mask, "mean", means=means):
            found = logits(model, ids)
    assert means.n_tokens == 60
    for layer, expected_mean in enumerate(expected_means):
        pairs = host_of(model).certificate.layers[layer].rotation.pairs
        torch.testing.assert_close(means.values[layer], expected_mean[:, pairs], rtol=0, atol=1e-6)
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=ATOL[host])


@pytest.mark.parametrize("host", tiny.HOSTS)
def test_keys_without_bands_do_as_queries_without_them(host: str):
    model, ids, mask = make(host), tiny.ids(), some(groups=True)
    with rl.ablate(model, mask):
        expected = logits(model, ids)
    with rl.ablate(model, mask, "keys") as ablation:
        found = logits(model, ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    # Of 2 layers x 2 key heads x (8 + 8) dims in float64, two dims a removed band.
    assert ablation.cache_bytes_per_token == 2 * 2 * 16 * 8
    assert ablation.bytes_per_token == int(mask[:, ::GROUP].sum()) * 2 * 8


# Pads, caches, blocks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host", tiny.HOSTS)
def test_a_padded_text_is_ablated_as_alone(host: str, mode: Any):
    model, ids = make(host), tiny.ids(2, 12)
    pads = torch.ones_like(ids)
    pads[1, :5] = 0
    means = rl.band_means(model, tiny.ids(2, 16, seed=3)) if mode == "mean" else None
    with Double(), torch.no_grad(), rl.ablate(model, some(groups=True), mode, means=means):
        whole, alone = logits(model, ids, pads), logits(model, ids[1:, 5:])
    torch.testing.assert_close(whole[1, 5:], alone[0], rtol=0, atol=1e-9)


@pytest.mark.filterwarnings(CACHE)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host", tiny.HOSTS)
def test_generation_is_the_same_with_a_cache(host: str, mode: Any):
    model, ids = make(host), tiny.ids(1, 10)
    means = rl.band_means(model, tiny.ids(2, 16, seed=3)) if mode == "mean" else None
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    cache = "use_cache" if host == "transformers" else "use_past_kv_cache"
    if host != "transformers":
        settings |= {"stop_at_eos": False, "verbose": False}
    with Double(), torch.no_grad():
        bare = model.generate(ids, **settings)
        with rl.ablate(model, some(groups=True), mode, means=means):
            cached = model.generate(ids, **{cache: True}, **settings)
            assert torch.equal(model.generate(ids, **{cache: False}, **settings), cached)
    assert not torch.equal(bare, cached)


@pytest.mark.parametrize("host", tiny.HOSTS)
def test_blocks_nest(host: str):
    model, ids, a, b = make(host), tiny.ids(), some(seed=1), some(seed=2)
    with rl.ablate(model, a | b):
        expected = logits(model, ids)
    with rl.ablate(model, a), rl.ablate(model, b):
        assert torch.equal(logits(model, ids), expected)
        with rl.ablate(model, torch.ones_like(a)):
            assert not torch.equal(logits(model, ids), expected)
        assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize("host", tiny.HOSTS)
def test_an_error_inside_leaves_nothing_behind(host: str):
    model, ids = make(host), tiny.ids()
    bare = logits(model, ids)

    def hooks() -> int:
        modules = (model.original_model if host == "bridge" else model).modules()
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)

    before = hooks()
    with pytest.raises(KeyError), rl.ablate(model, some(groups=True), "derotate"):
        raise KeyError
    assert hooks() == before
    assert torch.equal(logits(model, ids), bare)
    if host == "transformers":
        assert model.config._attn_implementation == "eager"


def test_what_is_ablated_is_measured_as_ablated():
    model, mask = make("transformers"), some()
    with rl.ablate(model, mask):
        values = rl.band_activation(model, tiny.ids()).values
    assert (values[mask] == 0).all()
    assert (values[~mask] > 0).all()


# Choosing bands ------------------------------------------------------------------------------------------


def test_bands_where():
    model = make("transformers")
    wavelength = rl.Bands.of(model).wavelength[0].tolist()  # 6.3, 63, 628, 6283
    where = rl.bands_where(model, wavelength=(wavelength[1], wavelength[3]))
    assert where.tolist() == [[[False, True, True, False]] * HEADS] * 2
    assert torch.equal(rl.bands_where(model, "fastest:1"), rl.bands_where(model, [0]))
    assert torch.equal(rl.bands_where(model, "slowest:25%"), rl.bands_where(model, [3]))
    assert torch.equal(rl.bands_where(model, "fastest:50%"), rl.bands_where(model, wavelength=(0, 100)))
    last = rl.bands_where(model, layers=[-1])
    assert last[1].all()
    assert not last[0].any()
    assert rl.bands_where(model, heads=[4]).sum(dim=(0, 2)).tolist() == [0, 0, 0, 0, 8, 0]
    assert rl.bands_where(model, [2], heads=[(1, 0)]).nonzero().tolist() == [[1, 0, 2]]
    assert rl.bands_where(make("transformers", "smollm3")).sum() == HEADS * BANDS  # one layer has none


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"wavelength": (5, 5)}, r"expected wavelength=\(low, high\) with low < high, got \(5, 5\)"),
        ({"wavelength": (1e5, 1e6)}, "got one that none fits: widen it"),
        ({"layers": [2]}, "expected a layer from 0 to 1, got 2"),
        ({"heads": [6]}, "expected a head from 0 to 5, got 6"),
        ({"bands": [4]}, "expected a band from 0 to 3, got 4"),
        ({"bands": "fastest:5"}, "expected at most 4 bands, as many as layer 0 has, got 'fastest:5'"),
        ({"bands": "quickest:2"}, 'expected bands as "fastest:12", "slowest:20%" or indices, got'),
        ({"bands": "slowest:2.5"}, 'expected bands as "fastest:12", "slowest:20%" or indices, got'),
    ],
)
def test_what_cannot_be_chosen(chosen: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        rl.bands_where(make("transformers"), **chosen)


def test_share_groups():
    model = make("transformers")
    mask = torch.zeros(2, HEADS, BANDS, dtype=torch.bool)
    mask[0, :3, 1] = True
    mask[1, 4, 2] = True
    assert rl.share_groups(model, mask).nonzero().tolist() == [[0, head, 1] for head in range(3)]
    assert rl.share_groups(model, mask, "any")[1].nonzero().tolist() == [[head, 2] for head in (3, 4, 5)]


# What is refused -----------------------------------------------------------------------------------------


def test_a_mask_of_another_model_is_refused():
    model = make("transformers")
    message = (
        r"expected a mask of bool \[2, 6, 4\], this model's layers, heads and bands, got torch.bool \[2, 6, "
    )
    with pytest.raises(ValueError, match=message), rl.ablate(model, torch.zeros(2, 6, 5).bool()):
        pass
    with pytest.raises(ValueError, match=r"got torch.float32 \[2, 6, 4\]: make it with bands_where"):
        checked_mask(host_of(model), torch.zeros(2, 6, 4))


def test_a_band_that_a_layer_does_not_have_is_refused():
    model = make("transformers", "smollm3")
    with pytest.raises(ValueError, match=r"it holds band 0 of layer \d, which has 0"):  # noqa: SIM117
        with rl.ablate(model, torch.ones(2, HEADS, BANDS, dtype=torch.bool)):
            pass


@pytest.mark.parametrize("mode", ["derotate", "keys"])
def test_heads_of_a_group_that_differ_are_refused(mode: Any):
    mask = torch.zeros(2, HEADS, BANDS, dtype=torch.bool)
    mask[1, 4, 2] = True
    message = (
        f'mode "{mode}" changes keys, which query heads share: expected heads 3 to 5 of layer 1 to agree on '
        "band 2, but only 1 of 3 name it"
    )
    with pytest.raises(ValueError, match=message), rl.ablate(make("transformers"), mask, mode):
        pass


def test_means_go_with_mode_mean_and_with_their_model():
    model, mask = make("transformers"), some()
    with pytest.raises(ValueError, match='expected means= with mode="mean" and only then'):  # noqa: SIM117
        with rl.ablate(model, mask, "mean"):
            pass
    other = rl.band_means(tiny.plain("llama", seed=1), tiny.ids())
    with pytest.raises(ValueError, match="expected means of this model, got another's"):  # noqa: SIM117
        with rl.ablate(model, mask, "mean", means=other):
            pass


def test_means_are_kept(tmp_path: Any):
    model = make("transformers")
    means = rl.band_means(model, tiny.ids())
    means.save(tmp_path / "means.safetensors")
    again = rl.BandMeans.load(tmp_path / "means.safetensors", model)
    assert torch.equal(again.values, means.values)
    assert (again.n_tokens, again.model) == (means.n_tokens, means.model)
    with pytest.raises(ValueError, match="was measured on another model"):
        rl.BandMeans.load(tmp_path / "means.safetensors", tiny.plain("llama", seed=1))
