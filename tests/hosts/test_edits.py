"""What a user changes while ropelens watches is measured as changed, or refused; never ignored."""

from __future__ import annotations

import pytest
import tiny
import torch

import ropelens as rl

Q, SCORES = "blocks.1.attn.hook_rot_q", "blocks.1.attn.hook_attn_scores"
REFUSED = "layer 1: the model's scores are not those of its queries and keys under the certified mask"


@pytest.fixture
def model():
    return tiny.bridge(tiny.plain("llama"))


def drop_band(q: torch.Tensor, hook: object) -> torch.Tensor:
    q = q.clone()
    q[..., [0, 4]] = 0
    return q


def test_an_edit_before_is_measured_as_edited(model):
    model.add_hook(Q, drop_band)
    values = rl.band_activation(model, tiny.ids()).values
    assert values[1, :, 0].abs().max() == 0
    assert values[1, :, 1].min() > 1


def test_an_edit_after_is_refused(model):
    with rl.observe(model) as seen:
        model.run_with_hooks(tiny.ids(), fwd_hooks=[(Q, drop_band)])
    with pytest.raises(ValueError, match=REFUSED):
        _ = seen.scores


@pytest.mark.parametrize("change", ["scaled", "one entry of one head"])
def test_edited_scores_are_refused(model, change: str):
    def edit(scores: torch.Tensor, hook: object) -> torch.Tensor:
        if change == "scaled":
            return torch.where(scores < -1e30, scores, scores * 0.99)
        scores = scores.clone()
        scores[:, 3, 10, 4] = -torch.inf
        return scores

    with model.hooks(fwd_hooks=[(SCORES, edit)]):
        for measure in (rl.band_entropy, rl.band_activation):
            with pytest.raises(ValueError, match=REFUSED):
                measure(model, tiny.ids())
        with pytest.raises(ValueError, match=REFUSED):
            rl.band_attribution(model, tiny.ids(1), layer=1, head=0)


@tiny.needs_hooked
@pytest.mark.parametrize("first", [False, True])
def test_ungrouped_keys_are_read_as_they_come(first: bool):
    from ropelens.hosts.load import hooked_from

    model = hooked_from(tiny.plain("llama"), None)
    model.set_ungroup_grouped_query_attention(first)
    rl.Bands.of(model)
    model.set_ungroup_grouped_query_attention(not first)
    pattern = model.run_with_cache(tiny.ids(1))[1]["blocks.1.attn.hook_pattern"]
    for head in range(6):
        found = rl.band_attribution(model, tiny.ids(1), layer=1, head=head, tol=1e-11)
        torch.testing.assert_close(found.pattern, pattern[0, head, -1].detach(), rtol=0, atol=1e-10)


def test_a_row_of_pads_is_no_document(model):
    ids, mask = tiny.ids(2), torch.ones(2, 24, dtype=torch.int64)
    mask[1] = 0
    with rl.observe(model) as seen:
        model(ids, attention_mask=mask)
    for scores in seen.scores.values():
        assert (scores.n_documents, scores.n_queries) == (1, 24)


def test_weights_changed_behind_autograd_make_another_model(model):
    before = rl.band_entropy(model, tiny.ids())
    for name, weight in model.original_model.named_parameters():
        if "q_proj" in name:
            weight.data.mul_(1.5)
    with pytest.raises(ValueError, match="different models"):
        before.merge(rl.band_entropy(model, tiny.ids()))


def test_fisher_says_that_it_needs_gradients(model):
    with torch.inference_mode(), pytest.raises(ValueError, match=r"leave torch.inference_mode\(\)"):
        rl.band_fisher(model, tiny.ids())


def test_hooks_that_were_reset_meanwhile_are_missed(model):
    def watch_and_reset() -> int:
        with rl.observe(model) as seen:
            model(tiny.ids())
            model.reset_hooks()
            model(tiny.ids())
        return seen.scores["entropy"].n_documents

    with pytest.warns(UserWarning, match="hooks were reset before their block ended"):
        assert watch_and_reset() == 2
