"""Calls that a request forces: the tests' model, which has never seen a tool, calls functions."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.server.serving import CHATS, NAME, Served, engine, serving
from tests.server.tools.scripted import HERMES, TIME, USER, with_special_tokens

pytest.importorskip("llguidance")

KIND = {"enum": ["sun", "rain"]}
PARAMETERS = {"type": "object", "properties": {"kind": KIND}, "required": ["kind"], "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "weather"}}
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
PLAIN = HERMES.replace("<think>", "").replace("</think>", "")
DRAWN = {"temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module", params=[False, True], ids=["text", "special"])
def caller(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server of a chat template with tools; its markers are text or special tokens."""
    with calling(PLAIN, request.param, strict=True) as found:
        yield found


@contextmanager
def calling(template: str, has_markers: bool, **settings: Any) -> Iterator[Served]:
    markers = MARKERS if has_markers else ()

    def wrap(tokenizer: Any) -> Any:
        return with_special_tokens(tokenizer, markers, template)

    with serving(engine(context=512, wrap=wrap), **settings) as found:
        yield found


def answered(served: Served, path: str = CHATS, **body: Any) -> Any:
    status, answer, _ = served.call("POST", path, body)
    assert status == 200, answer
    return answer


def called(served: Served, **body: Any) -> list[list[tuple[str, Any]]]:
    """Names and arguments of the calls of each choice."""
    answer = answered(served, messages=[USER], **{"max_tokens": 150, **DRAWN, **body})
    found = []
    for choice in answer["choices"]:
        assert choice["message"]["content"] is None
        assert choice["finish_reason"] == "tool_calls"
        calls = [call["function"] for call in choice["message"]["tool_calls"]]
        found.append([(call["name"], json.loads(call["arguments"])) for call in calls])
    return found


def is_weather(call: tuple[str, Any]) -> bool:
    return call[0] == "weather" and call[1] in ({"kind": "sun"}, {"kind": "rain"})


def test_one_of_several_functions(caller: Served) -> None:
    found = called(caller, tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False, n=4)
    assert all(len(calls) == 1 for calls in found)
    assert all(is_weather(call) or call == ("time", {}) for (call,) in found)


def test_several_calls(caller: Served) -> None:
    newline = {str(caller.alone.tokenizer("\n")["input_ids"][0]): 20}
    body = {"tools": [WEATHER, TIME], "tool_choice": "required", "logit_bias": newline, "max_tokens": 60}
    choice = answered(caller, messages=[USER], **DRAWN, **body)["choices"][0]
    assert len(choice["message"]["tool_calls"]) > 1


@pytest.mark.parametrize(
    "choice",
    [NAMED, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}],
)
def test_functions_by_their_names(caller: Served, choice: Any) -> None:
    for calls in called(caller, tools=[TIME, WEATHER], tool_choice=choice, parallel_tool_calls=False, n=4):
        assert all(map(is_weather, calls))
        assert len(calls) == 1


def test_allowed_tools_of_auto(caller: Served) -> None:
    """The chat template gets only the functions that may be called."""

    def prompt(**body: Any) -> Any:
        return answered(caller, "/tokenize", messages=[USER], **body)["tokens"]

    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    assert prompt(tools=[TIME, WEATHER], tool_choice=choice) == prompt(tools=[WEATHER])


def test_streams_of_a_forced_call(caller: Served) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{caller.url}/v1", api_key="none", max_retries=0) as client:
        given = {"model": NAME, "messages": [USER], "tools": [WEATHER], "tool_choice": NAMED, **DRAWN}
        whole = client.chat.completions.create(**given).choices[0]
        with client.chat.completions.stream(**given) as stream:
            final = stream.get_final_completion().choices[0]
    assert final.finish_reason == whole.finish_reason == "tool_calls"
    (call,), (other,) = final.message.tool_calls, whole.message.tool_calls
    assert (call.function.name, call.function.arguments) == (other.function.name, other.function.arguments)
    assert is_weather((call.function.name, json.loads(call.function.arguments)))


def test_reasoning_before_calls_and_forms() -> None:
    with calling(HERMES, has_markers=True) as served:
        close = served.alone.tokenizer.convert_tokens_to_ids("</think>")
        more = {"chat_template_kwargs": {"enable_thinking": True}, "logit_bias": {str(close): 9}, **DRAWN}
        body = {"tools": [WEATHER], "tool_choice": NAMED, "max_tokens": 200}
        (choice,) = answered(served, messages=[USER], **body, **more)["choices"]
        assert choice["message"]["reasoning_content"]
        (call,) = choice["message"]["tool_calls"]
        assert is_weather((call["function"]["name"], json.loads(call["function"]["arguments"])))
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 7}}}
        (choice,) = answered(served, messages=[USER], response_format=form, **more)["choices"]
        assert choice["message"]["reasoning_content"]
        assert choice["message"]["content"] == "7"


def test_forms_do_not_change_forced_calls(caller: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 7}}}
    (calls,) = called(caller, tools=[WEATHER], tool_choice=NAMED, response_format=form)
    assert all(map(is_weather, calls))
    body = {"tools": [WEATHER], "response_format": form, "max_tokens": 60, "parallel_tool_calls": False}
    for choice in answered(caller, messages=[USER], n=4, **DRAWN, **body)["choices"]:
        assert (choice["message"]["content"] == "7") != bool(choice["message"].get("tool_calls"))


@pytest.mark.parametrize(
    ("parameters", "param", "words"),
    [
        ({"type": "string"}, ".type", 'found "string"; allowed: "object"'),
        ({"type": "object", "not": {}}, "", 'of time: Unimplemented keys: ["not"]; allowed: JSON Schema of draft'),
        ({"properties": {"a": {"$ref": "https://example.com/a"}}}, "", "does not fetch resources"),
    ],
)
def test_parameters_that_cannot_be_forced(caller: Served, parameters: Any, param: str, words: str) -> None:
    tool = {"type": "function", "function": {"name": "time", "parameters": parameters}}
    for stream in (False, True):
        body = {"messages": [USER], "tools": [WEATHER, tool], "tool_choice": "required", "stream": stream}
        status, answer, _ = caller.call("POST", CHATS, body)
        assert (status, answer["error"]["param"]) == (400, f"tools.1.function.parameters{param}"), answer
        assert words in answer["error"]["message"]
        assert answer["error"]["message"].startswith("tools.1.function.parameters")


def test_forced_calls_need_llguidance(caller: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    schema = {"type": "json_schema", "json_schema": {"schema": {"const": "new"}}}
    messages = []
    for body in ({"tools": [TIME], "tool_choice": "required"}, {"response_format": schema}):
        status, answer, _ = caller.call("POST", CHATS, {"messages": [USER], **body})
        assert status == 400
        messages.append(answer["error"]["message"].partition(": ")[2])
    assert messages[0] == messages[1]
    assert "pip install 'qcut-inference[serve]'" in messages[0]


def test_without_a_parser_no_call_is_forced() -> None:
    with calling(PLAIN, has_markers=False, tool_parser="none") as served:
        body = {"messages": [USER], "tools": [TIME], "tool_choice": "required"}
        status, answer, _ = served.call("POST", CHATS, body)
        assert (status, answer["error"]["param"]) == (400, "tool_choice")
        assert "--tool-parser none" in answer["error"]["message"]
