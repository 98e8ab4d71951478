"""The explorer in a real browser: it draws, answers, fits a phone, and takes text for text."""

import json

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from report_example import HOSTILE, N_BANDS, N_LAYERS, TOKENS

PAGES = ("index", "head", "attention", "profiles", "ablation", "circuits", "lesions")


def trace(browser: WebDriver, plot: str, key: str, which: int = 0) -> list:
    """What Plotly holds for a trace of a figure, as plain lists."""
    script = "return JSON.stringify(document.getElementById(arguments[0]).data[arguments[1]][arguments[2]])"
    return json.loads(browser.execute_script(script, plot, which, key))


def choose(browser: WebDriver, name: str, value: str) -> None:
    Select(browser.find_element(By.ID, name)).select_by_visible_text(value)


def token(browser: WebDriver, at: int):
    return browser.find_element(By.CSS_SELECTOR, f"#tokens [data-at='{at}']")


def until(browser: WebDriver, true) -> None:
    WebDriverWait(browser, 10).until(lambda _: true())


def test_the_overview_opens_from_a_file_and_its_selectors_change_the_maps(page) -> None:
    browser = page()
    assert browser.title == "Rotary bands of tiny <model>"
    for plot in ("map-0", "map-1"):
        assert browser.find_elements(By.CSS_SELECTOR, f"#{plot} .main-svg"), plot
    mean = trace(browser, "map-0", "z")
    assert len(mean) == N_LAYERS
    assert mean[3][7] == pytest.approx(-3.17)
    choose(browser, "view", "layers, head 2")
    assert trace(browser, "map-0", "z")[3][7] == pytest.approx(-3.27)
    assert trace(browser, "map-1", "z")[1][0] == pytest.approx(120 / 5050)
    choose(browser, "show", "importance within each head")
    assert trace(browser, "map-0", "z")[3] == pytest.approx([(320 + b) / 327 for b in range(N_BANDS)])
    choose(browser, "view", "every head")
    assert len(trace(browser, "map-0", "z")) == 12
    # head 0.0 has the values 0 to 7, the most uneven; the higher a head, the more even
    choose(browser, "sort", "concentration, few bands first")
    names = [row[0] for row in trace(browser, "map-0", "text")]
    assert names == [f"head {layer}.{head}" for layer in range(4) for head in range(3)]
    choose(browser, "sort", "centroid, fast to slow")
    names = [row[0] for row in trace(browser, "map-0", "text")]
    assert names[-1] == "head 0.0"
    assert browser.find_elements(By.CSS_SELECTOR, "#all-heads a")[-1].get_attribute("href").endswith("#0.0")
    assert browser.get_log("browser") == []


def test_a_head_is_reached_from_the_overview_and_chosen_from_the_keyboard(page) -> None:
    browser = page()
    link = browser.find_element(By.CSS_SELECTOR, "main a")  # the sharpest: layer 3, head 2
    link.send_keys(Keys.ENTER)
    until(browser, lambda: browser.execute_script("return document.body.dataset.ready") == "yes")
    assert browser.current_url.endswith("head.html#3.2")
    assert trace(browser, "spectrum-0", "y")[0] == pytest.approx(-3.2)
    browser.find_element(By.ID, "layer").send_keys(Keys.ARROW_UP)
    choose(browser, "head", "1")
    until(browser, lambda: browser.current_url.endswith("#2.1"))
    assert trace(browser, "spectrum-0", "y") == pytest.approx([-(2.1 + b / 100) for b in range(N_BANDS)])
    said = browser.find_element(By.ID, "summary").text
    assert said.startswith("Layer 2, head 1: entropy -17.1, about a wavelength of")  # -(8 * 210 + 28) / 100
    rows = browser.find_elements(By.CSS_SELECTOR, "#kinds tr")
    assert [row.find_element(By.TAG_NAME, "th").text for row in rows][2] == "induction"
    # distance x band 8 * (4 * (3 * 2 + 1) + d) + b, in hundredths
    until(browser, lambda: len(trace(browser, "kernel-map", "z")) == N_BANDS)
    assert trace(browser, "kernel-map", "z")[3][1] == pytest.approx((8 * 29 + 3) / 100, rel=0.02)
    choose(browser, "which-kernel", "measured")
    until(browser, lambda: trace(browser, "kernel-map", "z")[3][1] < 0)
    examples = browser.find_elements(By.CSS_SELECTOR, "#examples li")
    assert examples[0].text == f"{TOKENS[4]} at 4 looks at {HOSTILE} at 1: 50%"
    examples[0].find_element(By.TAG_NAME, "a").click()
    until(browser, lambda: browser.execute_script("return document.body.dataset.ready") == "yes")
    assert browser.current_url.endswith("attention.html#2.1.4")
    assert browser.get_log("browser") == []


