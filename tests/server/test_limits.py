"""What a request may cost before it is refused: its JSON, its text, its share of threads, memory and the log."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qcut.errors import ConfigError, ContextError
from qcut.server.application import Settings
from qcut.server.bodies import Chat, Text
from qcut.server.guards import BodyMemory, is_loopback
from qcut.server.limits.executors import LARGE_BYTES, Executors
from qcut.server.limits.json_body import MOST_DEPTH, MOST_FIELDS, MOST_NESTED, parse_json
from qcut.server.limits.log_lines import LogLimit
from qcut.server.limits.prompts import PromptLimit
from qcut.server.refusals import Refusal
from tests.server.serving import COMPLETIONS, Served, engine, serving

HALF = 1 << 20


def refused(data: bytes) -> str:
    with pytest.raises(Refusal) as found:
        parse_json(data)
    assert found.value.status == 400
    return str(found.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[" * HALF, "more arrays and objects"),
        (b'{"a":' * HALF, "more arrays and objects"),
        (b'{"a":[' + b"{}," * HALF + b"{}]}", "more arrays and objects"),
        (b'{"a":' * (MOST_DEPTH + 1) + b"1" + b"}" * (MOST_DEPTH + 1), "deeper"),
        (b"{" + b",".join(b'"%d":1' % i for i in range(MOST_FIELDS + 1)) + b"}", "4097 fields"),
        (b'{"a":[{"b":{' + b",".join(b'"%d":1' % i for i in range(MOST_FIELDS + 1)) + b"}}]}", "4097 fields"),
        (b'{"a":NaN}', "no JSON"),
        (b'{"a":-Infinity}', "no JSON"),
        (b'{"a":1' + b"0" * HALF + b"}", "no JSON"),
        (b'{"a":"' + b"\\" * HALF, "no JSON"),
        (b"[" * (MOST_NESTED + 1) + b'\\"' * HALF, "more arrays and objects"),
        (b"[1]", "array"),
        (b"1e999", "number"),
        (b"true", "truth value"),
    ],
)
def test_json_that_is_refused(data: bytes, words: str) -> None:
    start = time.process_time()
    assert words in refused(data)
    assert time.process_time() - start < 2


def test_json_at_its_limits() -> None:
    wide = {str(i): i for i in range(MOST_FIELDS)}
    assert parse_json(json.dumps({"a": wide}).encode()) == {"a": wide}
    deep: Any = 1
    for _ in range(MOST_DEPTH):
        deep = {"a": deep}
    assert parse_json(json.dumps(deep).encode()) == deep
    many: Any = {"a": [[]] * (MOST_NESTED - 2)}
    assert parse_json(json.dumps(many).encode()) == many
    text = {"a": '[{\\"' * HALF}  # brackets of a text are none of JSON's
    assert parse_json(json.dumps(text).encode()) == text
    assert parse_json(b'\xef\xbb\xbf{"a":1}') == {"a": 1}


@pytest.mark.parametrize(
    "field",
    [
        *("top_k", "seed", "max_tokens", "n", "logprobs", "temperature", "top_p", "min_p", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty", "min_tokens", "best_of"),
    ],
)
@pytest.mark.parametrize(
    "value", ["9223372036854775808", "-9223372036854775809", "1e999", "-1e999", "NaN", '"1"', "[1]"]
)
def test_numbers_have_ranges(served: Served, field: str, value: str) -> None:
    """Each is refused by the server, in a body that is otherwise served."""
    rest = '"prompt": "x", "max_tokens": 1' if field != "max_tokens" else '"prompt": "x"'
    status, answer, _ = served.call("POST", COMPLETIONS, f'{{{rest}, "{field}": {value}}}'.encode())
    if value == "9223372036854775808" and field in ("seed", "temperature", "repetition_penalty"):  # within 64 bits
        assert status == 200
        return
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/v1/responses"])
def test_refusals_of_ranges_name_their_field(served: Served, path: str) -> None:
    wrong = {
        "temperature": -1,
        "top_p": 0,
        "min_p": 2,
        "top_k": 2**31,
        "repetition_penalty": 0,
        "presence_penalty": 101,
        "frequency_penalty": -101,
        "logit_bias": {"9999999": 1},
        "seed": 2**64,
        "n": 1000,
    }
    prompt = {COMPLETIONS: "prompt", "/v1/responses": "input"}.get(path, "messages")
    chat = [{"role": "user", "content": "x"}]
    for field, value in wrong.items():
        body = {prompt: "x" if path == COMPLETIONS else chat, field: value}
        status, answer, _ = served.call("POST", path, body)
        assert (status, answer["error"]["param"]) == (400, field), answer


@pytest.mark.parametrize("value", [2**63, -1, 2**31 + 5, 8192])
def test_stop_tokens_have_a_range(served: Served, value: int) -> None:
    body = {"prompt": "x", "max_tokens": 2, "stop_token_ids": [value]}
    assert served.call("POST", COMPLETIONS, body)[0] in ((400,) if value < 0 or value >= 2**63 else (200, 400))
    assert served.call("GET", "/health")[0] == 200


def words(normalizer: Any = None) -> Any:
    """A tokenizer of words of three bytes and single bytes."""
    tokenizer = Tokenizer(models.WordLevel({"abc": 0, "?": 1, "d": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")


def test_long_texts_are_refused_before_they_are_tokenized() -> None:
    limit = PromptLimit(words(), 3, 100)
    start = time.process_time()
    for prompt in (Text("abc " * HALF), Chat([{"role": "user", "content": "abc " * HALF}]), Text("d" * HALF)):
        with pytest.raises(ContextError, match="context is 100 tokens, of at most 300 bytes"):
            limit.check(prompt)
    assert time.process_time() - start < 1
    limit.check(Text("abc " * 400))  # perhaps too long, which the engine sees
    limit.check([1] * HALF)


def test_a_normalizer_may_shorten_a_text() -> None:
    """A long text is judged by the tokens that the normalizer leaves of its first part."""
    limit = PromptLimit(words(normalizers.Replace(" ", "")), 3, 100)
    limit.check(Text(" " * HALF + "abc"))
    spaced = PromptLimit(words(normalizers.Lowercase()), 3, 100)
    with pytest.raises(ContextError, match="more than 200 tokens"):
        spaced.check(Text("ABC " * HALF))


def test_a_long_prompt_is_refused_by_its_context(served: Served) -> None:
    with serving(engine(), most_body=4 << 20) as large:
        for text in ("word " * 400_000, "a" * 2_000_000, "\u00e9" * 600_000):
            for path, body in (
                (COMPLETIONS, {"prompt": text}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
            ):
                start = time.monotonic()
                status, answer, _ = large.call("POST", path, body)
                assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
                assert time.monotonic() - start < 5


def test_small_requests_do_not_wait_for_large_ones() -> None:
    async def scenario() -> None:
        executors, release = Executors(), threading.Event()
        large = [asyncio.ensure_future(executors.run(LARGE_BYTES, release.wait)) for _ in range(8)]
        assert await asyncio.wait_for(executors.run(LARGE_BYTES - 1, lambda: 3), 10) == 3
        release.set()
        assert await asyncio.gather(*large) == [True] * 8

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), BaseException("panic")])
def test_no_thread_ends_the_event_loop(error: BaseException) -> None:
    def fails() -> None:
        raise error

    async def scenario() -> None:
        with pytest.raises(RuntimeError, match=type(error).__name__):
            await Executors().run(0, fails)

    asyncio.run(scenario())


def test_bodies_share_a_memory(served: Served) -> None:
    memory, first, second = BodyMemory(100), {"type": "http"}, {"type": "http"}
    memory.take(first, 60)
    with pytest.raises(Refusal, match="allowed: 100") as found:
        memory.take(second, 50)
    assert found.value.status == 503
    memory.release(second)
    memory.release(first)
    memory.release(first)
    assert memory.held == 0
    memory.take(second, 100)


def test_more_prompts_than_may_wait(served: Served) -> None:
    with serving(engine(), most_prompts=8) as small:
        status, answer, _ = small.call("POST", COMPLETIONS, {"prompt": ["x"] * 9, "max_tokens": 1})
        assert (status, answer["error"]["param"]) == (400, "prompt")
        assert small.call("POST", COMPLETIONS, {"prompt": ["x"] * 8, "max_tokens": 1})[0] == 200


@pytest.mark.parametrize("more", [{"n": 4}, {"n": 3, "echo": True}])
def test_more_log_probabilities_than_memory_holds(served: Served, more: dict[str, Any]) -> None:
    body = {"prompt": [[1]] * 380, "logprobs": 20, "max_tokens": 90, **more}
    status, answer, _ = served.call("POST", COMPLETIONS, body)
    assert (status, answer["error"]["param"]) == (400, "logprobs")
    assert "allowed: 2097152" in answer["error"]["message"]


def test_the_log_counts_what_it_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    log, limit = logging.getLogger("qcut.test"), LogLimit(most=2, period_s=0.2)
    log.addFilter(limit)
    for i in range(10):
        log.warning("refused %s", i)
        log.warning("another %s", i)
    time.sleep(0.25)
    log.warning("refused %s", 10)
    log.removeFilter(limit)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("refused")]
    assert lines == ["refused 0", "refused 1", "refused 10 (8 lines like this were left out)"]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        *(("key", key, "API key") for key in ("", " ", "a ", "\n", "a\nb", "a\x00b")),
        *(("hosts", ["proxy", h], "--allow-host") for h in ("", "proxy:8080", "http://proxy", "a/b", "me@proxy")),
        *(("origins", [o], "--allow-origin") for o in ("", "a.example", "https://a.example/", "https://", "://a")),
        ("origins", ["HTTPS://a.example"], "--allow-origin"),
        *(("name", name, "--served-name") for name in ("", "a" * 4097)),
    ],
)
def test_settings_that_are_refused(field: str, value: Any, words: str) -> None:
    Settings("name", hosts=["proxy.example", "Proxy"], origins=["*", "https://a.example", "http://localhost:3000"])
    with pytest.raises(ConfigError, match=words):
        Settings(**{"name": "name", field: value})


def test_addresses_of_this_machine_alone() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.0.0.2", "127.255.255.254", "::1", "::ffff:127.0.0.1", "::1%lo"]))
    assert not any(
        map(is_loopback, ["", "localhost", "0.0.0.0", "::", "10.0.0.1", "128.0.0.1", "127.0.0.1.evil.example"])
    )
