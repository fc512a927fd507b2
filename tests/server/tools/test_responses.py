"""Calls and reasoning in ``/v1/responses``: items and their events, and the way back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest

from qcut.server.tools.items import messages_of
from tests.server.serving import NAME, RESPONSES, Served, engine, serving
from tests.server.tools.scripted import HERMES, TIME, USER, WEATHER, scripted, write

TOOLS = [{"type": "function", **tool["function"]} for tool in (WEATHER, TIME)]  # type: ignore[dict-item]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
ARGUMENTS = '{"city": "Zürich"}'


@pytest.fixture(scope="module")
def hermes() -> Iterator[Served]:
    with scripted(strict=True) as found:
        yield found


def asked(served: Served, **body: Any) -> Any:
    status, answer, _ = served.call("POST", RESPONSES, {"input": "How is the weather?", **body})
    assert status == 200, answer
    return answer


def bare(items: list[Any]) -> list[dict[str, Any]]:
    """Items without their ids."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def streamed(served: Served, **body: Any) -> tuple[list[str], Any]:
    """The kinds of events, and the response at the end; the deltas must add up to its items."""
    lines = asked(served, stream=True, **body).splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output = events[-1]["response"]["output"]
    for index, item in enumerate(output):
        own = [event for event in events if event.get("output_index") == index]
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}
        assert (own[0]["type"], own[-1]["type"]) == ("response.output_item.added", "response.output_item.done")
        assert own[0]["item"]["status"] == "in_progress"
        assert own[-1]["item"] == item
        text = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    return [kind for kind, _ in groupby(event["type"].removeprefix("response.") for event in events)], events[-1][
        "response"
    ]


@pytest.mark.parametrize("size", [3, 7, 1000])
def test_reasoning_text_and_calls(hermes: Served, size: int) -> None:
    time = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    write(hermes, f"<think>Hm.</think>Well. {CALL}\n{time}", size)
    answer = asked(hermes, tools=TOOLS)
    call = {"type": "function_call", "status": "completed", "name": "weather", "arguments": ARGUMENTS}
    part = {"type": "output_text", "text": "Well. ", "annotations": [], "logprobs": []}
    assert bare(answer["output"]) == [
        {
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {"type": "message", "status": "completed", "role": "assistant", "content": [part]},
        call,
        {**call, "name": "time", "arguments": "{}"},
    ]
    assert len({item["id"] for item in answer["output"]}) == 4
    assert answer["status"] == "completed"
    assert answer["tools"] == [{"strict": False, **TOOLS[0]}, {**answer["tools"][1], "name": "time"}]
    kinds, response = streamed(hermes, tools=TOOLS)
    assert bare(response["output"]) == bare(answer["output"])
    part_of = [
        "output_item.added",
        "content_part.added",
        "{}.delta",
        "{}.done",
        "content_part.done",
        "output_item.done",
    ]
    called = [
        "output_item.added",
        *(f"function_call_arguments.{kind}" for kind in ("delta", "done")),
        "output_item.done",
    ]
    assert kinds == [
        *("created", "in_progress"),
        *(kind.format("reasoning_text") for kind in part_of),
        *(kind.format("output_text") for kind in part_of),
        *called,
        *called,
        "completed",
    ]
    assert bare(asked(hermes, tools=TOOLS, parallel_tool_calls=False)["output"])[2:] == [call]
    assert len(streamed(hermes, tools=TOOLS, parallel_tool_calls=False)[1]["output"]) == 3


def test_only_a_call(hermes: Served) -> None:
    write(hermes, CALL)
    (item,) = asked(hermes, tools=TOOLS)["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "weather", ARGUMENTS)
    assert item["call_id"].startswith("call_")
    assert bare(streamed(hermes, tools=TOOLS)[1]["output"]) == bare([item])
    for body in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (item,) = asked(hermes, **body)["output"]
        assert item["content"][0]["text"] == CALL


def test_answers_that_are_cut_off(hermes: Served) -> None:
    write(hermes, f"Well. {CALL[:50]}", reason="length")
    for answer in (asked(hermes, tools=TOOLS), streamed(hermes, tools=TOOLS)[1]):
        assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]
        assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert ARGUMENTS.startswith(answer["output"][1]["arguments"])


def test_log_probabilities_go_to_messages(hermes: Served) -> None:
    write(hermes, f"<think>Hm.</think>Well. {CALL}")
    body = {"tools": TOOLS, "include": ["message.output_text.logprobs"]}
    answer = asked(hermes, **body)
    assert len(answer["output"][1]["content"][0]["logprobs"]) == answer["usage"]["output_tokens"]
    assert streamed(hermes, **body)[1]["output"][1]["content"][0]["logprobs"]


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([{"role": "assistant", "content": "Well.", "tool_calls": None}, "call"], [["content", "tool_calls"]]),
        (
            [{"role": "assistant", "content": None, "reasoning_content": "Hm."}, "call", "call"],
            [["reasoning_content", "tool_calls"]],
        ),
        (
            ["reasoning", "call", {"role": "assistant", "content": "Well."}],
            [["content", "reasoning_content", "tool_calls"]],
        ),
        (
            ["reasoning", {"role": "assistant", "content": "Well.", "reasoning_content": None}],
            [["content", "reasoning_content"]],
        ),
        (
            ["reasoning", {"role": "assistant", "content": "Well.", "reasoning_content": "Hm."}],
            [["reasoning_content"], ["content", "reasoning_content"]],
        ),
        (["call", {"role": "user", "content": "Well?"}], [["tool_calls"], ["content"]]),
    ],
)
def test_items_of_an_answer_are_one_message(items: list[Any], messages: list[list[str]]) -> None:
    kinds = {
        "call": {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": ARGUMENTS},
        "reasoning": {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
    }
    found = messages_of([kinds[item] if isinstance(item, str) else item for item in items])
    assert [sorted(name for name in one if name != "role" and one[name] is not None) for one in found] == messages
    assert sum(len(one.get("tool_calls") or ()) for one in found) == items.count("call")


@pytest.mark.parametrize("calls", [5, "ab", {"a": 1}, [None]])
def test_wrong_calls_before_an_item_are_refused(hermes: Served, calls: Any) -> None:
    call = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": ARGUMENTS}
    items = [USER, {"role": "assistant", "content": "Well.", "tool_calls": calls}, call]
    status, answer, _ = hermes.call("POST", RESPONSES, {"input": items})
    assert (status, answer["error"]["param"].startswith("messages.tool_calls")) == (400, True)


def test_items_go_back_as_messages(hermes: Served) -> None:
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": ARGUMENTS}
    items = [
        {"role": "user", "content": "A"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]},
        call,
        {**call, "call_id": "c2", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "dry"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}], "encrypted_content": None},
        {**call, "call_id": "c3"},
    ]
    chat = [
        {"role": "user", "content": "A"},
        {
            "role": "assistant",
            "content": "Well.",
            "reasoning_content": "Hm.",
            "tool_calls": [chatted("c1"), chatted("c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "dry"},
        {"role": "assistant", "reasoning_content": "So.", "tool_calls": [chatted("c3")]},
    ]
    write(hermes, "Yes.")
    status, found, _ = hermes.call("POST", "/tokenize", {"messages": chat, "tools": [TIME]})
    assert status == 200, found
    assert asked(hermes, input=items, tools=TOOLS[1:])["usage"]["input_tokens"] == found["count"]


def chatted(identifier: str) -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools.0.name"),
        ({"tools": [TOOLS[0], {"type": "web_search"}]}, "tools.1.type"),
        ({"tools": [{**TOOLS[1], "parameters": 5}]}, "tools.0.parameters"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools.1.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "time"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [{**TOOLS[1], "parameters": {"type": "array"}}], "tool_choice": "required"},
            "tools.0.parameters.type",
        ),
        ({"tools": [{**TOOLS[1], "parameters": {"not": {}}}], "tool_choice": "required"}, "tools.0.parameters"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "", "arguments": ""}]}, "input.0.name"),
        ({"input": [USER, {"type": "function_call", "name": "b", "arguments": "{}"}]}, "input.1.call_id"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "b", "arguments": {}}]}, "input.0.arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input.0.output"),
        ({"input": [{"type": "reasoning", "content": [5]}]}, "input.0.content.text"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": ["text"]}, "input"),
    ],
)
def test_wrong_fields(hermes: Served, body: dict[str, Any], param: str) -> None:
    status, answer, _ = hermes.call("POST", RESPONSES, {"input": "A", **body})
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert param in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 500


