"""``qcut plan``: the plan is Python's, and the page about it is whole, escaped and of use."""

from __future__ import annotations

import colorsys
import json
import math
import re
import shutil
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import qcut
from qcut.cli import main as cli
from qcut.cli.plan import LEVELS, plan_page
from qcut.conversion.planning.plan import LayerPlan, Plan, Point
from tests.cli.commands import DEMO
from tests.server.page.scripted import Tab
from tests.support import ROOT

EVIL = "h.0.<script>alert(1)</script>\"'&"
SCHEMES = ("w8a8", "w8a16", "codebook4")


@pytest.fixture
def plan() -> Plan:
    """Six layers; the third breaks under w8a8, and one has a name that no page must run."""
    layers = {}
    for i, name in enumerate(("h.0.q", "h.0.k", "h.1.q", "h.10.q", "h.2.q", EVIL)):
        sensitivity = {"w8a8": 10.0 ** (i - 6), "w8a16": 10.0 ** (i - 8), "codebook4": 0.02 * i}
        layers[name] = LayerPlan("w8a8", 64, 32, None, "", sensitivity, {"w8a8": 1.0, "w8a16": 2.5, "codebook4": 2.0})
    layers["h.1.q"].sensitivity["w8a8"] = math.inf
    layers["h.1.q"].scheme, layers["h.1.q"].reason = "w8a16", "perplexity +inf with w8a8 alone"
    return Plan(layers, 0.01, "perplexity", "time", 0.004, 0.0052, 0.5, 4096)


