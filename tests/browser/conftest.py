"""A headless Chromium and a page for it. Without the browser these tests fail: they are not skipped."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.wait import WebDriverWait

from report_example import write_example

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def browser(tmp_path_factory) -> Iterator[WebDriver]:
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # named, so that selenium looks for no driver elsewhere
    driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    yield driver
    driver.quit()


@pytest.fixture(scope="session")
def page_path(tmp_path_factory) -> Path:
    return write_example(tmp_path_factory.mktemp("page") / "site")


@pytest.fixture
def page(browser: WebDriver, page_path: Path):
    """Opens a page at a size and colour scheme, and waits until it has drawn itself."""

    def open_page(name: str = "index.html", width: int = 1280, scheme: str = "light") -> WebDriver:
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get("about:blank")  # or a new place on the same page would not load it anew
        browser.get(f"{page_path.parent.as_uri()}/{name}")
        WebDriverWait(browser, 20).until(
            lambda b: b.execute_script("return document.body.dataset.ready") == "yes"
        )
        return browser

    return open_page
