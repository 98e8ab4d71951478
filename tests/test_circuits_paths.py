"""Path expansion against brute force: every path, entry by entry, in float64."""

from itertools import combinations

import pytest
import tiny
import torch
from double import Double
from families import WINDOW

from attention_only import attention_only
from ropelens.circuits.frozen import freeze
from ropelens.circuits.paths import bigrams, path_importance
from ropelens.hosts import host_of


@pytest.fixture(autouse=True)
def double():
    with Double():
        yield


@pytest.fixture(scope="module")
def model():
    return attention_only(n_layers=2)


@pytest.fixture(scope="module")
def ids():
    return tiny.ids(batch=3, pos=10)


def by_hand(model, ids):
    """The embedding, each head's map on the residual stream and the last norm, with patterns frozen, read
    from transformers' own modules and its own attention patterns."""
    model.set_attn_implementation("eager")
    out = model(ids, output_attentions=True, output_hidden_states=True)
    maps, x = {}, model.model.embed_tokens(ids)
    start = x
    for layer, block in enumerate(model.model.layers):
        attn, norm = block.self_attn, block.input_layernorm
        divisor = (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
        written = torch.zeros_like(x)
        for head in range(2):
            dims = slice(8 * head, 8 * head + 8)

            def through(part, divisor=divisor, attn=attn, norm=norm, dims=dims, head=head, layer=layer):
                v = (part / divisor * norm.weight) @ attn.v_proj.weight[dims].T
                return (
                    torch.stack([out.attentions[layer][i, head] @ v[i] for i in range(len(v))])
                    @ attn.o_proj.weight[:, dims].T
                )

            maps[layer, head] = through
            written = written + through(x)
        x = x + written
    final = model.model.norm
    divisor = (x.square().mean(-1, keepdim=True) + final.variance_epsilon).sqrt()

    def logits(part):
        return (part / divisor * final.weight) @ model.lm_head.weight.T

    return start, maps, logits, out.logits


def mean_loss(logits, ids):
    logs = logits.log_softmax(-1)
    rows = [
        -sum(logs[i, p - 1, ids[i, p]] for p in range(1, ids.shape[1])) / (ids.shape[1] - 1)
        for i in range(len(ids))
    ]
    return torch.stack(rows)


@torch.no_grad()
def all_paths(model, ids):
    """Every path by its heads: (), ((0, 0),), ..., ((0, 1), (1, 1))."""
    start, maps, logits, whole = by_hand(model, ids)
    paths = {}
    for order in range(3):
        for heads in combinations(sorted(maps), order):
            if len({layer for layer, _ in heads}) < order:
                continue  # heads of one layer do not read each other
            part = start
            for head in heads:
                part = maps[head](part)
            paths[heads] = logits(part)
    return paths, whole


def test_the_sum_of_all_paths_is_the_logits(model, ids):
    paths, whole = all_paths(model, ids)
    assert len(paths) == 1 + 4 + 4
    torch.testing.assert_close(sum(paths.values()), whole, rtol=0, atol=1e-12)
    found = path_importance(model, ids)
    assert found.residual < 1e-12
    assert found.other == 0


def test_orders_heads_and_virtual_heads_are_those_of_brute_force(model, ids):
    paths, whole = all_paths(model, ids)
    found = path_importance(model, ids)
    total = mean_loss(whole, ids)
    torch.testing.assert_close(found.total, total, rtol=0, atol=1e-12)
    for order in range(3):
        kept = sum(logits for heads, logits in paths.items() if len(heads) <= order)
        torch.testing.assert_close(found.orders[:, order], mean_loss(kept, ids), rtol=0, atol=1e-12)
    for layer in range(2):
        for head in range(2):
            rise = mean_loss(whole - paths[((layer, head),)], ids) - total
            torch.testing.assert_close(found.heads[:, layer, head], rise, rtol=0, atol=1e-12)
    assert len(found.pairs) == 4
    for number, pair in enumerate(found.pairs):
        rise = mean_loss(whole - paths[pair], ids) - total
        torch.testing.assert_close(found.virtual[:, number], rise, rtol=0, atol=1e-12)
    for layer in range(2):
        for order in (1, 2):
            term = [x for heads, x in paths.items() if len(heads) == order and heads[-1][0] == layer]
            rise = mean_loss(whole - sum(term), ids) - total if term else torch.zeros(3).double()
            torch.testing.assert_close(found.layers[:, layer, order - 1], rise, rtol=0, atol=1e-12)


def test_frames_are_means_with_errors_over_documents(model, ids):
    found = path_importance(model, ids)
    orders = found.to_frame("orders")
    assert orders["marginal"].sum() == pytest.approx(float(found.total.mean()), abs=1e-12)
    steps = found.orders[:, 1] - found.orders[:, 0]
    assert orders["stderr"][1] == pytest.approx(float(steps.std() / 3**0.5))
    assert len(found.to_frame("layers")) == 3  # no path of two heads ends in layer 0
    virtual = found.to_frame("virtual")
    assert list(virtual.columns) == ["first_layer", "first_head", "layer", "head", "importance", "stderr"]


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi", "olmo2", "gpt_oss"])
def test_with_mlps_the_sum_is_still_the_logits(family, ids):
    model = tiny.plain(family).requires_grad_(False)
    found = path_importance(model, ids, pairs=False)
    scale = float(model(ids).logits.abs().max())
    assert found.residual < 1e-10 * max(scale, 1)
    assert found.other > 0.01
    held = freeze(host_of(model), ids)
    logits = held.logits(held.last) + (0 if held.ends.bias is None else held.ends.bias)
    if held.ends.softcap is not None:
        logits = held.ends.softcap * torch.tanh(logits / held.ends.softcap)
    # what is the same for all tokens is taken off
    own = model(ids).logits
    torch.testing.assert_close(logits.softmax(-1), own.softmax(-1), rtol=0, atol=1e-10)


def test_fewer_orders_leave_a_residual(model, ids):
    assert path_importance(model, ids, max_order=1).residual > 1e-3


@tiny.needs_hooked
@pytest.mark.parametrize("host", ["bridge", "hooked"])
def test_every_host_gives_the_same(host, model, ids):
    from ropelens.hosts.load import hooked_from

    expected = path_importance(model, ids)
    own = attention_only(n_layers=2)
    other = tiny.bridge(own) if host == "bridge" else hooked_from(own, None)
    found = path_importance(other, ids)
    # HookedTransformer keeps cos and sin in float32
    torch.testing.assert_close(found.orders, expected.orders, rtol=0, atol=1e-7)
    torch.testing.assert_close(found.virtual, expected.virtual, rtol=0, atol=1e-7)


def test_a_head_that_looks_back_one_token_is_positional(ids):
    model = attention_only(n_layers=1)
    with torch.no_grad():
        attn = model.model.layers[0].self_attn
        attn.q_proj.weight[:8] = attn.k_proj.weight[:8] = 0
        attn.q_proj.bias[:8], attn.k_proj.bias[:8] = 4.0, 4.0
        attn.q_proj.weight[8:] *= 8  # the other looks for tokens
    found = path_importance(model, ids)
    assert found.positional[0, 0] > 0.8  # not 1: the first queries have fewer keys to choose from
    assert found.positional[0, 1] < 0.5
    assert found.n_positional() == 1


def test_behind_a_window_uniform_attention_is_over_the_keys_in_it():
    model, ids = tiny.plain("mistral"), tiny.ids(batch=2, pos=3 * WINDOW)
    host = host_of(model)
    patterns = [freeze(host, row[None]).patterns for row in ids]
    found = path_importance(model, ids, pairs=False).positional
    for layer in range(host.n_layers):
        for head in range(found.shape[1]):
            above: dict[int, list[float]] = {}
            for of_row in patterns:
                for p in range(ids.shape[1]):
                    for i in range(max(0, p - WINDOW + 1), p + 1):
                        share = float(of_row[layer][0, head, p, i]) - 1 / min(p + 1, WINDOW)
                        above.setdefault(p - i, []).append(share)
            explained = sum(sum(some) ** 2 / len(some) for some in above.values())
            spread = sum(x * x for some in above.values() for x in some)
            assert float(found[layer, head]) == pytest.approx(explained / spread)


def test_bigrams_of_a_direct_path_that_is_made_of_them():
    model = attention_only(n_layers=1)
    table = torch.rand(61, 61, generator=torch.Generator().manual_seed(0)).double().pow(4)
    table = (table / table.sum(1, keepdim=True)).clamp(min=1e-6)
    with torch.no_grad():
        # one direction a token is what it takes: 61 of them in as wide a stream
        wide = attention_only(n_layers=1, d_model=64)
        wide.model.embed_tokens.weight.copy_(torch.eye(61, 64))
        divisor = (1 / 64 + wide.model.norm.variance_epsilon) ** 0.5
        wide.model.norm.weight.fill_(1)
        wide.lm_head.weight.zero_()
        wide.lm_head.weight[:, :61] = table.log().T * divisor
        wide.model.layers[0].self_attn.o_proj.weight.zero_()
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(61, (200,), generator=draw)]
    for _ in range(300):
        rows.append(torch.multinomial(table[rows[-1]], 1, generator=draw)[:, 0])
    ids = torch.stack(rows, 1)
    found = bigrams(wide, ids)
    assert found.n_pairs == 200 * 299
    true = -(table * table.log()).sum(1)
    weights = torch.bincount(ids[:, 1:-1].flatten(), minlength=61).double()
    assert found.direct == pytest.approx(float((true * weights).sum() / weights.sum()), abs=0.02)
    assert found.bigram < found.direct  # counted on the text itself
    assert found.correlation > 0.95
    assert found.unigram > found.direct
    assert bigrams(model, ids).correlation < 0.2
