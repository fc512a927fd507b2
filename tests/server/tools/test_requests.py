"""Fields of tools: refused by name, and given to the chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from qcut.errors import ConfigError
from qcut.server.tools.choice import Parsers, reasoning_parser_of, tool_parser_of
from tests.server.serving import TEMPLATE, Served
from tests.server.tools.scripted import HERMES, PARAMETERS, TIME, USER, WEATHER, post, scripted, write

CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def hermes() -> Iterator[Served]:
    with scripted(strict=True) as found:
        write(found, "Yes.")
        yield found


def prompt(served: Served, messages: Any, **more: Any) -> str:
    """The prompt that a chat becomes."""
    status, found, _ = served.call("POST", "/tokenize", {"messages": messages, **more})
    assert status == 200, found
    return str(served.alone.tokenizer.decode(found["tokens"]))


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": fields}]


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def calling(**fields: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": None, "tool_calls": [{**CALL, **fields}]}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [TIME] * 129}, "tools"),
        ({"tools": ["time"]}, "tools.0"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools.0.type"),
        ({"tools": [TIME, {"type": "function"}]}, "tools.1.function"),
        ({"tools": function(description="a")}, "tools.0.function.name"),
        ({"tools": function(name="a b")}, "tools.0.function.name"),
        ({"tools": function(name="")}, "tools.0.function.name"),
        ({"tools": function(name="a", description=5)}, "tools.0.function.description"),
        ({"tools": function(name="a", parameters="{}")}, "tools.0.function.parameters"),
        ({"tools": [TIME, TIME]}, "tools.1.function.name"),
        ({"tools": [TIME], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": allowed("any", NAMED)}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": allowed("auto")}, "tool_choice"),
        ({"tools": [TIME], "tool_choice": allowed("auto", *[NAMED] * 129)}, "tool_choice.allowed_tools.tools"),
        ({"tools": [TIME], "tool_choice": allowed("auto", NAMED)}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TIME], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"messages": calling(type="custom")}, "messages.tool_calls.0.type"),
        ({"messages": calling(id=5)}, "messages.tool_calls.0.id"),
        ({"messages": calling(function={"name": "a", "arguments": 5})}, "messages.tool_calls.0.function.arguments"),
        ({"messages": calling(function={"arguments": "{}"})}, "messages.tool_calls.0.function.name"),
        ({"messages": calling(function={"name": ""})}, "messages.tool_calls.0.function.name"),
        ({"messages": [{**USER, "tool_calls": "a"}]}, "messages.tool_calls"),
        ({"messages": [{"role": "tool", "content": "a", "tool_call_id": 5}]}, "messages.0.tool_call_id"),
        ({"messages": [{**USER, "reasoning_content": 5}]}, "messages.0.reasoning_content"),
        ({"functions": [{"name": "a"}]}, "functions"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {str(i): i for i in range(65)}}, "chat_template_kwargs"),
    ],
)
def test_wrong_fields(hermes: Served, body: dict[str, Any], param: str) -> None:
    status, answer = post(hermes, **body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert param in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 500


def test_variables_are_no_arguments(hermes: Served) -> None:
    for name in ("tools", "documents", "tokenize", "chat_template"):
        status, answer = post(hermes, chat_template_kwargs={name: []})
        assert (status, f"variable '{name}'" in answer["error"]["message"]) == (400, True)


def test_templates_get_tools(hermes: Served) -> None:
    given = {"type": "function", "function": {**WEATHER["function"], "strict": True, "x": None}}  # type: ignore[dict-item]
    text = prompt(hermes, [USER], tools=[given, TIME], tool_choice="auto", parallel_tool_calls=True)
    bare = {"name": "time", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert [json.loads(line) for line in text.splitlines()[:2]] == [WEATHER, {"type": "function", "function": bare}]
    assert prompt(hermes, [USER], tools=[WEATHER], tool_choice="none") == prompt(hermes, [USER])
    assert prompt(hermes, [USER], chat_template_kwargs={"enable_thinking": True}).endswith("<think>\n")


def test_templates_get_calls_and_results(hermes: Served) -> None:
    messages = [
        USER,
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}], "name": "weather"},
        {"role": "assistant", "content": "Sunny.", "reasoning": "So."},
    ]
    assert prompt(hermes, messages, tools=[TIME]).splitlines()[1:] == [
        f"user: {USER['content']}",
        'assistant: <think>Hm.</think><tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>',
        "toolc1: sunny",
        "assistant: Sunny.<think>So.</think>",
        "assistant:",
    ]
    assert post(hermes, messages=messages, tools=[TIME])[0] == 200


@pytest.mark.parametrize("name", ["get weather", "wetter_für", "a/b", "a" * 200])
def test_calls_of_the_model_go_back(hermes: Served, name: str) -> None:
    write(hermes, f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>', 50)
    answer = post(hermes, messages=[USER], tools=[TIME])[1]["choices"][0]["message"]
    assert answer["tool_calls"][0]["function"]["name"] == name
    result = {"role": "tool", "content": "no such tool", "tool_call_id": answer["tool_calls"][0]["id"]}
    status, found = post(hermes, messages=[USER, answer, result], tools=[TIME])
    assert status == 200 or found["error"]["code"] == "context_length_exceeded", found


def test_a_type_that_is_null(hermes: Served) -> None:
    messages = [*calling(type=None), {"role": "tool", "content": "sunny", "tool_call_id": "c1"}]
    assert post(hermes, messages=messages, tools=[{**TIME, "type": None}])[0] == 200


@pytest.mark.parametrize("arguments", ["{broken", "[1]", '{"a": NaN}', "[" * 5000, '{"a":' * 5000])
def test_arguments_that_are_no_object(hermes: Served, arguments: str) -> None:
    messages = calling(function={"name": "weather", "arguments": arguments})
    status, answer = post(hermes, messages=messages)
    assert status == 200 or answer["error"]["code"] == "context_length_exceeded", answer


def test_templates_that_take_arguments_as_text() -> None:
    with scripted(HERMES.replace("{{ c.function | tojson }}", "{{ 'call ' + c.function.arguments }}")) as served:
        assert '<tool_call>call {"city": "Bern"}</tool_call>' in prompt(served, calling())


def test_templates_that_refuse_results_without_calls() -> None:
    refusing = "{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}"
    with scripted(HERMES.replace("{% if m.r", f"{refusing}{{% endif %}}{{% if m.r")) as served:
        messages = [*calling(), {"role": "tool", "tool_call_id": "c1", "content": "sunny"}]
        assert "toolc1: sunny" in prompt(served, messages, tools=[WEATHER])
        status, answer = post(served, messages=[USER, messages[-1]])
        assert (status, "no call" in answer["error"]["message"]) == (400, True)


def test_templates_without_tools() -> None:
    with scripted(TEMPLATE, tool_parser="hermes") as served:
        write(served, "Yes.")
        for body, param in (({"tools": [WEATHER]}, "tools"), ({"messages": calling()}, "messages.tool_calls")):
            status, answer = post(served, **body)
            assert (status, answer["error"]["param"]) == (400, param)
            assert "the chat template of this model ignores them" in answer["error"]["message"]
        assert post(served, tools=[WEATHER], tool_choice="none")[0] == 200
        assert post(served)[0] == 200


def test_templates_with_unknown_calls() -> None:
    with scripted(HERMES.replace("<tool_call>", "<call>")) as served:
        status, answer = post(served, tools=[WEATHER])
        assert (status, answer["error"]["param"]) == (400, "tools")
        assert "--tool-parser (hermes, llama3, mistral, harmony, none)" in answer["error"]["message"]


def test_tools_count_towards_the_context(hermes: Served) -> None:
    tools = function(name="weather", description="very long " * 20000, parameters=PARAMETERS)
    status, answer = post(hermes, tools=tools)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (TEMPLATE, "none", "none"),
        (HERMES, "hermes", "think"),
        ("<tool_call>{{ x }}</tool_call>", "hermes", "none"),
        ("<tool_call><function=f></tool_call>", "none", "none"),
        ("<tool_call>f<arg_key>a</arg_key></tool_call></think>", "none", "think"),
        ('Respond with {"name": function name, "parameters": dictionary}', "llama3", "none"),
        ("<|python_tag|>", "llama3", "none"),
        ("<|python_tag|><function=f></function>", "none", "none"),
        ("[TOOL_CALLS][ARGS]", "mistral", "none"),
        ("[TOOL_CALLS][ARGS][THINK]", "mistral", "mistral"),
        ("<|start|><|channel|>analysis<|message|><|call|>", "harmony", "harmony"),
    ],
)
def test_parsers_by_templates(template: str, tools: str, reasoning: str) -> None:
    assert (tool_parser_of(template), reasoning_parser_of(template)) == (tools, reasoning)
    Parsers({"default": "{{ messages }}", "tool_use": template})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("pythonic", "auto"), "--tool-parser 'pythonic'; allowed: auto, hermes, llama3"),
        (("auto", "r1"), "--reasoning-parser 'r1'; allowed: auto, think"),
        (("hermes", "harmony"), "harmony only with harmony or none"),
    ],
)
def test_parsers_that_do_not_exist(options: tuple[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Parsers(HERMES, *options)
