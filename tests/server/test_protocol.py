"""What vLLM's server answers for a text model, asked over HTTP."""

from __future__ import annotations

import json
import logging
from itertools import groupby
from typing import Any

import pytest

import qcut
from tests.server.serving import CHATS, COMPLETIONS, NAME, RESPONSES, Served, engine, serving, until

TEXT = "The import statement"
USER = {"role": "user", "content": "What is a list?"}
PROMPT = "user: What is a list?\nassistant:"


def ask(served: Served, path: str, body: dict[str, Any]) -> Any:
    status, answer, _ = served.call("POST", path, {"temperature": 0, **body})
    assert status == 200, answer
    return answer


def complete(served: Served, prompt: Any = TEXT, count: int = 8, **more: Any) -> Any:
    return ask(served, COMPLETIONS, {"prompt": prompt, "max_tokens": count, **more})


def events(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = ask(served, path, {**body, "stream": True})
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


# ── scoring ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_scores_the_prompt(served: Served, count: int, stream: bool) -> None:
    """As the engine does, token by token."""
    ids = served.alone.tokenizer(TEXT)["input_ids"]
    body = {"prompt": ids, "max_tokens": count, "echo": True, "logprobs": 2, "ignore_eos": True}
    if stream:
        parts = [event["choices"][0] for event in events(served, COMPLETIONS, body)]
        text = "".join(part["text"] for part in parts)
        several = [part["logprobs"] for part in parts if part["logprobs"]]
        found = {name: [one for each in several for one in each[name]] for name in several[0]}
    else:
        (choice,) = complete(served, **body)["choices"]
        text, found = choice["text"], choice["logprobs"]
    (scores,) = served.alone.score([ids])
    assert text == TEXT + (served.text(TEXT, count) if count else "")
    assert "".join(found["tokens"]) == text
    assert found["text_offset"] == [len("".join(found["tokens"][:i])) for i in range(len(ids) + count)]
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    assert found["token_logprobs"][1 : len(ids)] == pytest.approx((-scores).tolist(), abs=1e-3)
    assert all(len(top) == 2 for top in found["top_logprobs"][1:])


def test_a_prompt_alone_is_echoed(served: Served) -> None:
    answer = complete(served, [TEXT, "A list"], 0, echo=True, n=2)
    assert [choice["text"] for choice in answer["choices"]] == [TEXT, TEXT, "A list", "A list"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 4
    assert answer["usage"]["completion_tokens"] == 0


def test_lines_of_a_stream_as_python_splits_them(served: Served) -> None:
    text = "a\u2028b\u2029c\x85d\x1ce\x0bf"
    body = {"prompt": text, "echo": True, "max_tokens": 1, "stream": True}
    lines = served.call("POST", COMPLETIONS, body)[1].splitlines()  # as iter_lines of httpx does
    assert all(line in ("", "data: [DONE]") or line.startswith("data: {") for line in lines)
    assert json.loads(lines[0][6:])["choices"][0]["text"] == text


def test_ids_of_tokens(served: Served) -> None:
    (choice,) = complete(served, count=3, return_token_ids=True, logprobs=1, return_tokens_as_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == served.alone.tokenizer(TEXT)["input_ids"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert served.alone.tokenizer.decode(choice["token_ids"]) == choice["text"]
    body = {"messages": [USER], "max_tokens": 3, "return_token_ids": True}
    parts = [event["choices"][0] for event in events(served, CHATS, body)]
    streamed = [token for part in parts for token in part.get("token_ids", ())]
    assert streamed == ask(served, CHATS, body)["choices"][0]["token_ids"]


# ── how tokens are chosen, and what ends them ─────────────────────────────────────────────────────


def test_a_bias_decides(served: Served) -> None:
    (banned,) = served.alone.generate(TEXT, 1)[0].tokens
    answer = complete(served, count=6, logit_bias={str(banned): -100}, return_token_ids=True)
    assert banned not in answer["choices"][0]["token_ids"]
    answer = complete(served, count=3, logit_bias={"77": 100}, return_token_ids=True, ignore_eos=True)
    assert answer["choices"][0]["token_ids"] == [77, 77, 77]


def test_no_stop_before_min_tokens(served: Served) -> None:
    (found,) = served.alone.generate(TEXT, 8)
    first = found.tokens[0]
    assert complete(served, stop_token_ids=[first])["usage"]["completion_tokens"] == 1
    longer = complete(served, stop_token_ids=[first], min_tokens=4)
    assert longer["usage"]["completion_tokens"] >= 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_may_be_kept(served: Served, stream: bool) -> None:
    whole = served.text(TEXT, 30)
    word = whole.split()[3]
    cut = whole[: whole.index(word)]
    for keeps, expected in ((False, cut), (True, cut + word)):
        body = {"prompt": TEXT, "max_tokens": 30, "stop": ["never", word], "include_stop_str_in_output": keeps}
        if stream:
            text = "".join(event["choices"][0]["text"] for event in events(served, COMPLETIONS, body))
        else:
            text = complete(served, **{**body, "count": 30})["choices"][0]["text"]
        assert text == expected


def test_special_tokens_stop_and_are_shown(served: Served) -> None:
    tokenizer = served.alone.tokenizer
    end = tokenizer.eos_token
    body = {"logit_bias": {str(tokenizer.eos_token_id): 100}, "ignore_eos": True}
    (choice,) = complete(served, count=3, stop=end, **body)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert complete(served, count=2, skip_special_tokens=False, **body)["choices"][0]["text"] == end * 2
    assert complete(served, count=2, **body)["choices"][0]["text"] == ""


# ── prompts ──────────────────────────────────────────────────────────────────────────────────────


def test_how_a_chat_becomes_a_prompt() -> None:
    one = engine()
    one.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{{ '\n' if not loop.last or add_generation_prompt else '' }}{% endfor %}"
        "{{ 'think' if think }}{{ 'assistant:' if add_generation_prompt }}"
    )
    begun = [USER, {"role": "assistant", "content": "A list is"}]
    with serving(one) as served:
        for messages, more, text in (
            ([USER], {}, PROMPT),
            ([USER], {"add_generation_prompt": False}, "user: What is a list?"),
            ([USER], {"chat_template_kwargs": {"think": True}}, "user: What is a list?\nthinkassistant:"),
            (begun, {"continue_final_message": True}, "user: What is a list?\nassistant: A list is"),
        ):
            body = {"messages": messages, "max_tokens": 1, "return_token_ids": True, **more}
            ids = ask(served, CHATS, body)["choices"][0]["prompt_token_ids"]
            assert served.alone.tokenizer.decode(ids) == text
            assert ask(served, "/tokenize", {"messages": messages, **more})["tokens"] == ids


def test_tokenize_and_back(served: Served) -> None:
    tokenizer = served.alone.tokenizer
    found = ask(served, "/tokenize", {"prompt": TEXT, "return_token_strs": True, "model": NAME})
    ids = tokenizer(TEXT)["input_ids"]
    assert found == {
        "count": len(ids),
        "max_model_len": served.alone.context,
        "tokens": ids,
        "token_strs": tokenizer.convert_ids_to_tokens(ids),
    }
    assert ask(served, "/detokenize", {"tokens": ids}) == {"prompt": TEXT}
    assert ask(served, "/tokenize", {"prompt": ""})["tokens"] == tokenizer("")["input_ids"]
    status, info, _ = served.call("GET", "/tokenizer_info")
    assert (status, info["eos_token"], info["chat_template"]) == (200, tokenizer.eos_token, tokenizer.chat_template)
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("/detokenize", {"tokens": [1 << 40]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
    ):
        status, answer, _ = served.call("POST", path, body)
        assert (status, answer["error"]["param"]) == (404 if param == "model" else 400, param)


# ── streams ──────────────────────────────────────────────────────────────────────────────────────


def test_usage_in_every_piece(served: Served) -> None:
    """As guidellm asks for it."""
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What is a list?"}]}],
        "max_completion_tokens": 5,
        "max_tokens": 5,
        "stop": None,
        "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    pieces = events(served, CHATS, body)
    counts = [piece["usage"]["completion_tokens"] for piece in pieces]
    assert counts == sorted(counts)
    assert (counts[-1], pieces[-1]["choices"]) == (5, [])


# ── responses ────────────────────────────────────────────────────────────────────────────────────


def test_a_response(served: Served) -> None:
    answer = ask(served, RESPONSES, {"input": USER["content"], "max_output_tokens": 6, "metadata": {"a": "b"}})
    text = served.text(PROMPT, 6)
    assert answer["output"][0]["content"] == [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    assert (answer["object"], answer["status"], answer["store"]) == ("response", "incomplete", False)
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["usage"]["output_tokens"] == 6
    assert answer["metadata"] == {"a": "b"}
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": USER["content"]}]}]
    again = ask(
        served, RESPONSES, {"input": items, "max_output_tokens": 6, "include": ["message.output_text.logprobs"]}
    )
    part = again["output"][0]["content"][0]
    assert ("".join(row["token"] for row in part["logprobs"]), part["text"]) == (text, text)
    back = ask(served, RESPONSES, {"input": [*items, answer["output"][0], *items], "max_output_tokens": 4})
    begun = f"user: What is a list?\nassistant: {text}\nuser: What is a list?\nassistant:"
    assert back["output"][0]["content"][0]["text"] == served.text(begun, 4)
    for method, path in (("GET", f"{RESPONSES}/resp_1"), ("POST", f"{RESPONSES}/resp_1/cancel")):
        status, answer, _ = served.call(method, path)
        assert (status, answer["error"]["code"]) == (404, "not_stored")


def test_events_of_a_response(served: Served) -> None:
    body: dict[str, Any] = {"input": "What is a list?", "max_output_tokens": 6, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    found = events(served, RESPONSES, body)
    kinds = [event["type"] for event in found]
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    begin = ("created", "in_progress", "output_item.added", "content_part.added")
    end = ("output_text.done", "content_part.done", "output_item.done", "incomplete")
    assert kinds[:4] == [f"response.{kind}" for kind in begin]
    assert kinds[-4:] == [f"response.{kind}" for kind in end]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    whole = served.text(PROMPT, 6)
    assert "".join(event["delta"] for event in deltas) == found[-4]["text"] == whole
    assert found[-1]["response"]["usage"]["output_tokens"] == 6
    text = ask(served, RESPONSES, {**body, "stream": True})
    lines = [line for line in text.splitlines() if line]
    named = [line[7:] for line in lines[::2]]  # as many deltas as the server had time for
    assert [kind for kind, _ in groupby(named)] == [kind for kind, _ in groupby(kinds)]
    assert "[DONE]" not in text


# ── what a server says of itself ─────────────────────────────────────────────────────────────────


def test_small_endpoints(served: Served) -> None:
    assert served.call("GET", "/version")[:2] == (200, {"version": qcut.__version__})
    assert served.call("GET", "/load")[:2] == (200, {"server_load": 0})
    assert [served.call(method, "/ping")[0] for method in ("GET", "POST")] == [200, 200]
    status, record, _ = served.call("GET", f"/v1/models/{NAME}")
    assert (status, record["max_model_len"]) == (200, served.alone.context)


def test_the_description_has_every_field_and_path(served: Served) -> None:
    status, found, _ = served.call("GET", "/openapi.json")
    assert (status, found["openapi"]) == (200, "3.1.0")
    body = found["paths"][CHATS]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = found["components"]["schemas"][body.rpartition("/")[2]]
    assert {"messages", "min_tokens", "logit_bias", "chat_template_kwargs"} <= schema["properties"].keys()
    assert schema["required"] == ["messages"]
    for path, methods in found["paths"].items():
        for method in methods:
            status = served.call(method.upper(), path.replace("{model}", NAME), b"{}" if method == "post" else None)[0]
            assert status in (200, 400), path
    status, page, headers = served.call("GET", "/docs")
    assert status == 200
    assert all(path in page for path in found["paths"])
    assert "http" not in page
    assert "default-src 'none'" in headers["content-security-policy"]


def test_names_of_models() -> None:
    with serving(engine(batch=1), any_model=True, strict=True) as served:
        for name in ("gpt-4o", NAME, None):
            answer = ask(served, COMPLETIONS, {"prompt": "A", "max_tokens": 1, "model": name})
            assert answer["model"] == (name or NAME)
        assert served.call("GET", "/v1/models/gpt-4o")[0] == 200
        status, answer, _ = served.call("POST", COMPLETIONS, {"prompt": "A", "max_token": 1})
        assert (status, answer["error"]["code"]) == (400, "unknown")


def test_a_line_for_each_request(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Refusals of earlier tests may have reached the limit of lines in a minute.
    monkeypatch.setattr(logging.getLogger("qcut.server"), "filters", [])
    with caplog.at_level("INFO", "qcut.server"):
        complete(served, count=2, n=2, ignore_eos=True)
        served.call("POST", COMPLETIONS, {"prompt": "A", "n": "two\nlines"})
        served.call("GET", "/nowhere")
        served.call("GET", "/health")
        until(lambda: len(caplog.records) >= 3, lambda: caplog.records)  # lines come after answers
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in lines] == ["INFO", "WARNING", "WARNING"]
    read = len(served.alone.tokenizer(TEXT)["input_ids"])
    for (_, line), words in zip(
        lines,
        (
            ("POST /v1/completions 200 in ", f"s: 2 sequences, 4 new tokens after {read}"),
            ("POST /v1/completions 400 in ", 'n: found "two\\nlines"'),
            ("GET /nowhere 404 in ", "GET /docs lists what is served"),
        ),
        strict=True,
    ):
        assert all(word in line for word in words), line
        assert "\n" not in line
