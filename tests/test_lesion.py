"""Lesions: the noise that is said, where it is said, on every host, and nothing left behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

import ropelens as rl
from ropelens.hosts import host_of
from ropelens.hosts.load import has_hooked_transformer, hooked_from
from ropelens.hosts.weights import layer_weights
from ropelens.hosts.weights.rows import query_and_key_rows
from ropelens.interventions.lesion import band_sizes, hurt_rows, plan_of

HOSTS = ("transformers", "bridge", "hooked") if has_hooked_transformer() else ("transformers", "bridge")
LAYOUTS = [
    ("llama", "transformers"),
    ("gpt_neox", "transformers"),
    ("gpt_neox", "bridge"),
    ("phi3", "transformers"),
    ("phi3", "bridge"),
    ("gptj", "transformers"),
    ("qwen3", "bridge"),
]


def make(family: str, host: str) -> Any:
    plain = tiny.plain(family)
    if host == "transformers":
        return plain
    return tiny.bridge(plain) if host == "bridge" else hooked_from(plain, None)


def snapshot(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def projections(model: Any) -> list[Tensor]:
    """Copies of the query, key and value weights of layer 1, [head, d_head, d_model]."""
    found = layer_weights(host_of(model), 1)
    return [w.transpose(1, 2).clone() for w in (found.q, found.k, found.v)]


def normal(seed: int, stream: int, layer: int, counter: int, shape: tuple[int, ...]) -> Tensor:
    bits = np.random.Philox(key=[seed, (stream << 32) + layer], counter=[0, 0, 0, counter])
    return torch.from_numpy(np.random.Generator(bits).standard_normal(shape))


def hurt_by_definition(weight: Tensor, stream: int, bands: list[int], std: float, seed: int) -> Tensor:
    """Rows [head, d_head, d_model] of layer 1 of the tiny Llama, whose band b is dims b and b + 4."""
    out = weight.clone()
    for band in bands:
        noise = normal(seed, stream, 1, band, (len(weight), 2, weight.shape[2]))
        for head in range(len(weight)):
            rows = weight[head, [band, band + 4]]
            rms = (sum(float(x) ** 2 for x in rows.flatten()) / rows.numel()) ** 0.5
            out[head, [band, band + 4]] = rows + std * rms * noise[head]
    return out


@pytest.mark.parametrize("host", HOSTS)
def test_weights_are_hurt_by_the_definition_and_come_back(host: str):
    model = make("llama", host)
    before, clean = snapshot(model), projections(model)
    with rl.lesion(model, 1, "slowest:2", std=0.7, seed=5) as done:
        hurt = projections(model)
        assert (done.layers, done.std, done.seeds, done.target) == ((1,), 0.7, (5,), "weights")
        inside = snapshot(model)
    for stream in (0, 1):
        expected = hurt_by_definition(clean[stream], stream, [2, 3], 0.7, 5)
        torch.testing.assert_close(hurt[stream], expected, rtol=1e-12, atol=1e-15)
    changed = {name for name in before if not torch.equal(before[name], inside[name])}
    assert len(changed) == 2  # a query and a key projection; biases stay
    assert all(".1." in name for name in changed)
    after = snapshot(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("family", "host"), LAYOUTS)
def test_only_the_named_rows_differ(family: str, host: str):
    model = make(family, host)
    seen = host_of(model)
    before, clean = snapshot(model), projections(model)
    with rl.lesion(model, 1, [1], std=1.0):
        hurt, inside = projections(model), snapshot(model)
    named = torch.zeros(8, dtype=torch.bool)
    named[seen.certificate.layers[1].rotation.pairs[1]] = True
    for new, old in zip(hurt[:2], clean[:2], strict=True):
        differs = new != old
        assert differs[:, named].all()
        assert not differs[:, ~named].any()
    assert torch.equal(hurt[2], clean[2])
    n_changed = sum(int((before[n] != inside[n]).sum()) for n in before)
    copies = 2 if (family, host) in (("gpt_neox", "bridge"), ("phi3", "bridge")) else 1  # joint, and split
    assert n_changed == copies * 2 * 48 * (len(hurt[0]) + len(hurt[1]))
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


def test_weights_come_back_after_an_error_and_in_nests():
    model = make("llama", "transformers")
    before, certificate = snapshot(model), host_of(model).certificate

    def fail() -> None:
        with rl.lesion(model, [0, 1], std=2.0):
            with rl.lesion(model, 1, "fastest:3", std=3.0, seed=1):
                host_of(model)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert host_of(model).certificate is certificate


def test_a_hurt_model_is_certified_anew():
    model = make("llama", "bridge")
    clean = rl.band_activation(model, tiny.ids())
    with rl.lesion(model, 0, "fastest:1", std=1.0):
        hurt = rl.band_activation(model, tiny.ids())
    assert (hurt.values[0] != clean.values[0])[:, 0].all()
    torch.testing.assert_close(hurt.values[0, :, 1:], clean.values[0, :, 1:], rtol=1e-9, atol=1e-9)
    assert hurt.model["signature"] != clean.model["signature"]
    again = rl.band_activation(model, tiny.ids())
    assert torch.equal(again.values, clean.values)


def test_gradients_flow_inside():
    model = make("llama", "transformers")
    with rl.lesion(model, 1, std=0.5):
        assert torch.is_grad_enabled()
        assert model(tiny.ids()).logits.requires_grad


@pytest.mark.parametrize("target", ["weights", "queries", "keys", "both"])
def test_every_host_is_hurt_alike(target: str):
    logits = []
    for host in HOSTS:
        model = make("llama", host)
        clean = host_of(model).run(tiny.ids(), None)
        with torch.no_grad(), rl.lesion(model, [0, 1], "slowest:50%", std=0.8, seed=3, target=target):
            logits.append(host_of(model).run(tiny.ids(), None))
        assert (logits[-1] - clean).abs().max() > 0.1
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=1e-5, atol=1e-5)  # tables of positions are float32


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("target", ["weights", "queries", "keys", "both"])
def test_no_noise_changes_nothing(host: str, target: str):
    model = make("llama", host)
    clean = host_of(model).run(tiny.ids(), None)
    versions = [p._version for p in model.parameters()]
    with rl.lesion(model, [0, 1], std=0, target=target):
        assert torch.equal(host_of(model).run(tiny.ids(), None), clean)
        assert [p._version for p in model.parameters()] == versions


def test_activations_are_hurt_by_the_definition():
    model = make("llama", "transformers")
    host, ids = host_of(model), tiny.ids(2, 70)
    shown: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(layer: int, q: Tensor, k: Tensor, mask: Tensor, sound: Tensor) -> None:
        shown[layer] = q.clone(), k.clone()

    with torch.no_grad(), host.observing([0], keep):
        host.run(ids, None)
        clean = shown[0]
        with rl.lesion(model, 0, [0, 2], std=0.6, seed=9, target="both"), host.observing([0], keep):
            host.run(ids, None)
        hurt = shown[0]
    sizes = band_sizes(host)[0]
    for which, stream in ((0, 2), (1, 3)):
        expected = clean[which].clone()
        n_heads = expected.shape[2]
        for pos in (0, 1, 63, 64, 69):
            noise = normal(9, stream, 0, pos, (n_heads, 8))  # in the order of bands: 0, 4, 1, 5, ...
            for band in (0, 2):
                scale = 0.6 * sizes[which][:, band]
                for part, dim in enumerate((band, band + 4)):
                    expected[:, pos, :, dim] += scale * noise[:, 2 * band + part]
            torch.testing.assert_close(hurt[which][:, pos], expected[:, pos], rtol=1e-6, atol=1e-6)
        same = [1, 3, 5, 7]
        assert torch.equal(hurt[which][..., same], clean[which][..., same])


def test_the_size_of_a_band_is_its_root_mean_square():
    model = make("llama", "bridge")
    host = host_of(model)
    ids = torch.randint(host.vocab_size, (1, 128), generator=torch.Generator().manual_seed(2))
    seen: dict[str, Tensor] = {}
    with torch.no_grad():
        model.run_with_hooks(
            ids,
            fwd_hooks=[("blocks.1.attn.hook_rot_q", lambda q, hook: seen.update(q=q.double().clone()))],
        )
    expected = seen["q"][0, :, 3, [2, 6]].square().mean().sqrt()
    torch.testing.assert_close(band_sizes(host)[1][0][3, 2], expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("host", [h for h in HOSTS if h != "hooked"])
@pytest.mark.parametrize("target", ["weights", "both"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_several_seeds_hurt_the_rows_of_a_batch(family: str, target: str, host: str):
    model, ids = make(family, host), tiny.ids(1, 20)
    with torch.no_grad(), rl.lesion(model, 1, "slowest:1", std=0.9, seed=[4, 7], target=target):
        together = host_of(model).run(ids.expand(2, -1), None)
    for row, seed in enumerate((4, 7)):
        with torch.no_grad(), rl.lesion(model, 1, "slowest:1", std=0.9, seed=seed, target=target):
            alone = host_of(model).run(ids, None)
        torch.testing.assert_close(together[row], alone[0], rtol=1e-9, atol=1e-9)
    assert (together[0] - together[1]).abs().max() > 1e-3


@pytest.mark.parametrize("target", ["weights", "keys"])
def test_each_row_of_a_batch_has_its_own_lesion(target: str):
    model, ids = make("gpt_neox", "transformers"), tiny.ids(1, 20)
    host = host_of(model)
    asked: list[tuple[Any, ...]] = [
        (1, "slowest:1", 0.9, (4, 7)),
        (0, "fastest:1", 2.0, (4,)),
        (1, [0], 0.0, (1,)),
    ]
    plans = [plan_of(host, *what, target) for what in asked]
    with torch.no_grad(), hurt_rows(host, plans):
        together = host.run(ids.expand(4, -1), None)
    rows = iter(together)
    for layer, bands, std, seeds in asked:
        for seed in seeds:
            with torch.no_grad(), rl.lesion(model, layer, bands, std=std, seed=seed, target=target):
                alone = host.run(ids, None)
            torch.testing.assert_close(next(rows), alone[0], rtol=1e-9, atol=1e-9)
    assert (together[2] - together[3]).abs().max() > 1e-3


def test_fewer_bands_keep_their_noise():
    model = make("llama", "transformers")
    rows = []
    for bands in ([3], [1, 3]):
        with rl.lesion(model, 0, bands, std=1.0, seed=2):
            rows.append(query_and_key_rows(host_of(model), 0)[0].weight[:, [3, 7]].clone())
    assert torch.equal(*rows)


def test_noise_grows_in_proportion():
    model = make("llama", "transformers")
    weight = query_and_key_rows(host_of(model), 0)[0].weight
    clean, found = weight.clone(), []
    for std in (0.5, 2.0):
        with rl.lesion(model, 0, "fastest:2", std=std):
            found.append(weight - clean)
    torch.testing.assert_close(found[1], 4 * found[0], rtol=1e-9, atol=1e-12)
    # Its size, over 6 heads x 2 bands x 2 rows x 48 numbers: a standard error of 3%.
    own = clean[:, [0, 1, 4, 5]].square().mean().sqrt()
    assert float(found[1][:, [0, 1, 4, 5]].square().mean().sqrt() / own) == pytest.approx(2.0, rel=0.15)


@pytest.mark.parametrize(
    ("bands", "expected"),
    [
        ("slowest:2", [2, 3]),
        ("fastest:1", [0]),
        ("slowest:20%", [3]),
        ("fastest:75%", [0, 1, 2]),
        ((6, 70), [0, 1]),
        ([0, -1], [0, 3]),
        (range(1, 3), [1, 2]),
    ],
)
def test_bands_are_named_by_frequency(bands: Any, expected: list[int]):
    """The tiny Llama's wavelengths are 6.3, 63, 628 and 6,283 tokens."""
    with rl.lesion(make("llama", "transformers"), 1, bands, std=0) as done:
        assert done.mask[1].all(0).nonzero()[:, 0].tolist() == expected
        assert not done.mask[0].any()


