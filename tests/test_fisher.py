"""Fisher information against finite differences, exact enumeration and the KL divergence's Hessian."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
import torch
from double import Double
from torch import Tensor

import ropelens as rl
from ropelens.hosts import Host, host_of
from ropelens.metrics.fisher import gain_gradients, sample_labels

EPS = torch.finfo(torch.float64).eps
FAMILIES = ["llama", "phi"]  # 6 query heads on 2 key heads; half the dims unrotated


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    with Double():
        yield


@pytest.fixture
def model() -> Any:
    return tiny.bridge(tiny.plain("llama"))


def gain_hook(gain: Tensor) -> Callable[[Tensor, Any], Tensor]:
    def multiply(q: Tensor, hook: Any) -> Tensor:
        return q * gain

    return multiply


def log_probs(host: Host, ids: Tensor, gains: list[Tensor]) -> Tensor:
    """Log-probabilities [pos, token] with a gain on every dim of every head's queries."""
    hooks = [(host.points(layer)[0], gain_hook(gain)) for layer, gain in enumerate(gains)]
    with host.attached(hooks):
        return host.run(ids, None)[0].log_softmax(-1)


def entry_dims(host: Host, layer: int) -> list[list[int]]:
    """The dims of every band of a layer, and in the end those of the rest, if there are any."""
    pairs = host.certificate.layers[layer].rotation.pairs.tolist()
    rotated = {dim for pair in pairs for dim in pair}
    rest = [dim for dim in range(host.certificate.layers[layer].d_head) if dim not in rotated]
    return pairs + ([rest] if rest else [])


def entry_gains(host: Host) -> tuple[list[Tensor], list[Tensor]]:
    """A gain, 1, for each (head, entry), and the gains of the dims that they stand for, by layer."""
    entries, gains = [], []
    for layer, spec in enumerate(host.certificate.layers):
        dims = entry_dims(host, layer)
        entry = torch.ones(spec.n_heads, len(dims), dtype=torch.float64, requires_grad=True)
        of_dim = torch.zeros(spec.d_head, dtype=torch.int64)
        for index, members in enumerate(dims):
            of_dim[members] = index
        entries.append(entry)
        gains.append(entry[:, of_dim])
    return entries, gains


def by_entry(scores: rl.BandScores, table: Tensor) -> Tensor:
    """[layer, head, entry]: bands, then the rest where a layer has one."""
    has_rest = bool((scores.bands.n_rest > 0).all())
    return torch.cat([table, scores.rest[..., None]], -1) if has_rest else table


def enumerated(host: Host, ids: Tensor) -> Tensor:
    """[layer, head, entry]: sum over positions and tokens of p(v) * (d log p(v) / d gain)^2."""
    entries, gains = entry_gains(host)
    log_p = log_probs(host, ids, gains)
    total = [torch.zeros_like(entry) for entry in entries]
    for one in log_p.flatten():
        for sums, gradient in zip(total, torch.autograd.grad(one, entries, retain_graph=True), strict=True):
            sums += one.detach().exp() * gradient.square()
    return torch.stack(total)


