"""A server's life: graceful shutdown, failure with its engine, restart."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from qcut.cli import main as cli
from qcut.errors import DeviceError
from qcut.server import streams
from tests.server.serving import MODEL, Process, call, engine, serving

LONG = {"prompt": "The import statement", "max_tokens": 90, "temperature": 0, "ignore_eos": True}


def asking(port: int, body: dict[str, Any]) -> http.client.HTTPConnection:
    """A request that waits for its answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection


def asked(port: int, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A stream."""
    connection = asking(port, {**body, "stream": True})
    return connection, connection.getresponse()


def begun(port: int, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A stream that has delivered its first chunk."""
    connection, answer = asked(port, body)
    while not (line := answer.readline()).startswith(b"data: {"):
        assert line in (b": waiting\n", b"\n")
    return connection, answer


def test_a_server_s_whole_life(tmp_path: Path) -> None:
    """Start, serve, be killed, start on the same port, serve the same; a signal lets what runs end."""
    first = Process(tmp_path / "first")
    try:
        assert (
            first.log.read_text().splitlines()[0].startswith("one GPU, or the processor, serves here; more than one: ")
        )
        status, whole, _ = call(first.port, "POST", "/v1/completions", LONG)
        assert status == 200
        connection, _ = begun(first.port, LONG)
    finally:
        first.process.kill()
    assert first.ended() == -signal.SIGKILL
    connection.close()
    second = Process(tmp_path / "second", port=first.port)
    try:
        assert second.port == first.port
        connection, answer = begun(second.port, {**LONG, "prompt": [LONG["prompt"]] * 8})
        second.process.send_signal(signal.SIGTERM)
        pieces = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
        choices = [choice for piece in pieces for choice in piece["choices"]]
        text = "".join(choice["text"] for choice in choices if choice["index"] == 7)
        assert text == whole["choices"][0]["text"]
        assert sum(choice["finish_reason"] == "length" for choice in choices) == 8
        assert second.ended() == 0
    finally:
        second.process.kill()
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
        while len(served.server.server_state.tasks) < 2:
            time.sleep(0.01)
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


def test_wrong_options_fail_before_the_model_loads(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def says(*options: object) -> str:
        with contextlib.suppress(SystemExit):
            assert cli.main(["serve", *map(str, options)]) == 1
        return capfd.readouterr().err

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--host 127.0.0.1 --port {port}: Address already in use" in says("missing", "--port", port)
    assert "--host no.such.host.invalid --port 8000: " in says("missing", "--host", "no.such.host.invalid")
    assert "--chat-template" in says(MODEL, "--port", 0, "--chat-template", tmp_path / "none")
    assert "a whole number from 1 up" in says(MODEL, "--batch", 0)


def test_a_client_that_takes_nothing_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """Its sequences end, and its place is free."""
    with serving(engine(), buffer=4096, limits={"write_s": 0.2}) as served, socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        stuck.connect(("127.0.0.1", served.port))
        body = json.dumps({**LONG, "prompt": ["x"] * 40, "logprobs": 20, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        stuck.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        end = time.monotonic() + 60
        while served.scheduler.load.running == 0:
            assert time.monotonic() < end
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
