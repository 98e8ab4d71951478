"""On one device that is not the CPU, and on two: the same numbers, made on devices that are not there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pandas as pd
import pytest
import tiny
import torch
from torch import Tensor

import pretended
import ropelens as rl
from ropelens.hosts import host_of
from ropelens.hosts.load import hooked_from
from ropelens.hosts.plain import PlainHost
from ropelens.hosts.weights import ends
from ropelens.hosts.weights.modules import here
from ropelens.lesions.generating import generate, token_losses
from ropelens.report import attention_grid

IDS = tiny.ids(2, 24)
HEADS = [(0, 1), (1, 4)]


def model() -> Any:
    """A model with all the biases that some circuits read."""
    return tiny.varied("qwen2")


def elsewhere() -> Any:
    made = model()
    pretended.moved(made, pretended.FIRST)
    return made


def spread() -> Any:
    made = model()
    return pretended.spread(made, made.model.layers, [made.model.norm, made.lm_head])


def logits(made: Any) -> Tensor:
    with torch.no_grad():
        return made(IDS.to(made.device)).logits


def inside(block: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(made: Any) -> Any:
        with block(made):
            return logits(made)

    return run


def lesion(target: Any, seed: Any = 0) -> Callable[[Any], Any]:
    return inside(lambda m: rl.lesion(m, [0, 1], "slowest:2", std=0.5, seed=seed, target=target))


def ablate(mode: Any) -> Callable[[Any], Any]:
    def block(m: Any) -> Any:
        means = rl.band_means(m, IDS) if mode == "mean" else None
        return rl.ablate(m, rl.bands_where(m, [1, 2]), mode, means=means)

    return inside(block)


def repeated(m: Any) -> Any:
    return rl.circuits.head_scores(m, n_sequences=2, length=24)


MEASURED: dict[str, Callable[[Any], Any]] = {
    "entropy": lambda m: rl.band_entropy(m, IDS),
    "activation": lambda m: rl.band_activation(m, IDS),
    "attribution": lambda m: rl.band_attribution(m, IDS[:1], layer=1, head=3),
    "fisher": lambda m: rl.band_fisher(m, IDS, n_samples=2),
    "taylor": lambda m: rl.band_taylor(m, IDS),
    "collect": lambda m: rl.collect(m, IDS, ("entropy", "norm_product"), progress=False),
    "inspect": lambda m: rl.inspect(m).drop(columns="error"),
    **{f"ablate {mode}": ablate(mode) for mode in ("zero", "derotate", "mean", "keys")},
    **{f"lesion {target}": lesion(target) for target in ("weights", "queries", "keys", "both")},
    "lesions of rows": lesion("weights", seed=[1, 2]),
    "frequencies": inside(lambda m: rl.frequencies(m, rl.Bands.of(m).inv_freq / 2)),
    "patch": inside(lambda m: rl.patch_bands(m, IDS.flip(1), rl.bands_where(m, "fastest:2"))),
    "losses": lambda m: rl.ablation_losses(m, {"a": rl.bands_where(m, [0])}, IDS, progress=False),
    "generate": lambda m: generate(host_of(m), [[5, 6, 7], [8, 9, 10]], 4, temperature=1.0, seeds=[0, 1]),
    "losses of tokens": lambda m: token_losses(host_of(m), [[5, 6, 7], [8, 9]], [[4], [4, 3]]),
    "ends": lambda m: ends(host_of(m)).folded().unembedding,
    "ov": lambda m: rl.circuits.copying_score(m),
    "qk": lambda m: rl.circuits.eigenvalue_score(rl.circuits.qk_eigenvalues(m, distance=[1, 2])),
    "qk by band": lambda m: rl.circuits.qk_eigenvalues(m, by_band=True).sum(-1).real,
    "qk through": lambda m: rl.circuits.qk_eigenvalues(m, through=[(0, 1)]).sum(-1).real,
    "composition": lambda m: rl.circuits.k_composition(m),
    "heads": lambda m: repeated(m).to_frame(),
    "prefixes": lambda m: rl.circuits.prefix_matching(m, n_sequences=2, length=48).to_frame(),
    "bands of heads": lambda m: rl.circuits.head_bands(m, heads=HEADS, n_sequences=2, length=24).to_frame(),
    "loss by position": lambda m: rl.circuits.loss_by_position(m, IDS).values,
    "paths": lambda m: rl.circuits.path_importance(m, IDS).to_frame(),
    "bigrams": lambda m: dataclasses.astuple(rl.circuits.bigrams(m, IDS)),
    "trigrams": lambda m: rl.circuits.skip_trigrams(m, 1, 4, 7).to_frame(),
    "copied": lambda m: rl.circuits.copied_tokens(m, 1, 4),
    "kernel": lambda m: rl.circuits.positional_kernel(m, distances=range(4)).values,
    "kernel of a text": lambda m: rl.circuits.positional_kernel(m, IDS, distances=range(4)).measured,
    "no-op": lambda m: rl.circuits.no_op_report(m, IDS),
    "view": lambda m: rl.circuits.head_view(m, IDS[:1], layer=1, head=4).to_frame(),
    "grid": lambda m: attention_grid(m, IDS[:1, :6], heads=[(1, 4)]).attribution(1, 4, 5),
}


def numbers(found: Any) -> list[Tensor]:
    """All numbers of a result, which must have come back to the CPU."""
    if isinstance(found, dict):
        return [x for one in found.values() for x in numbers(one)]
    if isinstance(found, list | tuple):
        return [x for one in found for x in numbers(one)]
    if isinstance(found, pd.DataFrame):
        return [torch.tensor(found[name].to_numpy(float)) for name in found.select_dtypes("number")]
    if dataclasses.is_dataclass(found):
        return [x for x in vars(found).values() if isinstance(x, Tensor)]
    return [torch.as_tensor(found).cpu()]


MODELS: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def _models() -> Iterator[None]:
    MODELS.update(here=model(), elsewhere=elsewhere(), spread=spread())
    yield
    MODELS.clear()


@cache
def expected_of(what: str) -> list[Tensor]:
    return numbers(MEASURED[what](MODELS["here"]))


@pytest.mark.parametrize("where", ["elsewhere", "spread"])
@pytest.mark.parametrize("what", MEASURED)
def test_devices_do_not_matter(what: str, where: str):
    expected = expected_of(what)
    with pretended.pretending():
        found = numbers(MEASURED[what](MODELS[where]))
    assert len(found) == len(expected) > 0
    for mine, its in zip(found, expected, strict=True):
        assert not isinstance(mine, pretended.Elsewhere)
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize(("device", "message"), [("mps", "no float64"), ("meta", "on the meta device")])
def test_devices_that_cannot_be_measured_on_are_refused(device: str, message: str, monkeypatch):
    monkeypatch.setattr(PlainHost, "device", torch.device(device))
    with pytest.raises(ValueError, match=rf"^expected a model .*{message}"):
        rl.inspect(tiny.plain("llama"))


def test_another_default_device_is_refused():
    with torch.device("meta"), pytest.raises(ValueError, match=r"default device to be the CPU, .* got meta"):
        rl.inspect(MODELS["here"])


def test_weights_that_are_offloaded_are_no_obstacle_until_they_are_read():
    made, expected = model(), rl.band_entropy(model(), IDS)
    made.lm_head.weight = torch.nn.Parameter(made.lm_head.weight.to("meta"))
    assert torch.equal(rl.band_entropy(made, IDS).values, expected.values)
    with pytest.raises(ValueError, match="expected weights that are in memory, got offloaded ones"):
        here(host_of(made), made.lm_head.weight)


@tiny.needs_hooked
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_hooked_transformer_in_half_precision_keeps_its_frequencies(dtype: torch.dtype):
    plain = tiny.plain("llama", dtype=torch.float32)
    for weight in plain.parameters():  # as transformers loads it: frequencies stay in float32
        weight.data = weight.data.to(dtype)
    hooked, expected = hooked_from(plain, None), rl.Bands.of(plain).inv_freq
    torch.testing.assert_close(rl.Bands.of(hooked).inv_freq, expected, rtol=1e-6, atol=0)
    with rl.frequencies(hooked, expected / 3):
        torch.testing.assert_close(rl.Bands.of(hooked).inv_freq, expected / 3, rtol=1e-6, atol=0)


def test_lesions_of_rows_bear_autocast():
    made = tiny.varied("qwen2").float()
    with rl.lesion(made, [0], "slowest:2", seed=[1, 2]), torch.autocast("cpu", torch.bfloat16):
        assert logits(made).isfinite().all()
