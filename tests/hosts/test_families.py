"""Every RoPE family on every host: the same bands, scores and metrics, or one sentence that says why not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import tiny
import torch
from double import Double
from families import D_HEAD, FAMILIES, WINDOW

import ropelens as rl
from ropelens.hosts import Certificate, host_of
from ropelens.hosts.load import hooked_from

CARRIED = tiny.carried(*FAMILIES)
REFUSED = [(family, host) for host in tiny.HOSTS for family in FAMILIES if tiny.refusal(family, host)]


def make(family: str, host: str) -> Any:
    dtype = torch.float32 if host in FAMILIES[family].half_on else torch.float64
    plain = tiny.plain(family, dtype=dtype)
    if host == "transformers":
        return plain
    return tiny.bridge(plain) if host == "bridge" else hooked_from(plain, None)


@dataclass
class Measured:
    certificate: Certificate
    logits: torch.Tensor
    entropy: rl.BandScores
    activation: rl.BandScores


@cache
def measured(family: str, host: str) -> Measured:
    model, ids = make(family, host), tiny.ids()
    with Double(), torch.no_grad():
        seen_by = host_of(model)
        logits = seen_by.run(ids, None)
        assert logits is not None
        return Measured(
            seen_by.certificate,
            logits.double(),
            rl.band_entropy(model, ids, tol=1e-6),
            rl.band_activation(model, ids),
        )


@pytest.mark.parametrize(("family", "host"), CARRIED)
def test_what_is_read_is_what_the_family_does(family: str, host: str):
    expected, found = FAMILIES[family], measured(family, host).certificate
    float32 = host in expected.half_on
    for layer, spec in enumerate(found.layers):
        ladder = torch.tensor(expected.ladders[layer], dtype=torch.float64)
        # The buffers are float32: a rounding or two of each.
        torch.testing.assert_close(spec.rotation.inv_freq, ladder, rtol=2**-22, atol=0)
        assert spec.layout == ("none" if not len(ladder) else "adjacent" if expected.adjacent else "half")
        assert found.bands.n_rest[layer] == D_HEAD - 2 * len(ladder)
        assert spec.rotation.amplitude == pytest.approx(expected.amplitude if len(ladder) else 1, rel=1e-6)
        assert spec.scale == pytest.approx(expected.scale, rel=1e-6 if float32 else 1e-12)
        assert (spec.softcap, spec.window) == (expected.softcap, expected.windows[layer])
        assert (spec.sinks is not None) == expected.sinks
        assert (spec.n_heads, spec.n_kv_heads, spec.d_head) == (6, expected.kv_heads, D_HEAD)
        assert spec.error < (1e-6 if float32 else 1e-12)


@pytest.mark.parametrize(("family", "host"), CARRIED)
def test_attention_is_far_from_uniform(family: str, host: str):
    """Or else the other tests would pass on anything."""
    logits = measured(family, host).logits
    assert logits.max() - logits.min() > 2
    assert tiny.ids().shape[1] > WINDOW
    assert measured(family, host).entropy.values.nan_to_num().abs().max() > 1


@pytest.mark.parametrize(("family", "host"), [pair for pair in CARRIED if pair[1] != "transformers"])
def test_all_hosts_measure_the_same(family: str, host: str):
    other = "bridge" if tiny.refusal(family, "transformers") else "transformers"
    ours, theirs = measured(family, host), measured(family, other)
    # HookedTransformer turns by float64 angles, the others by float32 buffers: at position 24 that is
    # 24 * 2**-24 of an angle, and as much of scores of up to 25. Float32 throughout costs more.
    loose = 1e-4 if host in FAMILIES[family].half_on else 1e-5 if host == "hooked" else 1e-11
    assert (ours.logits - theirs.logits).abs().max() < loose * 10
    for a, b in ((ours.entropy, theirs.entropy), (ours.activation, theirs.activation)):
        largest = float(b.values.nan_to_num().abs().max())
        torch.testing.assert_close(a.values, b.values, rtol=0, atol=loose * largest, equal_nan=True)
        torch.testing.assert_close(a.rest, b.rest, rtol=0, atol=loose * largest)
        assert torch.equal(a.n_pairs, b.n_pairs)
        assert a.merge(b).n_documents == 4  # the same model, by fingerprint


@pytest.mark.parametrize(("family", "host"), REFUSED)
def test_what_a_host_gets_wrong_is_refused_in_one_sentence(family: str, host: str):
    expected = tiny.refusal(family, host)
    assert expected is not None
    pattern = re.escape(expected).replace(re.escape("{number}"), r"\d\.\de[+-]\d\d")
    with pytest.raises(ValueError, match=f"^{pattern}$"):
        rl.band_entropy(make(family, host), tiny.ids())


def test_every_family_is_carried_by_some_host_or_by_none_for_a_reason():
    nowhere = {family for family in FAMILIES if all(tiny.refusal(family, host) for host in tiny.HOSTS)}
    assert nowhere == {"deepseek", "hunyuan"}  # MLA, and a norm after the rotation
