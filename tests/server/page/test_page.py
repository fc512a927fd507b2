"""The page, in a browser without a head: a chat, its figures, and nothing from elsewhere."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.serving import NAME, Served, engine, serving


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("there is no chromium")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


class Tab:
    """A page, what it asked for, and what it complained of."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.page.set_default_timeout(20_000)
        self.asked: list[str] = []
        self.said: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(dialog.message))
        self.page.goto(url)

    def send(self, text: str) -> None:
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")

    def until(self, expression: str) -> None:
        """Wait until the page is as an expression says. The page itself must not evaluate strings: its policy."""
        end = time.monotonic() + 20
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, expression
            time.sleep(0.02)

    def last(self, kind: str, number: int) -> str:
        """The text of the n-th paragraph of a kind, when there is one."""
        found = self.page.locator(f"#talk p.{kind}").nth(number)
        found.wait_for()
        return str(found.text_content())


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (360, "dark")])
def test_a_chat(browser: Any, served: Served, width: int, scheme: str) -> None:
    tab = Tab(browser, served.url, viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = tab.page
    tab.until(f"document.querySelector('#model').textContent === '{NAME}'")
    assert page.title() == NAME
    if not page.is_visible("#most"):
        assert width < 720
        page.click("summary")
    page.fill("#temperature", "0")
    page.fill("#most", "8")
    page.fill("#system", "Be short.")
    tab.send("What is a list?")
    assert re.fullmatch(r"8 tokens, \d+ a second, the first after \d+ ms", tab.last("figures", 0))
    first = served.text("system: Be short.\nuser: What is a list?\nassistant:", 8)
    assert tab.last("assistant", 0) == first
    tab.send("And a tuple?")
    tab.last("figures", 1)
    both = f"system: Be short.\nuser: What is a list?\nassistant: {first}\nuser: And a tuple?\nassistant:"
    assert tab.last("assistant", 1) == served.text(both, 8)
    page.click("#clear")
    assert page.locator("#talk p").count() == 0
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    tab.send(evil)
    assert tab.last("user", 0) == evil
    tab.last("figures", 0)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    assert all(url.startswith(served.url) for url in tab.asked if not url.startswith("data:"))
    assert tab.said == []
    page.close()


def test_figures_of_the_server(browser: Any, served: Served) -> None:
    tab = Tab(browser, served.url)
    tab.page.fill("#most", "60")
    tab.send("The import statement")
    tab.until("Number(document.querySelector('#rate').textContent) > 0")
    assert tab.page.text_content("#running").endswith(f" of {served.scheduler.engine.batch}")
    mebibytes = round(served.scheduler.cache_bytes / 2**20)
    assert tab.page.text_content("#cache") == f"{mebibytes} MiB"
    assert re.fullmatch(r"\d+(\.\d)? [MG]iB", tab.page.text_content("#memory"))
    tab.until("document.querySelector('#curve').getAttribute('points').split(' ').length > 2")
    tab.last("figures", 0)
    assert tab.said == []
    tab.page.close()


def test_stop_ends_the_answer(browser: Any, served: Served) -> None:
    tab = Tab(browser, served.url)
    tab.page.fill("#most", "90")
    before = served.scheduler.load.new_tokens
    tab.send("Strings are")
    tab.until("document.querySelector('#talk p.assistant')?.textContent.length > 3")
    tab.page.click("#stop")
    tab.page.wait_for_selector("#send:not([hidden])")
    served.idle()
    assert 0 < served.scheduler.load.new_tokens - before < 90
    assert tab.last("assistant", 0)
    tab.page.close()


def test_errors_keys_and_models_without_a_template(browser: Any) -> None:
    one = engine()
    one.tokenizer.chat_template = None
    with serving(one, key="secret") as served:
        tab = Tab(browser, served.url)
        page = tab.page
        tab.until("document.querySelector('#state').textContent.includes('no valid API key')")
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        assert "continues what you write" in tab.last("hint", 0)
        page.fill("#temperature", "0")
        page.fill("#most", "8")
        tab.send("The import statement")
        tab.last("figures", 0)
        assert tab.last("assistant", 0) == served.text("The import statement", 8)
        page.fill("#temperature", "-1")
        tab.send("again")
        assert "temperature -1" in tab.last("error", 0)
        page.reload()
        tab.until(f"document.querySelector('#model').textContent === '{NAME}'")  # the key is kept
    tab.until("document.querySelector('#state').textContent === 'the server does not answer'")
    page.close()
