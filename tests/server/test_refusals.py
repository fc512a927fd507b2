"""What a server does not serve, it says; nothing is served by halves."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

import qcut
from qcut.engine.speculation import DraftedLoop
from tests.server.serving import CHATS, COMPLETIONS, NAME, Served, engine, serving

GOOD = {"model": NAME, "prompt": "A list", "max_tokens": 2}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


def without(body: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != name}


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (COMPLETIONS, without(GOOD, "prompt"), "prompt", "required"),
        (COMPLETIONS, {**GOOD, "prompt": ""}, "prompt", "empty string"),
        (COMPLETIONS, {**GOOD, "prompt": []}, "prompt", "prompt"),
        (COMPLETIONS, {**GOOD, "prompt": [[]]}, "prompt", "prompt 0"),
        (COMPLETIONS, {**GOOD, "prompt": ["a", 1]}, "prompt", "found"),
        (COMPLETIONS, {**GOOD, "prompt": [1, 1 << 40]}, "prompt", "token id 1099511627776; allowed: 0 to 8191"),
        (COMPLETIONS, {**GOOD, "prompt": [1, 1 << 80]}, "prompt", "prompt"),
        (COMPLETIONS, {**GOOD, "prompt": [1, 1 << 40], "echo": True}, "prompt", "token id 1099511627776"),
        (COMPLETIONS, {**GOOD, "prompt": [-1], "echo": True, "stream": True}, "prompt", "token id -1"),
        (COMPLETIONS, {**GOOD, "prompt": [-1]}, "prompt", "token id -1"),
        (COMPLETIONS, {**GOOD, "prompt": {"text": "x"}}, "prompt", "found"),
        (COMPLETIONS, {**GOOD, "prompt": "word " * 200}, "prompt", "maximum context length is 96 tokens"),
        (COMPLETIONS, {**GOOD, "prompt": "\ud800"}, None, "JSON"),
        (COMPLETIONS, {**GOOD, "max_tokens": 0}, "max_tokens", "1 and more, or 0 with echo"),
        (COMPLETIONS, {**GOOD, "max_tokens": -2}, "max_tokens", "found -2"),
        (CHATS, {**CHAT, "max_tokens": 0}, "max_tokens", "1 and more"),
        (CHATS, {**CHAT, "max_completion_tokens": 0}, "max_completion_tokens", "1 and more"),
        (COMPLETIONS, {**GOOD, "max_tokens": "2"}, "max_tokens", 'found "2"'),
        (COMPLETIONS, {**GOOD, "max_tokens": 2.5}, "max_tokens", "found 2.5"),
        (COMPLETIONS, {**GOOD, "max_tokens": True}, "max_tokens", "found true"),
        (COMPLETIONS, {**GOOD, "n": 5}, "n", "n: found 5; allowed: 1 to 4"),
        (COMPLETIONS, {**GOOD, "n": 0}, "n", "greater"),
        (COMPLETIONS, {**GOOD, "temperature": -1}, "temperature", "temperature -1"),
        (COMPLETIONS, {**GOOD, "temperature": "hot"}, "temperature", 'found "hot"'),
        (COMPLETIONS, {**GOOD, "top_p": 0}, "top_p", "top_p"),
        (COMPLETIONS, {**GOOD, "top_k": -2}, "top_k", "greater than or equal to -1"),
        (COMPLETIONS, {**GOOD, "top_k": 1 << 63}, "top_k", "less than or equal to"),
        (COMPLETIONS, {**GOOD, "min_p": 2}, "min_p", "min_p"),
        (COMPLETIONS, {**GOOD, "repetition_penalty": 0}, "repetition_penalty", "repetition_penalty"),
        (COMPLETIONS, {**GOOD, "presence_penalty": 1e9}, "presence_penalty", "presence_penalty"),
        (COMPLETIONS, {**GOOD, "logprobs": 21}, "logprobs", "20"),
        (COMPLETIONS, {**GOOD, "stop": ""}, "stop", "1 character"),
        (COMPLETIONS, {**GOOD, "stop": ["x"] * 65}, "stop", "64"),
        (COMPLETIONS, {**GOOD, "stop_token_ids": ["x"]}, "stop_token_ids", "found"),
        (COMPLETIONS, {**GOOD, "suffix": "end"}, "suffix", 'found "end"; allowed: '),
        (COMPLETIONS, {**GOOD, "best_of": 3}, "best_of", "found 3; allowed: 1, which is n"),
        (COMPLETIONS, {**GOOD, "logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        (COMPLETIONS, {**GOOD, "logit_bias": {"٣": 1}}, "logit_bias", "token ids"),
        (COMPLETIONS, {**GOOD, "logit_bias": {"5": 101}}, "logit_bias", "-100 to 100"),
        (COMPLETIONS, {**GOOD, "logit_bias": {"8192": 1}}, "logit_bias", "8192"),
        (COMPLETIONS, {**GOOD, "min_tokens": 3}, "min_tokens", "found 3; allowed: 0 to 2"),
        (COMPLETIONS, {**GOOD, "stream_options": 1}, "stream_options", "found 1"),
        (CHATS, without(CHAT, "messages"), "messages", "required"),
        (CHATS, {**CHAT, "messages": []}, "messages", "at least 1 item"),
        (CHATS, {**CHAT, "messages": ["x"]}, "messages", "found"),
        (CHATS, {**CHAT, "messages": [{"role": "user"}]}, "messages", "required"),
        (CHATS, {**CHAT, "messages": [{"role": 1, "content": "x"}]}, "messages", "found 1"),
        (CHATS, {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "text"),
        (CHATS, {**CHAT, "chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs", "variable 'tokenize'"),
        (CHATS, {**CHAT, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "t"),
        (CHATS, {**CHAT, "top_logprobs": 2}, "top_logprobs", "logprobs true"),
        (CHATS, {**CHAT, "top_logprobs": 21, "logprobs": True}, "top_logprobs", "20"),
        (CHATS, {**CHAT, "tools": [{"type": "function"}]}, "tools", "allowed"),
        (CHATS, {**CHAT, "response_format": {"type": "yaml"}}, "response_format", "text, json_object, json_schema"),
        (CHATS, {**CHAT, "tools": [], "temperature": []}, "temperature", "found"),
    ],
)
def test_wrong_fields(served: Served, path: str, body: dict[str, Any], param: str | None, words: str) -> None:
    status, answer, _ = served.call("POST", path, body)
    assert status == 400, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert words in error["message"]
    assert (error["param"] or "").split(".")[0] == (param or "")
    assert len(error["message"]) < 1000


def test_too_long_prompt_has_openais_code(served: Served) -> None:
    _, answer, _ = served.call("POST", COMPLETIONS, {**GOOD, "prompt": "word " * 200})
    assert answer["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": NaN}'),
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": [1' + b"9" * 500 + b"]}",
        b"[" * 2000,
        b'{"prompt":' * 400,
        b'{"prompt": "x"} {"prompt": "y"}',
    ],
)
def test_bodies_that_are_no_requests(served: Served, body: bytes) -> None:
    status, answer, _ = served.call("POST", COMPLETIONS, body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"


def test_paths_and_methods(served: Served) -> None:
    for method, path, expected in (
        ("GET", "/nowhere", 404),
        ("GET", COMPLETIONS, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/other", 404),
    ):
        status, answer, _ = served.call(method, path)
        assert (status, "error" in answer) == (expected, True), path
        assert expected != 405 or "; allowed: " in answer["error"]["message"]
    status, answer, _ = served.call("POST", COMPLETIONS, {**GOOD, "model": "gpt-4o"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "--any-model" in answer["error"]["message"]


def test_a_long_body(served: Served) -> None:
    """By what it says of itself, and by what comes."""
    body = {**GOOD, "prompt": "x" * 5000}
    status, answer, headers = served.call("POST", COMPLETIONS, body)
    assert (status, answer["error"]["code"], headers["connection"]) == (413, "too_long", "close")
    assert "4096" in answer["error"]["message"]
    with socket.create_connection(("127.0.0.1", served.port), 60) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(5):
            connection.sendall(b"400\r\n" + b" " * 1024 + b"\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
        rest = b"".join(iter(lambda: connection.recv(4096), b""))
        assert rest == b"" or b"too_long" in rest


def test_another_type_than_json(served: Served) -> None:
    """A page of another origin may send text without asking the browser."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        status, answer, _ = served.call("POST", COMPLETIONS, GOOD, Content_Type=kind)
        assert (status, answer["error"]["code"]) == (415, "content_type")
    assert served.call("POST", COMPLETIONS, GOOD, Content_Type="Application/JSON; charset=utf-8")[0] == 200
    status, answer, _ = served.call("POST", COMPLETIONS, GOOD, Content_Encoding="gzip")
    assert (status, answer["error"]["code"]) == (415, "content_encoding")


