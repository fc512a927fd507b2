"""Connections that do not behave: slow, silent, too many, too long, and of two minds about where a body ends."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import (
    COMPLETIONS,
    LONG,
    PATIENCE_S,
    Process,
    Served,
    asking,
    call,
    engine,
    posted,
    serving,
    until,
)

HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
SHORT_S = 0.4
LIMITS = {"head_s": SHORT_S, "keep_alive_s": SHORT_S, "write_s": SHORT_S, "chunks": 64, "head_bytes": 4096}


@pytest.fixture(scope="module")
def brief() -> Iterator[Served]:
    """A server with little patience and 32 connections."""
    with serving(engine(), seconds=SHORT_S, limits={**LIMITS, "connections": 32}, buffer=4096) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test no connection, request or sequence of it is left."""
    yield
    if "brief" in request.fixturenames:
        request.getfixturevalue("brief").idle(connections=True)


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE_S)


def received(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    found = b""
    try:
        while part := connection.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def answers(data: bytes) -> list[int]:
    """Statuses of the answers in what has come."""
    return [int(part[:3]) for part in data.split(b"HTTP/1.1 ")[1:]]


def trickled(connection: socket.socket, data: bytes) -> float:
    """Send a byte now and then, until the server closes; the seconds that took."""
    start = time.monotonic()
    connection.settimeout(SHORT_S / 8)
    for i in range(len(data)):
        try:
            connection.sendall(data[i : i + 1])
            if not connection.recv(65536):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    else:
        raise AssertionError("the connection is still open")
    return time.monotonic() - start


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", HEALTH, HEALTH + b"GET", HEAD + b"Content-Length: 9\r\n\r\n{"])
def test_silence_ends_a_connection(brief: Served, sent: bytes) -> None:
    with connected(brief.port) as connection:
        connection.sendall(sent)
        start = time.monotonic()
        found = answers(received(connection))
        assert time.monotonic() - start < 10 * SHORT_S
    wanted = {b"": [], b"POST /v1/comp": [408], HEALTH: [200], HEALTH + b"GET": [200, 408]}
    assert found == wanted.get(sent, [408])


@pytest.mark.parametrize(
    "begin",
    [
        b"",
        HEAD + b"Content-Length: 10000\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1000\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000\r\n\r\n",
        b"DELETE /nowhere HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1000\r\n",
    ],
)
def test_bytes_one_by_one_end_a_connection(brief: Served, begin: bytes) -> None:
    """In the head, in a body that is read, and in a body that nobody asked for."""
    with connected(brief.port) as connection:
        connection.sendall(begin)
        assert trickled(connection, b"GET /" + b"x" * 2000) < 20 * SHORT_S


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (HEAD + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n", 400),
        (HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Transfer-Encoding: chunked\r\n\r\n", 400),
        (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n", 400),
        (HEAD + b"Content-Length: -2\r\n\r\n", 400),
        (HEAD + b"Content-Length: 1" + b"0" * 30 + b"\r\n\r\n", 400),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (HEAD + b"Transfer-Encoding : chunked\r\n\r\n", 400),
        (HEAD + b"Host: evil.example\r\n\r\n", 400),
        (HEAD + b"no colon\r\n\r\n", 400),
        (HEAD + b"X: a\x00b\r\n\r\n", 400),
        (HEAD + b"X: " + b"a" * 20000 + b"\r\n\r\n", 431),
        (HEAD + b"a: b\r\n" * 200 + b"\r\n", 431),
        (b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\n", 431),
        (b"\x16\x03\x01 is no HTTP\r\n\r\n", 400),
    ],
)
def test_heads_that_are_refused(brief: Served, head: bytes, status: int) -> None:
    """One answer in OpenAI's form; nothing after the head is taken for a request."""
    with connected(brief.port) as connection:
        connection.sendall(head + b"0\r\n\r\n" + HEALTH)
        found = received(connection)
    assert answers(found) == [status]
    head_, _, body = found.partition(b"\r\n\r\n")
    assert b"connection: close" in head_.lower()
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("kind", ["websocket", "h2c"])
def test_no_connection_becomes_another_kind(brief: Served, kind: str) -> None:
    """One that did would be outside of the limits."""
    headers = f"Connection: Upgrade, close\r\nUpgrade: {kind}\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x"
    with connected(brief.port) as connection:
        connection.sendall(f"GET /health HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n\r\n".encode())
        assert answers(received(connection)) == [200]


def test_chunks_beyond_the_limit(brief: Served) -> None:
    with connected(brief.port) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 100)
        found = received(connection)
    assert answers(found) == [413]
    assert b"more chunks than allowed: 64" in found


def test_a_body_within_the_limit_of_chunks(brief: Served) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    chunks = b"".join(b"1\r\n" + body[i : i + 1] + b"\r\n" for i in range(len(body)))
    with connected(brief.port) as connection:
        connection.sendall(HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert answers(received(connection)) == [200]


def test_pipelined_requests_are_answered_in_order(brief: Served) -> None:
    many = HEALTH * 10 + b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n" + HEALTH + b"no request\r\n\r\n"
    with connected(brief.port) as connection:
        connection.sendall(many)
        assert answers(received(connection)) == [*[200] * 10, 404, 200, 400]


@pytest.mark.parametrize("behind", [b"", HEALTH, b"G", b"x" * 30000])
def test_a_client_that_goes_is_noticed(brief: Served, behind: bytes) -> None:
    """Also one that has sent more than its request."""
    before = brief.scheduler.load.new_tokens
    with connected(brief.port) as connection:
        connection.sendall(posted({**LONG, "prompt": [LONG["prompt"]] * 40}) + behind)
        until(lambda: brief.scheduler.load.running)
    brief.idle()
    assert brief.scheduler.load.new_tokens - before < 40 * 90 / 2


def test_new_connection_replaces_an_idle_one(brief: Served) -> None:
    before = brief.metrics()
    running = asking(brief.port, {**LONG, "stream": True})
    assert running.getresponse().status == 200
    held = [connected(brief.port) for _ in range(100)]
    try:
        for one in held[::2]:
            one.sendall(HEALTH[:20])
        for _ in range(10):
            assert brief.call("GET", "/health")[0] == 200
        after = brief.metrics()
        assert after["qcut_connections"] <= after["qcut_connections_most"] == 32
        name = 'qcut_connections_closed_total{reason="evicted"}'
        assert after[name] - before.get(name, 0) >= 100 - 32
    finally:
        running.close()
        for one in held:
            one.close()


def test_beyond_the_limit_of_requests() -> None:
    """A new connection gets 503 if no open connection is idle."""
    with serving(engine(batch=1), limits={"connections": 2}) as served:
        held = [asking(served.port, {**LONG, "prompt": ["x"] * 20}) for _ in range(2)]
        until(lambda: served.scheduler.load.running + served.scheduler.load.waiting >= 30)
        status, answer, headers = served.call("GET", "/health")
        assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "busy", "1")
        for one in held:
            one.close()
        served.idle()
        assert served.call("GET", "/health")[0] == 200
        assert served.metrics()['qcut_refused_total{status="503"}'] == 1


def test_a_client_that_reads_nothing_is_closed(brief: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Whether it asks for one long answer, or for many."""
    with connected(brief.port) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.sendall(HEALTH.replace(b"/health", b"/") * 200)
        until(lambda: "a client took nothing" in caplog.text)
    assert brief.metrics()['qcut_connections_closed_total{reason="stalled"}'] >= 1


def test_a_flood_of_refusals_leaves_few_lines(brief: Served, caplog: pytest.LogCaptureFixture) -> None:
    before = brief.metrics().get('qcut_refused_total{status="400"}', 0)
    for _ in range(400):
        with connected(brief.port) as connection:
            connection.sendall(b"no request\r\n\r\n")
            assert answers(received(connection)) == [400]
    assert brief.metrics()['qcut_refused_total{status="400"}'] - before == 400
    assert len(caplog.records) <= 260


class Health(threading.Thread):
    """Asks for ``/health`` all the time."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port, self.seconds, self.is_over = port, list[float](), False
        self.wrong: list[Any] = []
        self.start()

    def run(self) -> None:
        while not self.is_over:
            start = time.perf_counter()
            try:
                status = call(self.port, "GET", "/health")[0]
            except OSError as error:
                self.wrong.append(error)
            else:
                self.wrong += [] if status == 200 else [status]
            self.seconds.append(time.perf_counter() - start)
            time.sleep(0.02)

    def end(self) -> None:
        self.is_over = True
        self.join()
        assert not self.wrong
        assert sorted(self.seconds)[len(self.seconds) * 9 // 10] < 0.5


def test_more_connections_than_open_files(tmp_path: Path) -> None:
    """A process with few files serves on, and its log stays short."""
    with Process(tmp_path / "log", files=200) as server:
        health = Health(server.port)
        held = [connected(server.port) for _ in range(300)]
        for one in held[::3]:
            one.sendall(HEALTH[:30])
        for one in held[1::3]:
            one.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        time.sleep(1)
        assert call(server.port, "POST", COMPLETIONS, {"prompt": "x", "max_tokens": 1})[0] == 200
        for one in held:
            one.close()
        for size in (100, 20000):
            with connected(server.port) as chunked:
                chunked.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
                try:
                    for _ in range(20):
                        chunked.sendall(b"1\r\n \r\n" * size)
                except ConnectionError:
                    assert size == 20000
        health.end()
        server.process.terminate()
        assert server.ended() == 0
    told = server.log.read_text()
    assert "Traceback" not in told
    assert len(told) < 100_000
