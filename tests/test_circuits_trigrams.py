"""Skip trigrams against real forward passes of a one-layer model."""

import pytest
import tiny
import torch
from double import Double
from transformers.models.qwen2 import modeling_qwen2

from attention_only import attention_only
from ropelens.circuits import copied_tokens, skip_trigrams


@pytest.fixture(autouse=True)
def double():
    with Double():
        yield


@pytest.fixture(scope="module")
def model():
    return attention_only(n_layers=1)


def run(model, ids, monkeypatch, *, without=None, divisor=None):
    """A forward pass of transformers' own model: (logits, attention logits, patterns, divisors of the norm).

    `without` = (head, query, key): that entry of the pattern is 0, all others as they were. `divisor`:
    the final norm divides by it instead of its own.
    """
    seen = {}

    def attend(module, query, key, value, attention_mask, scaling, **options):
        scores = query @ key.transpose(2, 3) * scaling
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
        seen["scores"], seen["pattern"] = scores, weights
        if without is not None:
            head, q, k = without
            weights = weights.clone()
            weights[:, head, q, k] = 0
        return (weights @ value).transpose(1, 2).contiguous(), weights

    norm = model.model.norm

    def scaled(x):
        own = (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
        seen["divisor"] = own
        return x / (own if divisor is None else divisor) * norm.weight

    with monkeypatch.context() as patch:
        patch.setattr(modeling_qwen2, "eager_attention_forward", attend)
        patch.setattr(norm, "forward", scaled)
        model.set_attn_implementation("eager")
        logits = model(ids, use_cache=False).logits
    return logits, seen["scores"], seen["pattern"], seen["divisor"]


@pytest.mark.parametrize("head", [0, 1])
def test_the_entries_are_the_changes_of_a_real_forward_pass(head, model, monkeypatch):
    ids = tiny.ids(batch=1, pos=12)
    logits, scores, pattern, divisor = run(model, ids, monkeypatch)
    assert (divisor.max() / divisor.min() - 1) > 0.1  # it matters which one is held
    for query, key in [(11, 3), (7, 0), (5, 5)]:
        source, destination = int(ids[0, key]), int(ids[0, query])
        found = skip_trigrams(model, 0, head, source, distances=query - key, divisor=float(divisor[0, query]))
        assert float(found.destinations[destination]) == pytest.approx(
            float(scores[0, head, query, key]), abs=1e-10
        )
        less, *_ = run(model, ids, monkeypatch, without=(head, query, key), divisor=divisor)
        change = (logits - less)[0, query]
        expected = pattern[0, head, query, key] * found.outputs
        torch.testing.assert_close(change - change.mean(), expected - expected.mean(), rtol=0, atol=1e-10)
        other = [p for p in range(12) if p != query]
        assert float((logits - less)[0, other].abs().max()) < 1e-12


def test_attention_to_a_source_is_the_mean_over_distances(model):
    each = [skip_trigrams(model, 0, 1, 7, distances=d).destinations for d in (1, 2, 5)]
    found = skip_trigrams(model, 0, 1, 7, distances=(1, 2, 5))
    torch.testing.assert_close(found.destinations, torch.stack(each).mean(0), rtol=0, atol=1e-12)
    others = torch.stack([skip_trigrams(model, 0, 1, s, distances=(1, 2, 5)).destinations for s in range(61)])
    torch.testing.assert_close(found.above, found.destinations - others.mean(0), rtol=0, atol=1e-12)


def test_copied_tokens_are_the_diagonal_of_all_tables(model):
    tables = torch.stack([skip_trigrams(model, 0, 0, s, distances=1).outputs for s in range(61)])
    own = tables.diagonal() - tables.mean(1)
    rank = (tables > tables.diagonal()[:, None]).sum(1)
    found = copied_tokens(model, 0, 0, k=5)
    order = own.argsort(descending=True)[:5]
    assert found["token"].tolist() == [str(i) for i in order.tolist()]
    assert found["ov"].tolist() == pytest.approx(own[order].tolist(), abs=1e-12)
    assert found["rank"].tolist() == rank[order].tolist()
    assert found.attrs["share"] == pytest.approx(float(((rank == 0) & (own > 0)).double().mean()))


def test_a_head_that_copies_is_seen_to():
    model = attention_only(n_layers=1, d_model=64)
    attn = model.model.layers[0].self_attn
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(61, 64))
        model.lm_head.weight.copy_(torch.eye(61, 64))
        model.model.norm.weight.fill_(1)
        model.model.layers[0].input_layernorm.weight.fill_(1)
        # the first head's 32 dims carry the first 32 tokens through, the second's turn the others round
        attn.v_proj.weight.copy_(torch.eye(64))
        attn.o_proj.weight.copy_(torch.eye(64))
        attn.o_proj.weight[:, 32:] *= -1
    copied = copied_tokens(model, 0, 0, k=61)
    assert copied.attrs["share"] == pytest.approx(32 / 61)
    assert skip_trigrams(model, 0, 0, 5).copying
    assert not skip_trigrams(model, 0, 1, 40).copying
    assert copied_tokens(model, 0, 1, k=1)["ov"][0] <= 1e-12


def test_bugs_are_counted_in_the_text(model):
    found = skip_trigrams(model, 0, 0, 7, distances=(1, 2))
    frame = found.to_frame(k=3)
    b, c = (int(frame["destination"][0]), int(frame["output"][1]))
    filler = next(i for i in range(61) if i not in (b, c, 7) and str(i) not in set(frame["destination"]))
    ids = torch.tensor([[7, b, c, filler, 7, filler, b, filler], [7, filler, filler, b, c, b, b, b]])
    bugs = found.bugs(ids, k=3).set_index(["destination", "output"])
    assert len(bugs) == 9
    # in the first row twice after the source and once followed by the output; in the second never near it
    assert bugs.loc[(str(b), str(c)), "n_destination"] == 2
    assert bugs.loc[(str(b), str(c)), "n"] == 1
    assert bugs["n"].sum() == 1
    assert bugs.loc[(str(b), str(c)), "qk"] == pytest.approx(frame["qk"][0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": 61}, "expected a token id from 0 to 60, got 61"),
        ({"source": " perfect"}, "no tokenizer"),
        ({"source": 1, "distances": ()}, "expected distances of at least 0"),
        ({"source": 1, "head": 2}, "expected a head from 0 to 1, got 2"),
        ({"source": 1, "layer": 1}, "expected a layer from 0 to 0, got 1"),
    ],
)
def test_bad_input_is_named(options, message, model):
    with pytest.raises(ValueError, match=message):
        skip_trigrams(model, **{"layer": 0, "head": 0} | options)


def test_a_source_of_several_tokens_is_refused(model):
    class Letters:
        def encode(self, text, add_special_tokens):
            return [ord(c) % 61 for c in text]

        def decode(self, ids):
            return "".join(chr(i) for i in ids)

    with pytest.raises(ValueError, match="expected one token, got 'ab', which is 2"):
        skip_trigrams(model, 0, 0, "ab", tokenizer=Letters())


def test_layers_that_norm_their_output_are_refused():
    with pytest.raises(ValueError, match="norms what its heads write"):
        skip_trigrams(tiny.plain("gemma2"), 0, 0, 5)
