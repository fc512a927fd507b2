"""Tables for notebooks: whole, escaped, bounded, and without anything that runs or loads."""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import qcut
from qcut.common.html import MOST_ROWS, html_table
from qcut.conversion.planning.plan import LayerPlan
from qcut.conversion.report import LayerReport, Report
from qcut.engine.likelihoods import LogProbability

HOSTILE = "<script>alert('&')</script>"
PLAIN = {"div", "pre", "table", "thead", "tbody", "tr", "th", "td"}


def parsed(element: str) -> tuple[str, list[list[str]]]:
    """The lines, and the texts of the rows, of an element that has nothing except text."""
    root = ElementTree.fromstring(element)
    for node in root.iter():
        assert node.tag in PLAIN
        assert set(node.attrib) <= {"style", "scope", "colspan"}
    above = root.find("pre")
    assert above is not None
    return above.text or "", [[cell.text or "" for cell in row] for row in root.iter("tr")]


def test_every_text_is_escaped() -> None:
    text, rows = parsed(html_table(HOSTILE, [HOSTILE], [[HOSTILE]]))
    assert (text, rows) == (HOSTILE, [[HOSTILE], [HOSTILE]])


@pytest.mark.parametrize("count", [0, 1, MOST_ROWS, MOST_ROWS + 1, 3 * MOST_ROWS])
def test_rows_beyond_the_most_are_counted(count: int) -> None:
    _, rows = parsed(html_table("", ["name", "number"], ([f"n{i}", str(i)] for i in range(count))))
    shown = min(count, MOST_ROWS)
    assert rows[1 : shown + 1] == [[f"n{i}", str(i)] for i in range(shown)]
    assert rows[shown + 1 :] == ([[f"… {count - shown} more"]] if count > shown else [])


def test_only_columns_of_numbers_are_aligned_right() -> None:
    root = ElementTree.fromstring(html_table("", ["layer", "scheme", "N"], [["0", "w8a8", "64"]]))
    for row in root.iter("tr"):
        assert [re.findall(r"left|right", cell.attrib["style"])[0] for cell in row] == ["left", "left", "right"]


def words_of(element: str) -> Iterable[str]:
    return " ".join(ElementTree.fromstring(element).itertext()).split()


def test_report_shows_the_words_it_prints() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16), nn.LayerNorm(16))
    batches = [torch.randn(8, 64)]
    calibration = qcut.calibrate(model, batches, progress=False)
    report = qcut.quantize(model, "w8a8", calibration=calibration, skip=["2"], progress=False)
    element = report._repr_html_()
    _, rows = parsed(element)
    assert [row[0] for row in rows] == ["layer", "0"]
    assert set(str(report).split()) <= set(words_of(element))


def test_report_of_hostile_names_is_text() -> None:
    layers = [LayerReport(HOSTILE, "w8a8", 64, 64, 16384, 4096, 0.01, tied_to=HOSTILE, note="a note")] * 60
    _, rows = parsed(Report(tuple(layers), {HOSTILE: HOSTILE}, 100, 50)._repr_html_())
    assert rows[1][0] == HOSTILE
    assert rows[1][-1] == f"tied to {HOSTILE}  a note"
    assert rows[-1] == ["… 10 more"]


def test_plan_shows_every_layers_scheme() -> None:
    layers = {
        "up": LayerPlan("w8a16", 64, 128, sensitivity={"w8a8": 0.5, "w8a16": 0.0125}, reason=HOSTILE),
        "down": LayerPlan("w8a8", 128, 64),
    }
    plan = qcut.Plan(layers, 0.01, "perplexity", "custom", 0.004, 0.005, 0.6)
    text, rows = parsed(plan._repr_html_())
    assert rows[1:] == [["up", "w8a16", "128 x 64", "1.250%", HOSTILE], ["down", "w8a8", "64 x 128", "", ""]]
    assert text
    assert str(plan).startswith(text)


def test_calibration_shows_each_layers_range() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    calibration = qcut.calibrate(model, [torch.tensor([[-2.0, 0.0, 0.5, 3.0]])], progress=False)
    text, rows = parsed(calibration._repr_html_())
    assert text == str(calibration)
    assert rows[1:] == [["0", "4", "1", "[-2, 3]"]]


def test_generated_shows_its_text_and_bounded_ids() -> None:
    result = qcut.Generated(list(range(60)), "stop", HOSTILE, [LogProbability(-0.5, ())] * 60, 8, 3)
    text, rows = parsed(result._repr_html_())
    facts = {row[0]: row[1] for row in rows[1:]}
    assert text == HOSTILE
    ids = facts.pop("ids")
    assert ids.startswith("[0, 1, ")
    assert ids.endswith(", 49, … 10 more]")
    assert facts == {
        "reason": "stop",
        "new tokens": "60",
        "mean log-probability": "-0.5000",
        "drafts": "3 of 8 accepted",
    }
    assert dict(parsed(qcut.Generated([7])._repr_html_())[1][1:])["ids"] == "[7]"
