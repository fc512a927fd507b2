"""The examples beside the server."""

from __future__ import annotations

import pytest

from tests.server.serving import Served

pytest.importorskip("openai")

from examples import client


def test_a_client_prints_what_comes(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    client.main("The import statement", f"{served.url}/v1")
    assert len(capsys.readouterr().out) > 20
