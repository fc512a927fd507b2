"""A server's life: graceful shutdown, failure with its engine, restart."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from qcut.errors import DeviceError
from qcut.server import streams
from tests.server.serving import LONG, Process, asking, call, engine, posted, serving, status, until

Stream = tuple[http.client.HTTPConnection, http.client.HTTPResponse]


def asked(port: int, body: dict[str, Any], **headers: str) -> Stream:
    """A stream."""
    connection = asking(port, {**body, "stream": True}, **headers)
    return connection, connection.getresponse()


def begun(port: int, body: dict[str, Any], **headers: str) -> Stream:
    """A stream that has delivered its first chunk."""
    connection, answer = asked(port, body, **headers)
    while not (line := answer.readline()).startswith(b"data: {"):
        assert line in (b": waiting\n", b"\n")
    return connection, answer


def test_a_server_s_whole_life(tmp_path: Path) -> None:
    """Start, serve, be killed, start on the same port, serve the same; a signal lets what runs end.

    The first server is on all addresses and reads its key from a file.
    """
    key = tmp_path / "key"
    key.write_text("secret\n")
    options = ("--host", "0.0.0.0", "--api-key-file", str(key), "--allow-host", "proxy.example")
    with Process(tmp_path / "first", *options) as first:
        assert first.log.read_text().startswith("one GPU, or the processor, serves here; more than one: ")
        for address in ("127.0.0.1", "127.0.0.2"):
            assert status(first.port, "GET /health", "Host: evil.example", address=address) == 403
        for host in ("proxy.example", f"127.0.0.2:{first.port}"):
            assert status(first.port, "GET /health", f"Host: {host}") == 200
        for given, expected in (("secret", 200), ("secret\\n", 401)):
            bearer = f"Authorization: Bearer {given}"
            assert status(first.port, "GET /v1/models", "Host: localhost", bearer) == expected
        assert b"secret" not in Path(f"/proc/{first.process.pid}/cmdline").read_bytes()
        code, whole, _ = call(first.port, "POST", "/v1/completions", LONG, Authorization="Bearer secret")
        assert code == 200
        connection, _ = begun(first.port, LONG, Authorization="Bearer secret")
        first.process.kill()
        assert first.ended() == -signal.SIGKILL
    connection.close()
    with Process(tmp_path / "second", port=first.port) as second:
        assert second.port == first.port
        connection, answer = begun(second.port, {**LONG, "prompt": [LONG["prompt"]] * 8})
        second.process.send_signal(signal.SIGTERM)
        pieces = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
        choices = [choice for piece in pieces for choice in piece["choices"]]
        text = "".join(choice["text"] for choice in choices if choice["index"] == 7)
        assert text == whole["choices"][0]["text"]
        assert sum(choice["finish_reason"] == "length" for choice in choices) == 8
        assert second.ended() == 0
    told = second.log.read_text()
    assert "served 720 tokens" in told
    assert re.search(r"1 requests come to their end: \d sequences run, \d prompts wait; a second Ctrl-C cancels", told)
    assert re.search(r"INFO \S+ POST /v1/completions 200 in \S+ s: 8 sequences, 720 new tokens after", told)
    with pytest.raises(ConnectionRefusedError):
        call(second.port, "GET", "/health")


def test_a_second_signal_ends_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with serving(engine()) as served:
        connection, answer = begun(served.port, {**LONG, "prompt": [LONG["prompt"]] * 200})
        served.server.handle_exit(signal.SIGTERM, None)
        with contextlib.suppress(ConnectionError):
            while True:  # until the server listens no more
                call(served.port, "GET", "/health")
        assert not served.finished
        served.server.handle_exit(signal.SIGTERM, None)
    assert served.finished == [False]
    assert served.scheduler.load.new_tokens < 200 * 90
    with pytest.raises(http.client.IncompleteRead):  # the client sees that something is missing
        answer.read()
    connection.close()
    assert not [record for record in caplog.records if record.exc_info]


def test_grace_bounds_what_runs(caplog: pytest.LogCaptureFixture) -> None:
    with serving(engine(), grace_s=1) as served:
        connection, _ = begun(served.port, {**LONG, "prompt": [LONG["prompt"]] * 200})
        waiting = asking(served.port, {**LONG, "stream": False})
        until(lambda: len(served.server.server_state.tasks) >= 2)
        served.server.handle_exit(signal.SIGTERM, None)
    assert served.finished == [False]
    assert served.scheduler.load.new_tokens < 200 * 90
    connection.close()
    waiting.close()
    assert "s: cut off before an answer, at the end of the server" in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_dies_with_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting requests get an error, and a broken engine serves no other."""
    one = engine()
    scheduler: Any = None

    def broken(*_: Any) -> None:
        raise DeviceError("the device is gone")

    lines: list[str] = []

    def break_it() -> None:
        nonlocal scheduler
        with serving(one) as served:
            scheduler = served.scheduler
            connection, answer = begun(served.port, LONG)
            monkeypatch.setattr(scheduler, "step", broken)
            lines.extend(answer.read().decode().splitlines())
            connection.close()

    with pytest.raises(DeviceError, match="the device is gone"):
        break_it()
    assert json.loads([line for line in lines if line][-1][6:])["error"]["code"] == "failed"
    assert isinstance(scheduler.error, DeviceError)


def test_a_failure_ends_its_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(engine()) as served:
        runner: Any = served.scheduler.engine.runner

        def broken(*_: Any) -> None:
            monkeypatch.undo()
            raise RuntimeError("a kernel has failed")

        connection, answer = begun(served.port, LONG)
        monkeypatch.setattr(runner, "decode_step", broken)
        lines = [line for line in answer.read().decode().splitlines() if line]
        connection.close()
        error = json.loads(lines[-1][6:])["error"]
        assert (error["code"], error["type"]) == ("failed", "server_error")
        assert "a kernel has failed" in error["message"]
        assert call(served.port, "POST", "/v1/completions", LONG)[0] == 200


def test_a_client_that_takes_nothing_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """Its sequences end, and its place is free."""
    with serving(engine(), buffer=4096, limits={"write_s": 0.2}) as served, socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        stuck.connect(("127.0.0.1", served.port))
        stuck.sendall(posted({**LONG, "prompt": ["x"] * 40, "logprobs": 20, "stream": True}))
        until(lambda: served.scheduler.load.running)
        served.idle()
        assert served.scheduler.load.new_tokens < 40 * 90
        assert call(served.port, "GET", "/health")[0] == 200
    assert "a client took nothing for" in caplog.text


def test_a_silent_stream_says_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SILENT_S", 0.02)
    one = engine(batch=1)
    with serving(one) as served:
        running, first = begun(served.port, LONG)
        waiting, second = asked(served.port, {"prompt": "x", "max_tokens": 2})
        assert second.readline() == b": waiting\n"
        assert second.read().endswith(b"data: [DONE]\n\n")
        assert first.read().endswith(b"data: [DONE]\n\n")
        running.close()
        waiting.close()