class Page(HTMLParser):
    """A page taken apart: elements in order, the table's cells, texts and titles."""

    VOID = ("meta", "link", "br", "img", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.rows: list[list[tuple[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        self.elements.append((tag, given))
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and "data-value" in given:
            self.rows[-1].append((given["data-value"], given.get("class", "")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and data.strip():
            self.texts.append((self._open[-1], data.strip()))

    def of(self, tag: str) -> list[dict[str, str]]:
        return [given for name, given in self.elements if name == tag]


def test_a_page_needs_nothing_else_and_escapes_names(plan: Plan) -> None:
    text = plan_page(plan, "<b>a model</b>")
    page = Page(text)
    assert len(page.of("script")) == 1  # the page's own, none from a name
    assert not page.of("b")
    assert not page.of("img")
    assert "src" not in {key for _, given in page.elements for key in given}
    assert {given.get("href") for given in page.of("link")} == {"data:,"}
    assert not re.search(r"https?://|@import|url\(", text)
    policy = next(g["content"] for g in page.of("meta") if g.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';")
    assert ("h1", "A plan for <b>a model</b>") in page.texts
    assert (EVIL, "") in page.rows[-1] or page.rows[-1][0][0] == EVIL
    assert "$" not in re.sub(r"<script>.*</script>", "", text, flags=re.DOTALL)


def test_a_page_shows_every_layer_under_every_scheme(plan: Plan) -> None:
    page = Page(plan_page(plan, "m"))
    rows = page.rows[1:]
    assert [row[0][0] for row in rows] == list(plan.layers)
    for row, layer in zip(rows, plan.layers.values(), strict=True):
        assert row[1][0] == layer.scheme
        assert [float(value) for value, _ in row[5:8]] == list(layer.sensitivity.values())
        (best,) = (SCHEMES[i] for i, (_, kind) in enumerate(row[5:8]) if "best" in kind)
        assert best == layer.scheme
    titles = [text for tag, text in page.texts if tag == "title"]
    for name, layer in plan.layers.items():
        assert [t for t in titles if t.startswith(f"{name}, ")], name
        assert sum(t.startswith(f"{name}, w8a8: ") for t in titles) == 1
        assert layer.scheme in SCHEMES
    assert sum(given.get("class") == "chosen" for given in page.of("rect")) == len(plan.layers)
    assert "h.1.q, w8a8: ∞" in titles


def test_worse_is_more_colourful(plan: Plan) -> None:
    def level(kind: str) -> int:
        return int(kind.split()[0].removeprefix("h"))

    rows = Page(plan_page(plan, "m")).rows[1:]
    cells = [(float(value), level(kind)) for row in rows for value, kind in row[5:8]]
    ordered = [colour for _, colour in sorted(cells)]
    assert ordered == sorted(ordered)
    assert ordered[0] == 0  # no loss at all
    assert ordered[-1] == LEVELS - 1  # a broken model
    assert len(set(ordered)) >= 6


def test_text_stands_out_from_every_colour(plan: Plan) -> None:
    """A contrast of 4.5, as WCAG 2 asks of text, on a light page and on a dark one."""
    text = plan_page(plan, "m")
    pairs = re.findall(r"--h\d: hsl\((\d+) (\d+)% ([\d.]+)%\); --t\d: #(\w+);", text)
    assert len(pairs) == 2 * LEVELS

    def luminance(colour: Sequence[float]) -> float:
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for hue, saturation, lightness, letters in pairs:
        ground = colorsys.hls_to_rgb(int(hue) / 360, float(lightness) / 100, int(saturation) / 100)
        whole = letters if len(letters) == 6 else "".join(2 * letter for letter in letters)
        ink = [int(whole[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        low, high = sorted((luminance(ground), luminance(ink)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (hue, saturation, lightness, letters)


def test_a_page_says_what_the_budget_bought(plan: Plan) -> None:
    page = Page(plan_page(plan, "m"))
    texts = [text for _, text in page.texts]
    facts = dict(zip(*([t for tag, t in page.texts if tag == kind] for kind in ("dt", "dd")), strict=True))
    assert facts["loss allowed"] == "1.00 %"
    assert facts["loss measured"] == "0.520 %"
    assert facts["tokens measured on"] == "4,096"
    assert {"cheapest schemes: 6.00 µs", "this plan: 7.50 µs", "dearest schemes: 15.00 µs"} <= set(texts)
    assert any(text.startswith("1 layer has a dearer scheme than the cheapest") for text in texts)


def test_page_draws_costs_of_other_budgets(plan: Plan) -> None:
    """The line falls, every measured scheme is a named dot at its place, and the plan has a dot of its own."""
    assert not Page(plan_page(plan, "m")).of("polyline")
    plan.budget, plan.limit, plan.gap, plan.objective = None, 2000.0, 0.0, "stored"
    for layer in plan.layers.values():
        layer.cost = {"w8a8": 256.0, "w8a16": 300.0, "codebook4": 128.0}
    plan.curve = [Point("", 768.0, 0.4), Point("", 1000.0, 0.05), Point("", 1800.0, 0.0002)]
    plan.uniform = [Point("codebook4", 768.0, 0.5), Point("w8a16", 1800.0, 0.0003), Point("<i>", 1700.0, math.inf)]
    plan.siblings = [["h.0.q", "h.0.k"], ["h.1.q", "h.10.q"]]
    page = Page(plan_page(plan, "m"))
    (line,) = page.of("polyline")
    places = [tuple(map(float, place.split(","))) for place in line["points"].split()]
    assert len(places) == 3
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert [y for _, y in places] == sorted(y for _, y in places)  # downwards
    dots = [given for given in page.of("circle") if given["class"] == "uniform"]
    assert [float(dot["cx"]) for dot in dots] == [places[0][0], places[2][0]]
    assert sum(given["class"] == "plan" for given in page.of("circle")) == 1
    titles = [text for tag, text in page.texts if tag == "title"]
    assert "codebook4: 0.500 bits, measured 50.0 %" in titles
    facts = dict(zip(*([t for tag, t in page.texts if tag == kind] for kind in ("dt", "dd")), strict=True))
    assert facts["cost allowed"] == "1.302 bits"
    assert "loss allowed" not in facts
    assert any("1 sets of layers that read the same input have several schemes" in text for _, text in page.texts)


def test_pages_of_edited_and_empty_plans() -> None:
    """Measurements may be missing, and a scheme may be one that was not tried."""
    layers = {"a": LayerPlan("codebook3", 8, 8), "b": LayerPlan("fp16", 8, 8, sensitivity={"w8a8": 0.0})}
    page = Page(plan_page(Plan(layers, 0.01, "output error", "custom", None, 0.0, math.inf), "m"))
    assert len(page.rows) == 3
    assert Page(plan_page(Plan({}, 0.01, "perplexity", "memory", 0.0, 0.0, 0.0), "m")).rows == [[]]


def test_the_command_writes_pythons_plan(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text, out, report = ROOT / "README.md", tmp_path / "plan.json", tmp_path / "plan.html"
    words = ["plan", DEMO, "--calibrate", text, "--budget", 0.02, "--objective", "memory", "--measure", "layer"]
    words += ["--candidates", "codebook4", "w8a8", "--window", 32, "--max-windows", 2, "--batch", 2, "--device", "cpu"]
    words += ["--include", "h.0.*", "h.1.*", "--out", out, "--report", report, "--json"]
    assert cli.main([*map(str, words)]) == 0
    captured = capfd.readouterr()
    answer = json.loads(captured.out)
    assert (answer["schema"], answer["status"], answer["out"]) == ("qcut.plan/1", 0, str(out))
    plan = Plan.load(out)
    assert plan.schemes == {name: layer["scheme"] for name, layer in answer["plan"]["layers"].items()}
    assert len(plan.layers) == 8
    assert [row[0][0] for row in Page(report.read_text()).rows[1:]] == list(plan.layers)
    assert plan.objective == "memory"

    made = tmp_path / "made"
    assert cli.main(["quantize", str(DEMO), "--plan", str(out), "--out", str(made), "--device", "cpu"]) == 0
    found = qcut.load(made, progress=False)
    schemes = {name: m.scheme.name for name, m in found.named_modules() if isinstance(m, qcut.Linear)}
    assert schemes == plan.schemes


def test_report_that_cannot_be_written_leaves_no_plan(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, report = tmp_path / "plan.json", tmp_path / ("r" * 250)  # the temporary file's name is longer
    words = ["--calibrate", ROOT / "README.md", "--include", "h.0.*", "--window", 32, "--max-windows", 1]
    words += ["--candidates", "w8a16", "fp16", "--measure", "layer", "--device", "cpu", "--overwrite"]
    out.write_text("before")
    assert cli.main([*map(str, ["plan", DEMO, *words, "--out", out, "--report", report])]) == 1
    assert f"--report {report}: cannot be written: File name too long" in capfd.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_the_command_plans_within_bits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text, out, report = ROOT / "README.md", tmp_path / "plan.json", tmp_path / "plan.html"
    words = ["--calibrate", text, "--include", "h.0.*", "--window", 32, "--max-windows", 2, "--batch", 2]
    words += ["--device", "cpu", "--out", out, "--json"]
    few = ["--candidates", "codebook3", "w8a16", "--measure", "gradient"]
    assert cli.main([*map(str, ["plan", DEMO, "--bits", 5, "--report", report, *few, *words])]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["bits_per_weight"] <= 5
    assert len(answer["schemes"]) == 2
    assert Page(report.read_text()).of("polyline")
    made = Plan.load(out)
    assert made.objective == "stored"
    assert made.schemes == {name: layer["scheme"] for name, layer in answer["plan"]["layers"].items()}
    for extra, message in (
        (["--bits", 2], "allow 3."),
        (["--bits", 4, "--gpu", "NVIDIA L40S"], "--gpu needs --step-us"),
        (["--step-us", 9, "--gpu", "abacus"], "abacus"),
    ):
        assert cli.main([*map(str, ["plan", DEMO, "--overwrite", *extra, *few, *words])]) != 0
        assert message in capfd.readouterr().out, extra


@pytest.fixture
def browser() -> Any:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        try:
            found = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        except sync_api.Error:
            pytest.skip("there is no browser")
        yield found
        found.close()


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (360, "dark")])
def test_in_a_browser(browser: Any, width: int, scheme: str, plan: Plan, tmp_path: Path) -> None:
    """Sorting, both colour schemes, a phone's width, and no request to anywhere."""
    file = tmp_path / "plan.html"
    file.write_text(plan_page(plan, "m"))
    tab = Tab(browser, file.as_uri(), viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = tab.page
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")

    def column(number: int) -> list[str]:
        script = f"rows => rows.map(row => row.cells[{number}].dataset.value)"
        found: list[str] = page.eval_on_selector_all("tbody tr", script)
        return found

    page.click("thead th:nth-child(6) button")
    assert [float(value) for value in column(5)] == sorted(float(value) for value in column(5))
    page.click("thead th:nth-child(6) button")
    assert column(5)[0] == "Infinity"
    assert page.get_attribute("thead th:nth-child(6)", "aria-sort") == "descending"
    page.focus("thead th:nth-child(1) button")
    page.keyboard.press("Enter")
    assert [name for name in column(0) if name != EVIL] == ["h.0.k", "h.0.q", "h.1.q", "h.2.q", "h.10.q"]
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    assert tab.asked == [file.as_uri()]
    assert tab.said == []
