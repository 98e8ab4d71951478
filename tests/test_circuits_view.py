"""What a head does on one text, and heads that do nothing."""

from __future__ import annotations

import pytest
import tiny
import torch
from double import Double

import handmade
import ropelens as rl
from handmade import Head
from ropelens.hosts import host_of
from ropelens.hosts.weights import ends, layer_weights
from ropelens.plots import circuits as plots


class Tokenizer:
    """Tokens that are markup."""

    def decode(self, ids: list[int]) -> str:
        return f"<b>{ids[0]}</b>\n" if ids[0] % 5 == 0 else f" t{ids[0]}"


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "gpt_oss"])
def test_a_heads_effect_is_what_the_logits_lose_without_it(family: str):
    """In the last layer, with norms as they were: nothing comes after it but the final norm."""
    model, ids = tiny.varied(family), tiny.ids(1, 16)
    layer, head = 1, 3
    with Double(), torch.no_grad():
        host = host_of(model)
        view = rl.circuits.head_view(model, ids, layer=layer, head=head)
        patterns = model(ids, output_attentions=True).attentions
        torch.testing.assert_close(view.pattern, patterns[layer][0, head], rtol=0, atol=1e-12)
        # The definition: values as the model projects them, one head's output alone through all that follows.
        blocks = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 2)
        seen = {}
        block = blocks[layer]
        attn = next(m for name, m in block.named_children() if name in ("self_attn", "attention"))
        handles = [
            block.register_forward_pre_hook(
                lambda m, a, kw: seen.update(x=(a[0] if a else kw["hidden_states"])), with_kwargs=True
            ),
            block.register_forward_hook(
                lambda m, a, out: seen.update(last=out[0] if isinstance(out, tuple) else out)
            ),
            attn.register_forward_hook(lambda m, a, out: seen.update(made=out[0])),
        ]
        model(ids)
        for handle in handles:
            handle.remove()
        w, last = layer_weights(host, layer), ends(host)
        v = w.norm(seen["x"]) @ w.v[head // w.group] + (0 if w.v_bias is None else w.v_bias[head // w.group])
        out = (view.pattern @ v[0]) @ w.o[head]
        if w.after is not None:
            out = w.after.gain * out / w.after.divisor(seen["made"][0])
        if last.norm.kind == "layer":
            out = out - out.mean(-1, keepdim=True)
        logits = out / last.norm.divisor(seen["last"][0]) * last.norm.gain @ last.unembedding
        logits = logits - logits.mean(-1, keepdim=True)
    for position in range(15):
        expected = logits[position, ids[0, position + 1]]
        torch.testing.assert_close(view.effect[position], expected, rtol=1e-9, atol=1e-11)
    assert view.effect[15].isnan()
    best = logits.max(-1)
    torch.testing.assert_close(view.raised_effect, best.values, rtol=1e-9, atol=1e-11)
    assert view.raised == tuple(str(i) for i in best.indices.tolist())


def test_an_induction_head_raises_what_came_next():
    model = handmade.induction()
    text = rl.circuits.repeated_tokens(model, n_sequences=1, length=20, seed=1)
    view = rl.circuits.head_view(model, text.ids, layer=1, head=0)
    frame = view.to_frame()
    second = frame.loc[11:18]  # the first query splits its attention, the last has no next token
    assert (second["attends_to"] == second.index - 9).all()
    assert (second["attention"] > 0.99).all()
    assert (second["effect"] > 1).all()
    assert [int(t) for t in second["raises"]] == text.ids[0, 12:20].tolist()
    assert frame.index.name == "position"


def test_views_show_tokens_as_text():
    model = handmade.induction()
    ids = rl.circuits.repeated_tokens(model, n_sequences=1, length=20, seed=1).ids
    view = rl.circuits.head_view(model, ids, layer=1, head=0, tokenizer=Tokenizer())
    html = view._repr_html_()
    assert "<b>" not in html
    assert html.count("<span") == 20
    figure = view.plot()
    assert "<b>" not in figure.to_json().replace("\\u003c", "<")
    heat, bars = figure.data
    assert heat.z.shape == (20, 20)
    assert len(bars.x) == 19


def test_a_text_or_head_that_is_not_there_is_refused():
    model = tiny.plain("llama")
    with pytest.raises(ValueError, match="a layer from 0 to 1 and a head from 0 to 5, got layer 0, head 6"):
        rl.circuits.head_view(model, tiny.ids(1), layer=0, head=6)
    with pytest.raises(ValueError, match=r"one text of at most 4096 tokens, got \[2, 24\]"):
        rl.circuits.head_view(model, tiny.ids(2), layer=0, head=0)


def test_a_head_that_rests_is_reported():
    """Attention goes to the first key, whose value is small: token 0's coordinate is not read by it."""
    model = handmade.model((Head("nowhere", "token"), Head("same", "token")))
    attn = model.model.layers[0].self_attn
    with torch.no_grad():
        attn.q_proj.weight[63, handmade.CONSTANT] = 2  # of the band that turns least
        attn.k_proj.weight[63, 0] = 2  # finds token 0
        attn.v_proj.weight[0, 0] = 0.01
    ids = torch.tensor([[0, *range(1, 30)]])
    frame = rl.circuits.no_op_report(model, ids).set_index(["layer", "head"])
    assert frame.loc[(0, 0), "first_key"] > 0.99
    assert frame.loc[(0, 0), "first_value"] == pytest.approx(0.01)
    assert frame.loc[(0, 1), "first_key"] < 0.1
    assert frame.loc[(0, 1), "first_value"] == pytest.approx(1)
    twice = rl.circuits.no_op_report(model, torch.cat([ids, ids]))
    assert twice["first_key"].tolist() == pytest.approx(frame["first_key"].tolist())


def test_no_op_by_definition_on_the_bridge():
    model, ids = tiny.bridge(tiny.plain("llama")), tiny.ids(2, 12)
    with Double(), torch.no_grad():
        frame = rl.circuits.no_op_report(model, ids)
        _, cache = model.run_with_cache(ids)
    pattern, v = cache["blocks.1.attn.hook_pattern"], cache["blocks.1.attn.hook_v"]
    v = v.reshape(2, 12, -1, 8)
    w = layer_weights(host_of(model), 1)
    for head in (0, 5):
        written = (v[:, :, head // 3] @ w.o[head]).norm(dim=-1)
        row = frame[(frame["layer"] == 1) & (frame["head"] == head)].iloc[0]
        assert row["first_key"] == pytest.approx(float(pattern[:, head, 1:, 0].mean()), rel=1e-9)
        ratio = (written[:, 0] / written[:, 1:].mean(1)).mean()
        assert row["first_value"] == pytest.approx(float(ratio), rel=1e-9)


# Figures --------------------------------------------------------------------------------------------


def test_figures_show_the_numbers():
    model = handmade.induction()
    values = rl.circuits.ov_eigenvalues(model)
    polar = plots.eigenvalue_polar({"1.0": values[1, 0]})
    assert polar.layout.polar.radialaxis.type == "log"
    assert polar.data[0].theta == pytest.approx(0, abs=1e-4)
    scores = rl.circuits.eigenvalue_score(values)
    assert len(plots.score_histogram({"OV": scores}).data[0].x) == int((~scores.isnan()).sum())
    induction = torch.zeros(2, 2, dtype=torch.float64)
    corner = plots.corner_plot(scores, torch.ones_like(scores), induction, named=[(1, 0)])
    assert [t for t in corner.data[0].text if t] == ["1.0"]
    kernel = rl.circuits.positional_kernel(model, distances=range(5))
    heat = plots.kernel_heatmap(kernel.to_frame(0, 0)).data[0]
    assert heat.z.shape == (32, 5)
    assert heat.z.max() == pytest.approx(float(kernel.values[0, 0].max()), rel=1e-6)
    bands = rl.circuits.head_bands(model, heads=[(1, 0), (1, 1)], n_sequences=1, length=20, n_queries=2)
    bars = plots.head_bands_bars(bands.to_frame())
    assert len(bars.data) == 4
    assert tuple(bars.data[0].y) == pytest.approx(tuple(bands.attribution[1, 0].tolist()))
