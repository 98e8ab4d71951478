"""Head scores: the definition on every kind of attention, and heads built to be found."""

from __future__ import annotations

import pytest
import tiny
import torch
from double import Double

import handmade
import ropelens as rl
from handmade import FAST, SLOW, Head
from ropelens.circuits.heads import attention_to_targets
from ropelens.hosts import host_of

OPTIONS = {"n_sequences": 3, "length": 50, "seed": 1}


@pytest.fixture(scope="module")
def pair():
    return handmade.induction()


# The definition -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_scores_are_means_of_the_models_own_attention(family: str):
    """Grouped heads, softcap and windows, sinks."""
    model = tiny.plain(family)
    text = rl.circuits.repeated_tokens(model, n_sequences=2, length=30, seed=3)
    with Double(), torch.no_grad():
        patterns = model(text.ids, output_attentions=True).attentions
        found = rl.circuits.head_scores(model, n_sequences=2, length=30, seed=3, copying=False)
    for name, target in text.targets.items():
        for layer in range(2):
            for head in range(6):
                for row in range(2):
                    paid = [patterns[layer][row, head, p, i] for p, i in enumerate(target[row]) if i >= 0]
                    expected = torch.stack(paid).mean()
                    torch.testing.assert_close(
                        found.by_sequence[name][layer, head, row], expected, rtol=1e-10, atol=1e-13
                    )


def test_the_targets_of_repeated_tokens(pair):
    text = rl.circuits.repeated_tokens(pair, n_sequences=2, length=21, seed=0)
    assert text.ids.shape == (2, 20)
    for row in range(2):
        ids = text.ids[row].tolist()
        assert ids[:10] == ids[10:]
        assert len(set(ids)) == 10
        for query in range(20):
            key = text.targets["induction"][row, query]
            assert (key >= 0) == (query >= 10)
            if key >= 0:
                assert ids[key - 1] == ids[query]
                assert key != query
            key = text.targets["duplicate_token"][row, query]
            assert key == (-1 if query < 11 else query - 10)
            assert text.targets["previous_token"][row, query] == (query - 1 if query >= 2 else -1)
            assert text.targets["first_key"][row, query] == (0 if query else -1)


def test_exactly_so_many_tokens_match():
    model = tiny.plain("llama")
    text = rl.circuits.shuffled_chunks(model, n_sequences=3, length=58, seed=2)
    for row, ids in enumerate(text.ids.tolist()):
        for m in range(1, 5):
            targets = text.targets[f"matched_{m}"][row]
            assert (targets >= 0).sum() == 7
            for query, key in enumerate(targets.tolist()):
                if key < 0:
                    continue
                matched = 0
                while matched <= m and ids[query - matched] == ids[key - 1 - matched]:
                    matched += 1
                    if key - 1 - matched < 0:
                        break
                assert matched == m


def test_special_tokens_come_first_and_are_not_drawn():
    class Tokenizer:
        all_special_ids = (0, 1, 2)

        def __len__(self) -> int:
            return 20  # fewer than embeddings

        def encode(self, text: str) -> list[int]:
            return [1]

    model = tiny.plain("llama")
    for make in (rl.circuits.repeated_tokens, rl.circuits.shuffled_chunks):
        ids = make(model, length=40, tokenizer=Tokenizer()).ids
        assert (ids[:, 0] == 1).all()
        assert ids[:, 1:].min() >= 3
        assert ids.max() < 20


def test_lengths_that_do_not_suit_are_refused(pair):
    with pytest.raises(ValueError, match="room for segments, got 4 of 5 tokens"):
        rl.circuits.head_scores(pair, length=5)
    with pytest.raises(ValueError, match="at most 512 tokens, the context of this model, got length=600"):
        rl.circuits.head_scores(pair, length=600)


# Heads that were built ------------------------------------------------------------------------------


