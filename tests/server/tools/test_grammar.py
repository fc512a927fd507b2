"""Grammars of answers with calls: what models write is allowed, and what is allowed is read back."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from qcut.server.refusals import Refusal
from qcut.server.structured import Asked
from qcut.server.tools.choice import Parsers, Parsing
from qcut.server.tools.pieces import Piece, joined
from qcut.server.tools.requests import Calling, calling, checked_tools
from qcut.text.constraint import Constraint
from qcut.text.matcher import Grammars, Matcher, write_masks
from tests.server.serving import MODEL
from tests.server.tools.scripted import with_special_tokens

pytest.importorskip("llguidance")

MARKERS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]"),
    *("[/THINK]", "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
)
TEMPLATES = {
    "hermes": "<tool_call><think>",
    "llama3": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "mistral with names": "[TOOL_CALLS][ARGS][THINK]",
    "mistral with ids": "[TOOL_CALLS][CALL_ID][ARGS]",
    "harmony": "<|channel|><|message|>",
}
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "maxLength": 6}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "description": "start: // %json {"}},
    {"type": "function", "function": {"name": "time"}},
]
ARGUMENTS = '{"city": "Zürich", "days": 3}'
WEATHER = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
TIME = '{"name": "time", "arguments": {}}'
HERMES = f"<tool_call>\n{WEATHER}\n</tool_call>"
NAMED = {"type": "function", "function": {"name": "time"}}
FINAL = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
ONE, BOTH = [("call", "weather"), ("arguments", ARGUMENTS)], [("call", "time"), ("arguments", "{}")]
CASES = [
    ("hermes", "", HERMES, ONE),
    ("hermes", "", f"{HERMES}\n<tool_call>\n{TIME}\n</tool_call>", [*ONE, *BOTH]),
    ("hermes", "", f"<think>\nIs a < b?\n</think>\n\n{HERMES}", [("reasoning", "Is a < b?"), *ONE]),
    ("hermes", "<think>\n", f"Hm.</think>{HERMES}", [("reasoning", "Hm."), *ONE]),
    ("hermes", "<think>\n\n</think>\n\n", HERMES, ONE),
    ("llama3", "", WEATHER.replace("arguments", "parameters"), ONE),
    ("llama3", "", f"{WEATHER}; {TIME}".replace("arguments", "parameters"), [*ONE, *BOTH]),
    ("mistral", "", f"[TOOL_CALLS][{WEATHER}]", ONE),
    ("mistral", "", f"[TOOL_CALLS] [{WEATHER}, {TIME}]", [*ONE, *BOTH]),
    ("mistral with names", "", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", ONE),
    (
        "mistral with names",
        "",
        f"[THINK]Hm.[/THINK][TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]time[ARGS]{{}}",
        [("reasoning", "Hm."), *ONE, *BOTH],
    ),
    ("mistral with ids", "", f"[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{ARGUMENTS}", ONE),
    ("mistral with ids", "", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", ONE),
    (
        "harmony",
        "",
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}",
        ONE,
    ),
    (
        "harmony",
        "",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}",
        [("reasoning", "Hm."), *ONE],
    ),
]
REFUSED = [
    ("hermes", "", f"Well.{HERMES}"),
    ("hermes", "", HERMES.replace("weather", "wind")),
    ("hermes", "", HERMES.replace('"Zürich"', "5")),
    ("hermes", "", HERMES.replace('"days": 3', '"hours": 3')),
    ("hermes", "", f"Hm.</think>{HERMES}"),
    ("hermes", "<think>", HERMES),
    ("hermes", "</think>", f"<think>Hm.</think>{HERMES}"),
    ("llama3", "", WEATHER),
    ("mistral", "", "[TOOL_CALLS][]"),
    ("mistral with names", "", '[TOOL_CALLS]time[ARGS]{"a": 1}'),
    ("harmony", "", "<|channel|>final<|message|>Yes."),
]


@cache
def tokenizer(marked: bool) -> Any:
    found = AutoTokenizer.from_pretrained(MODEL)
    return with_special_tokens(found, MARKERS, "") if marked else found


@cache
def grammars(marked: bool) -> Grammars:
    found = tokenizer(marked)
    return Grammars(found, len(found), [found.eos_token_id])


def asked_of(
    family: str, prompt: str, marked: bool, called: Calling, content: Asked | None = None
) -> tuple[Parsing, Matcher]:
    parsing = Parsers(TEMPLATES[family], tokens=tokenizer(marked).get_added_vocab()).of(called)
    assert parsing is not None
    asked = parsing.asked(prompt, content)
    assert asked is not None
    return parsing, grammars(marked).matcher(asked.constraint)


def called(choice: Any = "required", several: bool = True, tools: Sequence[Any] = TOOLS) -> Calling:
    return calling(checked_tools(list(tools)), choice, several, [f"tools.{i}" for i in range(len(tools))])


def mask_of(matcher: Matcher) -> int | None:
    """The tokens that may come next, a bit each; None: the answer has ended."""
    if not matcher.goes_on:
        return None
    masks = np.zeros((1, matcher.words), np.uint32)
    write_masks([(0, matcher, ())], masks)
    return int.from_bytes(masks.tobytes(), "little") if matcher.error is None else None


def allows(matcher: Matcher, ids: Sequence[int]) -> bool:
    """Whether an answer may be these tokens, and may end after them."""
    for token in ids:
        mask = mask_of(matcher)
        if mask is None or not mask >> token & 1:
            return False
        matcher.consume(token)
    assert matcher.error is None
    mask = mask_of(matcher)
    return mask is None or bool(mask & 1)  # token 0 ends texts


def is_valid(name: str, arguments: dict[str, Any]) -> bool:
    """Whether arguments are of their function's schema."""
    if name == "time":
        return arguments == {}
    city, days = arguments.pop("city"), arguments.pop("days", 1)
    return arguments == {} and isinstance(city, str) and len(city) <= 6 and isinstance(days, int) and 1 <= days <= 14


