"""Chooses the parsers of a server by the chat template, and those of a request by its fields."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from qcut.errors import ConfigError, shown
from qcut.server.refusals import Refusal
from qcut.server.structured import Asked
from qcut.server.tools import harmony
from qcut.server.tools.calls import HermesCalls, LlamaCalls, MistralCalls
from qcut.server.tools.grammar import AnswerGrammar
from qcut.server.tools.harmony import Harmony
from qcut.server.tools.pieces import Parser, Piece
from qcut.server.tools.reasoning import Think
from qcut.server.tools.requests import Calling

JSON = dict[str, Any]
_CALLS: Mapping[str, type[HermesCalls | LlamaCalls | MistralCalls]] = {
    "hermes": HermesCalls,
    "llama3": LlamaCalls,
    "mistral": MistralCalls,
}
TOOL_PARSERS = ("auto", *_CALLS, "harmony", "none")
"""Values of ``--tool-parser``."""
_THOUGHT: Mapping[str, tuple[str, str]] = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
REASONING_PARSERS = ("auto", *_THOUGHT, "harmony", "none")
"""Values of ``--reasoning-parser``."""
PROMPT_TOKENS = 16
"""Tokens at the end of a prompt that show whether it begins the reasoning."""
_OTHER_FORMS = ("<function=", "<arg_key>")  # calls that are no JSON, within markers of other forms
_LLAMA = ("<|python_tag|>", '{"name": function name, "parameters": ')
_MISTRAL_ID = 9  # Mistral's templates refuse ids of another length


def tool_parser_of(template: str) -> str:
    """The name of the parser of the calls that a chat template writes; ``none`` if it is unknown."""
    if "<|channel|>" in template and "<|message|>" in template:
        return "harmony"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if any(form in template for form in _OTHER_FORMS):
        return "none"
    if "<tool_call>" in template:
        return "hermes"
    return "llama3" if any(mark in template for mark in _LLAMA) else "none"


def reasoning_parser_of(template: str) -> str:
    """The name of the parser of the reasoning that a chat template writes; ``none`` if it writes none."""
    if tool_parser_of(template) == "harmony":
        return "harmony"
    return next((name for name, marks in _THOUGHT.items() if any(mark in template for mark in marks)), "none")


@dataclass(frozen=True)
class Parsing:
    """How the answers to a request are parsed.

    Attributes:
        parser: makes the parser of a choice from the end of the prompt's text.
        markers: strings that texts have although they may be special tokens.
        new_id: makes the id of a call.
        several: whether an answer may have several calls; otherwise further ones are left out.
        asked: makes the constraint of an answer from the end of the prompt's text, and the one that the request asks
            for; either may be None.
    """

    parser: Callable[[str], Parser]
    markers: tuple[str, ...]
    new_id: Callable[[], str]
    several: bool
    asked: Callable[[str, Asked | None], Asked | None]


class Parsers:
    """The parsers of a server.

    Args:
        template: the tokenizer's ``chat_template``: a text, several by their names, or None.
        tool_parser: one of `TOOL_PARSERS`.
        reasoning_parser: one of `REASONING_PARSERS`.
        tokens: ids of the tokenizer's added tokens by their spelling.

    Raises:
        ConfigError: another name, or ``harmony`` with a parser that is not for its channels.
    """

    def __init__(
        self,
        template: Any,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        tokens: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        for option, name, allowed in (
            ("--tool-parser", tool_parser, TOOL_PARSERS),
            ("--reasoning-parser", reasoning_parser, REASONING_PARSERS),
        ):
            if name not in allowed:
                raise ConfigError(f"{option} {shown(name)}; allowed: {', '.join(allowed)}")
        several = template.values() if isinstance(template, Mapping) else [template]
        text = "\n".join(one for one in several if isinstance(one, str))
        self._is_auto = tool_parser == "auto"
        self._tools = tool_parser_of(text) if self._is_auto else tool_parser
        if reasoning_parser == "auto":
            reasoning_parser = "harmony" if self._tools == "harmony" else reasoning_parser_of(text)
            if reasoning_parser == "harmony" and self._tools not in ("harmony", "none"):
                reasoning_parser = "none"
        self._reasoning = reasoning_parser
        if "harmony" in (self._tools, self._reasoning) and {self._tools, self._reasoning} - {"harmony", "none"}:
            raise ConfigError(
                f"--tool-parser {self._tools} with --reasoning-parser {self._reasoning}; allowed: harmony only with "
                "harmony or none"
            )
        is_harmony = "harmony" in (self._tools, self._reasoning)
        self._grammar = AnswerGrammar(self._tools, _THOUGHT.get(self._reasoning), is_harmony, text, tokens)

    def of(self, calling: Calling) -> Parsing | None:
        """How to parse the answers to a request; None: not at all.

        Args:
            calling: functions that may be called.

        Raises:
            Refusal: the form of the model's calls is unknown.
        """
        options = ", ".join(TOOL_PARSERS[1:])
        if calling.tools and self._is_auto and self._tools == "none":
            message = "tools: found no form of calls in the chat template; allowed: no tools, or a server with "
            raise Refusal(400, f"{message}--tool-parser ({options})", param="tools", code="unsupported")
        if calling.is_forced and self._tools == "none":
            message = "tool_choice: --tool-parser none forces no call; allowed: none, auto, or a server with another"
            raise Refusal(400, f"{message} ({options})", param="tool_choice", code="unsupported")
        calls = self._tools if calling.tools else "none"
        new_id = _mistral_id if calls == "mistral" else _id

        def asked(prompt: str, content: Asked | None) -> Asked | None:
            if calling.is_forced:
                return self._grammar.asked(calling, prompt)
            if content is None or content.constraint.kind != "json_schema":
                return content
            return self._grammar.asked(calling, prompt, content)

        if "harmony" in (calls, self._reasoning):
            has_calls, has_reasoning = calls == "harmony", self._reasoning == "harmony"
            return Parsing(lambda _: Harmony(has_calls, has_reasoning), harmony.MARKERS, new_id, calling.several, asked)
        if calls == self._reasoning == "none":
            return None
        names = frozenset(str(tool["function"]["name"]) for tool in calling.tools)
        kind, thought = _CALLS.get(calls), _THOUGHT.get(self._reasoning)

        def parser(prompt: str) -> Parser:
            content = _Plain() if kind is None else kind(names)
            return content if thought is None else Think(content, prompt.rstrip().endswith(thought[0]), thought)

        markers = (*(() if kind is None else kind.MARKERS), *(thought or ()))
        return Parsing(parser, markers, new_id, calling.several, asked)


class _Plain:
    """All text is content."""

    def add(self, text: str) -> list[Piece]:
        return [Piece("content", text)] if text else []

    def end(self) -> list[Piece]:
        return []


def _id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_MISTRAL_ID))
