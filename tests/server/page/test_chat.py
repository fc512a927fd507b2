"""The page's chat: memory, failures, what is sent, and how it looks while things go wrong."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.server.page.scripted import Refused, Scripted, Slow, Tab

BOXES = """JSON.stringify([...document.querySelectorAll("header, main, #form, aside, h1, dl")].map(
  element => element.getBoundingClientRect()))"""
UNNAMED = """[...document.querySelectorAll("button, input, textarea")].filter(
  one => !one.labels?.length && !one.ariaLabel && !one.textContent.trim()).map(one => one.id)"""
BROKEN = [
    "no JSON",
    "null",
    "[]",
    '{"version": 0, "turns": [{"asked": "old", "answer": "old"}]}',
    '{"version": 1, "turns": 7, "settings": 7, "draft": [], "from": "x"}',
    '{"version": 1, "turns": [null, 1, {"asked": 5}, {"asked": ""}, {"answer": "x"}], "from": 9}',
    '{"version": 1, "settings": {"temperature": {"a": 1}, "system": null}, "from": -3}',
]


def contents(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"]]


def kept(tab: Tab) -> Any:
    return json.loads(tab.page.evaluate("localStorage.getItem('qcut-chat')"))


def test_failed_message_stays_and_is_sent_again(tab: Tab, scripted: Scripted) -> None:
    scripted.answers = [Refused(503, "1024 prompts wait; allowed: 1024"), ["fine"], ["more"]]
    tab.send("a question")
    assert tab.text("error") == "1024 prompts wait; allowed: 1024"
    assert tab.text("user") == "a question"
    tab.page.reload()
    assert tab.text("error") == "1024 prompts wait; allowed: 1024"
    tab.page.click("text=Try again >> visible=true")
    tab.text("figures")
    assert tab.answer() == "fine"
    assert tab.page.locator("#talk .error:not([hidden])").count() == 0
    tab.ask("next", 1)
    assert [contents(body) for body in scripted.bodies] == [["a question"]] * 2 + [["a question", "fine", "next"]]


def test_message_without_an_answer_is_not_sent_later(tab: Tab, scripted: Scripted) -> None:
    scripted.answers = [Refused(500, "a fault")]
    tab.send("first")
    tab.text("error")
    tab.ask("second")
    assert contents(scripted.bodies[-1]) == ["second"]


def test_edit_takes_the_last_message_back(tab: Tab, scripted: Scripted) -> None:
    scripted.answers = [["one"], Refused(400, "no")]
    tab.ask("first")
    tab.send("secnd")
    tab.text("error")
    tab.page.click("text=Edit >> visible=true")
    assert tab.page.input_value("#text") == "secnd"
    assert tab.page.evaluate("document.activeElement.id") == "text"
    tab.ask("second", 1)
    assert contents(scripted.bodies[-1]) == ["first", "one", "second"]


def test_failed_retry_keeps_the_answer_before(tab: Tab, scripted: Scripted) -> None:
    scripted.answers = [["good"], Refused(500, "a fault")]
    tab.ask("hello")
    tab.page.click("text=Try again >> visible=true")
    assert tab.text("error") == "a fault"
    assert tab.text("assistant") == tab.answer() == "good"


@pytest.mark.parametrize("ending", ["without an end", "with an error"])
def test_broken_answer_keeps_its_text(tab: Tab, scripted: Scripted, ending: str) -> None:
    scripted.broken = True
    error = {"error": {"message": "the engine has failed"}}
    scripted.answers = [["half of ", "it", *([error] if ending == "with an error" else [])]]
    tab.send("hello")
    expected = "the engine has failed" if ending == "with an error" else "The answer broke off"
    assert expected in tab.text("error")
    assert tab.answer() == "half of it"


def test_chat_settings_and_draft_outlive_a_reload(tab: Tab, scripted: Scripted) -> None:
    scripted.answers = [["**one**"]]
    values = {"temperature": "0.25", "top_p": "", "most": "", "system": "Be\nshort."}
    for name, value in values.items():
        tab.page.fill(f"#{name}", value)
    tab.ask("first")
    tab.page.fill("#text", "not yet sent")
    tab.page.reload()
    assert {name: tab.page.input_value(f"#{name}") for name in values} == values
    assert tab.page.input_value("#text") == "not yet sent"
    assert tab.page.inner_html("#talk .assistant") == "<p><strong>one</strong></p>"
    tab.ask("second", 1)
    assert contents(scripted.bodies[-1]) == ["Be\nshort.", "first", "**one**", "second"]
    assert tab.said == []


def test_reload_in_the_middle_of_an_answer(tab: Tab, scripted: Scripted) -> None:
    slow = Slow()
    scripted.answers = [slow]
    tab.send("first")
    slow.put("as far as ")
    tab.until("document.querySelector('.assistant').textContent.startsWith('as far as')")
    tab.page.reload()
    slow.end()
    assert tab.text("assistant") == "as far as"
    assert "left before the answer was whole" in tab.text("error")
    tab.page.click("text=Try again >> visible=true")
    tab.text("figures")
    assert tab.answer() == "ok"


@pytest.mark.parametrize("way", ["#clear", "#forget"])
def test_cleared_chat_stays_cleared(tab: Tab, way: str) -> None:
    tab.page.fill("#temperature", "1.5")
    tab.page.fill("#key", "secret")
    tab.ask("first")
    tab.page.click(way)
    assert tab.page.locator("#talk section").count() == 0
    tab.page.reload()
    tab.until("document.querySelector('#state').textContent === 'Ready'")
    assert tab.page.locator("#talk section").count() == 0
    assert tab.page.input_value("#temperature") == ("0.7" if way == "#forget" else "1.5")
    assert tab.page.input_value("#key") == ("" if way == "#forget" else "secret")
    storage = tab.page.evaluate("JSON.stringify(localStorage) + JSON.stringify(sessionStorage)")
    assert "first" not in storage
    assert way != "#forget" or storage == "{}{}"


def test_broken_memory_is_a_new_chat(tab: Tab) -> None:
    for stored in BROKEN:
        tab.page.evaluate("stored => localStorage.setItem('qcut-chat', stored)", stored)
        tab.page.reload()
        assert tab.page.locator("#talk section").count() == 0, stored
        assert tab.page.input_value("#temperature") == "0.7", stored
    tab.ask("hello")
    assert tab.answer() == "ok"
    assert tab.said == []


def test_memory_is_bounded(tab: Tab) -> None:
    turns = [{"asked": f"{i} " + "x" * 9000, "answer": "y" * 1000, "state": "whole"} for i in range(190)]
    stored = json.dumps({"version": 1, "turns": turns, "from": 180})
    tab.page.evaluate("stored => localStorage.setItem('qcut-chat', stored)", stored)
    tab.page.reload()
    tab.send("hello")
    tab.idle()
    found = kept(tab)
    assert found["turns"][-1]["asked"] == "hello"
    assert 40 < len(found["turns"]) < 60
    assert sum(len(turn["asked"] + turn["answer"]) for turn in found["turns"]) <= 500_000
    assert 0 <= found["from"] < len(found["turns"])


def test_full_storage_keeps_the_newest_turns(tab: Tab) -> None:
    for _ in range(3):
        tab.send("x" * 1000)
        tab.idle()
    fill = "(length => { localStorage.setItem('other', ''); localStorage.setItem('other', 'z'.repeat(length)); })"
    used = tab.page.evaluate("localStorage.getItem('qcut-chat').length")
    tab.page.evaluate(f"{fill}({5 * 2**20} - {used} - 100)")
    tab.send("newest")
    tab.idle()
    found = kept(tab)["turns"]
    assert found[-1]["asked"] == "newest"
    assert len(found) < 4
    assert tab.text("user", 3) == "newest"


def test_page_without_storage_says_so(browser: Any, scripted: Scripted) -> None:
    context = browser.new_context()
    broken = "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('denied'); }});"
    context.add_init_script(broken)
    tab = Tab(context, scripted.url)
    tab.ask("hello")
    assert "keeps nothing" in tab.page.text_content("#unkept")
    assert tab.said == []
    context.close()


def test_empty_fields_are_left_out(tab: Tab, scripted: Scripted) -> None:
    tab.ask("with")
    for name in ("temperature", "most", "top_p"):
        tab.page.fill(f"#{name}", "")
    tab.ask("without", 1)
    tab.page.fill("#temperature", "0")
    tab.page.fill("#top_p", "0.5")
    tab.ask("zero", 2)
    names = ("temperature", "max_tokens", "top_p")
    given = [{name: body[name] for name in names if name in body} for body in scripted.bodies]
    assert given == [{"temperature": 0.7, "max_tokens": 512}, {}, {"temperature": 0, "top_p": 0.5}]


def test_field_without_a_number_is_refused(tab: Tab, scripted: Scripted) -> None:
    tab.page.fill("#temperature", "")
    tab.page.type("#temperature", "1e")
    tab.send("hello")
    assert tab.text("error") == "Temperature: found what is no number."
    assert scripted.bodies == []


def test_key_is_sent_as_its_bytes(tab: Tab, scripted: Scripted) -> None:
    tab.page.fill("#key", "schl\u00fcssel\u2026")
    tab.ask("hello")
    assert scripted.keys[-1].encode("latin-1") == "Bearer schl\u00fcssel\u2026".encode()


def test_new_chat_leaves_the_old_answer_behind(tab: Tab, scripted: Scripted) -> None:
    old, new = Slow(), Slow()
    scripted.answers = [old, new]
    tab.send("old question")
    old.put("old ")
    tab.until("document.querySelector('.assistant').textContent.startsWith('old')")
    tab.page.click("#clear")
    tab.send("new question")
    old.put("old " * 20)
    new.put("new ")
    tab.until("document.querySelector('.assistant').textContent.startsWith('new')")
    old.put("old")
    old.end()
    assert tab.page.is_visible("#stop")
    new.put("answer")
    new.end()
    tab.text("figures")
    assert tab.answer() == "new answer"
    assert len(kept(tab)["turns"]) == 1
    assert "old" not in tab.page.text_content("#talk")
    assert contents(scripted.bodies[-1]) == ["new question"]
    assert tab.said == []


def test_one_message_at_a_time(tab: Tab, scripted: Scripted) -> None:
    slow = Slow()
    scripted.answers = [slow]
    tab.page.evaluate("(() => { $('text').value = 'twice'; for (let i = 0; i < 3; i++) $('form').requestSubmit(); })()")
    tab.page.fill("#text", "later")
    tab.page.press("#text", "Enter")
    slow.end()
    tab.idle()
    assert [contents(body) for body in scripted.bodies] == [["twice"]]
    assert tab.page.input_value("#text") == "later"
    assert "empty" in tab.text("error")


def test_enter_shift_enter_and_compositions(tab: Tab, scripted: Scripted) -> None:
    page = tab.page
    page.focus("#text")
    height = page.evaluate("$('text').offsetHeight")
    page.keyboard.type("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    assert page.input_value("#text") == "a\nb"
    assert page.evaluate("$('text').offsetHeight") > height
    for event in ("{isComposing: true}", "{keyCode: 229}"):
        options = f"Object.assign({{key: 'Enter', bubbles: true, cancelable: true}}, {event})"
        page.evaluate(f"$('text').dispatchEvent(new KeyboardEvent('keydown', {options}))")
    assert scripted.bodies == []
    page.keyboard.press("Enter")
    tab.text("figures")
    assert contents(scripted.bodies[0]) == ["a\nb"]
    assert page.evaluate("$('text').offsetHeight") == height


@pytest.mark.parametrize("words", ["as a code", "as words", "as a body"])
def test_refused_length_drops_turns(tab: Tab, scripted: Scripted, words: str) -> None:
    scripted.context = 4000
    scripted.answers = [["y" * 300]] * 6
    tab.page.set_viewport_size({"width": 390, "height": 844})
    tab.page.reload()
    tab.page.evaluate("$('system').value = 'system'")
    for number in range(6):
        tab.ask(str(number) + "x" * 299, number)
    refusal = {
        "as a code": Refused(400, "too many", "context_length_exceeded"),
        "as words": Refused(400, "This model's maximum context length is 4000 tokens"),
        "as a body": Refused(413, "a body of more bytes than allowed"),
    }[words]
    scripted.answers = [refusal, refusal, ["fits"]]
    tab.ask("last", 6)
    assert tab.answer(6) == "fits"
    tried = [contents(body) for body in scripted.bodies[-3:]]
    assert len(tried[0]) > len(tried[1]) > len(tried[2])
    assert all(texts[0] == "system" and texts[-1] == "last" and len(texts) % 2 == 0 for texts in tried)
    assert re.fullmatch(
        r"The context holds 4,000 tokens. The \d+ turns above no longer fit and are not sent.", tab.text("note")
    )
    assert tab.page.locator("#talk .past").count() == kept(tab)["from"] > 0
    assert tab.page.evaluate("isAtEnd() && $('newest').hidden")
    tab.page.reload()
    assert "The context holds" in tab.text("note")


def test_room_is_left_for_the_answer(tab: Tab, scripted: Scripted) -> None:
    scripted.context = 2000
    scripted.answers = [["y" * 200]] * 12
    tab.page.reload()
    for number in range(12):
        tab.ask(str(number) + "x" * 200, number)
    sizes = [sum(map(len, contents(body))) for body in scripted.bodies]
    assert len(sizes) == 12, "nothing was refused"
    assert max(sizes) <= 1500
    assert sizes[-1] > 500
    assert contents(scripted.bodies[-1])[-1].startswith("11x")


def test_one_message_beyond_the_context(tab: Tab, scripted: Scripted) -> None:
    scripted.context = 100
    tab.page.reload()
    tab.ask("short")
    tab.send("x" * 200)
    assert "maximum context length is 100 tokens" in tab.text("error")
    tab.page.click("text=Edit >> visible=true")
    assert tab.page.input_value("#text") == "x" * 200
    tab.ask("y", 1)
    assert contents(scripted.bodies[-1]) == ["short", "ok", "y"]


def test_dead_server_moves_nothing_and_returns(browser: Any) -> None:
    scripted = Scripted()
    with scripted.serving():
        tab = Tab(browser, scripted.url)
        tab.ask("hello")
        tab.until("document.querySelector('#state').textContent === 'Ready'")
        before = tab.page.evaluate(BOXES)
    tab.until("document.querySelector('#state').textContent === 'The server does not answer.'")
    assert tab.page.evaluate(BOXES) == before
    assert tab.page.text_content("#running") == "–"
    tab.send("anyone?")
    assert tab.text("error") == "The server does not answer."
    assert tab.page.evaluate("document.querySelector('#talk').scrollWidth <= innerWidth")
    with scripted.serving():
        tab.until("document.querySelector('#state').textContent === 'Ready'")
        assert tab.page.evaluate(BOXES) == before
        tab.page.click("text=Try again >> visible=true")
        tab.text("figures", 1)
        assert tab.answer(1) == "ok"
    tab.page.close()


@pytest.mark.parametrize("safe", [True, False], ids=["clipboard", "without a clipboard"])
def test_copies_of_messages_and_code(browser: Any, scripted: Scripted, safe: bool) -> None:
    source = "Do *this*:\n\n```sh\nls  -l\n\tcd\n```\n"
    scripted.answers = [[source]]
    context = browser.new_context()
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    if not safe:  # the old way of copying still reaches the clipboard, which the test reads
        context.add_init_script("navigator.clipboard.writeText = () => Promise.reject(new Error('no'));")
    tab = Tab(context, scripted.url)
    tab.ask("hello")
    tab.page.click(".foot .copy")
    tab.until("document.querySelector('.foot .copy').textContent === 'Copied'")
    assert tab.page.text_content("#said") == "Copied"
    assert tab.page.evaluate("navigator.clipboard.readText()") == source
    tab.page.click(".code .copy")
    tab.until("document.querySelector('.code .copy').textContent === 'Copied'")
    assert tab.page.evaluate("navigator.clipboard.readText()") == "ls  -l\n\tcd"
    tab.until("document.querySelector('.code .copy').textContent === 'Copy'")
    context.close()


def test_figures_fold_away_on_a_phone(tab: Tab) -> None:
    tab.page.set_viewport_size({"width": 390, "height": 844})
    page = tab.page
    tab.ask("hello")
    assert not page.is_visible("#rate")
    assert not page.is_visible("#temperature")
    assert page.evaluate("$('talk').clientHeight") > 600
    assert page.get_attribute("#more", "aria-expanded") == "false"
    page.click("#more")
    assert page.is_visible("#rate")
    assert page.is_visible("#temperature")
    assert page.get_attribute("#more", "aria-expanded") == "true"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "temperature"
    page.keyboard.press("Escape")
    assert not page.is_visible("#rate")
    assert page.evaluate("document.activeElement.id") == "more"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_text_is_followed_only_at_its_end(tab: Tab, scripted: Scripted) -> None:
    slow = Slow()
    scripted.answers = [slow]
    tab.page.set_viewport_size({"width": 800, "height": 500})
    tab.send("hello")
    slow.put("line\n\n" * 60)
    tab.until("isAtEnd() && talk.scrollTop > 500")
    tab.page.evaluate("talk.scrollTop = 100")
    tab.page.wait_for_selector("#newest:not([hidden])")
    slow.put("more\n\n" * 60)
    tab.until("document.querySelector('.assistant').textContent.includes('more')")
    assert tab.page.evaluate("talk.scrollTop") == 100
    tab.page.click("#newest")
    tab.until("isAtEnd() && $('newest').hidden")
    slow.end()
    tab.idle()


def test_what_a_screen_reader_is_told(tab: Tab, scripted: Scripted) -> None:
    slow = Slow()
    scripted.answers = [slow, Refused(500, "a fault")]
    page = tab.page
    assert page.evaluate(UNNAMED) == []
    tab.send("hello")
    slow.put("an answer")
    tab.until("document.querySelector('.assistant').textContent === 'an answer'")
    assert page.get_attribute(".assistant", "aria-busy") == "true"
    assert page.text_content("#said") == ""
    slow.end()
    tab.text("figures")
    assert page.get_attribute(".assistant", "aria-busy") == "false"
    assert page.text_content("#said") == "an answer"
    tab.send("again")
    tab.text("error")
    assert page.text_content("#said") == "a fault"
    assert page.evaluate("document.activeElement.id") == "text"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_of_text(tab: Tab, scheme: str) -> None:
    tab.page.emulate_media(color_scheme=scheme)
    script = """() => {
      const style = getComputedStyle(document.documentElement), canvas = document.createElement("canvas");
      const brush = canvas.getContext("2d");
      const light = name => {
        brush.fillStyle = style.getPropertyValue(name);
        brush.fillRect(0, 0, 1, 1);
        const parts = [...brush.getImageData(0, 0, 1, 1).data].slice(0, 3).map(value => value / 255);
        const [r, g, b] = parts.map(value => value <= .04045 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4);
        return .2126 * r + .7152 * g + .0722 * b;
      };
      const pairs = [["--ink", "--paper"], ["--faint", "--paper"], ["--faint", "--panel"], ["--faint", "--code"],
        ["--ink", "--mine"], ["--ink", "--code"], ["--accent", "--paper"], ["--on-accent", "--accent"],
        ["--bad", "--paper"]];
      return pairs.map(([text, ground]) => {
        const [low, high] = [light(text), light(ground)].sort((a, b) => a - b);
        return [text, ground, (high + .05) / (low + .05)];
      });
    }"""
    found = tab.page.evaluate(script)
    assert not [one for one in found if one[2] < 4.5], found
    assert max(one[2] for one in found) > 12


def test_motion_ends_where_it_is_unwanted(browser: Any, scripted: Scripted) -> None:
    for motion, expected in (("reduce", "none"), ("no-preference", "wait")):
        slow = Slow()
        scripted.answers = [slow]
        tab = Tab(browser, scripted.url, reduced_motion=motion)
        tab.send("hello")
        tab.page.wait_for_selector("[data-state='open']")
        name = "getComputedStyle(document.querySelector('.assistant'), '::after').animationName"
        assert tab.page.evaluate(name) == expected
        slow.end()
        tab.idle()
        tab.page.close()