def test_a_previous_token_head_and_an_induction_head_are_found(pair):
    scores = rl.circuits.head_scores(pair, **OPTIONS)
    assert scores.top("previous_token", 1) == [(0, 0)]
    assert scores.top("induction", 1) == [(1, 0)]
    # What is left to other keys: 50 of them at most, exp(-20) each. The first token has none before it and
    # remembers itself, so that one of 25 queries attends to it by half.
    assert scores["previous_token"][0, 0] > 1 - 1e-6
    assert scores["induction"][1, 0] == pytest.approx(1 - 0.5 / 25, abs=1e-4)
    for name, built in (("previous_token", (0, 0)), ("induction", (1, 0))):
        others = scores[name].clone()
        others[built] = 0
        assert others.max() < 0.1
    frame = scores.to_frame()
    assert list(frame.columns) == [
        *["layer", "head", "previous_token", "duplicate_token", "induction", "first_key", "copying"]
    ]
    assert frame.loc[2].tolist()[:2] == [1, 0]
    assert frame.loc[2, "copying"] == pytest.approx(1, abs=1e-9)
    assert scores.stderr("induction")[1, 0] < 1e-3


def test_they_are_found_with_the_right_bands(pair):
    for kind, (layer, head), own, others in (
        ("previous_token", (0, 0), FAST, SLOW),
        ("induction", (1, 0), SLOW, FAST),
    ):
        found = rl.circuits.head_bands(pair, kind, heads=[(layer, head)], n_queries=6, **OPTIONS)
        carried = found.attribution[layer, head]
        assert carried[list(own)].sum() > 0.9
        assert carried[list(others)].abs().sum() < 0.1
        assert set(found.strongest(layer, head, 2)) <= set(own)
        torch.testing.assert_close(carried.sum() + found.rest[layer, head], found.score[layer, head])
        change = found.without[layer, head] - found.score[layer, head]
        assert change[list(others)].abs().max() < 1e-6
        assert int(change.argmin()) in own
        assert change.min() < -1e-4
        assert found.heads == [(layer, head)]
    frame = found.to_frame()
    assert len(frame) == 32
    assert frame["wavelength"].is_monotonic_increasing


def test_induction_matches_at_every_length(pair):
    scores = rl.circuits.prefix_matching(pair, n_sequences=2, length=35, seed=1)
    for m in range(1, 5):
        assert scores[f"matched_{m}"][1, 0] == pytest.approx(1 - (m == 1) * 0.5 / 4, abs=1e-4)
        assert scores[f"matched_{m}"][1, 1] < 0.1


