"""The lesion browser in a real one: choose a run, read its text, see what differs; text stays text."""

from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.select import Select
from selenium.webdriver.support.wait import WebDriverWait

from lesion_example import FAST, HOSTILE, SLOW, example
from ropelens.report import write_lesions


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_lesions(tmp_path_factory.mktemp("lesions") / "page", example())


@pytest.fixture
def page(browser: WebDriver, path: Path) -> WebDriver:
    size = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(path.as_uri())
    WebDriverWait(browser, 20).until(
        lambda b: b.execute_script("return document.body.dataset.ready") == "yes"
    )
    return browser


def choose(browser: WebDriver, **values: str) -> None:
    for name, value in values.items():
        Select(browser.find_element(By.ID, name)).select_by_visible_text(value)


def words(browser: WebDriver, which: str, only: str = "") -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
    return browser.execute_script(script, f"#{which} span{only}")


def test_a_chosen_run_is_shown_with_its_differences(page: WebDriver) -> None:
    choose(page, layers="8", bands=SLOW, std="2", seed="1")
    assert words(page, "hurt") == ["the ", "cat ", "2"]
    assert words(page, "hurt", ".differs") == ["2"]
    assert words(page, "healthy") == ["the ", "cat ", "sat"]
    assert words(page, "healthy", ".differs") == ["sat"]
    assert page.find_element(By.ID, "loss").text == "5 nats a token"
    assert page.find_element(By.ID, "healthy-loss").text == "1 nats a token"
    assert page.find_element(By.ID, "verdict").text == "read as: yes"
    assert page.find_element(By.ID, "correction").text == "the cat"
    assert page.get_log("browser") == []


def test_choices_are_those_that_exist(page: WebDriver) -> None:
    def offered(name: str) -> list[str]:
        return [option.text for option in Select(page.find_element(By.ID, name)).options]

    assert offered("layers") == ["0", "1", "8"]
    assert offered("bands") == [SLOW]
    choose(page, layers="8", bands=FAST, std="2")
    assert offered("bands") == [SLOW, FAST]
    choose(page, layers="0")
    assert offered("bands") == [SLOW]
    assert words(page, "hurt") == ["the ", "cat ", "2"]


def test_the_curve_shows_the_chosen_point(page: WebDriver) -> None:
    choose(page, layers="1", std="2", seed="2")
    script = "return JSON.stringify(document.getElementById('curve').data.map((t) => [t.x, t.y]))"
    import json

    curve, runs, chosen = json.loads(page.execute_script(script))
    assert curve == [["0", "1", "2"], pytest.approx([1, 2, 3])]
    assert len(runs[0]) == 6
    assert chosen == [["2"], [pytest.approx(3.2)]]


def test_text_from_a_model_stays_text(page: WebDriver) -> None:
    choose(page, layers="1", std="1", seed="0")
    assert words(page, "hurt")[1:3] == [HOSTILE, "</script>"]
    assert page.find_element(By.ID, "prompt").text == f"Tell {HOSTILE}"
    assert page.find_elements(By.TAG_NAME, "img") == []
    assert page.title == "Lesions of tiny <model>"
    token = page.find_elements(By.CSS_SELECTOR, "#hurt span")[1]
    assert token.get_attribute("title") == "1: 9 nats"
    assert "217, 115, 13" in token.value_of_css_property("background-color")


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_overflows(page: WebDriver, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    inner, content = page.execute_script("return [innerWidth, document.documentElement.scrollWidth]")
    assert inner == width
    assert content <= width
