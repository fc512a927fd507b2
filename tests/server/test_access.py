"""Who is let in: hosts, keys, paths and ports, by their exact spelling."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qcut.cli import main as cli
from qcut.errors import ConfigError
from qcut.server import running
from qcut.server.guards import Hosts
from qcut.server.refusals import Refusal
from tests.server.serving import MODEL, Served, engine, serving, status

KEY = "a key"


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    """A server that asks for a key."""
    with serving(engine(batch=1), key=KEY) as found:
        yield found


@pytest.mark.parametrize(
    "path",
    [
        *("//health", "///health", "/health/", "/health//", "/./health", "/health/.", "/x/../health", "/health%2f"),
        *("/%2fhealth", "/Health", "/health;x", "/health%00", "//", "/.", "/%2f", "/metrics", "/v1/models"),
        *("//v1/models", "http://localhost/health", "//localhost/health"),
    ],
)
def test_no_other_spelling_of_a_path_is_open(locked: Served, path: str) -> None:
    assert status(locked.port, f"GET {path}", "Host: localhost") == 401


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY, "Bearer \u00e9"]
)
def test_wrong_keys(locked: Served, given: str) -> None:
    assert status(locked.port, "GET /v1/models", "Host: localhost", f"Authorization: {given}") == 401
    assert status(locked.port, "GET /v1/models", "Host: localhost", f"Authorization: bearer {KEY}") == 200


def test_refusals_of_all_middleware_are_counted(locked: Served) -> None:
    def refused() -> list[float]:
        found = locked.metrics(Authorization=f"Bearer {KEY}")
        return [found.get(f'qcut_refused_total{{status="{code}"}}', 0) for code in (401, 403)]

    before = refused()
    assert status(locked.port, "GET /v1/models", "Host: localhost") == 401
    assert status(locked.port, "GET /v1/models", "Host: evil.example") == 403
    after = refused()
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 1]


@pytest.mark.parametrize(
    ("server", "host", "is_let_in"),
    [
        ("127.0.0.1", "localhost:8000", True),
        ("127.0.0.1", "LOCALHOST", True),
        ("127.0.0.1", "localhost.", True),
        ("127.0.0.1", "app.localhost:80", True),
        ("127.0.0.1", "127.0.0.1:8000", True),
        ("127.0.0.1", "127.8.8.8", True),
        ("::1", "[::1]:8000", True),
        ("::1", "[::1]", True),
        ("::ffff:127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "proxy.example", True),
        ("127.0.0.1", "Proxy.Example:443", True),
        ("127.0.0.2", "evil.example", False),
        ("127.0.0.1", "evil.example:8000", False),
        ("::1", "evil.example", False),
        ("::ffff:127.0.0.1", "evil.example", False),
        ("127.0.0.1", "localhost.evil.example", False),
        ("127.0.0.1", "evillocalhost", False),
        ("127.0.0.1", "127.0.0.1.evil.example", False),
        ("127.0.0.1", "10.0.0.1", False),
        ("127.0.0.1", "localhost@evil.example", False),
        ("127.0.0.1", "evil.example/localhost", False),
        ("127.0.0.1", "evil.example#localhost", False),
        ("127.0.0.1", "[::1", False),
        ("127.0.0.1", "", False),
        ("10.0.0.1", "any.example", True),
        ("10.0.0.1", "", True),
    ],
)
def test_hosts(server: str, host: str, is_let_in: bool) -> None:
    """By the address at which a connection comes in: other machines' names are theirs to choose."""
    reached = []

    async def app(*_: Any) -> None:
        reached.append(True)

    scope = {"type": "http", "server": (server, 8000), "headers": [(b"host", host.encode())]}
    guard = Hosts(app, ["proxy.example"])
    with contextlib.suppress(Refusal):
        asyncio.run(guard(scope, None, None))  # type: ignore[arg-type]
    assert bool(reached) is is_let_in


@pytest.mark.parametrize("port", [-1, 65536, 99999, 1 << 40])
def test_ports_beyond_the_range(port: int) -> None:
    with pytest.raises(ConfigError, match=f"--port {port}; allowed: 0 to 65535"):
        running.listening("127.0.0.1", port)


def test_options_that_are_refused_at_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is loaded."""

    def says(*options: object, model: object = MODEL) -> str:
        with contextlib.suppress(SystemExit):
            assert cli.main(["serve", *map(str, (model, *options))]) == 1
        return capfd.readouterr().err

    assert "--port 99999; allowed: 0 to 65535" in says("--port", 99999)
    assert "API key is empty" in says("--api-key", "")
    assert "API key is empty" in says("--api-key", " ")
    (tmp_path / "empty").write_text("\n")
    assert "API key is empty" in says("--api-key-file", tmp_path / "empty")
    assert "--api-key-file" in says("--api-key-file", tmp_path / "none")
    assert "allowed: one of them" in says("--api-key-file", tmp_path / "empty", "--api-key", "k")
    monkeypatch.setenv("QCUT_API_KEY", "")
    assert "API key is empty" in says()
    monkeypatch.delenv("QCUT_API_KEY")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = says("--port", port, model="missing")
    assert f"--host 127.0.0.1 --port {port}: Address already in use" in found
    assert "another program listens there" in found
    assert "not an address of this machine" in says("--host", "192.0.2.1")
    assert "--host no.such.host.invalid --port 8000: " in says("--host", "no.such.host.invalid", model="missing")
    assert "label too long" in says("--host", "x" * 99, model="missing")
    assert "--chat-template" in says("--port", 0, "--chat-template", tmp_path / "none")
    for number, template in enumerate(("", "{% for %}", "{{ raise_exception('no user') }}")):
        (tmp_path / f"{number}.jinja").write_text(template)
        found = says("--port", 0, "--chat-template", tmp_path / f"{number}.jinja")
        assert f"{number}.jinja: found" in found
        assert "allowed: a Jinja template for chats" in found
    assert "a whole number from 1 up" in says("--batch", 0)
