"""Figures: the numbers, colours and words in them, on scores worked out by hand."""

import math

import pandas as pd
import plotly.graph_objects as go
import pytest
import torch

from ropelens.bands import Bands, pair_dims
from ropelens.plots import (
    TEMPLATE,
    ablation_curves,
    attribution_heatmap,
    band_heatmap,
    band_spectrum,
    layer_profiles,
    shares_by_position,
    tokens_html,
)
from ropelens.plots.scores import colour_range
from ropelens.plots.style import band_axis, tokens_label
from ropelens.scores import BandAttribution, BandScores


def scores_of(values: torch.Tensor, bands: Bands, metric: str = "entropy", **changes) -> BandScores:
    n_layers, n_heads, _ = values.shape
    given = {
        "rest": torch.zeros(n_layers, n_heads).double(),
        "squares": values**2,
        "n_queries": 10,
        "n_pairs": torch.full((n_layers,), 55),
        "n_tokens": 10,
        "n_documents": 1,
    }
    return BandScores(metric=metric, bands=bands, values=values, **{**given, **changes})


@pytest.fixture
def entropy() -> BandScores:
    values = -torch.arange(24).double().reshape(2, 3, 4)
    return scores_of(values, Bands.uniform(2, 8, 10_000.0))


def attribution(tokens: tuple[str, ...] = ("<s>", " a\n", "<b>x</b>"), **changes) -> BandAttribution:
    n = len(tokens)
    given = {
        "values": torch.tensor([[0.4, 0.1], [0.05, -0.05], [0.3, 0.2]])[:n].double(),
        "rest": torch.zeros(n).double(),
        "visible": torch.ones(n, dtype=torch.bool),
    }
    return BandAttribution(
        layer=0,
        head=1,
        query=n - 1,
        inv_freq=torch.tensor([1.0, 0.01]).double(),
        pairs=pair_dims(4, False),
        sink=None,
        tokens=tokens,
        residual=0.0,
        **{**given, **changes},
    )


def z_of(figure: go.Figure) -> torch.Tensor:
    return torch.as_tensor(figure.data[0].z)


def test_heatmap_starts_with_the_mean_and_has_a_view_for_each_head(entropy: BandScores) -> None:
    figure = band_heatmap(entropy)
    assert z_of(figure).tolist() == entropy.mean().mean(1).float().tolist()
    buttons = figure.layout.updatemenus[0].buttons
    assert [b.label for b in buttons] == ["all heads (mean)", "head 0", "head 1", "head 2"]
    for head in range(3):
        update = buttons[head + 1].args[0]
        assert torch.as_tensor(update["z"][0]).tolist() == entropy.mean()[:, head].float().tolist()
        assert update["zmin"][0] == -update["zmax"][0] < 0


def test_heatmap_of_one_head_has_no_menu(entropy: BandScores) -> None:
    figure = band_heatmap(entropy, head=2, per="pair")
    assert not figure.layout.updatemenus
    assert figure.layout.title.text == "head 2"
    assert z_of(figure)[1, 3].item() == pytest.approx(-23 / 55)
    assert figure.data[0].colorbar.title.text == "entropy drop (nats) per pair"


def test_heatmap_of_importances(entropy: BandScores) -> None:
    figure = band_heatmap(entropy, normalize="head", head=0)
    assert z_of(figure)[0].tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert figure.data[0].zmin == 0.0
    assert figure.data[0].colorbar.title.text == "importance within each head"


def test_figures_share_the_template_and_know_their_errors(entropy: BandScores) -> None:
    figures = (band_heatmap(entropy), band_spectrum(entropy, 0, 0), attribution_heatmap(attribution()))
    for figure in figures:
        assert figure.layout.template == TEMPLATE
    with pytest.raises(ValueError, match=r"^expected a head from 0 to 2, got 3$"):
        band_heatmap(entropy, head=3)
    with pytest.raises(ValueError, match=r"^expected a layer from 0 to 1, got -1$"):
        band_spectrum(entropy, -1, 0)
    with pytest.raises(ValueError, match=r"^expected a head from 0 to 2, got 7$"):
        band_spectrum(entropy, 0, 7)


def test_plot_methods_draw_the_same_figures(entropy: BandScores) -> None:
    assert entropy.plot(head=1) == band_heatmap(entropy, head=1)
    assert attribution().plot(n_keys=2) == attribution_heatmap(attribution(), n_keys=2)


def test_bands_that_a_layer_lacks_stay_empty() -> None:
    layers = [(0.1 ** torch.arange(n).double(), pair_dims(2 * n, False), 6 - 2 * n, 1.0) for n in (3, 1)]
    values = torch.tensor([[[1.0, 2.0, 3.0]], [[4.0, math.nan, math.nan]]]).double()
    scores = scores_of(values, Bands.stack(layers), "activation", rest=torch.tensor([[0.0], [5.0]]).double())
    figure = band_heatmap(scores)
    assert z_of(figure)[1].isnan().tolist() == [False, True, True]
    assert figure.data[0].customdata[1] == ["6.3", "-", "-"]
    assert figure.layout.xaxis.ticktext == ("6.3", "63", "628")
    spectrum = band_spectrum(scores, 1, 0)
    assert list(spectrum.data[0].y) == [0.4, 0.5]  # one band, then the dims that do not rotate
    assert spectrum.layout.xaxis.ticktext == ("6.3", "rest")


