"""A fault within a request ends only that request and leaves nothing behind."""

from __future__ import annotations

import json
import logging
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import qcut
from tests.server.serving import CHATS, COMPLETIONS, PATIENCE_S, TEMPLATE, Served, engine, posted, serving, until

GOOD = {"prompt": "A list", "max_tokens": 2, "temperature": 0}
BAD_TOKEN = 7


class Panic(BaseException):
    """As tokenizers in Rust raise it: no Exception."""


class FaultyTokenizer:
    """A tokenizer that fails on some texts and on one token, as its caller says."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.chat_template = TEMPLATE
        self.error: BaseException = RuntimeError("a fault")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, text: str, *given: Any, **options: Any) -> Any:
        if "FAULT" in text:
            raise self.error
        return self._tokenizer(text, *given, **options)

    def decode(self, ids: Any, *given: Any, **options: Any) -> Any:
        if BAD_TOKEN in list(ids):
            raise self.error
        return self._tokenizer.decode(ids, *given, **options)

    def apply_chat_template(self, chat: Any, *given: Any, **options: Any) -> Any:
        if any("FAULT" in message["content"] for message in chat):
            raise self.error
        return self._tokenizer.apply_chat_template(chat, *given, **options)


class FaultyScheduler(qcut.Scheduler):
    """A scheduler that fails with what it is given, at a prompt of one token."""

    fault: BaseException

    def submit_samples(self, prompt: Any, samples: int, *given: Any, **options: Any) -> Any:
        if list(prompt) == [BAD_TOKEN]:
            raise self.fault
        return super().submit_samples(prompt, samples, *given, **options)


@pytest.fixture(scope="module")
def faulty() -> Iterator[Served]:
    with serving(engine(wrap=FaultyTokenizer)) as found:
        yield found


@pytest.mark.parametrize("error", [RuntimeError("a fault"), Panic("a panic"), SystemExit(3), MemoryError()])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tokenizer_that_fails(faulty: Served, error: BaseException, stream: bool) -> None:
    """In a text, in a chat, and in tokens that become text."""
    faulty.scheduler.engine.tokenizer.error = error
    for path, body in (
        (COMPLETIONS, {**GOOD, "prompt": "FAULT"}),
        (COMPLETIONS, {**GOOD, "prompt": ["A list", "FAULT"]}),
        (CHATS, {"messages": [{"role": "user", "content": "FAULT"}], "max_tokens": 2}),
        (COMPLETIONS, {**GOOD, "prompt": [5, BAD_TOKEN]}),
        (COMPLETIONS, {**GOOD, "prompt": [5, BAD_TOKEN], "echo": True, "logprobs": 2}),
    ):
        status, answer, _ = faulty.call("POST", path, {**body, "stream": stream})
        if isinstance(answer, str):
            answer = json.loads([line for line in answer.splitlines() if line][-1][6:])
        else:
            assert status in (400, 500)
        assert set(answer["error"]) == {"message", "type", "param", "code"}, body
        status, answer, _ = faulty.call("POST", COMPLETIONS, GOOD)
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
    faulty.idle()
    assert faulty.scheduler.error is None


@pytest.mark.parametrize("error", [RuntimeError("a fault"), Panic("a panic"), SystemExit(3), KeyError("x")])
def test_a_handler_that_fails(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    with serving(engine(), kind=FaultyScheduler) as served:
        served.scheduler.fault = error  # type: ignore[attr-defined]
        for stream in (False, True):
            body = {**GOOD, "prompt": [[5], [BAD_TOKEN]], "stream": stream}
            status, answer, _ = served.call("POST", COMPLETIONS, body)
            assert (status, answer["error"]["type"]) == (500, "server_error")
            assert "a fault in the server" in answer["error"]["message"]
            assert served.call("POST", COMPLETIONS, GOOD)[0] == 200
        assert served.metrics()['qcut_refused_total{status="500"}'] == 2
        served.idle()
    traced = [record for record in caplog.records if record.exc_info and record.levelno == logging.ERROR]
    assert len(traced) == 2  # once each


class SlowScheduler(qcut.Scheduler):
    """A scheduler that takes a while for each prompt, as a slow tokenizer does."""

    submitted = 0

    def submit_samples(self, *given: Any, **options: Any) -> Any:
        self.submitted += 1
        time.sleep(0.1)
        return super().submit_samples(*given, **options)


def test_client_disconnects_while_prompts_are_submitted() -> None:
    """No further prompt of it is submitted, and what runs ends."""
    with serving(engine(), kind=SlowScheduler) as served:
        with socket.create_connection(("127.0.0.1", served.port), PATIENCE_S) as connection:
            connection.sendall(posted({"prompt": ["x"] * 100, "max_tokens": 90, "ignore_eos": True}))
            until(lambda: served.scheduler.submitted >= 3)  # type: ignore[attr-defined]
        served.idle()
        assert served.call("POST", COMPLETIONS, GOOD)[0] == 200
        time.sleep(0.3)
        assert served.scheduler.submitted < 50  # type: ignore[attr-defined]
        assert served.scheduler.load.running == served.scheduler.load.waiting == 0


def test_all_gauges_return_to_zero() -> None:
    """After answers, refusals, clients that go in every state of a request, and pieces of requests."""
    with serving(engine(), seconds=0.5, limits={"head_s": 0.5, "keep_alive_s": 0.5}) as served:
        served.call("POST", COMPLETIONS, GOOD)
        threads = threading.active_count()
        end = time.monotonic() + 3

        def client(seed: int) -> None:
            draws = random.Random(seed)
            while time.monotonic() < end:
                body: dict[str, Any] = {**GOOD, "max_tokens": draws.randint(1, 80), "n": draws.randint(1, 5)}
                body |= draws.choice([{}, {"stream": True}, {"prompt": ["x"] * 30}, {"top_k": 2**63}, {"logprobs": 5}])
                sent = posted(body)
                with socket.create_connection(("127.0.0.1", served.port), PATIENCE_S) as connection:
                    connection.sendall(sent[: draws.choice([len(sent), len(sent), draws.randrange(len(sent))])])
                    time.sleep(draws.choice([0, 0.002, 0.02, 0.1]))
                    if draws.random() < 0.3:
                        connection.settimeout(1)
                        try:
                            while connection.recv(65536):
                                pass
                        except OSError:
                            pass

        clients = [threading.Thread(target=client, args=(seed,)) for seed in range(6)]
        for each in clients:
            each.start()
        for each in clients:
            each.join()
        served.idle(connections=True)
        found = served.metrics()
        names = ("requests_waiting", "prompts_reading", "sequences_running", "body_bytes")
        assert {name: found[f"qcut_{name}"] for name in names} == dict.fromkeys(names, 0)
        assert found["qcut_connections"] == 1  # that which asks
        assert threading.active_count() <= threads + 2  # executors have up to four threads
