"""A browser without a head, and a server with answers that tests write."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.page.scripted import Scripted, Tab


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


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    found = Scripted()
    with found.serving():
        yield found


@pytest.fixture
def tab(browser: Any, scripted: Scripted) -> Iterator[Tab]:
    found = Tab(browser, scripted.url)
    yield found
    found.page.close()
