"""What a body's fields mean: served, without influence, refused by name, or unknown."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import pytest

from qcut.server.bodies import Body, Chat, ChatBody, CompletionBody, Schema, Text, parsed
from qcut.server.endpoints import TokenizeBody
from qcut.server.known_fields import UnknownFields
from qcut.server.refusals import Refusal
from qcut.server.responses_api import ResponsesBody

USER = {"role": "user", "content": "What is a list?"}
LEAST: dict[type[Schema], dict[str, Any]] = {
    CompletionBody: {"prompt": "a"},
    ChatBody: {"messages": [USER]},
    ResponsesBody: {"input": "a"},
    TokenizeBody: {"prompt": "a"},
}
WRONG_ITEMS = ("null", "1.5", '"x",1', "{}", "[[]]")


def read(kind: type[Schema], more: dict[str, Any], unknown: UnknownFields | None = None) -> Any:
    return parsed(kind, json.dumps({**LEAST[kind], **more}).encode(), unknown)


def refusal(kind: type[Schema], more: dict[str, Any], unknown: UnknownFields | None = None) -> Refusal:
    with pytest.raises(Refusal) as found:
        read(kind, more, unknown)
    return found.value


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody, ResponsesBody])
def test_null_is_as_good_as_absent(kind: type[Body]) -> None:
    names = [*kind.model_fields, *kind.UNSERVED, *kind.UNUSED, "something_else"]
    absent = dict.fromkeys(name for name in names if name not in (*LEAST[kind], "messages", "input"))
    assert read(kind, absent) == read(kind, {})


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "A sequence.", "refusal": None},
        {"role": "assistant", "content": "A sequence.", "annotations": [], "audio": None, "tool_calls": None},
        {"role": "assistant", "content": None, "function_call": None, "tool_calls": []},
        {"role": "assistant"},
        {"role": "user", "content": None, "name": None},
        {"role": "user", "content": "assistant"},
        {"role": "user", "content": [{"type": "text", "text": "A "}, {"type": "output_text", "text": "list"}, "s"]},
        {"role": "assistant", "content": "x", "reasoning_content": None, "id": "msg_1", "status": "completed"},
        {"role": "tool", "content": "x", "tool_call_id": "call_1"},
    ],
)
def test_messages_that_clients_send(message: dict[str, Any]) -> None:
    (chat,) = read(ChatBody, {"messages": [USER, message, USER]}).prompts
    assert [one["role"] for one in chat.messages] == ["user", message["role"], "user"]
    assert chat.messages[1]["content"] in ("A sequence.", message.get("content") or "", "A lists")
    assert "name" not in chat.messages[1]


@pytest.mark.parametrize(
    "message",
    [{"content": None, "refusal": "No."}, {"refusal": "No."}, {"content": [{"type": "refusal", "refusal": "No."}]}],
)
def test_what_an_assistant_refused_is_its_text(message: dict[str, Any]) -> None:
    (chat,) = read(ChatBody, {"messages": [USER, {"role": "assistant", **message}, USER]}).prompts
    assert chat.messages[1] == {"role": "assistant", "content": "No."}


@pytest.mark.parametrize(
    ("kind", "field", "value", "advice"),
    [
        (CompletionBody, "suffix", "end", "into the prompt"),
        (CompletionBody, "guided_regex", "a" * 5000, "allowed: 4096"),
        (CompletionBody, "use_beam_search", True, "n samples"),
        (CompletionBody, "length_penalty", 0.8, "n samples"),
        (CompletionBody, "prompt_logprobs", 1, "echo, logprobs and max_tokens 0"),
        (CompletionBody, "best_of", 4, "n log-probabilities"),
        (CompletionBody, "mirostat", 2, "temperature"),
        (CompletionBody, "use_beam_search", 0, "n samples"),
        (ChatBody, "functions", [{"name": "f"}], "Use tools"),
        (ChatBody, "function_call", {"name": "f"}, "Use tool_choice"),
        (ChatBody, "response_format", {"type": "json_schema", "json_schema": {}}, "a JSON Schema, an object"),
        (ChatBody, "response_format", {"type": "structural_tag"}, "text, json_object, json_schema"),
        (ChatBody, "structured_outputs", {"structural_tag": "{}"}, "json, json_object, regex, choice, grammar"),
        (ChatBody, "structured_outputs", {"json": {}, "regex": "a"}, "allowed: one constraint"),
        (ChatBody, "guided_whitespace_pattern", " *", "a line's end and spaces"),
        (ChatBody, "modalities", ["text", "audio"], "text only"),
        (ChatBody, "chat_template", "{{ messages }}", "--chat-template"),
        (ChatBody, "messages", [{"role": "user", "content": [{"type": "image_url"}]}], "text only"),
        (ChatBody, "messages", [{**USER, "tool_calls": [{"id": "1"}]}], "an object with a name"),
        (ChatBody, "messages", [{**USER, "function_call": {"name": "f"}}], "Send tool_calls"),
        (ResponsesBody, "previous_response_id", "resp_1", "whole conversation"),
        (ResponsesBody, "background", True, "whole conversation"),
        (ResponsesBody, "tools", [{"type": "web_search"}], 'allowed: "function"'),
        (ResponsesBody, "text", {"format": {"type": "json_schema"}}, "a JSON Schema, an object"),
        (ResponsesBody, "input", [{"type": "computer_call_output", "output": "1"}], "text only"),
        (ResponsesBody, "input", [{"role": "user", "content": [{"type": "input_image"}]}], "text only"),
    ],
)
def test_refusals_say_what_to_do(kind: type[Schema], field: str, value: Any, advice: str) -> None:
    found = refusal(kind, {field: value})
    assert found.status == 400
    assert field in (found.param or "").replace("messages", "input messages")
    assert advice in str(found)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (CompletionBody, {"best_of": 1, "use_beam_search": False, "length_penalty": 1, "early_stopping": False}),
        (CompletionBody, {"best_of": 3, "n": 3, "suffix": "", "n_probs": 0, "mirostat": 0, "tfs_z": 1.0}),
        (CompletionBody, {"cache_prompt": True, "id_slot": -1, "spaces_between_special_tokens": False, "user": "me"}),
        (ChatBody, {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False, "service_tier": "priority"}),
        (ChatBody, {"tools": [{"type": "function"}], "tool_choice": "none"}),
        (ChatBody, {"response_format": {"type": "text", "json_schema": None}}),
        (ChatBody, {"structured_outputs": {"json": None, "json_object": False}, "guided_json": None, "grammar": ""}),
        (ChatBody, {"guided_choice": [], "guided_regex": "", "json_schema": {}, "guided_json_object": False}),
        (ChatBody, {"response_format": {"type": "text"}, "modalities": ["text"], "verbosity": "medium"}),
        (ChatBody, {"store": True, "metadata": {"a": None}, "safety_identifier": "x", "prompt_cache_key": "y"}),
        (ChatBody, {"logprobs": False, "top_logprobs": 0, "stream_options": {"include_obfuscation": True}}),
        (ResponsesBody, {"store": True, "truncation": "disabled", "text": {"format": {"type": "text"}}}),
        (ResponsesBody, {"reasoning": {"effort": "low", "summary": "auto"}, "include": [], "tool_choice": "auto"}),
    ],
)
def test_values_that_ask_for_nothing(kind: type[Schema], fields: dict[str, Any]) -> None:
    read(kind, fields, UnknownFields(strict=True))


def test_numbers_that_mean_no_limit() -> None:
    for field, value, most in (("max_tokens", -1, None), ("n_predict", -1, None), ("n_predict", 7, 7)):
        assert read(CompletionBody, {field: value}).most == most
    assert read(ChatBody, {"max_tokens": 5, "max_completion_tokens": -1}).most == 5
    assert [read(CompletionBody, {"top_k": k}).sampling.top_k for k in (-1, 0, 7, 2**31 - 1)] == [0, 0, 7, 2**31 - 1]
    draws = {read(CompletionBody, {"seed": seed}).sampling.seed for seed in (-1, -1, None)}
    assert len(draws) == 3
    assert read(CompletionBody, {"repeat_penalty": 1.5}).sampling.repetition_penalty == 1.5
    assert read(CompletionBody, {"logit_bias": {"7": -100, "9": 0.5}}).sampling.logit_bias == {7: -100.0, 9: 0.5}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 5}, "input"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"instructions": True}, "instructions"),
        ({"instructions": "b", "input": [{"role": 5, "content": "a"}]}, "input.0.role"),
        ({"messages": [USER]}, "messages"),
        ({"metadata": {"a": [1]}}, "metadata"),
        ({"model": "m" * 5000}, "model"),
    ],
)
def test_refusals_name_the_field_that_was_sent(fields: dict[str, Any], param: str) -> None:
    assert refusal(ResponsesBody, fields, UnknownFields(strict=True)).param == param


def test_infinite_numbers_are_not_sent_back() -> None:
    with pytest.raises(Refusal, match="metadata"):
        parsed(ResponsesBody, b'{"input": "a", "metadata": {"a": 1e999}}')


def test_a_request_can_do_without_drafts() -> None:
    for kind in (CompletionBody, ChatBody, ResponsesBody):
        assert [read(kind, more).speculate for more in ({}, {"speculate": False})] == [True, False]
        assert "speculate: found" in str(refusal(kind, {"speculate": 7}))


def test_prompts_of_all_kinds() -> None:
    def prompts(prompt: Any, **more: Any) -> Any:
        return read(CompletionBody, {"prompt": prompt, **more}).prompts

    assert prompts("a") == [Text("a")]
    assert prompts(["a", "b"], add_special_tokens=False) == [Text("a", False), Text("b", False)]
    assert prompts([1, 2]) == [[1, 2]]
    assert prompts([[1], [2, 3]]) == [[1], [2, 3]]
    chat = read(
        ChatBody, {"continue_final_message": True, "chat_template_kwargs": {"x": None}, "reasoning_effort": "low"}
    )
    assert chat.prompts == [Chat([USER], False, True, False, {"x": None, "reasoning_effort": "low"})]
    assert read(ResponsesBody, {"input": "a", "instructions": "b"}).prompts == [
        Chat([{"role": "system", "content": "b"}, {"role": "user", "content": "a"}])
    ]


def test_unknown_fields_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    unknown = UnknownFields()
    for _ in range(3):
        read(ChatBody, {"max_token": 2, "messages": [{**USER, "wieght": 1}], "stream_options": {"a": 1}}, unknown)
    names = sorted(str(record.args) for record in caplog.records)
    assert names == ["('max_token',)", "('messages.wieght',)", "('stream_options.a',)"]


def test_the_log_of_unknown_fields_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    unknown = UnknownFields()
    for start in (0, 500):
        read(CompletionBody, {f"{i}" * 100: i for i in range(start, start + 500)}, unknown)
    assert len(caplog.records) == 65
    assert max(len(record.getMessage()) for record in caplog.records) < 200


def test_a_strict_server_refuses_unknown_fields() -> None:
    strict = UnknownFields(strict=True)
    found = refusal(CompletionBody, {"max_token": 2}, strict)
    assert (found.code, found.param) == ("unknown", "max_token")
    assert "allowed: add_special_tokens, best_of, " in str(found)
    for more, param in (
        ({"messages": [{**USER, "weight": 1}]}, "messages.weight"),
        ({"stream_options": {"a": 1}}, "stream_options.a"),
    ):
        assert refusal(ChatBody, more, strict).param == param


@pytest.mark.parametrize(
    ("kind", "field", "item", "tail"),
    [
        (CompletionBody, "prompt", "[1]", ",[[]]"),
        (CompletionBody, "stop", "1", ""),
        (CompletionBody, "stop_token_ids", '"a"', ""),
        (ChatBody, "messages", "[]", ""),
        (ChatBody, "messages", '{"role":"user","content":0}', ""),
        (ResponsesBody, "input", '{"role":"user"}', ""),
        *((CompletionBody, field, item, "") for field in ("prompt", "stop_token_ids") for item in WRONG_ITEMS),
        *((ChatBody, "messages", item, "") for item in WRONG_ITEMS),
    ],
)
def test_many_wrong_items_cost_one_error(kind: type[Schema], field: str, item: str, tail: str) -> None:
    others = "".join(f",{json.dumps(name)}:{json.dumps(value)}" for name, value in LEAST[kind].items() if name != field)
    for count in (30_000, (1 << 20) // len(item)):
        body = f'{{"{field}":[{",".join([item] * count)}{tail}]{others}}}'
        start = time.process_time()
        with pytest.raises(Refusal, match=r"found|required|more arrays"):
            parsed(kind, body.encode())
        assert time.process_time() - start < 2, "half a minute, where an error is listed for each item"


def test_known_fields_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        read(ChatBody, {"store": True, "tools": None, "user": "me", "cache_prompt": True})
    assert not caplog.records