def read(parsing: Parsing, prompt: str, text: str) -> list[Piece]:
    parser = parsing.parser(prompt)
    return joined([*parser.add(text), *parser.end()])


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(("family", "prompt", "text", "expected"), CASES)
def test_what_models_write_is_allowed(
    family: str, prompt: str, text: str, expected: list[tuple[str, str]], marked: bool
) -> None:
    parsing, matcher = asked_of(family, prompt, marked, called())
    assert allows(matcher, tokenizer(marked).encode(text))
    assert read(parsing, prompt, text) == expected


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(("family", "prompt", "text"), REFUSED)
def test_other_answers_are_not_allowed(family: str, prompt: str, text: str, marked: bool) -> None:
    _, matcher = asked_of(family, prompt, marked, called())
    assert not allows(matcher, tokenizer(marked).encode(text))


@pytest.mark.parametrize(("family", "prompt", "text", "expected"), CASES)
def test_one_call_if_one_is_asked_for(family: str, prompt: str, text: str, expected: list[tuple[str, str]]) -> None:
    _, matcher = asked_of(family, prompt, True, called(several=False))
    assert allows(matcher, tokenizer(True).encode(text)) == (BOTH[0] not in expected)
    _, matcher = asked_of(family, prompt, True, called(NAMED))
    assert not allows(matcher, tokenizer(True).encode(text))


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("family", TEMPLATES)
def test_all_that_is_allowed_is_read_back(family: str, marked: bool) -> None:
    """Tokens are drawn among those that are allowed."""
    draw, one = random.Random(family), tokenizer(marked)
    complete = 0
    for _ in range(8):
        parsing, matcher = asked_of(family, "", marked, called())
        ids: list[int] = []
        while (bits := mask_of(matcher)) is not None and len(ids) < (300 if marked else 80):
            allowed = [token for token in range(len(one)) if bits >> token & 1]
            if 0 in allowed:
                break
            # The end of a reasoning is rare among all tokens.
            ends = [
                token for token in one.convert_tokens_to_ids(["</think>", "[/THINK]", "<|end|>"]) if token in allowed
            ]
            ids.append(draw.choice(ends if ends and len(ids) > 20 else allowed))
            matcher.consume(ids[-1])
        if bits is not None and not bits & 1:
            continue
        complete += 1
        pieces = read(parsing, "", one.decode(ids))
        assert {piece.kind for piece in pieces} <= {"reasoning", "call", "arguments"}, one.decode(ids)
        calls = [piece.text for piece in pieces if piece.kind == "call"]
        arguments = [json.loads(piece.text) for piece in pieces if piece.kind == "arguments"]
        assert calls
        for name, found in zip(calls, arguments, strict=True):
            assert is_valid(name, found), found
    assert complete


