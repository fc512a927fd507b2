"""A command: its arguments, declared as text, and its result."""

from __future__ import annotations

import argparse
import json
import math
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TextIO

SCHEMA_VERSION = 1
"""Version of the JSON results; incremented if a field is renamed, removed or changes its meaning."""

_DIGITS = 18
"""Most digits of an integer argument; more may overflow torch's int64."""


@dataclass(frozen=True)
class Answer:
    """The outcome of a command: text for people, or with ``--json`` one object for programs.

    Attributes:
        data: fields of the JSON object, documented by the command's ``fields``.
        text: output without ``--json``; empty if the command has printed it already.
        status: exit status.
    """

    data: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    status: int = 0


def write_json(stream: TextIO, name: str, status: int, data: Mapping[str, Any]) -> None:
    """Write one JSON object and a newline.

    Args:
        stream: destination.
        name: name of the command, or ``error``.
        status: exit status.
        data: the other fields; numbers that are not finite become null.
    """
    answer = {"schema": f"qcut.{name}/{SCHEMA_VERSION}", "status": status, **data}
    stream.write(json.dumps(_finite(answer), allow_nan=False) + "\n")
    stream.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class UsageError(Exception):
    """An invalid command line.

    Args:
        parser: parser of the command.
        message: the error.
    """

    def __init__(self, parser: argparse.ArgumentParser, message: str) -> None:
        super().__init__(message)
        self.parser = parser


