"""The page at /, in a headless Chromium: a prompt is typed, a picture and its timeline are seen."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_backend import FakeBackend, Live, serving, until

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver on the PATH")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=900,1100",
    ):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    browser.get_log("browser")  # what a page before this one has said
    yield browser
    browser.get("about:blank")  # it would go on asking a server that has ended
    said = [entry for entry in browser.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")]
    complaints = [entry for entry in said if "responded with a status of" not in entry["message"]]
    assert complaints == []  # nothing that the Content-Security-Policy refused, no error in a script


def opened(page: Any, server: Live) -> None:
    page.get(server.url + "/")
    until(lambda: "ready" in page.find_element(By.ID, "state").text, 20, "the page says that the server is ready")


def ask(page: Any, prompt: str) -> None:
    box = page.find_element(By.ID, "prompt")
    box.clear()
    box.send_keys(prompt, Keys.ENTER)


def card(page: Any, prompt: str) -> Any:
    """Return the finished card of a prompt."""

    def find() -> Any:
        for article in page.find_elements(By.CSS_SELECTOR, "article[data-done]"):
            if article.find_element(By.TAG_NAME, "h2").text == prompt:
                return article
        return None

    return until(find, 20, f"an answer to {prompt!r}")


def natural_width(page: Any, image: Any) -> int:
    return int(page.execute_script("return arguments[0].complete ? arguments[0].naturalWidth : 0", image))


def keep_screenshot(page: Any, name: str) -> None:
    """Save a screenshot where ENFOLD_SCREENSHOTS names a folder."""
    if folder := os.environ.get("ENFOLD_SCREENSHOTS"):
        page.save_screenshot(str(Path(folder) / f"{name}.png"))


def test_a_prompt_becomes_a_picture_with_its_timeline(page: Any) -> None:
    with serving(FakeBackend()) as server:
        opened(page, server)
        assert page.find_element(By.ID, "model").text == "fake"
        ask(page, "a red circle above a blue square")
        article = card(page, "a red circle above a blue square")
        (image,) = article.find_elements(By.TAG_NAME, "img")
        until(lambda: natural_width(page, image) == 64, 10, "the picture is shown")
        assert image.get_attribute("alt") == "a red circle above a blue square"
        lanes = [each.text for each in article.find_elements(By.CSS_SELECTOR, ".timeline > span")]
        assert lanes == ["queue", "rank 0", "rank 1"]
        assert len(article.find_elements(By.CSS_SELECTOR, ".bar.encode")) == 2
        widths = [bar.size["width"] for bar in article.find_elements(By.CSS_SELECTOR, ".bar.denoise")]
        assert all(width > 20 for width in widths)
        (lane, *_) = article.find_elements(By.CSS_SELECTOR, ".lane")
        last = article.find_elements(By.CSS_SELECTOR, ".bar.decode")[0].rect
        assert last["x"] + last["width"] <= lane.rect["x"] + lane.rect["width"] + 1
        assert "denoise 30 ms" in article.find_element(By.CLASS_NAME, "legend").text
        plan = article.find_element(By.CSS_SELECTOR, ".plan summary")
        plan.click()
        assert "T5: dp, layout 1x2x1" in article.find_element(By.CSS_SELECTOR, ".plan dl").text
        assert "2 of 2 ranks" in page.find_element(By.ID, "state").text
        assert "from the cache" not in article.text
        ask(page, "blue again")
        assert "1 of 1 text from the cache" in card(page, "blue again").text
        keep_screenshot(page, "page")


def test_several_requests_run_and_errors_are_words(page: Any) -> None:
    with serving(FakeBackend()) as server:
        opened(page, server)
        for prompt in ("green slow", "boom", "blue"):
            ask(page, prompt)
        assert len(page.find_elements(By.TAG_NAME, "article")) == 3  # each has its card while all wait
        assert "ValueError: boom" in card(page, "boom").find_element(By.CLASS_NAME, "error").text
        for prompt in ("green slow", "blue"):
            image = card(page, prompt).find_element(By.TAG_NAME, "img")
            until(lambda image=image: natural_width(page, image) == 64, 10, "the picture is shown")
        page.find_element(By.CSS_SELECTOR, "#more summary").click()
        page.find_element(By.ID, "size").send_keys("60x60")
        ask(page, "a size that can't be")
        assert "multiple of 8" in card(page, "a size that can't be").find_element(By.CLASS_NAME, "error").text
        keep_screenshot(page, "errors")


def test_prompts_are_text_and_never_markup(page: Any) -> None:
    with serving(FakeBackend()) as server:
        opened(page, server)
        prompt = "<img src=x onerror=alert(1)> <b>red</b>"
        ask(page, prompt)
        assert len(card(page, prompt).find_elements(By.TAG_NAME, "img")) == 1  # the picture alone


def test_a_key_is_asked_for(page: Any) -> None:
    with serving(FakeBackend(), api_key="secret") as server:
        opened(page, server)
        ask(page, "red")
        assert "--api-key" in card(page, "red").find_element(By.CLASS_NAME, "error").text
        page.find_element(By.ID, "key").send_keys("secret")  # the fields were opened
        ask(page, "blue")
        assert card(page, "blue").find_elements(By.TAG_NAME, "img")


def test_a_clip_is_waited_for(page: Any) -> None:
    with serving(FakeBackend(is_video=True)) as server:
        opened(page, server)
        until(lambda: page.find_element(By.ID, "size").get_attribute("placeholder") == "64x64", 10, "defaults known")
        ask(page, "red slow")
        image = card(page, "red slow").find_element(By.TAG_NAME, "img")
        until(lambda: natural_width(page, image) == 64, 10, "the clip is shown")
        assert card(page, "red slow").find_elements(By.CSS_SELECTOR, ".timeline .bar.encode")


def test_lost_ranks_are_seen_on_the_page(page: Any) -> None:
    with serving(FakeBackend(restart_s=4)) as server:
        opened(page, server)
        ask(page, "kill")
        assert "SIGKILL" in card(page, "kill").find_element(By.CLASS_NAME, "error").text
        until(lambda: "restarting, 1 of 2" in page.find_element(By.ID, "state").text, 10, "the page tells of it")
        until(lambda: "ready" in page.find_element(By.ID, "state").text, 15, "and of the end")
