"""Calls and reasoning in answers over HTTP, whole and in streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.serving import Served, engine, serving
from tests.server.tools.scripted import (
    HERMES,
    TIME,
    USER,
    WEATHER,
    deltas,
    message_of,
    post,
    scripted,
    with_special_tokens,
    write,
)

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
MADE = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}


@pytest.fixture(scope="module")
def hermes() -> Iterator[Served]:
    with scripted() as found:
        yield found


def both(served: Served, prefix: str = "call_", **body: Any) -> tuple[dict[str, Any], str]:
    """Message and reason of an answer, which a stream gives as well; calls without their ids."""
    status, answer = post(served, **body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    parts = deltas(served, **body)
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
    message = {name: value for name, value in choice["message"].items() if value is not None}
    for call in message.get("tool_calls", ()):
        assert call.pop("id").startswith(prefix)
    assert {name: value for name, value in message.items() if value not in ("", "assistant")} == message_of(parts)
    return message, choice["finish_reason"]


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_call(hermes: Served, size: int) -> None:
    write(hermes, CALL, size)
    message, reason = both(hermes, tools=[WEATHER])
    assert (message, reason) == ({"role": "assistant", "tool_calls": [MADE]}, "tool_calls")


def test_several_calls_after_a_text(hermes: Served) -> None:
    write(hermes, f"Let me see.\n{CALL}\n{CALL}")
    message, reason = both(hermes, tools=[WEATHER, TIME])
    assert (message["content"], message["tool_calls"], reason) == ("Let me see.\n", [MADE, MADE], "tool_calls")
    message, reason = both(hermes, tools=[WEATHER], parallel_tool_calls=False)
    assert (message["tool_calls"], reason) == ([MADE], "tool_calls")
    ids = [call["id"] for call in post(hermes, tools=[WEATHER])[1]["choices"][0]["message"]["tool_calls"]]
    assert len(set(ids)) == 2


def test_deltas_of_a_call(hermes: Served) -> None:
    """Index, id and name first, then arguments as they come."""
    write(hermes, f"A {CALL}", 1)
    role, *parts = deltas(hermes, tools=[WEATHER])
    assert role["delta"] == {"role": "assistant", "content": ""}
    calls = [call for part in parts for call in part["delta"].get("tool_calls", ())]
    first, *others = calls
    assert first.pop("id")
    assert first == {"index": 0, "type": "function", "function": {"name": "weather", "arguments": ""}}
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in others)


def test_calls_are_text_unless_asked_for(hermes: Served) -> None:
    write(hermes, CALL)
    for body in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        message, reason = both(hermes, **body)
        assert (message, reason) == ({"role": "assistant", "content": CALL}, "stop")


def test_a_call_that_is_cut_off(hermes: Served) -> None:
    write(hermes, CALL[:50], reason="length")
    message, reason = both(hermes, tools=[WEATHER])
    assert reason == "length"
    assert MADE["function"]["arguments"].startswith(message["tool_calls"][0]["function"]["arguments"])  # type: ignore[index]


def test_reasoning_and_calls(hermes: Served) -> None:
    write(hermes, f"<think>\nHm.\n</think>\n\nYes.{CALL}")
    message, reason = both(hermes, tools=[WEATHER])
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    assert (message["tool_calls"], reason) == ([MADE], "tool_calls")
    write(hermes, "Hm.</think>Yes.")
    message, reason = both(hermes, chat_template_kwargs={"enable_thinking": True})
    assert (message, reason) == ({"role": "assistant", "reasoning_content": "Hm.", "content": "Yes."}, "stop")
    write(hermes, "Hm.", reason="length")
    _, answer = post(hermes, chat_template_kwargs={"enable_thinking": True})
    assert answer["choices"][0]["message"]["content"] is None
    assert answer["usage"]["completion_tokens"] == 1


def test_samples_are_parsed_apart(hermes: Served) -> None:
    write(hermes, f"<think>Hm.</think>{CALL}", 2)
    _, answer = post(hermes, tools=[WEATHER], n=2)
    assert [len(choice["message"]["tool_calls"]) for choice in answer["choices"]] == [1, 1]
    parts = deltas(hermes, tools=[WEATHER], n=2)
    for index in (0, 1):
        found = message_of([part for part in parts if part["index"] == index])
        assert found == {"reasoning_content": "Hm.", "tool_calls": [MADE]}


def test_log_probabilities_of_calls(hermes: Served) -> None:
    write(hermes, CALL)
    body = {"tools": [WEATHER], "logprobs": True, "return_token_ids": True}
    _, answer = post(hermes, **body)
    rows = answer["choices"][0]["logprobs"]["content"]
    parts = deltas(hermes, **body)
    streamed = [row for part in parts if part["logprobs"] for row in part["logprobs"]["content"]]
    assert len(rows) == len(streamed) == answer["usage"]["completion_tokens"]
    assert len([token for part in parts for token in part.get("token_ids", ())]) == len(rows)


@pytest.mark.parametrize(
    ("template", "text", "arguments"),
    [
        ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "time", "arguments": {"a": 1}}]', '{"a": 1}'),
        ("<|python_tag|>", '{"name": "time", "parameters": {"a": 1}}', '{"a": 1}'),
        (
            "<|channel|><|message|>",
            '<|channel|>commentary to=functions.time<|message|>{"a": 1}<|call|>',
            '{"a": 1}',
        ),
    ],
)
def test_the_template_chooses_the_parser(template: str, text: str, arguments: str) -> None:
    made = HERMES.replace("<tool_call>", "").replace("<think>", "").replace("</think>", "")
    with scripted(f"{made}{{# {template} #}}") as served:
        write(served, text)
        _, answer = post(served, tools=[TIME])
        (choice,) = answer["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"], choice["finish_reason"]) == ({"name": "time", "arguments": arguments}, "tool_calls")
        assert len(call["id"]) == (9 if template == "[TOOL_CALLS]" else 29)
        assert message_of(deltas(served, tools=[TIME]))["tool_calls"][0]["function"]["arguments"] == arguments


def test_reasoning_of_mistral() -> None:
    made = HERMES.replace("<tool_call>", "[TOOL_CALLS]").replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    with scripted(made) as served:
        write(served, '[THINK]Hm.[/THINK]Yes.[TOOL_CALLS]time[ARGS]{"a": 1}')
        message, reason = both(served, "", tools=[TIME])
        assert (message["reasoning_content"], message["content"], reason) == ("Hm.", "Yes.", "tool_calls")
        assert message["tool_calls"][0]["function"] == {"name": "time", "arguments": '{"a": 1}'}
        write(served, "Hm.[/THINK]Yes.")
        message, _ = both(served, chat_template_kwargs={"enable_thinking": True})
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


def test_parsers_can_be_turned_off() -> None:
    with scripted(tool_parser="none", reasoning_parser="none") as served:
        write(served, f"<think>Hm.</think>{CALL}")
        message, reason = both(served, tools=[WEATHER])
        assert (message["content"], reason) == (f"<think>Hm.</think>{CALL}", "stop")


def test_markers_that_are_special_tokens() -> None:
    """They are parsed, and left out of texts otherwise."""
    marker = "<tool_call>"
    with serving(engine(context=256, wrap=lambda one: with_special_tokens(one, [marker], HERMES))) as served:
        token = served.alone.tokenizer.convert_tokens_to_ids(marker)
        given: dict[str, Any] = {"logit_bias": {str(token): 100}, "ignore_eos": True, "temperature": 0}
        for body, text in (
            ({"max_tokens": 3}, ""),
            ({"max_tokens": 3, "tools": [TIME]}, marker * 3),
            ({"max_tokens": 3, "skip_special_tokens": False}, marker * 3),
            ({"tools": [TIME], "stop": marker * 2}, ""),
            ({"tools": [TIME], "stop": marker * 2, "include_stop_str_in_output": True}, marker * 2),
            ({"tools": [TIME], "stop_token_ids": [token], "include_stop_str_in_output": True}, marker),
        ):
            status, answer = post(served, **given, **body)
            assert status == 200, answer
            assert answer["choices"][0]["message"]["content"] == text, body
            assert message_of(deltas(served, **given, **body)).get("content", "") == text


def test_an_openai_client_runs_a_function(hermes: Served) -> None:
    openai = pytest.importorskip("openai")
    write(hermes, f"<think>Hm.</think>{CALL}")
    with openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0) as client:
        given = {"model": "gpt2", "messages": [USER], "tools": [WEATHER]}
        answer = client.chat.completions.create(**given)
        message = answer.choices[0].message
        assert (message.content, message.reasoning_content) == (None, "Hm.")
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Zürich"}')
        with client.chat.completions.stream(**given) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.tool_calls[0].function.arguments == call.function.arguments
        write(hermes, "It is sunny.")
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        answer = client.chat.completions.create(**{**given, "messages": [USER, message, result]})
        assert answer.choices[0].message.content == "It is sunny."