def kl_hessian(host: Host, ids: Tensor) -> Tensor:
    """[layer, head, entry]: second derivative, at gain 1, of the sum over positions of KL(p_1 || p_gain)."""
    entries, gains = entry_gains(host)
    log_p = log_probs(host, ids, gains)
    divergence = (log_p.detach().exp() * (log_p.detach() - log_p)).sum()
    slopes = torch.autograd.grad(divergence, entries, create_graph=True)
    curvature = [torch.zeros_like(entry) for entry in entries]
    for layer, slope in enumerate(slopes):
        for head, entry in torch.cartesian_prod(*(torch.arange(n) for n in slope.shape)).tolist():
            (gradient,) = torch.autograd.grad(slope[head, entry], entries[layer], retain_graph=True)
            curvature[layer][head, entry] = gradient[head, entry]
    return torch.stack(curvature)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_equals_the_finite_difference_of_the_sampled_log_probability(family: str):
    host, ids = host_of(tiny.bridge(tiny.plain(family))), tiny.ids(1, 8)
    ones = [torch.ones(spec.n_heads, spec.d_head).double() for spec in host.certificate.layers]
    with torch.no_grad():
        start = log_probs(host, ids, ones)
    found = list(gain_gradients(host, ids, n_samples=2, seed=(3, 0)))
    for sample, gradient in enumerate(found):
        labels = sample_labels(start, seed=(3, 0, sample))

        def nudged(layer: int, head: int, dims: list[int], by: float, labels: Tensor = labels) -> float:
            gains = [one.clone() for one in ones]
            gains[layer][head, dims] += by
            with torch.no_grad():
                return float(log_probs(host, ids, gains).gather(-1, labels[:, None]).sum())

        level = abs(float(start.gather(-1, labels[:, None]).sum()))
        for layer, head in ((0, 0), (0, 5), (1, 2)):
            for dims in entry_dims(host, layer):
                step = 2e-4
                coarse, fine = (
                    (nudged(layer, head, dims, h) - nudged(layer, head, dims, -h)) / (2 * h)
                    for h in (step, step / 2)
                )
                # Halving the step takes 3/4 of the truncation error away and leaves 1/4, so the change is
                # 3 times what is left; a loss of this size is rounded in each of some 100 operations.
                tolerance = abs(coarse - fine) + 100 * EPS * level / step
                assert abs(float(gradient[layer][head, dims].sum()) - fine) <= tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_fisher_equals_enumeration_of_the_vocabulary_and_the_hessian_of_kl(family: str):
    model, ids = tiny.bridge(tiny.plain(family)), tiny.ids(1, 4)
    host = host_of(model)
    exact = enumerated(host, ids)
    assert float(exact.max()) > 0.01  # the model does depend on its bands
    # Both are exact derivatives: what remains is rounding, of sums of 4 x 61 terms.
    torch.testing.assert_close(kl_hessian(host, ids), exact, rtol=1e-9, atol=1e-12 * float(exact.max()))

    scores = rl.band_fisher(model, ids, n_samples=400, seed=1)
    assert (
        (scores.mean("document") - exact[..., : scores.bands.n_bands]).abs() / scores.sampling_stderr()
    ).max() < 5
    draws = torch.stack(
        [
            squared_entries(host, gradient)
            for gradient in gain_gradients(host, ids, n_samples=400, seed=(1, 0))
        ]
    )
    torch.testing.assert_close(by_entry(scores, scores.values), draws.mean(0), rtol=1e-12, atol=0)
    error = draws.std(0) / len(draws) ** 0.5
    assert float(((draws.mean(0) - exact).abs() / error).max()) < 5  # the rest, too
    torch.testing.assert_close(
        scores.sampling_stderr(), error[..., : scores.bands.n_bands], rtol=1e-9, atol=0
    )


def squared_entries(host: Host, gradient: list[Tensor]) -> Tensor:
    """[layer, head, entry]: the squared derivative by each band's gain, summed over its dims first."""
    return torch.stack(
        [
            torch.stack([g[:, dims].sum(-1).square() for dims in entry_dims(host, layer)], -1)
            for layer, g in enumerate(gradient)
        ]
    )


def test_per_dim_gains_are_squared_one_by_one():
    model, ids = tiny.bridge(tiny.plain("phi")), tiny.ids(2, 8)
    host = host_of(model)
    scores = rl.band_fisher(model, ids, n_samples=2, seed=5, unit="dim")
    expected = torch.zeros_like(by_entry(scores, scores.values))
    for document, row in enumerate(ids):
        for gradient in gain_gradients(host, row[None], n_samples=2, seed=(5, document)):
            for layer, g in enumerate(gradient):
                for entry, dims in enumerate(entry_dims(host, layer)):
                    expected[layer, :, entry] += g[:, dims].square().sum(-1) / 2
    torch.testing.assert_close(by_entry(scores, scores.values), expected, rtol=1e-12, atol=0)