def test_a_key_shift_on_slow_bands_makes_one_layer_an_induction_model():
    """Keys of the token before, in the bands that hold content: no second layer is needed."""
    model = handmade.model((Head("same", "token"), Head()))
    host, text = host_of(model), rl.circuits.repeated_tokens(model, **OPTIONS)
    slow = torch.tensor([b + half for b in SLOW for half in (0, 32)])

    def shift(k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        k = k.clone()
        k[:, 1:, 0, slow] = k[:, :-1, 0, slow].clone()
        k[:, 0, 0, slow] = 0
        return k

    def measured() -> tuple[float, float, float]:
        scores = rl.circuits.head_scores(model, **OPTIONS)
        with torch.no_grad():
            logits = model(text.ids).logits
        n = text.ids.shape[1] // 2
        right = (logits[:, n:-1].argmax(-1) == text.ids[:, n + 1 :]).double().mean()
        return float(scores["duplicate_token"][0, 0]), float(scores["induction"][0, 0]), float(right)

    duplicate, induction, right = measured()
    assert duplicate > 0.4  # itself is the same token too
    assert induction < 1e-3
    assert right < 0.2
    with host.editing(keys={0: shift}):
        duplicate, induction, right = measured()
    assert duplicate < 1e-3
    assert induction > 0.99
    assert right == 1


# By band --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_without_a_band_is_what_the_model_does_without_it(family: str):
    model = tiny.plain(family)
    host = host_of(model)
    options = {"n_sequences": 2, "length": 30, "seed": 3}
    text = rl.circuits.repeated_tokens(model, **options)
    targets = {"induction": text.targets["induction"]}
    with Double():
        found = rl.circuits.head_bands(model, heads=[(0, 1), (1, 4)], n_queries=100, **options)
        for layer, head, band in [(0, 1, 0), (1, 4, 2)]:
            dims = host.bands.pairs[layer, band]

            def drop(
                q: torch.Tensor, positions: torch.Tensor, h: int = head, d: torch.Tensor = dims
            ) -> torch.Tensor:
                q = q.clone()
                q[:, :, h, d] = 0
                return q

            with host.editing(queries={layer: drop}):
                edited = attention_to_targets(host, text.ids, targets)["induction"]
            torch.testing.assert_close(
                found.without_by_sequence[layer, head, band], edited[layer, head], rtol=1e-9, atol=1e-12
            )
    whole = found.attribution.nan_to_num().sum(-1) + found.rest
    torch.testing.assert_close(
        whole, found.score, rtol=0, atol=2e-6, equal_nan=True
    )  # tol of the path integral
    assert found.residual <= 1e-6


def test_layers_without_rotation_have_no_bands():
    model = tiny.plain("smollm3")
    options = {"n_sequences": 2, "length": 20}
    found = rl.circuits.head_bands(model, n_queries=4, **options)
    assert found.attribution[1].isnan().all()
    assert found.attribution[0].isfinite().all()
    torch.testing.assert_close(found.rest[1], found.score[1], rtol=0, atol=1e-6)
    assert rl.circuits.qk_eigenvalues(model, by_band=True)[1].real.isnan().all()
    near, far = (rl.circuits.qk_eigenvalues(model, distance=d)[1] for d in (1, 9))
    assert torch.equal(near, far)
    kernel = rl.circuits.positional_kernel(model, tiny.ids(1), distances=(0, 5))
    assert kernel.values[1].isnan().all()
    assert kernel.rest[1].isfinite().all()


def test_band_scores_refuse_what_is_not_there(pair):
    with pytest.raises(ValueError, match="expected one of"):
        rl.circuits.head_bands(pair, "inductive")
    with pytest.raises(ValueError, match=r"got \[\(2, 0\)\] as \(layer, head\)"):
        rl.circuits.head_bands(pair, heads=[(2, 0)])
    with pytest.raises(ValueError, match=r"expected one of \['previous_token'.*got 'copy'"):
        _ = rl.circuits.head_scores(pair, length=50, copying=False)["copy"]


# All hosts, and TransformerLens ------------------------------------------------------------------------


def test_the_same_on_the_bridge():
    plain, bridge = tiny.plain("llama"), tiny.bridge(tiny.plain("llama"))
    options = {"n_sequences": 2, "length": 30}
    with Double():
        a, b = (rl.circuits.head_scores(model, **options) for model in (plain, bridge))
    for name in (*a.by_sequence, "copying"):
        torch.testing.assert_close(a[name], b[name], rtol=1e-10, atol=1e-12)


@tiny.needs_hooked
def test_transformer_lens_detects_the_same_heads(pair):
    from transformer_lens import head_detector

    from ropelens.hosts.load import hooked_from

    hooked = hooked_from(pair, None)
    text = rl.circuits.repeated_tokens(hooked, n_sequences=1, length=50, seed=1)
    scores = rl.circuits.head_scores(hooked, n_sequences=1, length=50, seed=1)
    _, cache = hooked.run_with_cache(text.ids, remove_batch_dim=True)
    n = text.ids.shape[1]
    for name, detect, counted in (
        ("previous_token", head_detector.get_previous_token_head_detection_pattern, n - 2),
        ("induction", head_detector.get_induction_head_detection_pattern, n // 2),
    ):
        wanted = detect(text.ids)
        if name == "previous_token":
            wanted[1, 0] = 0  # ours leaves out the first position
        for layer in range(2):
            for head in range(2):
                # Theirs is a share of all attention, ours a mean over the queries that have a target.
                theirs = head_detector.compute_head_attention_similarity_score(
                    cache["pattern", layer, "attn"][head].double(),
                    wanted.double(),
                    exclude_bos=False,
                    exclude_current_token=False,
                    error_measure="mul",
                )
                assert theirs * n / counted == pytest.approx(float(scores[name][layer, head]), abs=1e-6)