def test_who_asks() -> None:
    """Hosts, keys, pages elsewhere; a body that does not come; a queue that is full; tokens beyond the limit."""
    one = engine(batch=1)
    own = {"hosts": {"127.0.0.1", "localhost"}, "origins": ("http://pages.example",), "key": "s\u00e9cret"}
    with serving(one, max_waiting=1, seconds=0.3, most_tokens=60, **own) as served:
        key = "Bearer s\u00e9cret".encode().decode("latin-1")
        assert served.call("GET", "/health")[0] == 200
        assert served.call("GET", "/")[0] == 200
        for wrong in ("", "Bearer", "Bearer secret", "Basic s\u00e9cret", "s\u00e9cret"):
            for path in ("/v1/models", "/metrics"):
                status, answer, headers = served.call("GET", path, Authorization=wrong)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
                assert headers["www-authenticate"] == "Bearer"
        assert served.call("GET", "/v1/models", Authorization=key)[0] == 200
        for host in ("evil.example", f"evil.example:{served.port}", "", "[", "127.0.0.1.evil.example"):
            assert served.call("GET", "/health", Host=host)[0] == 403
        assert served.call("GET", "/health", Host=f"LOCALHOST:{served.port}")[0] == 200
        asked = {
            "Origin": "http://pages.example",
            "Access_Control_Request_Method": "POST",
            "Access_Control_Request_Headers": "authorization,content-type,x-stainless-arch,x-any-client",
            "Access_Control_Request_Private_Network": "true",  # Chrome, for a server on this machine
        }
        status, _, headers = served.call("OPTIONS", COMPLETIONS, **asked)
        assert (status, headers["access-control-allow-origin"]) == (200, "http://pages.example")
        assert "x-stainless-arch" in headers["access-control-allow-headers"]
        headers = served.call("GET", "/health", Origin="http://pages.example")[2]
        assert headers["access-control-expose-headers"] == "Retry-After"
        status, _, headers = served.call("OPTIONS", COMPLETIONS, **{**asked, "Origin": "http://evil.example"})
        assert "access-control-allow-origin" not in headers

        with socket.create_connection(("127.0.0.1", served.port), 60) as connection:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {key}\r\nContent-Length: 9\r\n"
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{{".encode("latin-1"))
            assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")

        # One prompt runs, one waits, the third is one too many, and so is all that came with it.
        body = {"prompt": ["A", "B", "C", "D"], "max_tokens": 90, "ignore_eos": True}
        status, answer, headers = served.call("POST", COMPLETIONS, body, Authorization=key)
        assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "busy", "1")
        assert answer["error"]["type"] == "server_error"
        served.idle()
        status, answer, _ = served.call("POST", COMPLETIONS, {**body, "prompt": "A"}, Authorization=key)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 60)
        figures = served.metrics(Authorization=key)
        assert [figures[f'qcut_refused_total{{status="{status}"}}'] for status in (408, 503)] == [1, 1]