def test_standard_errors_over_documents_are_those_of_the_documents_values(model: Any):
    documents = tiny.ids(3, 10)
    # Labels are drawn by a document's place, so each one's value is what it adds to those before it.
    totals = [rl.band_fisher(model, documents[:n], seed=2).values for n in (1, 2, 3)]
    each = torch.stack([totals[0], totals[1] - totals[0], totals[2] - totals[1]])
    scores = rl.band_fisher(model, documents, seed=2)
    torch.testing.assert_close(scores.mean("document"), each.mean(0), rtol=1e-9, atol=0)
    torch.testing.assert_close(scores.squares, each.square().sum(0), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(scores.stderr(), each.std(0) / 3**0.5, rtol=1e-6, atol=1e-12)
    assert (scores.n_documents, scores.n_tokens, scores.n_pairs.tolist()) == (3, 30, [165, 165])


def test_one_document_has_no_standard_error(model: Any):
    with pytest.raises(
        ValueError, match="a standard error needs at least 2 documents, and these scores have 1"
    ):
        rl.band_fisher(model, tiny.ids(1, 6)).stderr()


def test_sampling_error_needs_two_samples(model: Any):
    ids = tiny.ids(2, 6)
    with pytest.raises(
        ValueError, match="know no sampling error: measure with band_fisher and n_samples >= 2"
    ):
        rl.band_fisher(model, ids, n_samples=1).sampling_stderr()
    scores, host = rl.band_fisher(model, ids, n_samples=4), host_of(model)
    variance = torch.zeros_like(scores.values)
    for document, row in enumerate(ids):
        draws = [
            squared_entries(host, g) for g in gain_gradients(host, row[None], n_samples=4, seed=(0, document))
        ]
        variance += torch.stack(draws).var(0) / 4
    torch.testing.assert_close(scores.sampling_stderr(), variance.sqrt() / 2, rtol=1e-9, atol=0)


def test_a_seed_stands_for_its_labels(model: Any):
    ids = tiny.ids(2, 8)
    first, again, other = (rl.band_fisher(model, ids, seed=seed) for seed in (4, 4, 5))
    assert torch.equal(first.values, again.values)
    assert torch.equal(first.squares, again.squares)
    assert not torch.equal(first.values, other.values)
    assert other.settings == {"n_samples": 1, "seed": 5, "unit": "band"}


def test_labels_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.3, 0.2, 0.0]).double()
    n = 20_000
    labels = sample_labels(probabilities.log().expand(n, 4), seed=(0, 0, 0))
    shares = labels.bincount(minlength=4) / n
    error = (probabilities * (1 - probabilities) / n).sqrt()
    assert bool(((shares - probabilities).abs() <= 5 * error).all())


@pytest.mark.parametrize("side", ["left", "right"])
def test_pads_change_nothing(model: Any, side: str):
    ids = tiny.ids(1, 8)
    pads, ones = torch.zeros(1, 5, dtype=torch.int64), torch.ones(1, 8, dtype=torch.int64)
    order = 1 if side == "right" else -1
    padded, mask = (torch.cat([x, pads][::order], 1) for x in (ids, ones))
    alone, found = rl.band_fisher(model, ids), rl.band_fisher(model, padded, attention_mask=mask)
    assert torch.equal(alone.values, found.values)
    assert (alone.n_tokens, alone.n_pairs.tolist(), alone.data) == (
        found.n_tokens,
        found.n_pairs.tolist(),
        found.data,
    )


def traces(model: Any) -> tuple[list[bool], dict[str, int], list[Any]]:
    """What a measurement may leave behind: frozen weights, hooks, gradients."""
    return (
        [p.requires_grad for p in model.parameters()],
        {name: len(point.fwd_hooks) + len(point._forward_hooks) for name, point in model.hook_dict.items()},
        [p.grad for p in model.parameters()],
    )


def test_nothing_is_left_behind(model: Any):
    next(model.parameters()).requires_grad_(False)  # one that the user froze stays frozen
    before = traces(model)
    assert not all(before[0])
    rl.band_fisher(model, tiny.ids(1, 6))
    assert traces(model) == before


def test_nothing_is_left_behind_after_an_error(model: Any):
    host_of(model)

    def fail(value: Tensor, hook: Any) -> None:
        raise RuntimeError("the user's own")

    model.hook_dict["blocks.1.attn.hook_attn_scores"].add_hook(fail)
    before = traces(model)
    with pytest.raises(RuntimeError, match="the user's own"):
        rl.band_fisher(model, tiny.ids(1, 6))
    assert traces(model) == before


def test_works_where_gradients_are_off(model: Any):
    expected = rl.band_fisher(model, tiny.ids(1, 6)).values
    with torch.no_grad():
        assert torch.equal(rl.band_fisher(model, tiny.ids(1, 6)).values, expected)


def test_bad_settings(model: Any):
    with pytest.raises(ValueError, match="n_samples must be at least 1, got 0"):
        rl.band_fisher(model, tiny.ids(1, 6), n_samples=0)