def test_content_of_a_form_or_calls() -> None:
    """With ``auto``, an answer is of the form, or calls; reasoning comes before either."""
    content = Asked("response_format", Constraint.json_schema(FINAL))
    for family, text, kinds in (
        ("hermes", '{"a": 1}', ["content"]),
        ("hermes", f"<think>Hm.</think>\n{HERMES}", ["reasoning", "call", "arguments"]),
        ("hermes", '<think>Hm.</think>{"a": 2}', ["reasoning", "content"]),
        ("llama3", '{"a": 1}', ["content"]),
        ("llama3", WEATHER.replace("arguments", "parameters"), ["call", "arguments"]),
        ("mistral with names", '[THINK]Hm.[/THINK]{"a": 1}', ["reasoning", "content"]),
        ("harmony", '<|channel|>final<|message|>{"a": 1}', ["content"]),
        (
            "harmony",
            '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>{"a": 1}',
            ["reasoning", "content"],
        ),
    ):
        for marked in (False, True):
            parsing, matcher = asked_of(family, "", marked, called("auto"), content)
            assert allows(matcher, tokenizer(marked).encode(text)), text
            assert [piece.kind for piece in read(parsing, "", text)] == kinds
            _, matcher = asked_of(family, "", marked, called("auto"), content)
            assert not allows(matcher, tokenizer(marked).encode(text.replace('"a": ', '"b": ').replace("Zü", "ZuZu")))


def test_forms_stay_without_tools_and_reasoning() -> None:
    content = Asked("response_format", Constraint.json_schema(FINAL))
    assert Parsers("{{ messages }}").of(Calling()) is None
    parsing = Parsers("<tool_call>").of(called("auto"))
    assert parsing is not None
    assert parsing.asked("", None) is None
    other = Asked("guided_regex", Constraint.regex("a+"))
    assert parsing.asked("", other) is other
    assert parsing.asked("", content) is not content


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        (
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "$id": "https://example.com/tool",
                "type": "object",
                "properties": {"a": {"$ref": "#/definitions/n"}},
                "definitions": {"n": {"type": "integer"}},
            },
            '{"a": 1}',
            '{"a": "b"}',
        ),
        (
            {
                "$ref": "#/$defs/T",
                "$defs": {"T": {"properties": {"t": {"$ref": "#/$defs/T"}}, "additionalProperties": False}},
            },
            '{"t": {"t": {}}}',
            '{"t": {"a": {}}}',
        ),
        (
            {
                "properties": {"const": {"$ref": "#/$defs/enum"}, "properties": {"$ref": "#/$defs/enum"}},
                "required": ["const", "properties"],
                "$defs": {"enum": {"const": 1}},
            },
            '{"const": 1, "properties": 1}',
            '{"const": 1, "properties": 2}',
        ),
        ({"properties": {"$ref": {"enum": [{"$ref": "#"}]}}}, '{"$ref": {"$ref": "#"}}', '{"$ref": {"$ref": "/"}}'),
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"b": 1}', '{"c": 1}'),
        ({"properties": {}}, "{}", '{"a": 1}'),
    ],
)
@pytest.mark.parametrize("family", ["hermes", "mistral with names"])
def test_references_lead_into_the_parameters(family: str, parameters: dict[str, Any], good: str, bad: str) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    for arguments, is_good in ((good, True), (bad, False)):
        text = HERMES if family == "hermes" else f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}"
        _, matcher = asked_of(family, "", True, called(tools=tools))
        assert allows(matcher, tokenizer(True).encode(text.replace(ARGUMENTS, arguments))) == is_good


def test_many_large_tools() -> None:
    properties = {f"field{i}": {"type": "string", "description": "words " * 4} for i in range(8)}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object", "properties": properties}}}
        for i in range(64)
    ]
    _, matcher = asked_of("hermes", "", True, called(tools=tools))
    text = HERMES.replace(WEATHER, '{"name": "f63", "arguments": {"field0": "é", "field7": "", "x": [1]}}')
    assert allows(matcher, tokenizer(True).encode(text))


def test_tools_that_are_too_long_to_force() -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": ["x" * 1000] * 70}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(Refusal, match=r"tools: grammar has \d+ bytes; allowed: 65536") as found:
        asked_of("hermes", "", False, called(tools=tools))
    assert found.value.param == "tools"