def test_clicking_a_token_changes_the_attribution(page) -> None:
    browser = page("attention.html#2.1.4")
    # query 4 pays key i (i + 1) * 0.05
    assert trace(browser, "bands", "x", 1) == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.25], abs=1e-3)
    token(browser, 2).click()
    until(browser, lambda: len(trace(browser, "bands", "x", 1)) == 3)
    assert trace(browser, "bands", "x", 1) == pytest.approx([0.05, 0.1, 0.15], abs=1e-3)
    assert trace(browser, "parts", "x", 0) == pytest.approx([0.05, 0.1, 0.15], abs=1e-3)
    assert trace(browser, "bands", "z")[1] == pytest.approx([0.025] * 4 + [0] * 4, abs=1e-3)
    assert "at 2 attends most to" in browser.find_element(By.ID, "status").text
    assert token(browser, 2).get_attribute("aria-pressed") == "true"
    token(browser, 2).send_keys(Keys.ARROW_RIGHT)
    until(browser, lambda: len(trace(browser, "bands", "x", 1)) == 4)
    assert browser.switch_to.active_element == token(browser, 3)
    assert browser.current_url.endswith("#2.1.3")
    choose(browser, "entry", "layer 0, head 0")
    until(browser, lambda: trace(browser, "bands", "x", 1)[0] < 0.03)
    assert browser.get_log("browser") == []


def test_tokens_are_shaded_by_the_bands_chosen(page) -> None:
    browser = page("attention.html#2.1.4")
    choose(browser, "entry", "layer 2, head 1: token 4 of a longer text")
    until(browser, lambda: token(browser, 2).get_attribute("title") == "2: 0.4")
    assert browser.find_element(By.ID, "reading").text == "A <phrase> ends here."
    assert "217, 115, 13" in token(browser, 2).value_of_css_property("background-color")
    choose(browser, "mode", "slow bands: a turn takes more than 1,024 tokens")
    assert token(browser, 2).get_attribute("title") == "2: -0.3"
    assert "47, 127, 193" in token(browser, 2).value_of_css_property("background-color")
    choose(browser, "mode", "the range that brings most")
    # fast bands bring 0.4, middle 0.3, slow take 0.3: the first of the colours
    assert "47, 127, 193" in token(browser, 2).value_of_css_property("background-color")
    choose(browser, "mode", "band 4: 628 tokens a turn")
    assert token(browser, 2).get_attribute("title") == "2: -0.1"


def test_hostile_text_stays_text(page) -> None:
    browser = page("attention.html#2.1.4")
    assert token(browser, 1).text == HOSTILE
    assert token(browser, 3).text == TOKENS[3]
    assert browser.find_elements(By.TAG_NAME, "img") == []
    assert browser.find_elements(By.CSS_SELECTOR, "#tokens b, .keys b, #bands b") == []
    assert browser.title == "Attention: Rotary bands of tiny <model>"
    labels = [e.text for e in browser.find_elements(By.CSS_SELECTOR, "#bands .ytick text")]
    assert "<b>end</b> 4" in labels


def test_every_page_fits_a_phone_and_a_desk_without_errors(page) -> None:
    too_wide = """return [...document.querySelectorAll('header *, main *, footer *')].filter((e) =>
        !e.closest('.scroll, .tokens, pre') && e.getBoundingClientRect().right > innerWidth + 1).length"""
    for name in PAGES:
        for width, scheme in ((390, "dark"), (1280, "light")):
            browser = page(f"{name}.html", width, scheme)
            inner, content = browser.execute_script(
                "return [innerWidth, document.documentElement.scrollWidth]"
            )
            assert inner == width, name  # a phone's window grows with content that is too wide
            assert content <= width, name
            assert browser.execute_script(too_wide) == 0, (name, width)
            assert browser.get_log("browser") == [], name
            plots = browser.find_elements(By.CSS_SELECTOR, ".plot")
            assert all(plot.find_elements(By.CSS_SELECTOR, ".main-svg") for plot in plots), name


def test_colours_follow_the_scheme_and_names_are_given_to_all(page) -> None:
    browser = page(scheme="light")
    ink = "return document.getElementById('map-0').layout.font.color"
    ground = "return getComputedStyle(document.body).backgroundColor"
    seen = [(browser.execute_script(ground), browser.execute_script(ink))]
    media = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    until(browser, lambda: browser.execute_script(ink) == "#e6edf3")
    seen.append((browser.execute_script(ground), browser.execute_script(ink)))
    assert seen == [("rgb(255, 255, 255)", "#24292f"), ("rgb(15, 19, 24)", "#e6edf3")]
    unnamed = """return [...document.querySelectorAll('select, .plot, [role=region], nav')].filter(
        (e) => !e.closest('label') && !e.getAttribute('aria-label')
            && !document.getElementById(e.getAttribute('aria-labelledby'))).length"""
    assert browser.execute_script(unnamed) == 0
    made = browser.find_element(By.CSS_SELECTOR, ".made pre").get_attribute("textContent")
    assert json.loads(made)["made_from"][0]["data"] == "c0ffee"