class Help(argparse.HelpFormatter):
    """Wraps paragraphs to the terminal's width, except those with indented lines (examples and lists)."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=26, **options)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = re.split(r"\n\n+", text)
        return "\n\n".join(part if "\n  " in part else "\n".join(self._split_lines(part, width)) for part in parts)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Wrap without breaking at hyphens, which are part of options."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)


class Parser(argparse.ArgumentParser):
    """A parser without abbreviated options that raises `UsageError` and suggests the command that was meant."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", Help)
        super().__init__(allow_abbrev=False, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the command line; unrecognized arguments are an error of the command itself."""
        found, extra = self.parse_known_args(args, namespace)
        if extra:
            command = getattr(found, "parser", self)
            options = [option for action in command._actions for option in action.option_strings]
            near = get_close_matches(extra[0].partition("=")[0], options, 1, 0.7)
            hint = f"did you mean {near[0]}? " if near else ""
            command.error(f"{hint}unrecognized arguments: {' '.join(map(str, extra))}")
        return found

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError`."""
        raise UsageError(self, message)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help or version; argparse's own ignores errors of the output."""
        print(message, end="", file=file, flush=True)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = get_close_matches(str(value), [str(choice) for choice in action.choices or ()], 1)
            if near:
                error.message = f"did you mean {near[0]}? {error.message}"
            raise


@dataclass(frozen=True)
class Command:
    """A command, with text or ``--json`` output.

    Attributes:
        name: name of the command.
        arguments: declaration, see `add_arguments`.
        types: types of arguments by name, in addition to `TYPES`.
        help: one line for the list of commands.
        description: help text; its first sentence is the purpose.
        example: one or more command lines.
        fields: fields of the JSON result and their meaning, for `qcut.cli.developer.manual`.
        usage: replaces argparse's usage line.
    """

    name: str
    arguments: str
    types: Mapping[str, Callable[[str], Any]] = field(default_factory=dict)
    _: KW_ONLY
    help: str
    description: str
    example: str
    fields: Mapping[str, str]
    usage: str | None = None

    def add_to(self, commands: Any, run: Callable[[Any], Answer]) -> None:
        """Add the command to the subparsers of ``qcut``; ``run`` is called with the parsed arguments."""
        epilog = "example:\n" + textwrap.indent(self.example, "  ")
        texts = {"help": self.help, "description": self.description.strip(), "usage": self.usage}
        parser: argparse.ArgumentParser = commands.add_parser(self.name, epilog=epilog, **texts)
        parser.set_defaults(parser=parser, name=self.name, fields=self.fields, example=self.example, command=run)
        parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        add_arguments(parser, self.arguments, {**TYPES, **self.types})


_ARGUMENT = re.compile(
    r"(?P<one_of>\| )?(?P<name>(--)?[\w\[\]-]+)( (?P<value>[^\s:=|,]+))?( (?P<choices>[^\s:=,]+\|[^\s:=,]+))?"
    r"(?P<many> \.\.\.)?(?P<again>, again)?(?P<required>, required)?(: (?P<type>\w+))?( = (?P<default>\S+))?"
)


def add_arguments(parser: argparse.ArgumentParser, text: str, types: Mapping[str, Callable[[str], Any]]) -> None:
    """Add the arguments declared by a text: one per line, with its help indented below.

    ``--top-k K: natural = 0`` is an option with a metavariable, a type and a default. ``--type f16|s8`` has choices,
    with or without a metavariable before them. ``--fit`` is a flag, ``--[no-]verify`` can be switched off. ``--skip
    GLOB ...`` takes several values, ``--host NAME, again`` may be given again, ``--out DIR, required: Path`` has to be
    given. ``MODEL`` is positional, ``MODEL ?`` may be left out. Neighbours that begin with ``| `` exclude each other.
    ``quantization:`` starts a group with that title, ``options:`` continues with the options without a group.
    """
    group: Any = parser
    one_of: Any = None
    for paragraph in re.split(r"\n(?=\S)", text.strip()):
        head, _, below = paragraph.partition("\n")
        if head.endswith(":"):
            group, one_of = parser if head == "options:" else parser.add_argument_group(head[:-1]), None
            continue
        found = _ARGUMENT.fullmatch(head)
        assert found is not None, head
        one_of = (one_of or group.add_mutually_exclusive_group()) if found["one_of"] else None
        name, options = _options_of(found, types[found["type"]] if found["type"] else None)
        (one_of or group).add_argument(name, help=" ".join(below.split()), **options)


def _options_of(found: re.Match[str], convert: Callable[[str], Any] | None) -> tuple[str, dict[str, Any]]:
    """The name and the options with which argparse adds a declared argument."""
    name, value, choices, default = (found[each] for each in ("name", "value", "choices", "default"))
    several = choices and tuple(choices.split("|"))
    if not name.startswith("--"):
        return name.lower(), {"metavar": name, "type": convert, "nargs": value, "choices": several}
    options: dict[str, Any] = {"action": "append", "default": []} if found["again"] else {}
    if "[no-]" in name:
        on = None if default is None else default == "True"
        return name.replace("[no-]", ""), {"action": argparse.BooleanOptionalAction, "default": on}
    if not value and not choices:
        return name, {"action": "store_true"}
    options |= {"metavar": value, "type": convert, "choices": several}
    if found["many"]:
        options["nargs"] = "+"
    if found["required"]:
        options["required"] = True
    if default is not None:
        values = [convert(each) if convert else each for each in default.strip("'").split(",")]
        options["default"] = values if found["many"] else values[0]
    return name, options


def positive(text: str) -> int:
    """An integer of at least 1, of at most 18 digits."""
    value = natural(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a whole number from 1 up")
    return value


def natural(text: str) -> int:
    """An integer of at least 0, of at most 18 digits."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a whole number from 0 up")
    if len(text) > _DIGITS:
        raise argparse.ArgumentTypeError(f"{text[:_DIGITS]}… has {len(text)} digits; allowed: {_DIGITS}")
    return int(text)


def positive_float(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def share(text: str) -> float:
    """A number above 0, at most 1."""
    value = positive_float(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, at most 1")
    return value


TYPES: dict[str, Callable[[str], Any]] = {
    each.__name__: each for each in (positive, natural, positive_float, share, float, Path)
}
"""Types of arguments by name; the default is str."""
