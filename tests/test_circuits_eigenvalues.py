"""Eigenvalues of circuits against the explicit matrices, copying heads, compositions, positional kernels."""

from __future__ import annotations

import math

import pytest
import tiny
import torch
from double import Double
from scipy.optimize import linear_sum_assignment

import handmade
import ropelens as rl
from handmade import FAST, Head
from ropelens.hosts import host_of
from ropelens.hosts.weights import ends, layer_weights

FAMILIES = ("llama", "gpt_neox", "yarn")  # grouped heads; layer norms, biases, rest dims; an amplitude


def same_values(found: torch.Tensor, matrix: torch.Tensor) -> None:
    """The eigenvalues of a matrix are those found, and zeros."""
    explicit = torch.linalg.eigvals(matrix)
    largest = explicit.abs().max()
    padded = torch.cat([found, found.new_zeros(len(explicit) - len(found))])
    distance = (padded[:, None] - explicit[None]).abs()
    rows, columns = linear_sum_assignment(distance.numpy())
    assert distance[rows, columns].max() < 1e-8 * largest


def explicit_ov(host, layer: int, head: int) -> torch.Tensor:
    """Vocabulary by vocabulary, step by step: the norms as matrices, the logits' mean taken off."""
    w, last = layer_weights(host, layer), ends(host)
    d = last.embedding.shape[1]
    centre = torch.eye(d, dtype=torch.float64) - 1 / d if last.norm.kind == "layer" else torch.eye(d).double()
    kv = head // w.group
    logits = (
        last.embedding
        @ centre
        @ w.norm.gain.diag()
        @ w.v[kv]
        @ w.o[head]
        @ centre
        @ last.norm.gain.diag()
        @ last.unembedding
    )
    return logits - logits.mean(-1, keepdim=True)


