"""One server for all tests that leave it as it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

for package in ("starlette", "uvicorn", "prometheus_client", "pydantic", "transformers"):
    pytest.importorskip(package)

from tests.server.serving import Served, engine, serving  # noqa: E402


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with serving(engine(), most_body=4096) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does, the server has nothing to do afterwards."""
    yield
    if "served" in request.fixturenames:
        request.getfixturevalue("served").idle()