@pytest.mark.parametrize("stream", [False, True])
def test_an_openai_client_runs_a_function(hermes: Served, stream: bool) -> None:
    openai = pytest.importorskip("openai")
    write(hermes, f"<think>Hm.</think>{CALL}")
    with openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0) as client:
        given = {"model": NAME, "input": [USER], "tools": TOOLS}
        if stream:
            with client.responses.stream(**given) as events:
                deltas = [one.delta for one in events if one.type == "response.function_call_arguments.delta"]
                answer = events.get_final_response()
            assert "".join(deltas) == ARGUMENTS
        else:
            answer = client.responses.create(**given)
        reasoning, call = answer.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Hm.")
        assert (call.type, call.name, call.arguments, answer.output_text) == ("function_call", "weather", ARGUMENTS, "")
        write(hermes, "It is sunny.")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        answer = client.responses.create(**{**given, "input": [USER, *answer.output, result]})
        assert answer.output_text == "It is sunny."


def test_an_openai_client_forces_a_call() -> None:
    openai = pytest.importorskip("openai")
    pytest.importorskip("llguidance")
    template = HERMES.replace("<think>", "").replace("</think>", "")

    def wrap(tokenizer: Any) -> Any:
        tokenizer.chat_template = template
        return tokenizer

    with (
        serving(engine(context=512, wrap=wrap)) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        given = {"model": NAME, "input": "A", "tools": TOOLS, "max_output_tokens": 60}
        for choice in (
            {"type": "function", "name": "time"},
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]},
        ):
            answer = client.responses.create(tool_choice=choice, parallel_tool_calls=False, **given)
            (call,) = answer.output
            assert (call.name, call.arguments) == ("time", "{}")
            assert answer.tool_choice.type == choice["type"]