def explicit_qk(
    host, layer: int, head: int, distance: int, band: int | None = None, key=None
) -> torch.Tensor:
    """Every token's score for every token, rotated by hand."""
    w, last, spec = layer_weights(host, layer), ends(host), host.certificate.layers[layer]
    d = last.embedding.shape[1]
    centre = torch.eye(d, dtype=torch.float64) - 1 / d if last.norm.kind == "layer" else torch.eye(d).double()
    read = centre @ w.norm.gain.diag()
    q = last.embedding @ read @ w.q[head]
    k = (last.embedding if key is None else key) @ read @ w.k[head // w.group]
    total = torch.zeros(len(q), len(q), dtype=torch.float64)
    rotated = set(spec.rotation.pairs.flatten().tolist())
    for b, ((i, j), speed) in enumerate(zip(spec.rotation.pairs, spec.rotation.inv_freq, strict=True)):
        if band is not None and b != band:
            continue
        angle = speed * distance
        turned = torch.complex(q[:, i], q[:, j]) * torch.polar(torch.ones(()).double(), angle)
        total += (
            spec.rotation.amplitude**2 * (turned[:, None] * torch.complex(k[:, i], k[:, j]).conj()[None]).real
        )
    if band is None:
        rest = [dim for dim in range(spec.d_head) if dim not in rotated]
        total += q[:, rest] @ k[:, rest].T
    return spec.scale * total


@pytest.mark.parametrize("family", FAMILIES)
def test_eigenvalues_are_those_of_the_explicit_matrices(family: str):
    model = tiny.varied(family)
    with Double(), torch.no_grad():
        host = host_of(model)
        ov = rl.circuits.ov_eigenvalues(model)
        qk = rl.circuits.qk_eigenvalues(model, distance=3)
        averaged = rl.circuits.qk_eigenvalues(model, distance=range(1, 4))
        by_band = rl.circuits.qk_eigenvalues(model, distance=3, by_band=True)
        through = rl.circuits.qk_eigenvalues(model, distance=3, through=[(0, 1), (0, 4)])
        for layer, head in [(0, 0), (0, 4), (1, 2)]:
            same_values(ov[layer, head], explicit_ov(host, layer, head))
            same_values(qk[layer, head], explicit_qk(host, layer, head, 3))
            mean = sum(explicit_qk(host, layer, head, d) for d in (1, 2, 3)) / 3
            same_values(averaged[layer, head], mean)
            for band in range(by_band.shape[2]):
                same_values(by_band[layer, head, band], explicit_qk(host, layer, head, 3, band))
        assert through[0].isnan().all()
        w, last = layer_weights(host, 0), ends(host)
        d = last.embedding.shape[1]
        centre = (
            torch.eye(d, dtype=torch.float64) - 1 / d if last.norm.kind == "layer" else torch.eye(d).double()
        )
        written = sum(
            last.embedding @ centre @ w.norm.gain.diag() @ w.v[h // w.group] @ w.o[h] for h in (1, 4)
        )
        same_values(through[1, 3], explicit_qk(host, 1, 3, 3, key=written))


def test_bands_add_up_as_traces():
    model = tiny.varied("gpt_neox")
    whole = rl.circuits.qk_eigenvalues(model, distance=5).sum(-1)
    bands = rl.circuits.qk_eigenvalues(model, distance=5, by_band=True).sum((-1, -2))
    host = host_of(model)
    for layer in range(2):
        for head in range(6):
            w, spec = layer_weights(host, layer).folded(), host.certificate.layers[layer]
            e = ends(host).folded().embedding
            rest = spec.scale * ((e @ w.q[head])[:, 4:] * (e @ w.k[head])[:, 4:]).sum()
            torch.testing.assert_close(whole[layer, head].real, bands[layer, head].real + rest)


@tiny.needs_hooked
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_all_hosts_have_the_same_copying_scores(family: str):
    from ropelens.hosts.load import hooked_from

    folding = hooked_from(tiny.varied(family), None)
    folding.process_weights_()
    expected = rl.circuits.copying_score(tiny.varied(family))
    assert expected.abs().max() > 0.2
    for model in (tiny.bridge(tiny.varied(family)), hooked_from(tiny.varied(family), None), folding):
        # HookedTransformer keeps norms in float32; eigenvalues of 8 x 8 matrices follow their entries.
        torch.testing.assert_close(rl.circuits.copying_score(model), expected, rtol=0, atol=1e-5)


@tiny.needs_hooked
def test_transformer_lens_has_the_same_eigenvalues_and_compositions():
    from transformer_lens import FactoredMatrix

    from ropelens.hosts.load import hooked_from

    hooked = hooked_from(tiny.varied("llama"), None)
    hooked.process_weights_()
    w = layer_weights(host_of(hooked), 1).repeated()
    theirs = FactoredMatrix(hooked.W_E @ w.v[2], w.o[2] @ hooked.W_U).eigenvalues
    found = rl.circuits.ov_eigenvalues(hooked)[1, 2]
    distance = (theirs[:, None] - found[None]).abs().detach()
    rows, columns = linear_sum_assignment(distance.numpy())
    assert distance[rows, columns].max() < 1e-6 * found.abs().max()

    theirs = hooked.all_composition_scores("K").detach()
    found = rl.circuits.k_composition(hooked)
    assert found[1].isnan().all()
    assert found[:, :, 0].isnan().all()
    torch.testing.assert_close(found[0, :, 1], theirs[0, :, 1], rtol=1e-6, atol=0)
    turned = rl.circuits.k_composition(hooked, distance=3, senders=[(0, 2)])
    assert turned[0, 1].isnan().all()
    assert (turned[0, 2, 1] - found[0, 2, 1]).abs().max() > 1e-3


def test_copying_and_suppressing_heads():
    model = handmade.model(
        (Head("same", "token"), Head("same", "-token")), (Head(), Head("before", "before"))
    )
    scores = rl.circuits.copying_score(model)
    assert scores[0, 0] == pytest.approx(1, abs=1e-9)
    assert scores[0, 1] == pytest.approx(-1, abs=1e-9)
    assert scores[1].isnan().all()  # these write nothing that is read: no eigenvalue but 0


def test_the_corner_needs_the_previous_token_head():
    model = handmade.induction()
    direct = rl.circuits.eigenvalue_score(rl.circuits.qk_eigenvalues(model, distance=range(1, 30)))
    through = rl.circuits.eigenvalue_score(
        rl.circuits.qk_eigenvalues(model, distance=range(1, 30), through=[(0, 0)])
    )
    assert direct[1, 0].isnan()
    assert through[1, 0] > 0.99
    composition = rl.circuits.k_composition(model, senders=[(0, 0)])
    assert composition[0, 0, 1, 0] == composition.nan_to_num().max()
    assert composition[0, 0, 1, 0] > 0.1


def test_eigenvalue_scores():
    values = torch.tensor([[1, 2, 0], [-1, -2, math.nan], [0, 0, 0]], dtype=torch.complex128)
    found = rl.circuits.eigenvalue_score(values)
    assert found[:2].tolist() == [1, -1]
    assert found[2].isnan()


def test_norms_of_queries_and_keys_leave_no_qk_circuit():
    model = tiny.varied("qwen3")
    assert rl.circuits.copying_score(model).isfinite().all()
    for refused in (rl.circuits.qk_eigenvalues, rl.circuits.k_composition, rl.circuits.positional_kernel):
        with pytest.raises(ValueError, match="layer 0: its queries and keys pass norms of their own"):
            refused(model)
    assert rl.circuits.positional_kernel(model, tiny.ids(1), distances=range(3)).content == "text"


def test_distances_are_checked():
    with pytest.raises(ValueError, match=r"distances of 0 tokens or more, got \[-1\]"):
        rl.circuits.qk_eigenvalues(handmade.induction(), distance=-1)


# Positional kernels ---------------------------------------------------------------------------------


def test_the_kernel_of_a_previous_token_head_is_the_cosines_that_it_was_built_of():
    model = handmade.induction()
    kernel = rl.circuits.positional_kernel(model, distances=range(20))
    inv_freq = handmade.BASE ** (-torch.arange(32, dtype=torch.float64) / 32)
    # Each band gives sharpness * cos(inv_freq * (distance - 1)), embeddings being what they are; the
    # model's own frequencies are float32, and its eps is 1e-6.
    expected = 30 * torch.cos(inv_freq * (torch.arange(20).double()[:, None] - 1))
    expected[:, len(FAST) :] = 0
    torch.testing.assert_close(kernel.values[0, 0], expected, rtol=0, atol=30 * 1e-4)
    assert int(kernel.values[0, 0].sum(-1).argmax()) == 1
    assert kernel.measured is None
    assert len(kernel.to_frame(0, 0)) == 20 * 32


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "yarn"])
def test_kernels_by_definition(family: str):
    model, ids = tiny.varied(family), tiny.ids(2, 20)
    with Double(), torch.no_grad():
        host = host_of(model)
        seen = {}
        with host.observing([1], lambda layer, q, k, mask, sound: seen.update({layer: (q, k)})):
            host.run(ids, None)
        text = rl.circuits.positional_kernel(model, ids, distances=(0, 1, 7))
        expected = rl.circuits.positional_kernel(model, distances=(0, 1, 7))
    spec, head = host.certificate.layers[1], 4
    q, k = seen[1][0][:, :, head], seen[1][1][:, :, head // (6 // spec.n_kv_heads)]
    w, e = layer_weights(host, 1), ends(host).embedding
    kv = head // w.group
    normed = w.norm(e)
    bias = 0 if w.q_bias is None else w.q_bias[head], 0 if w.k_bias is None else w.k_bias[kv]
    mean_q, mean_k = (normed @ w.q[head] + bias[0]).mean(0), (normed @ w.k[kv] + bias[1]).mean(0)
    for band, ((i, j), speed) in enumerate(zip(spec.rotation.pairs, spec.rotation.inv_freq, strict=True)):
        zq, zk = (torch.complex(x[..., i], x[..., j]) for x in (q, k))
        turn = torch.polar(torch.ones(20).double(), -speed * torch.arange(20))
        bare_q, bare_k = (zq * turn)[:, 1:].mean(), (zk * turn)[:, 1:].mean()
        weights_q, weights_k = torch.complex(mean_q[i], mean_q[j]), torch.complex(mean_k[i], mean_k[j])
        for index, distance in enumerate((0, 1, 7)):
            phase = torch.polar(torch.ones(()).double(), speed * distance)
            value = spec.scale * (bare_q * bare_k.conj() * phase).real
            torch.testing.assert_close(text.values[1, head, index, band], value, rtol=1e-9, atol=1e-12)
            pairs = [
                (zq[row, p] * zk[row, p - distance].conj()).real
                for row in range(2)
                for p in range(distance + 1, 20)
            ]
            measured = spec.scale * torch.stack(pairs).mean()
            torch.testing.assert_close(text.measured[1, head, index, band], measured, rtol=1e-9, atol=1e-12)
            value = spec.scale * spec.rotation.amplitude**2 * (weights_q * weights_k.conj() * phase).real
            torch.testing.assert_close(expected.values[1, head, index, band], value, rtol=1e-9, atol=1e-12)


def test_texts_too_short_for_the_distances_are_refused():
    with pytest.raises(ValueError, match="at least 65 tokens for distances up to 63, got 24"):
        rl.circuits.positional_kernel(tiny.plain("llama"), tiny.ids(1))
