"""The files that usual jobs enter, as far as they are within their aims."""

from __future__ import annotations

import pytest

from tests.paths import MOST, files_of


@pytest.mark.parametrize("name", ["import", "quantize", "load", "save", "call"])
def test_jobs_enter_few_files(name: str) -> None:
    assert len(files_of(name)) <= MOST[name]
