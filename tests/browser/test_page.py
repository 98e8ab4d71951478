"""The demo's page in a real browser: it draws, answers, fits a phone, and takes text for text."""

import json

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.select import Select

from report_example import HOSTILE, N_BANDS, N_LAYERS, TOKENS

PLOTS = ("heat-entropy", "heat-activation", "spectrum-entropy", "spectrum-activation", "attribution")


def trace(browser: WebDriver, plot: str, key: str) -> list:
    """What Plotly holds for a figure's first trace, as plain lists."""
    script = "return JSON.stringify(document.getElementById(arguments[0]).data[0][arguments[1]])"
    return json.loads(browser.execute_script(script, plot, key))


def test_it_opens_from_a_file_without_errors(page) -> None:
    browser = page()
    assert browser.title == "Rotary bands of tiny <model>"
    assert browser.get_log("browser") == []
    for plot in PLOTS:
        assert browser.find_elements(By.CSS_SELECTOR, f"#{plot} .main-svg"), plot
    assert len(browser.find_elements(By.CSS_SELECTOR, "#tokens span")) == len(TOKENS)


def test_the_head_selector_changes_both_maps(page) -> None:
    browser = page()
    mean = trace(browser, "heat-entropy", "z")
    assert len(mean) == N_LAYERS
    assert mean[3][7] == -3.17
    Select(browser.find_element(By.ID, "view")).select_by_visible_text("head 2")
    assert trace(browser, "heat-entropy", "z")[3][7] == -3.27
    assert trace(browser, "heat-activation", "z")[1][0] == pytest.approx(120 / 5050, rel=1e-3)
    assert browser.get_log("browser") == []


def test_layer_and_head_change_the_spectrum_from_the_keyboard(page) -> None:
    browser = page()
    assert trace(browser, "spectrum-entropy", "y")[0] == -2.1  # the head of the attribution: layer 2, head 1
    layer = browser.find_element(By.ID, "layer")
    layer.send_keys(Keys.ARROW_DOWN)
    assert trace(browser, "spectrum-entropy", "y") == [-(3.1 + b / 100) for b in range(N_BANDS)]
    Select(browser.find_element(By.ID, "head-of-layer")).select_by_visible_text("0")
    assert trace(browser, "spectrum-entropy", "y")[0] == -3.0


def test_a_finding_leads_to_its_head(page) -> None:
    browser = page()
    button = browser.find_element(By.CSS_SELECTOR, "button[data-layer]")  # the sharpest: layer 3, head 2
    assert button.text == "layer 3, head 2"
    button.send_keys(Keys.ENTER)
    assert trace(browser, "spectrum-entropy", "y")[0] == -3.2
    assert Select(browser.find_element(By.ID, "view")).first_selected_option.text == "head 2"


def test_hostile_text_stays_text(page) -> None:
    browser = page()
    tokens = browser.find_elements(By.CSS_SELECTOR, "#tokens span")
    assert tokens[1].text == HOSTILE
    assert tokens[3].text == TOKENS[3]
    assert browser.find_elements(By.TAG_NAME, "img") == []
    assert browser.find_elements(By.CSS_SELECTOR, "#tokens b, .keys b, #attribution b") == []
    assert browser.title == "Rotary bands of tiny <model>"
    labels = [e.text for e in browser.find_elements(By.CSS_SELECTOR, "#attribution .ytick text")]
    assert "<b>end</b> 4" in labels


def test_tokens_are_shaded_by_the_bands_chosen(page) -> None:
    browser = page()
    token = browser.find_elements(By.CSS_SELECTOR, "#tokens span")[2]
    assert token.get_attribute("title") == "2: 0.4"
    assert "217, 115, 13" in token.value_of_css_property("background-color")
    Select(browser.find_element(By.ID, "group")).select_by_visible_text(
        "3 bands of 1,000 and more tokens a turn"
    )
    assert token.get_attribute("title") == "2: -0.3"
    assert "47, 127, 193" in token.value_of_css_property("background-color")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_overflows(page, width: int, scheme: str) -> None:
    browser = page(width, scheme)
    inner, content = browser.execute_script("return [innerWidth, document.documentElement.scrollWidth]")
    assert inner == width  # a phone's window grows with content that is too wide
    assert content <= width
    too_wide = """return [...document.querySelectorAll('main *')].filter(
        (e) => !e.closest('.scroll, .tokens') && e.getBoundingClientRect().right > innerWidth + 1).length"""
    assert browser.execute_script(too_wide) == 0


def test_colours_follow_the_scheme(page) -> None:
    backgrounds, inks = [], []
    for scheme in ("light", "dark"):
        browser = page(scheme=scheme)
        backgrounds.append(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
        inks.append(
            browser.execute_script("return document.getElementById('heat-entropy').layout.font.color")
        )
    assert backgrounds == ["rgb(255, 255, 255)", "rgb(15, 19, 24)"]
    assert inks == ["#24292f", "#e6edf3"]
