"""LiteLLM gets what the engine gives, and knows errors by their kind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pytest

from tests.server.clients.conftest import KEY
from tests.server.serving import NAME, Served
from tests.server.tools.scripted import WEATHER, write

CHAT = [{"role": "user", "content": "What is a list?"}]
PROMPT = "user: What is a list?\nassistant:"
PROVIDERS = ("openai", "hosted_vllm", "litellm_proxy")


def options(served: Served, provider: str = "openai", **more: Any) -> dict[str, Any]:
    given = {"model": f"{provider}/{NAME}", "api_base": f"{served.url}/v1", "api_key": KEY, "max_retries": 0}
    return {**given, "messages": CHAT, "temperature": 0, "max_tokens": 8, **more}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_completion(keyed: Served, provider: str) -> None:
    text = keyed.text(PROMPT, 8)
    answer = litellm.completion(**options(keyed, provider))
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "length")
    assert answer.usage.completion_tokens == 8
    pieces = list(litellm.completion(**options(keyed, provider), stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == text
    assert pieces[-1].usage.completion_tokens == 8


def test_a_conversation_of_several_turns(keyed: Served) -> None:
    """The message of an answer goes back as it came."""
    first = litellm.completion(**options(keyed)).choices[0].message
    messages = [*CHAT, first, {"role": "user", "content": "And a set?"}]
    answer = litellm.completion(**options(keyed, messages=messages))
    text = keyed.text(f"user: What is a list?\nassistant: {first.content}\nuser: And a set?\nassistant:", 8)
    assert answer.choices[0].message.content == text


def test_parameters_of_all_kinds(keyed: Served) -> None:
    answer = litellm.completion(
        **options(keyed, temperature=0.7, seed=3, top_p=0.9, n=2, stop=["never"], presence_penalty=0.1),
        logprobs=True,
        top_logprobs=3,
        user="me",
        logit_bias={"5": -100},
        response_format={"type": "text"},
        extra_body={"top_k": 20, "min_tokens": 2, "chat_template_kwargs": {"thinking": False}},
    )
    assert len(answer.choices) == 2
    rows = answer.choices[0].logprobs.content
    assert "".join(row.token for row in rows) == answer.choices[0].message.content
    assert all(len(row.top_logprobs) == 3 for row in rows)


def test_asynchronous_calls(keyed: Served) -> None:
    async def ask() -> tuple[str, str]:
        whole = await litellm.acompletion(**options(keyed))
        stream = await litellm.acompletion(**options(keyed), stream=True)
        return whole.choices[0].message.content, "".join([p.choices[0].delta.content or "" async for p in stream])

    assert asyncio.run(ask()) == (keyed.text(PROMPT, 8),) * 2


def test_text_completion(keyed: Served) -> None:
    given = options(keyed, "text-completion-openai", prompt="The import statement", logprobs=2)
    del given["messages"]
    answer = litellm.text_completion(**given)
    assert answer.choices[0].text == keyed.text("The import statement", 8)
    assert "".join(answer.choices[0].logprobs.tokens) == answer.choices[0].text


def test_responses(keyed: Served) -> None:
    given = {key: value for key, value in options(keyed).items() if key not in ("messages", "max_tokens")}
    answer = litellm.responses(**given, input="What is a list?", max_output_tokens=16)  # it sends no fewer
    assert answer.output[0].content[0].text == keyed.text(PROMPT, 16)
    events = list(litellm.responses(**given, input="What is a list?", max_output_tokens=16, stream=True))
    assert events[-1].response.output[0].content[0].text == keyed.text(PROMPT, 16)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_tools_and_reasoning(caller: Served, provider: str) -> None:
    write(caller, '<think>Hm.</think><tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>')
    given = options(caller, provider, tools=[WEATHER])
    (choice,) = litellm.completion(**given).choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.reasoning_content) == ("tool_calls", "Hm.")
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Zürich"}')
    deltas = [piece.choices[0].delta for piece in litellm.completion(**given, stream=True)]
    parts = [part.function for delta in deltas for part in delta.tool_calls or ()]
    assert "".join(part.name or "" for part in parts) == "weather"
    assert "".join(part.arguments or "" for part in parts) == '{"city": "Zürich"}'
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
    write(caller, "It is sunny.")
    messages = [*CHAT, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    answer = litellm.completion(**options(caller, provider, messages=messages, tools=[WEATHER]))
    assert answer.choices[0].message.content == "It is sunny."


KIND = {"type": "object", "properties": {"kind": {"enum": ["sun", "rain"]}}, "additionalProperties": False}
FORECAST = {"type": "function", "function": {"name": "forecast", "description": "The weather.", "parameters": KIND}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "forecast"}}])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_forced_calls(forcer: Served, provider: str, choice: Any) -> None:
    given = options(forcer, provider, tools=[FORECAST], tool_choice=choice, parallel_tool_calls=False, max_tokens=80)
    (selected,) = litellm.completion(**given).choices
    (call,) = selected.message.tool_calls
    assert (selected.finish_reason, call.function.name) == ("tool_calls", "forecast")
    assert json.loads(call.function.arguments).get("kind", "sun") in ("sun", "rain")


def test_forced_calls_of_responses(forcer: Served) -> None:
    given = {key: value for key, value in options(forcer).items() if key not in ("messages", "max_tokens")}
    tools = [{"type": "function", **FORECAST["function"]}]  # type: ignore[dict-item]
    more = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 80}
    answer = litellm.responses(**given, **more, input="What is a list?")
    assert [(item.type, item.name) for item in answer.output] == [("function_call", "forecast")]
    events = list(litellm.responses(**given, **more, input="What is a list?", stream=True))
    assert events[-1].response.output[0].arguments == answer.output[0].arguments


def test_errors_have_their_kind(keyed: Served) -> None:
    for wrong, kind, words in (
        ({"messages": [{"role": "user", "content": "word " * 300}]}, litellm.ContextWindowExceededError, "256 tokens"),
        ({"model": "openai/another"}, litellm.NotFoundError, "--any-model"),
        ({"api_key": "wrong"}, litellm.AuthenticationError, "API key"),
        ({"temperature": -1}, litellm.BadRequestError, "temperature"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, litellm.BadRequestError, "form of calls"),
        ({"response_format": {"type": "yaml"}}, litellm.BadRequestError, "json_object, json_schema"),
    ):
        with pytest.raises(kind, match=words):
            litellm.completion(**options(keyed, **wrong))  # type: ignore[arg-type]
