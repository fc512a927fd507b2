"""Parsers of calls and reasoning: whole texts, and the same texts in pieces of all kinds."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from qcut.server.tools.calls import HermesCalls, LlamaCalls, MistralCalls
from qcut.server.tools.harmony import Harmony
from qcut.server.tools.pieces import Parser, Piece, cut, joined
from qcut.server.tools.reasoning import Think

Make = Callable[[], Parser]
Found = list[tuple[str, str]]
NAMES = frozenset({"weather", "time"})
NESTED = '{"a": {"b": [1, {"c": "}]{"}]}, "quote": "\\"}", "city": "Zürich 🌧"}'


def hermes() -> Parser:
    return HermesCalls(NAMES)


def llama() -> Parser:
    return LlamaCalls(NAMES)


def mistral() -> Parser:
    return MistralCalls(NAMES)


def harmony() -> Parser:
    return Harmony()


def thinking() -> Parser:
    return Think(HermesCalls(NAMES))


def opened() -> Parser:
    return Think(HermesCalls(NAMES), is_open=True)


def mistral_thinking() -> Parser:
    return Think(MistralCalls(NAMES), markers=("[THINK]", "[/THINK]"))


def mistral_opened() -> Parser:
    return Think(MistralCalls(NAMES), True, ("[THINK]", "[/THINK]"))


def content(text: str) -> tuple[str, str]:
    return "content", text


def call(name: str, arguments: str) -> Found:
    return [("call", name), ("arguments", arguments)]


WEATHER = f'{{"name": "weather", "arguments": {NESTED}}}'
PARAMETERS = f'{{"name": "weather", "parameters": {NESTED}}}'
MARKED = f"<tool_call>\n{WEATHER}\n</tool_call>"
CASES: list[tuple[Make, str, Found]] = [
    # Hermes
    (hermes, "", []),
    (hermes, " \n", [content(" \n")]),
    (hermes, MARKED, call("weather", NESTED)),
    (hermes, f"Let me see.\n{MARKED} Done.", [content("Let me see.\n"), *call("weather", NESTED), content(" Done.")]),
    (hermes, f"\n\n{MARKED}\n{MARKED}\n", [*call("weather", NESTED), *call("weather", NESTED)]),
    (hermes, f"<tool_call>{WEATHER}", call("weather", NESTED)),
    (hermes, MARKED[:-4], call("weather", NESTED)),
    (hermes, f"{MARKED}\n<tool_cal", [*call("weather", NESTED), content("\n<tool_cal")]),
    (hermes, f"<tool_call>{WEATHER} and more", [*call("weather", NESTED), content(" and more")]),
    (hermes, '<tool_call>{"arguments": {"a": 1}, "name": "time"}</tool_call>', call("time", '{"a": 1}')),
    (hermes, '<tool_call>{"name": "time"}</tool_call>', call("time", "{}")),
    (hermes, '<tool_call>{"name":"time","arguments":"{\\"a\\": \\"é\\"}"}</tool_call>', call("time", '{"a": "é"}')),
    (hermes, '<tool_call>{"id": "1", "name": "time", "arguments": null, "x": [2]}</tool_call>', call("time", "null")),
    (hermes, "if a < b: <tool <tool_ca <tool_call", [content("if a < b: <tool <tool_ca <tool_call")]),
    (hermes, "<tool_call>no JSON</tool_call> text", [content("<tool_call>no JSON</tool_call> text")]),
    (hermes, '<tool_call>{"name": 5}</tool_call>', [content('<tool_call>{"name": 5}</tool_call>')]),
    (hermes, '<tool_call>{"name": "time', [content('<tool_call>{"name": "time')]),
    (hermes, f"<tool_call>{MARKED}", [content("<tool_call>"), *call("weather", NESTED)]),
    (hermes, '<tool_call>{"name": "time", "arguments": {"a": 1</tool_call>b', [*call("time", '{"a": 1'), content("b")]),
    (
        hermes,
        f'<tool_call>{{"name": "time", "arguments": {{"a": "b\n</tool_call>\n{MARKED}',
        [*call("time", '{"a": "b'), *call("weather", NESTED)],
    ),
    (hermes, f"<tool_call>{WEATHER[:-1]}] x</tool_call>", [*call("weather", NESTED), content("] x</tool_call>")]),
    (
        hermes,
        '<tool_call>{"name": "time", "arguments": {"html": "</tool_call> <tool_call>"}}</tool_call>',
        call("time", '{"html": "</tool_call> <tool_call>"}'),
    ),
    # Llama 3
    (llama, PARAMETERS, call("weather", NESTED)),
    (llama, f" <|python_tag|>{PARAMETERS}", call("weather", NESTED)),
    (llama, f"{PARAMETERS}; ", call("weather", NESTED)),
    (llama, f'{PARAMETERS}; {{"name": "time", "parameters": {{}}}}', [*call("weather", NESTED), *call("time", "{}")]),
    (llama, f"Well. <|python_tag|>{PARAMETERS}", [content("Well. "), *call("weather", NESTED)]),
    (llama, f"{PARAMETERS} is it", [*call("weather", NESTED), content(" is it")]),
    (llama, f"Well. {PARAMETERS}", [content(f"Well. {PARAMETERS}")]),
    (llama, '{"name": "Ada", "parameters": {"a": 1}}', [content('{"name": "Ada", "parameters": {"a": 1}}')]),
    (llama, '{"name": "time"}', [content('{"name": "time"}')]),
    (llama, '{"type": "function", "name": "time", "parameters": {}}', call("time", "{}")),
    (llama, '{"answer": [1, 2]} {', [content('{"answer": [1, 2]} {')]),
    (llama, '<|python_tag|>time.call(a="b")', [content('<|python_tag|>time.call(a="b")')]),
    # Mistral
    (mistral, f"[TOOL_CALLS] [{WEATHER}]", call("weather", NESTED)),
    (mistral, f"[TOOL_CALLS][{WEATHER} , {WEATHER}] ", [*call("weather", NESTED), *call("weather", NESTED)]),
    (mistral, f"Yes.[TOOL_CALLS]weather[ARGS]{NESTED}", [content("Yes."), *call("weather", NESTED)]),
    (
        mistral,
        f"[TOOL_CALLS]weather{NESTED}[TOOL_CALLS]time[CALL_ID]123456789[ARGS]{{}}",
        [*call("weather", NESTED), *call("time", "{}")],
    ),
    (mistral, '[TOOL_CALLS]time[ARGS]{"a": ', call("time", '{"a": ')),
    (mistral, "[TOOL_CALLS]time please", [content("[TOOL_CALLS]time please")]),
    (mistral, "[TOOL_CALLS] [1, 2]", [content("[TOOL_CALLS] [1, 2]")]),
    (mistral, "a[0] [TOOL [TOOL_CALLS", [content("a[0] [TOOL [TOOL_CALLS")]),
    (mistral, f"[TOOL_CALLS]{'n' * 200}[ARGS]{{}}", [content(f"[TOOL_CALLS]{'n' * 200}[ARGS]{{}}")]),
    # GPT-OSS
    (harmony, "plain < text", [content("plain < text")]),
    (
        harmony,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes 🌧.<|return|>",
        [("reasoning", "Hm."), content("Yes 🌧.")],
    ),
    (
        harmony,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        f"{NESTED}<|call|>",
        [("reasoning", "Hm."), content("Let me see."), *call("weather", NESTED)],
    ),
    (
        harmony,
        f" to=functions.weather<|channel|>commentary json<|message|>{NESTED}<|call|>"
        "<|start|>assistant to=functions.time<|channel|>commentary<|message|>{}",
        [*call("weather", NESTED), *call("time", "{}")],
    ),
    (
        harmony,
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B<|end|>"
        "<|start|>assistant<|channel|>fin",
        [("reasoning", "A\nB")],
    ),
    (harmony, f"<|channel|>{'x' * 600}", [content(f"<|channel|>{'x' * 600}")]),
    # Reasoning
    (thinking, "<think>\nHm <b>.\n\n</think>\n\nYes.", [("reasoning", "Hm <b>."), content("Yes.")]),
    (thinking, "\n<think>Hm", [("reasoning", "Hm")]),
    (thinking, "<think>\n\n</think>\n\nYes.", [content("Yes.")]),
    (thinking, " Yes, <think>no</think>", [content(" Yes, <think>no</think>")]),
    (thinking, "<thin", [content("<thin")]),
    (thinking, f"<think>{MARKED}</think>{MARKED}", [("reasoning", MARKED), *call("weather", NESTED)]),
    (opened, f"Hm.\n\nOr?\n</think>\n\n{MARKED}", [("reasoning", "Hm.\n\nOr?"), *call("weather", NESTED)]),
    (opened, "<think>\nHm.</think>Yes.", [("reasoning", "Hm."), content("Yes.")]),
    (opened, "Hm </thin", [("reasoning", "Hm </thin")]),
    (mistral_thinking, "[THINK]Hm [x] [/TH.[/THINK]\nYes.", [("reasoning", "Hm [x] [/TH."), content("Yes.")]),
    (
        mistral_thinking,
        f"[THINK]Hm.[/THINK][TOOL_CALLS]weather[ARGS]{NESTED}[TOOL_CALLS]time[ARGS]{{}}",
        [("reasoning", "Hm."), *call("weather", NESTED), *call("time", "{}")],
    ),
    (mistral_thinking, f"[TOOL_CALLS][{WEATHER}]", call("weather", NESTED)),
    (mistral, f"[TOOL_CALLS][{WEATHER}, ", call("weather", NESTED)),
    (mistral_thinking, "<think>no</think>[THINK]", [content("<think>no</think>[THINK]")]),
    (
        mistral_opened,
        "Hm.[/THINK]Yes.[TOOL_CALLS]time[ARGS]{}",
        [("reasoning", "Hm."), content("Yes."), *call("time", "{}")],
    ),
    (mistral_opened, "[THINK]Hm [/THINK", [("reasoning", "Hm [/THINK")]),
]


def parsed(make: Make, parts: list[str]) -> Found:
    parser, found = make(), list[Piece]()
    for part in parts:
        found += parser.add(part)
    return [tuple(piece) for piece in joined([*found, *parser.end()])]  # type: ignore[misc]


@pytest.mark.parametrize(("make", "text", "expected"), CASES)
def test_whole_texts(make: Make, text: str, expected: Found) -> None:
    assert parsed(make, [text]) == expected


@pytest.mark.parametrize(("make", "text", "expected"), CASES)
def test_every_split_gives_the_same(make: Make, text: str, expected: Found) -> None:
    draw = random.Random(len(text))
    splits = [[at] for at in range(len(text) + 1)]
    splits += [sorted(draw.choices(range(len(text) + 1), k=draw.randrange(2, 9))) for _ in range(200)]
    for cuts in [*splits, list(range(len(text)))]:
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parsed(make, parts) == expected, parts


@pytest.mark.parametrize("make", [hermes, llama, mistral, harmony, thinking, opened, mistral_thinking, mistral_opened])
def test_random_texts_lose_nothing_by_splits(make: Make) -> None:
    draw = random.Random(0)
    words = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "time"]
    words += [
        "[THINK]",
        "[/THINK]",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "to=functions.f",
        *'{}[]":;,\\ \na<',
        '{"name": "time", ',
        WEATHER,
    ]
    words += ['"arguments": {', '"parameters": ', "analysis"]
    for _ in range(1500):
        text = "".join(draw.choices(words, k=draw.randrange(12)))
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(1, 6)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parsed(make, parts) == parsed(make, [text]) == parsed(make, list(text)), text


@pytest.mark.parametrize("make", [hermes, mistral, thinking])
def test_text_is_held_only_as_needed(make: Make) -> None:
    """Content comes with its last letter, and arguments with theirs."""
    parser = make()
    assert "".join(piece.text for piece in parser.add("a < b and [c] ")) == "a < b and [c] "
    assert parser.add("<" if make is not mistral else "[TOOL") == []
    assert [piece.text for piece in parser.add("x")] == ["<x" if make is not mistral else "[TOOLx"]
    begin = "[TOOL_CALLS]time[ARGS]{" if make is mistral else '<tool_call>{"name": "time", "arguments": {'
    assert joined(parser.add(begin)) == [Piece("call", "time"), Piece("arguments", "{")]
    for character in '"a": "b c':
        assert parser.add(character) == [Piece("arguments", character)]


def test_answers_in_json_are_not_held() -> None:
    parser = llama()
    assert joined(parser.add('{"answer"')) == [Piece("content", '{"answer"')]
    assert parser.add(": ") == [Piece("content", ": ")]


def test_long_arguments_take_no_longer_each() -> None:
    begin, text = '<tool_call>{"name": "time", "arguments": {"text": "', "word " * 100_000
    start = time.process_time()
    assert len(parsed(hermes, [f'{begin}{text}"}}}}</tool_call>'])[1][1]) > len(text)
    assert time.process_time() - start < 5, "minutes, where each character copies those before it"


def test_channels_as_content() -> None:
    text = "<|channel|>analysis<|message|>A<|end|><|start|>assistant to=functions.f<|channel|>commentary<|message|>{}"
    assert parsed(lambda: Harmony(calls=False, reasoning=False), [text]) == [content("A\n{}")]
    assert parsed(lambda: Harmony(calls=False), [text]) == [("reasoning", "A"), content("{}")]


def test_cuts_at_markers() -> None:
    assert cut("a<b><c>d", ("<c>", "<b>")) == ("a", "<b>", "<c>d")
    assert cut("a<<", ("<b>",)) == ("a<", None, "<")
    assert cut("", ("<b>",)) == ("", None, "")
