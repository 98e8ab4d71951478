"""The page as text, and what it chooses to show."""

import json
import re

import pytest
import torch

from report_example import HOSTILE, N_BANDS, N_HEADS, N_LAYERS, example_scores, write_example
from ropelens.bands import Bands
from ropelens.report import Repeat, choose_head, choose_repeat, lowest_heads
from ropelens.scores import BandScores


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    return write_example(tmp_path_factory.mktemp("page") / "new" / "folder").read_text(encoding="utf-8")


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def entropy_of(values: torch.Tensor, base: float = 10_000.0) -> BandScores:
    n_layers, n_heads, n_bands = values.shape
    return BandScores(
        metric="entropy",
        bands=Bands.uniform(n_layers, 2 * n_bands, base),
        values=values,
        rest=torch.zeros(n_layers, n_heads).double(),
        squares=values**2,
        n_queries=10,
        n_pairs=torch.full((n_layers,), 55),
        n_tokens=10,
        n_documents=1,
    )


def test_the_page_needs_nothing_but_the_script_beside_it(page: str, tmp_path) -> None:
    path = write_example(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index.html", "plotly.min.js"]
    assert path == tmp_path / "index.html"
    assert re.findall(r"<script[^>]+src=\"([^\"]+)\"", page) == ["plotly.min.js"]
    assert not re.findall(r"(?:src|href)=\"(?:https?:)?//", page)
    assert path.stat().st_size < 500_000


def test_the_page_says_what_one_looks_at(page: str) -> None:
    assert "each head of tiny &lt;model&gt; use?" in page
    assert "The 4 layers of tiny &lt;model&gt; have 3 heads of 8 bands each, from\n6.3 to 20k tokens" in page
    assert "<dd>tiny &amp; &lt;b&gt;random&lt;/b&gt;</dd>" in page
    assert "bands miss log N - H by 2.0e-04 nats" in page
    assert "1.0e-03 of a head&#x27;s sum" in page
    assert "bands miss the attention by 3.0e-06" in page
    assert "<q> &lt;b&gt;end&lt;/b&gt;</q> at position 4" in page


def test_text_of_the_document_never_becomes_markup(page: str) -> None:
    assert HOSTILE not in page
    assert "<b>end" not in page
    # one for the data, plotly, and the page's own; the token </script> closes none
    assert page.count("</script>") == page.count("<script") == 3
    assert "&lt;img src=x onerror=&quot;" in page


def test_the_page_holds_every_heads_numbers(page: str) -> None:
    views = data_of(page)["views"]
    assert len(views["entropy"]) == len(views["activation"]) == 1 + N_HEADS
    assert views["entropy"][1 + 2]["z"][3][7] == -3.27  # -(300 + 20 + 7) over 100 queries
    assert views["entropy"][0]["z"][3][7] == -3.17  # the mean over heads 0, 1, 2
    assert views["activation"][1]["z"][1][0] == pytest.approx(100 / 5050, rel=1e-3)
    assert len(views["entropy"][0]["z"]) == N_LAYERS
    assert len(views["entropy"][0]["z"][0]) == N_BANDS


def test_tokens_can_be_shaded_by_ranges_of_wavelengths(page: str) -> None:
    groups = {g["name"]: g["values"] for g in data_of(page)["groups"]}
    # wavelengths 6.3, 20, 63, 199, 628, 1987, 6283, 19869
    assert groups["all bands: the attention itself"] == [0, 0.4, 0.4, 0, 0.2]
    assert groups["1 band of 0 to 10 tokens a turn"] == [0, 0.05, 0.2, 0, 0.2]
    assert groups["2 bands of 100 to 1,000 tokens a turn"] == [0, 0.1, 0.1, 0, 0]
    assert groups["3 bands of 1,000 and more tokens a turn"] == [0, 0.15, -0.3, 0, 0]


def test_figures_are_small(page: str) -> None:
    for name, figure in data_of(page)["figures"].items():
        assert len(json.dumps(figure)) < 100_000, name


def test_lowest_heads_come_with_the_bands_that_lower_them() -> None:
    values = torch.zeros(2, 2, 4).double()
    values[0, 1] = torch.tensor([-6.0, 1.0, -2.0, 0.0])
    values[1, 0] = torch.tensor([0.0, 0.0, 0.0, -30.0])
    first, second = lowest_heads(entropy_of(values), 2)
    assert (first.layer, first.head, first.drop) == (1, 0, -3.0)
    assert first.carriers == ((pytest.approx(6283.2, rel=1e-4), 1.0),)
    assert (second.layer, second.head, second.drop) == (0, 1, pytest.approx(-0.7))
    assert [share for _, share in second.carriers] == pytest.approx([0.75, 0.25])
    assert [(s.layer, s.head) for s in lowest_heads(entropy_of(values), 1, layer=0)] == [(0, 1)]
    assert lowest_heads(entropy_of(torch.zeros(1, 1, 2).double()), 1)[0].carriers == ()
    with pytest.raises(ValueError, match=r"^expected entropy scores, got activation: measure with band_ent"):
        lowest_heads(example_scores("activation"), 1)


def test_the_query_to_show_ends_the_longest_repeated_phrase() -> None:
    text = [*range(100), 50, 51, 52, 200, 60, 61, 201]
    assert choose_repeat(text, min_distance=10) == Repeat(query=102, earlier=52, length=3)
    assert choose_repeat(text, min_distance=51) == Repeat(query=106, earlier=-1, length=0)  # all too near
    assert choose_repeat([7, 7, 7, 7], min_distance=2) == Repeat(query=3, earlier=1, length=2)


def test_the_head_to_show_looks_there_most() -> None:
    attention = torch.tensor([[0.1, 0.5], [0.7, 0.2], [0.3, 0.4]]).double()
    assert choose_head(attention) == (1, 0)
    assert choose_head(attention, layer=2) == (2, 1)
    assert choose_head(attention, head=1) == (0, 1)
    assert choose_head(attention, layer=1, head=1) == (1, 1)
    with pytest.raises(ValueError, match=r"^expected a layer from 0 to 2, got 3$"):
        choose_head(attention, layer=3)
    with pytest.raises(ValueError, match=r"^expected a head from 0 to 1, got -1$"):
        choose_head(attention, head=-1)


def test_the_page_says_why_this_query(tmp_path) -> None:
    page = write_example(tmp_path, why="A <phrase> ends here.").read_text(encoding="utf-8")
    assert "(outlined). A &lt;phrase&gt; ends here. The keys" in page


def test_a_page_of_a_model_that_lacks_bands_in_a_layer(tmp_path) -> None:
    scores = {m: example_scores(m) for m in ("entropy", "activation")}
    for metric, full in scores.items():
        inv_freq = full.bands.inv_freq.clone()
        inv_freq[0, -1] = torch.nan
        bands = Bands(inv_freq, full.bands.pairs, full.bands.n_rest, full.bands.amplitude)
        values = full.values.where(~inv_freq.isnan()[:, None], torch.nan)
        bound = None if full.bound is None else full.bound.where(~values.isnan(), torch.nan)
        scores[metric] = BandScores(**{**vars(full), "bands": bands, "values": values, "bound": bound})
    page = write_example(tmp_path, **scores).read_text(encoding="utf-8")
    assert data_of(page)["views"]["entropy"][0]["z"][0][-1] is None
