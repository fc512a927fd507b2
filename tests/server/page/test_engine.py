"""The page over the embedded model: chats, figures, keys, and nothing from elsewhere."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.server.page.scripted import Tab
from tests.server.serving import NAME, Served, engine, serving

FIGURES = r"8 tokens, \d+ a second, the first after \d+ ms, cut off at the most tokens"


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (360, "dark")])
def test_answers_are_those_of_the_engine(browser: Any, served: Served, width: int, scheme: str) -> None:
    tab = Tab(browser, served.url, viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = tab.page
    tab.until(f"document.querySelector('#model').textContent === '{NAME}'")
    assert page.title() == NAME
    if width < 720:
        page.click("#more")
    page.fill("#temperature", "0")
    page.fill("#most", "8")
    page.fill("#system", "Be short.")
    if width < 720:
        page.keyboard.press("Escape")
    tab.send("What is a list?")
    assert re.fullmatch(FIGURES, tab.text("figures"))
    first = served.text("system: Be short.\nuser: What is a list?\nassistant:", 8)
    assert tab.answer() == first
    tab.ask("And a tuple?", 1)
    both = f"system: Be short.\nuser: What is a list?\nassistant: {first}\nuser: And a tuple?\nassistant:"
    assert tab.answer(1) == served.text(both, 8)
    page.click("#clear")
    assert page.locator("#talk section").count() == 0
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    tab.send(evil)
    assert tab.text("user") == evil
    tab.text("figures")
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
    assert float(tab.page.text_content("#width")) == 1  # no drafts
    assert tab.page.text_content("#running").endswith(f" of {served.scheduler.engine.batch}")
    assert tab.page.text_content("#context") == f"{served.scheduler.engine.context} tokens"
    mebibytes = round(served.scheduler.cache_bytes / 2**20)
    assert tab.page.text_content("#cache") == f"{mebibytes} MiB"
    assert re.fullmatch(r"\d+(\.\d)? [MG]iB", tab.page.text_content("#memory"))
    tab.until("document.querySelector('#curve').getAttribute('points').split(' ').length > 2")
    tab.text("figures")
    assert tab.said == []
    tab.page.close()


@pytest.mark.parametrize("way", ["#stop", "Escape", "#clear"])
def test_stop_ends_the_request(browser: Any, served: Served, way: str) -> None:
    tab = Tab(browser, served.url)
    tab.page.fill("#most", "90")
    before = served.scheduler.load.new_tokens
    tab.send("Strings are")
    tab.until("document.querySelector('#talk .assistant')?.textContent.length > 3")
    if way.startswith("#"):
        tab.page.click(way)
    else:
        tab.page.press("#text", way)
    tab.idle()
    served.idle()
    assert 0 < served.scheduler.load.new_tokens - before < 90
    if way != "#clear":
        assert tab.answer()
        assert tab.text("error") == "Stopped."
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
        tab.until("document.querySelector('#hint').textContent.includes('continues what you write')")
        page.fill("#temperature", "0")
        page.fill("#most", "8")
        tab.ask("The import statement")
        assert tab.text("assistant") == tab.answer() == served.text("The import statement", 8)
        page.fill("#temperature", "-1")
        tab.send("again")
        assert "temperature -1" in tab.text("error")
        page.reload()
        tab.until("document.querySelector('#state').textContent === 'Ready'")  # the key is kept
        assert page.evaluate("!JSON.stringify(localStorage).includes('secret')")
    page.close()


def test_long_chat_drops_its_oldest_turns(browser: Any, served: Served) -> None:
    tab = Tab(browser, served.url)
    tab.page.fill("#most", "8")
    for number in range(6):
        tab.ask(f"Say what the {number}th built-in function of the language is for, and when one uses it.", number)
    assert "The context holds 96 tokens" in tab.text("note")
    assert tab.page.locator("#talk .error:not([hidden])").count() == 0
    tab.page.close()
