"""The page on supported models says what the script finds."""

from __future__ import annotations

import re

import pytest

from tests.support import ROOT
from tests.supported_models import checking

transformers = pytest.importorskip("transformers")

from qcut.engine.families import FAMILIES  # noqa: E402
from tests.supported_models.checking import NO, NONE, YES, Finding, examine  # noqa: E402
from tests.supported_models.page import CLASSES, PAGE, cells, page, rows, versions  # noqa: E402

COSINES = {"w8a8": 0.99, "codebook4": 0.9}
"""Least cosines of the page's random models."""
LESS = {"BlipForConditionalGeneration": {"w8a8": 0.99, "codebook4": 0.88}}
"""Of models with a class that leaves parameters as memory; these are drawn at random for the page."""
NUMBERS = slice(5, 7)
"""Cells with cosines; their last digits depend on the processor."""


def test_page_is_of_pinned_versions() -> None:
    pinned = (ROOT / "constraints-dev.txt").read_text()
    torch, newest = (re.search(rf"^{name}==([\w.]+)", pinned, re.MULTILINE) for name in ("torch", "transformers"))
    assert torch is not None
    assert newest is not None
    written = f"with torch {torch[1]} and transformers {newest[1]},"
    assert written in PAGE.read_text(), "run `python -m tests.supported_models`"


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration", "CLIPModel"])
def test_the_page_says_what_the_script_finds(name: str) -> None:
    written = "with torch {} and transformers {},".format(*versions())
    if written not in PAGE.read_text():
        pytest.skip("the page is of other versions of torch and transformers")
    row, found = rows(PAGE.read_text())[name], examine(name)
    now = [*cells(found), *found.notes]
    assert [float(cell) for cell in row[NUMBERS]] == pytest.approx(list(found.cosines.values()), abs=2e-3)
    assert [*row[:5], *row[7:]] == [*now[:5], *now[7:]], "run `python -m tests.supported_models`"


@pytest.mark.parametrize("name", CLASSES)
def test_no_row_hides_a_failure(name: str) -> None:
    row = rows(PAGE.read_text())[name]
    kind, _, layers, percent, _, *cosines = row[:7]
    saved, pretrained, loading, generates, engine = row[7:12]
    notes = row[12:]
    assert int(layers) > 0
    assert 0 < float(percent) < 100
    assert all(float(cosine) > least for cosine, least in zip(cosines, LESS.get(name, COSINES).values(), strict=True))
    claims = {", qcut.load": saved, ", from_pretrained": pretrained, ", QcutConfig": loading, ", generate": generates}
    for what, claim in claims.items():
        assert claim in (YES, NO, NONE)
        assert (claim == NO) == any(what in note.partition(":")[0] for note in notes)
    assert engine == NONE or (engine == YES) == (kind in FAMILIES)


def test_a_page_is_read_back_with_its_failures() -> None:
    def finding(name: str) -> Finding:
        one = Finding("kind", name, 3, 12.345, "norms", dict.fromkeys(COSINES, 0.99999), YES, YES, YES, NONE, NONE)
        if name == "BertForMaskedLM":
            one.loading, one.notes = NO, ["w8a8, QcutConfig: no"]
        return one

    text = page([finding(name) for name in CLASSES])
    table = rows(text)
    assert list(table) == CLASSES
    assert table["BertForMaskedLM"][9:] == [NO, NONE, NONE, "w8a8, QcutConfig: no"]
    assert table["CLIPModel"] == cells(finding("CLIPModel"))
    assert "0.9999 |" in text
    assert "1.0000" not in text


def test_what_fails_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise OSError("no such file")

    monkeypatch.setattr(checking.qcut, "load", load)
    found = examine("GPT2LMHeadModel")
    assert (found.saved, found.pretrained) == (NO, YES)
    assert found.notes == [f"{scheme}, qcut.load: OSError: no such file" for scheme in checking.SCHEMES]