def test_a_tokenizer_without_a_template_for_chats(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.scheduler.engine.tokenizer, "chat_template", None)
    status, answer, _ = served.call("POST", CHATS, CHAT)
    assert status == 400
    assert "no chat template" in answer["error"]["message"]


def test_drafts_are_counted(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftedLoop, "cost", lambda loop, width, choose=None: 1.0)
    body = {"prompt": "one two three " * 8, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    want = served.call("POST", COMPLETIONS, body)[1]
    names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
    assert [want["usage"]["completion_tokens_details"][name] for name in names] == [0, 0]
    with serving(engine(speculate=qcut.Lookup())) as drafted:
        plain = drafted.call("POST", COMPLETIONS, {**body, "speculate": False})[1]
        before = drafted.metrics()
        found = drafted.call("POST", COMPLETIONS, {**body, "n": 2})[1]
        after = drafted.metrics()
    assert [choice["text"] for choice in found["choices"]] == [want["choices"][0]["text"]] * 2
    assert (plain["choices"], plain["usage"]) == (want["choices"], want["usage"])
    assert (before["qcut_drafted_tokens_total"], before["qcut_steps_total"]) == (0, 23)
    accepted, rejected = (found["usage"]["completion_tokens_details"][name] for name in names)
    assert after["qcut_accepted_tokens_total"] == accepted > 10
    assert after["qcut_drafted_tokens_total"] == accepted + rejected
    assert after["qcut_steps_total"] < 23 + 23


def test_metrics_count(served: Served) -> None:
    before = served.metrics()
    assert served.call("POST", COMPLETIONS, {**GOOD, "max_tokens": 7, "n": 2, "ignore_eos": True})[0] == 200
    assert served.call("POST", COMPLETIONS, {**GOOD, "n": 0})[0] == 400
    after = served.metrics()

    def more(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert more("qcut_new_tokens_total") == 14
    assert more('qcut_requests_total{reason="length"}') == 2
    assert more("qcut_time_to_first_token_seconds_count") == 2
    assert more("qcut_time_between_tokens_seconds_count") == 12
    assert more("qcut_sequence_seconds_count") == 2
    assert more('qcut_refused_total{status="400"}') == 1
    assert after["qcut_sequences_most"] == served.scheduler.engine.batch
    assert after["qcut_cache_bytes"] == served.scheduler.cache_bytes > 0
    assert json.dumps(after)
