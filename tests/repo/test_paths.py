"""The files that usual jobs enter, as far as they are within their aims."""

from __future__ import annotations

from tests.paths import MOST, files_of


def test_jobs_enter_few_files() -> None:
    found = files_of(("import", "quantize", "load", "save", "call"))
    assert {name: len(files) for name, files in found.items() if len(files) > MOST[name]} == {}
    assert all(found.values())
