"""A server of the embedded model, in a thread of the tests' process or in a process of its own."""

from __future__ import annotations

import copy
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import qcut
from qcut.numerics.sampling import sample
from qcut.server import running
from qcut.server.application import Settings, application
from qcut.server.limits.connections import ConnectionLimits
from qcut.server.metrics import Metrics
from qcut.text.detokenizer import Detokenizer
from tests.support import ROOT

MODEL = ROOT / "models" / "gpt2-5m"
NAME = "gpt2"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
PATIENCE_S = 60
COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
LONG = {"prompt": "The import statement", "max_tokens": 90, "temperature": 0, "ignore_eos": True}
NOISE = 0.03


@cache
def quantized() -> Any:
    """The embedded model in W8A8; all engines share its weights."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    qcut.quantize(model, "w8a8")
    return model


def engine(
    batch: int = 4, context: int = 96, wrap: Callable[[Any], Any] = lambda tokenizer: tokenizer, **options: Any
) -> qcut.Engine:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = TEMPLATE
    return qcut.Engine(quantized(), batch=batch, context=context, tokenizer=wrap(tokenizer), **options)


def steady(alone: qcut.Engine, prompt: str, most: int, sampling: qcut.Sampling, index: int = 0) -> list[str]:
    """Texts of a sample after 1, 2 and more tokens, as long as no token is near another.

    The order of sums depends on neighbours, and an integer that is rounded the other way moves logits by hundredths.
    A token counts if `NOISE` at each logit does not change it.
    """
    ids = alone.tokenizer(prompt)["input_ids"]
    detokenizer = Detokenizer(alone.tokenizer)
    pieces = detokenizer.incremental(ids)
    noise = torch.randn(32, alone.decoder.vocabulary, generator=torch.Generator().manual_seed(1)) * NOISE
    noise[0] = 0
    texts: list[str] = []
    logits, whole = alone.prefill([ids]), ""
    while True:
        places = torch.full((32,), index), torch.full((32,), len(ids) + len(texts))
        tokens = sample(logits.float() + noise, sampling, *places)
        if len(texts) == most or len(tokens.unique()) > 1:
            return texts
        whole += pieces.add(int(tokens[0]))
        texts.append(whole + copy.deepcopy(pieces, {id(detokenizer): detokenizer}).rest())
        logits = alone.decode(tokens[:1])


@dataclass
class Served:
    """A running server with its scheduler and engine.

    Attributes:
        port: of this machine's own address.
        scheduler: the server's.
        alone: another engine over the same weights, for comparison.
        server: ended by signals.
        finished: what `running.run` has returned, when it has.
    """

    port: int
    scheduler: qcut.Scheduler
    alone: qcut.Engine
    server: running.Server
    finished: list[bool]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON or text, and headers of an answer; a body that is no text is sent as JSON."""
        return call(self.port, method, path, body, **headers)

    def metrics(self, **headers: str) -> dict[str, float]:
        return metrics(self.port, **headers)

    def idle(self, connections: bool = False) -> None:
        """Wait until nothing is left of any request, and of any connection if those count too."""

        def left() -> list[Any]:
            load, state = self.scheduler.load, self.server.server_state
            return [load.waiting, load.prefilling, load.running, *(connections * [state.connections, state.tasks])]

        until(lambda: not any(left()), left)

    def text(self, prompt: str, count: int, **options: Any) -> str:
        """The text that the engine generates for one prompt, without a server."""
        stop = [*self.alone.end_tokens, *options.pop("stop", ())]
        (found,) = self.alone.generate(prompt, count, stop=stop, **options)
        assert found.text is not None
        return found.text


def until(condition: Callable[[], object], found: Callable[[], object] = lambda: None) -> None:
    """Wait until a condition holds; the failure shows what is found instead."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, found()
        time.sleep(0.005)


def metrics(port: int, **headers: str) -> dict[str, float]:
    """Figures of ``/metrics`` by name and labels."""
    lines = [line for line in call(port, "GET", "/metrics", **headers)[1].splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def status(port: int, line: str, *headers: str, address: str = "127.0.0.1") -> int:
    """The status of the answer to a request that is sent as it is."""
    with socket.create_connection((address, port), PATIENCE_S) as connection:
        head = "\r\n".join([f"{line} HTTP/1.1", "Connection: close", *headers])
        connection.sendall(f"{head}\r\n\r\n".encode("latin-1"))
        return int(connection.recv(64).split()[1])


def posted(body: Any) -> bytes:
    """The bytes of a request for completions."""
    data = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    return f"{head}Content-Type: application/json\r\n\r\n".encode() + data


def asking(port: int, body: dict[str, Any], **headers: str) -> http.client.HTTPConnection:
    """A request for completions that waits for its answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json", **headers})
    return connection


def call(port: int, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        given = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        connection.request(method, path, body, given)
        answer = connection.getresponse()
        data = answer.read()
        kind = answer.headers.get_content_type()
        return answer.status, json.loads(data) if kind == "application/json" else data.decode(), dict(answer.headers)
    finally:
        connection.close()


@contextmanager
def serving(
    one: qcut.Engine,
    *,
    max_waiting: int = 1024,
    grace_s: float | None = None,
    buffer: int = 0,
    limits: dict[str, Any] | None = None,
    kind: type[qcut.Scheduler] = qcut.Scheduler,
    **settings: Any,
) -> Iterator[Served]:
    """A server in a thread, with ``buffer`` bytes for what it sends, if not 0, and some `ConnectionLimits`."""
    scheduler = kind(one, chunk=32, max_waiting=max_waiting)
    metrics = Metrics(scheduler)
    app = application(scheduler, Settings(NAME, **settings), metrics)
    server = running.server(app, metrics, grace_s=grace_s, limits=ConnectionLimits(**(limits or {})))
    finished: list[bool] = []
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            finished.append(running.run(server, scheduler, found))
        except BaseException as error:
            failed.append(error)

    with running.listening("127.0.0.1", 0) as found:
        if buffer:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        thread = threading.Thread(target=serve, name="server")
        thread.start()
        try:
            end = time.monotonic() + PATIENCE_S
            while not server.started:
                assert thread.is_alive(), failed
                assert time.monotonic() < end
                time.sleep(0.01)
            yield Served(found.getsockname()[1], scheduler, one.with_batch(1), server, finished)
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    if failed:
        raise failed[0]


class Process:
    """``qcut serve`` of the embedded model."""

    def __init__(
        self,
        log: Path,
        *options: str,
        environment: dict[str, str] | None = None,
        port: int = 0,
        files: int | None = None,
    ) -> None:
        limit = [] if files is None else ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh"]
        command = [*limit, sys.executable, "-m", "qcut", "serve", str(MODEL), "--scheme", "w8a8", "--device", "cpu"]
        command += ["--port", str(port), "--batch", "4", "--context", "96", "--served-name", NAME, *options]
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env={**os.environ, **(environment or {})}
            )
        self.port = self._wait()

    def _wait(self) -> int:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if found := re.search(r"^http://\S+:(\d+) serves", self.log.read_text(), re.MULTILINE):
                return int(found[1])
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.ended()

    def ended(self) -> int:
        return self.process.wait(PATIENCE_S)