def test_a_mask_is_limited_to_the_layers():
    model = make("llama", "transformers")
    mask = torch.zeros(2, 6, 4, dtype=torch.bool)
    mask[:, 2, 1] = True
    with rl.lesion(model, 1, mask, std=0.5, target="queries") as done:
        assert done.mask.nonzero().tolist() == [[1, 2, 1]]


BAD = [
    ({"std": -0.1}, r"^expected a std of 0 or more, in units of .*, got -0.1"),
    ({"std": float("nan")}, r"^expected a std of 0 or more, .* got nan"),
    ({"std": float("inf")}, r"^expected a std of 0 or more, .* got inf"),
    ({"seed": -1}, r"^expected a seed from 0 up"),
    ({"layer": 2}, r"^expected layers from 0 to 1, got 2"),
    ({"layer": []}, r"^expected layers from 0 to 1, got none"),
    ({"bands": "quickest:2"}, r"^expected bands as \"fastest:12\""),
    ({"bands": "slowest:5"}, r"^expected at most 4 bands"),
    ({"bands": [4]}, r"^expected a band from 0 to 3, got 4"),
    ({"bands": (1, 2, 3)}, r"^expected wavelengths as a tuple \(low, high\), got one of 3"),
    ({"bands": (7, 8)}, r"^expected a choice that some of"),
    ({"bands": torch.ones(4, dtype=torch.bool)}, r"^expected bands as a mask of bool \[2, 6, 4\]"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_input_is_refused_in_a_sentence(changes: dict[str, Any], message: str):
    model = make("llama", "transformers")
    before = snapshot(model)
    with pytest.raises(ValueError, match=message), rl.lesion(model, **{"layer": 1, **changes}):
        pass
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_heads_that_share_keys_must_agree():
    mask = torch.zeros(2, 6, 4, dtype=torch.bool)
    mask[1, 2, 1] = True
    model, message = make("llama", "transformers"), "expected heads 0 to 2 of layer 1 to agree on band 1"
    with pytest.raises(ValueError, match=message), rl.lesion(model, 1, mask):
        pass


@tiny.needs_hooked
def test_folded_norms_are_refused():
    model = make("llama", "hooked")
    model.process_weights_(fold_ln=True, center_writing_weights=False, center_unembed=False)
    message = "^expected a HookedTransformer with its weights as published, got one with the norms' gains"
    with pytest.raises(ValueError, match=message), rl.lesion(model, 1):
        pass
    with rl.lesion(model, 1, target="both"):
        pass


@tiny.needs_hooked
def test_a_hookedtransformer_takes_one_seed_for_weights():
    message = "^expected one seed on a HookedTransformer, got 2"
    with pytest.raises(ValueError, match=message), rl.lesion(make("llama", "hooked"), 1, seed=[0, 1]):
        pass


def test_a_batch_must_have_a_row_for_each_seed():
    model = make("llama", "transformers")
    for target in ("weights", "queries"):
        with (
            pytest.raises(ValueError, match="expected a batch of 3 rows, one for each seed"),
            rl.lesion(model, 1, seed=[0, 1, 2], target=target),
        ):
            model(tiny.ids(2))


def test_layers_that_share_weights_are_refused():
    model = make("llama", "transformers")
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj.weight = first.q_proj.weight
    message = "layers 0 and 1 share the weights of their queries and keys"
    with pytest.raises(ValueError, match=message), rl.lesion(model, 1):
        pass
