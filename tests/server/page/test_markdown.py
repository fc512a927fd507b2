"""Markdown of answers as elements of the page: what is rendered, how safely, and how it grows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.page.scripted import Scripted, Slow, Tab


def code(language: str, text: str) -> str:
    bar = f'<div class="bar"><span>{language}</span><button class="copy" type="button">Copy</button></div>'
    return f'<div class="code">{bar}<pre tabindex="0"><code>{text}</code></pre></div>'


def link(address: str, text: str) -> str:
    return f'<a href="{address}" target="_blank" rel="noopener noreferrer">{text}</a>'


def table(head: str, rows: str) -> str:
    parts = f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    return f'<div class="table" tabindex="0"><table>{parts}</table></div>'


HEAD = '<th scope="col">a</th>'
MARKS = "<em>a</em> <strong>b</strong> <em><strong>c</strong></em> <em>d</em> <strong>e</strong> <del>f</del>"
BOX = '<li class="task"><input type="checkbox" disabled="">'
CASES = {
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "# A *b*\n## C ##\n####### no": "<h1>A <em>b</em></h1><h2>C</h2><p>####### no</p>",
    "Title\n===\nLess\n---\n": "<h1>Title</h1><h2>Less</h2>",
    "a\n\n***\n- - -\nb": "<p>a</p><hr><hr><p>b</p>",
    "*a* **b** ***c*** _d_ __e__ ~~f~~": f"<p>{MARKS}</p>",
    "snake_case_name 2*3*4 * no *": "<p>snake_case_name 2<em>3</em>4 * no *</p>",
    "**bold *both* bold**": "<p><strong>bold <em>both</em> bold</strong></p>",
    "_**a**_ _** ****b****": "<p><em><strong>a</strong></em> _** <strong><strong>b</strong></strong></p>",
    "**open and `a*b`": "<p>**open and <code>a*b</code></p>",
    "`` a`b `` `` ` `` `x": "<p><code>a`b</code> <code>`</code> `x</p>",
    r"\*no\* \_ \\ \a": r"<p>*no* _ \ \a</p>",
    "a  \nb\\\nc<br>d": "<p>a<br>b<br>c<br>d</p>",
    "&lt;b&gt; &amp;amp; &copy; &#65; &#x42; &#0;": "<p>&lt;b&gt; &amp;amp; &amp;copy; A B \ufffd</p>",
    "<b>x</b> <!-- y --> <u>": "<p>&lt;b&gt;x&lt;/b&gt; &lt;!-- y --&gt; &lt;u&gt;</p>",
    "- a\n- b\n  - c\n    - d\n- e": ("<ul><li>a</li><li>b<ul><li>c<ul><li>d</li></ul></li></ul></li><li>e</li></ul>"),
    "1. a\n  - b\n2. c": "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>",
    "3) a\n4) b\n- c": '<ol start="3"><li>a</li><li>b</li></ol><ul><li>c</li></ul>',
    "- a\n\n- b": "<ul><li><p>a</p></li><li><p>b</p></li></ul>",
    "- a\nlazy\n\nout": "<ul><li>a\nlazy</li></ul><p>out</p>",
    "text:\n* a\n+ b": "<p>text:</p><ul><li>a</li></ul><ul><li>b</li></ul>",
    "text\n2. no list": "<p>text\n2. no list</p>",
    "- [x] done\n- [ ] open": f"<ul>{BOX} done</li>{BOX} open</li></ul>",
    "1. a\n\n   ```py\n   x\n     y\n   ```\n2. b": (
        f"<ol><li><p>a</p>{code('py', 'x{}  y')}</li><li>b</li></ol>".format("\n")
    ),
    "```python\nif a:\n    b\n\n```\nc": code("python", "if a:\n    b\n") + "<p>c</p>",
    "~~~\n```\n<b>\n~~~~": code("text", "```\n&lt;b&gt;"),
    "```js\nopen `` \n``\n": code("js", "open `` \n``\n"),
    "a\n\n    code\n\n      more\nb": "<p>a</p>" + code("text", "code\n\n  more") + "<p>b</p>",
    "> a\n> - b\nlazy\n\nc": "<blockquote><p>a</p><ul><li>b\nlazy</li></ul></blockquote><p>c</p>",
    "> a\n\n> b\n>\nc": "<blockquote><p>a</p></blockquote><blockquote><p>b</p></blockquote><p>c</p>",
    "> > deep\n> less": "<blockquote><blockquote><p>deep\nless</p></blockquote></blockquote>",
    "| a | b |\n|---|:-:|\n| `x` | **y** |\n| 1 \\| 2 |\n\nc": table(
        HEAD + '<th class="middle" scope="col">b</th>',
        '<tr><td><code>x</code></td><td class="middle"><strong>y</strong></td></tr><tr><td>1 | 2</td></tr>',
    )
    + "<p>c</p>",
    "a | a\n--- | ---\n1 | 2 | 3": table(HEAD + HEAD, "<tr><td>1</td><td>2</td></tr>"),
    "a | b\nno table": "<p>a | b\nno table</p>",
    "[a *b*](https://x.org/y_(z) 'title')": f"<p>{link('https://x.org/y_(z)', 'a <em>b</em>')}</p>",
    "see https://x.org/a_b_c. (http://y.org/)": (
        f"<p>see {link('https://x.org/a_b_c', 'https://x.org/a_b_c')}. ({link('http://y.org/', 'http://y.org/')})</p>"
    ),
    "<https://x.org> ![alt](https://x.org/i.png)": (
        f"<p>{link('https://x.org', 'https://x.org')} {link('https://x.org/i.png', 'Image: alt')}</p>"
    ),
    "[a](https://x.org and [b](c": f"<p>[a]({link('https://x.org', 'https://x.org')} and [b](c</p>",
    "[https://x.org](https://x.org/)": f"<p>{link('https://x.org/', 'https://x.org')}</p>",
}
HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "[a](javascript:alert(1)) [b](data:text/html,x) [c](//x.org) [d](file:///etc) [e](&#106;avascript:alert(1))",
    "[a](jAvAsCrIpT:alert(1)) <javascript:alert(1)> [b](<javascript:alert(1)>) ![c](data:image/png,x)",
    '[a](https://x.org/"onmouseover="alert(1)) ```"><script>alert(1)</script>',
    "<iframe srcdoc='<script>alert(1)</script>'></iframe><style>*{display:none}</style>",
    "```<script>\nalert(1)\n```\n| <svg onload=alert(1)> |\n|---|\n| <b> |",
]
LONG = {
    "brackets": "[" * 60_000,
    "closed brackets": "[a](" * 20_000,
    "stars": "*a **b " * 10_000,
    "star run": "*" * 60_000,
    "backticks": "` `` ``` " * 8_000,
    "quotes": ">" * 20_000 + "\n" + "> " * 10_000,
    "lists": "\n".join("  " * i + "- a" for i in range(400)),
    "list line": "- " * 20_000,
    "spaces": "a" + " " * 60_000 + "b" + " " * 60_000,
    "heads": "#" * 60_000 + "x",
    "pipes": "|" * 30_000 + "\n" + "|-" * 400,
    "short rows": "|a" * 400 + "\n" + "|-" * 400 + "\n" + "x\n" * 20_000,
    "paragraphs": "a\n\n" * 20_000,
    "lines": "a\n" * 40_000,
    "addresses": "https://x.org/" + ")" * 1500 + " http" * 5_000,
    "fences": "```\n" * 10_000,
}
PIECES = ["a", "b c", "*", "**", "_", "`", "```", "~~~\n", "\n", "\n\n", "- ", "1. ", "2. ", "  ", "    ", "> ", "# "]
PIECES += ["---", "|", "a | b\n", "---|---\n", "===", "[x](https://x.org)", "\\", "- [ ] ", "\t", "~~", "<br>"]
PIECES += ["&amp;", ": "]

RENDER = "text => { const place = make('div'); new Growing(place).show(text); return place.innerHTML; }"
GROW = """([text, cuts]) => {
  const place = make("div"), growing = new Growing(place);
  for (const cut of cuts) growing.show(text.slice(0, cut));
  growing.show(text);
  return place.innerHTML;
}"""


@pytest.fixture(scope="module")
def page(browser: Any) -> Iterator[Any]:
    scripted = Scripted()
    with scripted.serving():
        tab = Tab(browser, scripted.url)
        yield tab.page
        assert tab.said == []
        tab.page.close()


@pytest.mark.parametrize("text", CASES, ids=repr)
def test_elements(page: Any, text: str) -> None:
    assert page.evaluate(RENDER, text) == CASES[text]


def test_growing_text_shows_the_same(page: Any) -> None:
    for text in CASES:
        assert page.evaluate(GROW, [text, list(range(len(text)))]) == page.evaluate(RENDER, text), text
    draw = random.Random(5)
    for _ in range(150):
        text = "".join(draw.choices(PIECES, k=draw.randrange(3, 40)))
        cuts = sorted(draw.choices(range(len(text)), k=len(text)))
        assert page.evaluate(GROW, [text, cuts]) == page.evaluate(RENDER, text), repr(text)


def test_closed_blocks_are_left_alone(page: Any) -> None:
    script = """() => {
      const place = make("div"), growing = new Growing(place), text = "# a\\n\\nb\\n\\n- c\\n- d\\n\\ne\\n\\nf\\ng\\n";
      growing.show(text);
      const first = [...place.children].slice(0, 4);
      growing.show(text + "h\\n\\nlast\\n");
      return [first.every((element, i) => element === place.children[i]), place.children.length];
    }"""
    assert page.evaluate(script) == [True, 6]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_makes_no_markup(page: Any, text: str) -> None:
    script = """text => {
      const place = make("div"), allowed = new Set(["href", "target", "rel", "class", "type", "tabindex", "scope"]);
      new Growing(place).show(text);
      document.body.append(place);
      const all = [...place.querySelectorAll("*")], found = [];
      for (const element of all) {
        if (/^(script|img|iframe|style|svg|object|form)$/i.test(element.tagName)) found.push(element.tagName);
        for (const {name} of element.attributes) if (!allowed.has(name)) found.push(name);
        if (element.href !== undefined && !/^https?:$/.test(element.protocol)) found.push(element.href);
      }
      place.remove();
      return found;
    }"""
    assert page.evaluate(script, text) == []


def test_browser_refuses_strings_as_markup(tab: Tab) -> None:
    script = (
        "() => { try { make('div').innerHTML = '<b>x</b>'; return 'taken'; } catch (error) { return error.name; } }"
    )
    assert tab.page.evaluate(script) == "TypeError"


def test_time_of_hostile_text(page: Any) -> None:
    script = """text => {
      const since = performance.now();
      new Growing(make("div")).show(text);
      return performance.now() - since;
    }"""
    took = {name: page.evaluate(script, text) for name, text in LONG.items()}
    assert max(took.values()) < 3000, took


def test_long_answer_does_not_hold_up_the_page(tab: Tab, scripted: Scripted) -> None:
    slow = Slow()
    scripted.answers = [slow]
    tab.send("hello")
    text = "".join(f"- item {i} with **some** `words` in it\n" for i in range(3000))
    for start in range(0, len(text), 200):
        slow.put(text[start : start + 200])
    script = """async () => {
      const busy = [];
      for (let i = 0; i < 40; i++) {
        const since = performance.now();
        await new Promise(resolve => setTimeout(resolve, 25));
        busy.push(performance.now() - since - 25);
      }
      return busy.reduce((sum, value) => sum + value) / busy.length;
    }"""
    assert tab.page.evaluate(script) < 250
    slow.end()
    tab.idle()
    assert tab.page.locator(".assistant li").count() == 3000
    assert tab.answer() == text
