"""Many clients, some of them faulty: the server must not lose, mix or leak anything.

Clients ask for whole responses and streams, which must equal the engine's without a server; they disconnect during a
stream or before the response; they send malformed and oversized requests. Afterwards the server is idle and holds no
more memory, files and threads than before.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import qcut
from tests.server.serving import NAME, Process, asking, call, engine, metrics, steady

TEXTS = [
    *("The import statement", "A function that", "Strings are", "When a module", "In this chapter", "The class"),
    *("ROMEO:", "def main(", "What is a list?", "KING RICHARD", "This PEP proposes", "for i in range("),
]
MOST = 24
"""Most new tokens of what is compared."""
KINDS = ("whole", "stream", "samples", "leave", "vanish", "malformed", "oversized", "refused")
GROWTH = 1.02
"""Most memory at the end, by that after the first half."""
SEED = 7
TEMPERATURE = 0.25
Expected = dict[str, list[list[str]]]


@dataclass
class Report:
    """What happened.

    Attributes:
        done: requests of each kind that were answered as they should.
        wrong: what was not.
        memory: resident bytes of the server, a figure a second.
        seconds: of all whole answers and streams.
        counts: open files and threads of the server, before and after.
    """

    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    counts: list[tuple[int, int]] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """Memory of the last quarter, by that of the third."""
        quarter = max(1, len(self.memory) // 4)
        return statistics.median(self.memory[-quarter:]) / statistics.median(self.memory[-2 * quarter : -quarter])

    @property
    def lines(self) -> list[str]:
        """For people."""
        counts = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.done.items()))
        seconds = statistics.quantiles(self.seconds, n=100)
        (files, threads), (last_files, last_threads) = self.counts
        return [
            f"{self.done.total():,} requests: {counts}",
            f"answers: median {seconds[49]:.3f} s, 99 % within {seconds[98]:.3f} s",
            f"memory: {self.memory[0] / 2**20:.0f} MiB at first, {self.memory[-1] / 2**20:.0f} at last; "
            f"last quarter by third {self.growth:.4f}",
            f"open files {files} and {last_files}, threads {threads} and {last_threads}",
            *self.wrong[:20],
            f"{len(self.wrong)} wrong",
        ]


def soak(port: int, pid: int, seconds: float, clients: int, prompts: Sequence[str] = TEXTS) -> Report:
    """Let clients loose on a server of `tests.server.serving.Process`.

    Args:
        port: the server's.
        pid: the server's.
        seconds: for which clients begin anew.
        clients: at once.
        prompts: what they ask for.
    """
    expected = _expected(prompts)
    report, lock = Report(), threading.Lock()
    end = time.monotonic() + seconds

    def client(number: int) -> None:
        draws = random.Random(SEED + number)
        while time.monotonic() < end:
            kind = draws.choice(KINDS)
            start = time.perf_counter()
            try:
                problem = _act(kind, port, draws, expected)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            with lock:
                if problem is not None:
                    report.wrong.append(f"{kind}: {problem}")
                else:
                    report.done[kind] += 1
                if kind in ("whole", "stream", "samples"):
                    report.seconds.append(time.perf_counter() - start)

    for kind in KINDS:  # what is made at the first time does not count as growth
        if (problem := _act(kind, port, random.Random(SEED), expected)) is not None:
            report.wrong.append(f"{kind}: {problem}")
    _wait_idle(port, report)
    report.counts.append(_held(pid))
    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        report.memory.append(metrics(port)["process_resident_memory_bytes"])
        time.sleep(min(1.0, seconds / 8))
    _wait_idle(port, report)
    report.counts.append(_held(pid))
    return report


def _expected(prompts: Sequence[str]) -> Expected:
    """Texts of each prompt by length, of one sample after the other; the first is the likeliest."""
    alone, drawn = engine(batch=1), qcut.Sampling(TEMPERATURE, seed=SEED)
    found = {
        text: [
            steady(alone, text, MOST, qcut.Sampling()),
            *(steady(alone, text, MOST, drawn, index) for index in range(2)),
        ]
        for text in prompts
    }
    return {text: texts for text, texts in found.items() if all(texts)}


def _act(kind: str, port: int, draws: random.Random, expected: Expected) -> str | None:
    """Do one thing; returns what was wrong with the answer."""
    text = draws.choice(list(expected))
    likeliest, *drawn = expected[text]
    body: dict[str, Any] = {"model": NAME, "prompt": text, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    if kind == "samples":
        length = draws.randint(1, min(map(len, drawn)))
        body |= {"max_tokens": length, "n": 2, "temperature": TEMPERATURE, "seed": SEED, "stream": draws.random() < 0.5}
        return _unlike(_texts(port, body), [texts[length - 1] for texts in drawn])
    if kind in ("whole", "stream"):
        length = draws.randint(1, len(likeliest))
        found = _texts(port, {**body, "max_tokens": length, "stream": kind == "stream"})
        return _unlike(found, [likeliest[length - 1]])
    if kind == "leave":
        connection, answer = _sent(port, {**body, "max_tokens": 80, "stream": True})
        for _ in range(draws.randrange(1, 6)):
            answer.readline()
        _drop(connection)
        return None
    if kind == "vanish":
        connection = asking(port, {**body, "max_tokens": 80, "n": 2})
        time.sleep(draws.random() * 0.02)
        _drop(connection)
        return None
    if kind == "malformed":
        data = json.dumps(body).encode()
        status, _, _ = call(port, "POST", "/v1/completions", data[: draws.randrange(len(data))])
        return None if status == 400 else f"status {status}"
    if kind == "oversized":
        with socket.create_connection(("127.0.0.1", port), 60) as raw:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1 << 40}\r\n"
            raw.sendall(f"{head}Content-Type: application/json\r\n\r\n{{".encode())
            first = raw.recv(64)
        return None if first.startswith(b"HTTP/1.1 413 ") else f"answer {first!r}"
    status, _, _ = call(port, "POST", "/v1/completions", {**body, "prompt": [1 << 40]})
    return None if status == 400 else f"status {status}"


def _texts(port: int, body: dict[str, Any]) -> list[str]:
    connection, answer = _sent(port, body)
    try:
        data = answer.read().decode()
    finally:
        connection.close()
    if answer.status != 200:
        return [f"status {answer.status}: {data}"]
    if not body.get("stream"):
        return [choice["text"] for choice in json.loads(data)["choices"]]
    assert data.endswith("data: [DONE]\n\n")
    texts = [""] * body.get("n", 1)
    for line in data.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["text"]
    return texts


def _unlike(found: list[str], wanted: list[str]) -> str | None:
    return None if found == wanted else f"found {found}; expected {wanted}"


def _sent(port: int, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = asking(port, body)
    return connection, connection.getresponse()


def _drop(connection: http.client.HTTPConnection) -> None:
    """Go without a word."""
    raw = connection.sock
    if raw is not None:
        raw.shutdown(socket.SHUT_RDWR)
    connection.close()


def _wait_idle(port: int, report: Report) -> None:
    """Wait until the server has nothing to do."""
    end = time.monotonic() + 60
    names = ("qcut_requests_waiting", "qcut_prompts_reading", "qcut_sequences_running")
    while any((found := metrics(port))[name] for name in names):
        if time.monotonic() > end:
            report.wrong.append(f"left: {[(name, found[name]) for name in names]}")
            return
        time.sleep(0.05)


def _held(pid: int) -> tuple[int, int]:
    """Open files and threads of a process, its connections having ended."""
    own = Path(f"/proc/{pid}")
    time.sleep(0.5)
    return len(list((own / "fd").iterdir())), len(list((own / "task").iterdir()))


def main() -> int:
    """Start a server and run the clients against it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--clients", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with Process(Path(folder) / "log") as server:
            report = soak(server.port, server.process.pid, arguments.seconds, arguments.clients)
            server.process.terminate()
            status = server.ended()
        log = server.log.read_text()
    print("\n".join(report.lines))
    print(log if "Traceback" in log else f"the server ended with {status}")
    return int(bool(report.wrong) or status != 0 or report.growth > GROWTH or "Traceback" in log)


if __name__ == "__main__":
    raise SystemExit(main())
