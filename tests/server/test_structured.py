"""Structured answers by each server's fields: whole, in streams and by OpenAI's client."""

from __future__ import annotations

import json
import re
import select
import time
from typing import Any, Literal

import pytest

from tests.server.serving import CHATS, COMPLETIONS, NAME, RESPONSES, Served, asking, until

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")
pytest.importorskip("llguidance")


class Answer(pydantic.BaseModel, extra="forbid"):
    name: str = pydantic.Field(max_length=6)
    kind: Literal["list", "set"]


SCHEMA = Answer.model_json_schema()
DRAWN = {"temperature": 1.0, "seed": 5}
CHAT = {"messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 80, **DRAWN}
TEXT = {"prompt": "The import", "max_tokens": 60, **DRAWN}


@pytest.fixture(scope="session")
def client(served: Served) -> Any:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def posted(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, answer, _ = served.call("POST", path, body)
    assert status == 200, answer
    return dict(answer)


def test_openais_formats(served: Served) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    answer = posted(served, CHATS, {**CHAT, "response_format": schema, "n": 3})
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    for text in texts:
        Answer.model_validate_json(text)
    assert len(set(texts)) > 1
    close = {str(served.alone.tokenizer("}")["input_ids"][0]): 5}
    answer = posted(served, CHATS, {**CHAT, "response_format": {"type": "json_object"}, "logit_bias": close})
    assert isinstance(json.loads(answer["choices"][0]["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-c]{5}", "backend": "xgrammar"}}, "[a-c]{5}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "v" /[0-9]/'}}, "v[0-9]"),
        ({"structured_outputs": {"json": {"enum": [1, "two"]}}}, '1|"two"'),
        ({"guided_regex": "x{3}"}, "xxx"),
        ({"guided_choice": ["up", "down"]}, "up|down"),
        ({"guided_json": {"type": "boolean"}}, "true|false"),
        ({"guided_json": '{"type": "boolean"}'}, "true|false"),
        ({"guided_grammar": 'root ::= "a" | "b"'}, "a|b"),
        ({"json_schema": {"const": 7}}, "7"),
        ({"grammar": 'root ::= "n" [0-9]'}, "n[0-9]"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "é"}}}}, '"é"'),
    ],
)
def test_other_servers_fields(served: Served, fields: dict[str, Any], pattern: str) -> None:
    for path, body in ((COMPLETIONS, TEXT), (CHATS, CHAT)):
        (choice,) = posted(served, path, {**body, **fields})["choices"]
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        assert re.fullmatch(pattern, text)
        assert choice["finish_reason"] == "stop"


def test_parsed_answers_of_the_client(client: Any) -> None:
    found = client.chat.completions.parse(model=NAME, response_format=Answer, **CHAT)
    assert isinstance(found.choices[0].message.parsed, Answer)
    with client.chat.completions.stream(model=NAME, response_format=Answer, **CHAT) as stream:
        last = stream.get_final_completion()
    assert last.choices[0].message.parsed == found.choices[0].message.parsed
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=NAME, response_format=Answer, **{**CHAT, "max_tokens": 3})


def test_parsed_answers_of_the_newer_interface(client: Any) -> None:
    given = {"model": NAME, "input": "What is a list?", "max_output_tokens": 80, "temperature": 1.0}
    found = client.responses.parse(text_format=Answer, extra_body={"seed": 5}, **given)
    assert isinstance(found.output_parsed, Answer)
    assert found.text.format.type == "json_schema"
    with client.responses.stream(text_format=Answer, extra_body={"seed": 5}, **given) as stream:
        assert stream.get_final_response().output_parsed == found.output_parsed


def test_answers_end_where_tokens_are_to_be_ignored(served: Served) -> None:
    more = {"guided_regex": "[ab]{2}", "ignore_eos": True, "min_tokens": 30}
    (choice,) = posted(served, COMPLETIONS, {**TEXT, **more})["choices"]
    assert (choice["finish_reason"], len(choice["text"])) == ("stop", 2)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}},
            "response_format.json_schema.schema",
            "Invalid type: strin",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "found null"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", 'found "yaml"'),
        ({"response_format": "json"}, "response_format", "found"),
        ({"structured_outputs": {"regex": "a("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to 1024"),
        ({"structured_outputs": {"yaml": 1}}, "structured_outputs.yaml", "found 1"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs.disable_any_whitespace", "true"),
        ({"guided_json": [1]}, "guided_json", "found"),
        ({"guided_json": {"$ref": "http://localhost/x"}}, "guided_json", "not fetch"),
        ({"guided_choice": ["a", 1]}, "guided_choice", "found 1"),
        ({"guided_grammar": "start: x"}, "guided_grammar", 'unknown name: "x"'),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "found next to guided_regex"),
    ],
)
def test_wrong_constraints_are_refused(served: Served, fields: dict[str, Any], param: str, words: str) -> None:
    for stream in (False, True):
        status, answer, _ = served.call("POST", COMPLETIONS, {**TEXT, "stream": stream, **fields})
        assert status == 400, answer
        assert answer["error"]["param"].startswith(param)
        assert words in answer["error"]["message"]
        assert len(answer["error"]["message"]) < 1000


def test_wrong_formats_of_the_newer_interface(served: Served) -> None:
    wrong = {"type": "json_schema", "name": "x", "schema": {"not": {}}}
    status, answer, _ = served.call("POST", RESPONSES, {"input": "a", "text": {"format": wrong}})
    assert (status, answer["error"]["param"]) == (400, "text.format.schema")
    assert "Unimplemented keys" in answer["error"]["message"]


def test_a_failure_midway_is_its_own(served: Served, client: Any) -> None:
    stream = client.completions.create(model=NAME, prompt="A", max_tokens=90, temperature=0, stream=True)
    wrong = {**TEXT, "guided_regex": "(.{0,1000}[a-z]){0,100}"}
    status, answer, _ = served.call("POST", COMPLETIONS, wrong)
    assert (status, answer["error"]["code"]) == (500, "failed")
    assert "the constraint fails after" in answer["error"]["message"]
    pieces = list(stream)
    assert pieces[-1].choices[0].finish_reason in ("stop", "length")


def test_clients_may_leave(served: Served, client: Any) -> None:
    body = {"model": NAME, "prompt": "A", "max_tokens": 90, "stream": True}
    with client.completions.create(**body, extra_body={"guided_regex": "[a-z]{200}"}) as stream:
        next(iter(stream))
    until(lambda: served.scheduler.load.running == 0)
    posted(served, COMPLETIONS, {**TEXT, "guided_regex": "[a-z]{3}"})


def test_others_do_not_wait_for_hostile_constraints(served: Served) -> None:
    hostile = [{"allOf": [{"type": "string", "pattern": f"{c}{i}"} for i in range(50)]} for c in "ab"]
    asked = [asking(served.port, {**TEXT, "guided_json": schema}) for schema in hostile]
    time.sleep(0.2)
    posted(served, COMPLETIONS, {**TEXT, "max_tokens": 2})
    waiting = [not select.select([one.sock], [], [], 0)[0] for one in asked]
    for one in asked:
        assert b"too many parts that depend on one another" in one.getresponse().read()
        one.close()
    assert waiting == [True, True]
