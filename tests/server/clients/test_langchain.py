"""LangChain's models of OpenAI's interface get what the engine gives."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field, SecretStr

from tests.server.clients.conftest import KEY
from tests.server.serving import NAME, Served
from tests.server.tools.scripted import write

QUESTION = "What is a list?"
PROMPT = f"user: {QUESTION}\nassistant:"


def chat(served: Served, **options: Any) -> ChatOpenAI:
    given = {"temperature": 0, "max_tokens": 8, "max_retries": 0, **options}
    return ChatOpenAI(model=NAME, base_url=f"{served.url}/v1", api_key=SecretStr(KEY), **given)


def completions(served: Served, **options: Any) -> OpenAI:
    given = {"temperature": 0, "max_tokens": 8, "max_retries": 0, **options}
    return OpenAI(model=NAME, base_url=f"{served.url}/v1", api_key=SecretStr(KEY), **given)


def test_a_chat(keyed: Served) -> None:
    answer = chat(keyed).invoke(QUESTION)
    assert answer.content == keyed.text(PROMPT, 8)
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 8


def test_a_stream(keyed: Served) -> None:
    pieces = list(chat(keyed, stream_usage=True).stream(QUESTION))
    assert "".join(str(piece.content) for piece in pieces) == keyed.text(PROMPT, 8)
    assert sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata) == 8


def test_a_conversation(keyed: Served) -> None:
    first = chat(keyed).invoke([SystemMessage("Be short."), HumanMessage(QUESTION)])
    answer = chat(keyed).invoke([SystemMessage("Be short."), HumanMessage(QUESTION), first, HumanMessage("And a set?")])
    begun = f"system: Be short.\nuser: {QUESTION}\nassistant: {first.content}\nuser: And a set?\nassistant:"
    assert answer.content == keyed.text(begun, 8)
    empty = chat(keyed).invoke([HumanMessage(QUESTION), AIMessage(""), HumanMessage("And a set?")])
    assert isinstance(empty.content, str)


def test_chains_batches_and_asynchronous_calls(keyed: Served) -> None:
    chain = ChatPromptTemplate.from_messages([("user", "What is a {thing}?")]) | chat(keyed)
    texts = [keyed.text(f"user: What is a {thing}?\nassistant:", 8) for thing in ("list", "set")]
    assert [answer.content for answer in chain.batch([{"thing": "list"}, {"thing": "set"}])] == texts

    async def ask() -> list[str]:
        whole = await chat(keyed).ainvoke(QUESTION)
        return [str(whole.content), "".join([str(piece.content) async for piece in chat(keyed).astream(QUESTION)])]

    assert asyncio.run(ask()) == [texts[0]] * 2


def test_log_probabilities(keyed: Served) -> None:
    answer = chat(keyed).bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    rows = answer.response_metadata["logprobs"]["content"]
    assert "".join(row["token"] for row in rows) == answer.content
    assert all(len(row["top_logprobs"]) == 2 for row in rows)


def test_options(keyed: Served) -> None:
    model = chat(keyed, temperature=0.8, seed=1, top_p=0.9, stop_sequences=["never"], frequency_penalty=0.1)
    assert model.bind(logit_bias={"5": -100}).invoke(QUESTION).content
    assert len(chat(keyed, n=2, temperature=1).generate([[HumanMessage(QUESTION)]]).generations[0]) == 2
    served = chat(keyed, extra_body={"top_k": 5, "min_tokens": 2, "repetition_penalty": 1.1, "ignore_eos": True})
    assert served.invoke(QUESTION).usage_metadata["output_tokens"] == 8  # type: ignore[index]


def test_texts(keyed: Served) -> None:
    text = keyed.text("The import statement", 8)
    assert completions(keyed).invoke("The import statement") == text
    assert "".join(completions(keyed).stream("The import statement")) == text
    found = completions(keyed, n=2, best_of=2, temperature=1, logprobs=1).generate(["A", "B"])
    assert [len(one) for one in found.generations] == [2, 2]


def test_the_newer_interface(keyed: Served) -> None:
    model = chat(keyed, use_responses_api=True)
    text = keyed.text(PROMPT, 8)
    assert model.invoke(QUESTION).text == text
    assert "".join(piece.text for piece in model.stream(QUESTION)) == text
    with pytest.raises(openai.BadRequestError, match="whole conversation"):
        model.invoke(QUESTION, previous_response_id="resp_1")


def test_tools(caller: Served) -> None:
    """Calls come whole and in streams, and go back with their results."""

    class Weather(BaseModel):
        """The weather of a city."""

        city: str

    model = chat(caller).bind_tools([Weather])
    write(caller, 'Well. <tool_call>{"name": "Weather", "arguments": {"city": "Zürich"}}</tool_call>')
    answer = model.invoke(QUESTION)
    (call,) = answer.tool_calls
    assert (answer.content, call["name"], call["args"]) == ("Well. ", "Weather", {"city": "Zürich"})
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    pieces = list(model.stream(QUESTION))
    whole = sum(pieces[1:], pieces[0])
    assert [(one["name"], one["args"]) for one in whole.tool_calls] == [("Weather", {"city": "Zürich"})]
    write(caller, "It is sunny.")
    result = ToolMessage("sunny", tool_call_id=call["id"])
    assert model.invoke([HumanMessage(QUESTION), answer, result]).content == "It is sunny."


class Town(BaseModel, extra="forbid"):
    """A town."""

    name: Literal["Bern", "Basel"]


class River(BaseModel, extra="forbid"):
    """A river."""

    length: Literal[1, 2]


@pytest.mark.parametrize("choice", ["any", "Town"])
@pytest.mark.parametrize("newer", [False, True])
def test_forced_calls(forcer: Served, choice: str, newer: bool) -> None:
    served = chat(forcer, max_tokens=80, use_responses_api=newer)
    model = served.bind_tools([Town, River], tool_choice=choice, parallel_tool_calls=False)
    pieces = list(model.stream(QUESTION))
    for answer in (model.invoke(QUESTION), sum(pieces[1:], pieces[0])):
        (call,) = answer.tool_calls
        assert {"Town": Town, "River": River}[call["name"]](**call["args"])
        assert choice == "any" or call["name"] == choice


def test_structured_answers_by_calls(forcer: Served) -> None:
    model = chat(forcer, max_tokens=80).with_structured_output(Town, method="function_calling")
    assert isinstance(model.invoke(QUESTION), Town)


class Answer(BaseModel, extra="forbid"):
    text: str = Field(max_length=8)


def test_structured_answers(keyed: Served) -> None:
    for strict in (True, False):
        model = chat(keyed, max_tokens=200).with_structured_output(Answer, method="json_schema", strict=strict)
        assert isinstance(model.invoke(QUESTION), Answer)


def test_what_is_not_served_says_so(keyed: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="found no form of calls"):
        chat(keyed).bind_tools([Answer]).invoke(QUESTION)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens"):
        chat(keyed).invoke("word " * 300)
