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
from tests.server.serving import MODEL, PATIENCE_S, Process, Served, call, engine, serving

KEY = "a key"


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    """A server that asks for a key."""
    with serving(engine(batch=1), key=KEY) as found:
        yield found


def status(port: int, line: str, *headers: str) -> int:
    """The status of what is sent as it is."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
        head = "\r\n".join([f"{line} HTTP/1.1", "Connection: close", *headers])
        connection.sendall(f"{head}\r\n\r\n".encode("latin-1"))
        return int(connection.recv(64).split()[1])


@pytest.mark.parametrize(
    "path",
    [
        "//health",
        "///health",
        "/health/",
        "/health//",
        "/./health",
        "/health/.",
        "/x/../health",
        "/health%2f",
        "/%2fhealth",
        "/Health",
        "/health;x",
        "/health%00",
        "//",
        "/.",
        "/%2f",
        "/metrics",
        "/v1/models",
        "//v1/models",
        "http://localhost/health",
        "//localhost/health",
    ],
)
def test_no_other_spelling_of_a_path_is_open(locked: Served, path: str) -> None:
    assert status(locked.port, f"GET {path}", "Host: localhost") in (401, 404)
    assert status(locked.port, f"GET {path}", "Host: localhost") == 401


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY, "Bearer \u00e9"]
)
def test_wrong_keys(locked: Served, given: str) -> None:
    assert status(locked.port, "GET /v1/models", "Host: localhost", f"Authorization: {given}") == 401
    assert status(locked.port, "GET /v1/models", "Host: localhost", f"Authorization: bearer {KEY}") == 200


def test_refusals_of_all_middleware_are_counted(locked: Served) -> None:
    def refused() -> list[float]:
        text = call(locked.port, "GET", "/metrics", Authorization=f"Bearer {KEY}")[1]
        found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("qcut_refused_total"))
        return [float(found.get(f'qcut_refused_total{{status="{code}"}}', 0)) for code in (401, 403)]

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


def test_every_address_of_this_machine_looks_at_hosts(tmp_path: Path) -> None:
    """A server on all addresses that reads its key from a file."""
    key = tmp_path / "key"
    key.write_text("secret\n")
    server = Process(tmp_path / "log", "--host", "0.0.0.0", "--api-key-file", str(key), "--allow-host", "proxy.example")
    try:
        for address in ("127.0.0.1", "127.0.0.2"):
            with socket.create_connection((address, server.port), PATIENCE_S) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n")
                assert connection.recv(64).split()[1] == b"403"
        for host in ("proxy.example", f"127.0.0.2:{server.port}"):
            assert status(server.port, "GET /health", f"Host: {host}") == 200
        assert status(server.port, "GET /v1/models", "Host: localhost", "Authorization: Bearer secret") == 200
        assert status(server.port, "GET /v1/models", "Host: localhost", "Authorization: Bearer secret\\n") == 401
        assert b"secret" not in Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
    finally:
        server.process.kill()
        server.ended()


@pytest.mark.parametrize("port", [-1, 65536, 99999, 1 << 40])
def test_ports_beyond_the_range(port: int) -> None:
    with pytest.raises(ConfigError, match=f"--port {port}; allowed: 0 to 65535"):
        running.listening("127.0.0.1", port)


def test_options_that_are_refused_at_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def says(*options: object) -> str:
        with contextlib.suppress(SystemExit):
            assert cli.main(["serve", str(MODEL), *map(str, options)]) == 1
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
        assert "another program listens there" in says("--port", taken.getsockname()[1])
    assert "not an address of this machine" in says("--host", "192.0.2.1")