def test_spectrum_has_error_bars_with_two_documents(entropy: BandScores) -> None:
    assert band_spectrum(entropy, 1, 2).data[0].error_y.array is None
    two = scores_of(entropy.values, entropy.bands, squares=entropy.values**2, n_documents=2)
    bars = band_spectrum(two, 1, 2).data[0]
    assert list(bars.y) == pytest.approx([-2.0, -2.1, -2.2, -2.3])
    # documents x, y with x + y = -20 and x^2 + y^2 = 400: 0 and -20, a standard error of 10 a document
    assert bars.error_y.array[0] == pytest.approx(10.0 * 2 / 10)


def test_axis_counts_bands_where_layers_differ() -> None:
    one, two = Bands.uniform(1, 8, 100.0), Bands.uniform(1, 8, 1000.0)
    assert "tickvals" in band_axis(torch.cat([one.wavelength, one.wavelength]))
    assert band_axis(torch.cat([one.wavelength, two.wavelength]))["title"]["text"] == "band, fast to slow"


def test_colours_end_where_most_values_do() -> None:
    values = torch.ones(1000).double()
    values[0] = 100.0
    assert colour_range(values) == (0.0, 1.0)
    values[1] = -1.0
    assert colour_range(values) == (-1.0, 1.0)
    assert colour_range(torch.zeros(3).double()) == (0.0, 1.0)
    assert colour_range(torch.full((2,), math.nan).double()) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("wavelength", "label"), [(9.96, "10"), (0.5, "0.5"), (999.6, "1k"), (2_000.0, "2k"), (1.26e6, "1.3M")]
)
def test_wavelengths_are_short(wavelength: float, label: str) -> None:
    assert tokens_label(wavelength) == label


def test_attribution_shows_the_strongest_keys_in_the_order_of_the_text() -> None:
    figure = attribution_heatmap(attribution(), n_keys=2)
    assert z_of(figure).tolist() == torch.tensor([[0.4, 0.1], [0.3, 0.2]]).tolist()
    assert list(figure.data[1].x) == pytest.approx([0.5, 0.5])
    assert figure.layout.yaxis.ticktext == ("&lt;s&gt; 0", "&lt;b&gt;x&lt;/b&gt; 2")
    assert figure.data[0].zmin == -figure.data[0].zmax


def test_long_and_empty_tokens_become_labels() -> None:
    figure = attribution_heatmap(attribution((" ", "\n\n", "x" * 40)))
    assert figure.layout.yaxis.ticktext == ("␣ 0", "⏎⏎ 1", "x" * 15 + "… 2")


def test_tokens_are_escaped_shaded_and_titled() -> None:
    hostile = '<img src=x onerror="alert(1)">'
    page = tokens_html(attribution((hostile, " a\n", "</div><script>")))
    assert "<img" not in page
    assert "<script" not in page
    assert "&lt;img src=x onerror=&quot;alert(1)&quot;&gt;" in page
    assert 'title="0: 0.5" style="background:#d9730dff"' in page
    assert 'title="1: 0"> a⏎\n</span>' in page  # nothing received, nothing shaded
    assert page.count("outline") == 1


def test_tokens_can_be_shaded_by_one_band() -> None:
    result = attribution()
    page = tokens_html(result, result.values[:, 1])
    assert 'title="0: 0.1" style="background:#d9730db4"' in page
    assert 'title="1: -0.05" style="background:#2f7fc180"' in page


def test_layer_profiles_show_medians_and_quartiles() -> None:
    values = torch.tensor([[[1.0, 0, 0, 0], [1.0, 1, 0, 0], [1.0, 1, 1, 1]]]).double()
    frame = scores_of(values, Bands.uniform(1, 8, 10_000.0)).profile()
    figure = layer_profiles({"activation": frame})
    lines = {(trace.yaxis, trace.hoverinfo == "skip"): list(trace.y) for trace in figure.data}
    assert lines["y2", False] == pytest.approx([2])
    assert lines["y2", True] == pytest.approx([3, 1.5])
    assert lines["y", False] == pytest.approx([2 * math.pi * 10**0.5])
    with pytest.raises(ValueError, match="at least one profile"):
        layer_profiles({})


def test_shares_by_position_leave_empty_spans_out() -> None:
    shares = torch.tensor([[0.25, 0.75], [math.nan, math.nan], [0.5, 0.5]]).double()
    figure = shares_by_position(shares, edges=(32, 64), names=("fast", "slow"))
    assert [list(trace.y) for trace in figure.data] == [[0.25, 0.5], [0.75, 0.5]]
    assert list(figure.data[0].x) == ["0+", "64+"]
    with pytest.raises(ValueError, match="2 spans and 2 ranges"):
        shares_by_position(shares, edges=(32,), names=("fast", "slow"))


def test_masks_of_ones_own_are_not_said_to_be_ranked() -> None:
    frame = pd.DataFrame({"score": ["a", "a"], "scope": "mask", "fraction": [0, 0.5], "loss": [3.0, 4.0]})
    frame["stderr"] = 0.1
    assert ablation_curves(frame).layout.title.text == "Loss without bands"
    ranked = ablation_curves(frame.assign(scope="model")).layout.title.text
    assert ranked == "Loss as the lowest-ranked bands are removed"
