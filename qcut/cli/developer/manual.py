"""Generates docs/cli.md from the parsers: ``python -m qcut.cli.developer.manual > docs/cli.md``."""

from __future__ import annotations

import argparse
import re

from qcut.cli.main import parser
from qcut.common.versions import install

_HEAD = """\
# The command line

`qcut` does from a shell what the package does from Python. This page is written by `python -m
qcut.cli.developer.manual` from `qcut COMMAND --help`.

```
qcut quantize models/gpt2-5m --scheme codebook4 --out gpt2-4bit    # a model in, a smaller one out
qcut info gpt2-4bit                                                 # what it holds
qcut eval gpt2-4bit --text book.txt                                 # what the quality is now
qcut generate gpt2-4bit --prompt "The import statement"             # try it
```

A model is a folder, or a name on the hub. The disk is looked at first, the hub's cache included. The hub is asked once
and has four seconds to answer; it is never asked for a path.

## Answers and exit statuses

Answers go to standard output; messages and progress bars, which only a terminal gets, to standard error. With `--json`
standard output gets one JSON object, on one line, and nothing else:

| field | meaning |
|---|---|
| `schema` | `qcut.COMMAND/1`, or `qcut.error/1`; the number rises when a field goes or changes its meaning |
| `status` | the exit status |
| `error` | only in `qcut.error/1`: `kind`, a name from [errors](reference/index.md#errors), and `message` |

The other fields are listed with each command. Numbers that are not finite are null.

| exit status | meaning |
|---|---|
| 0 | done |
| 1 | a failure or a problem found; one line on standard error starts with `qcut:` and names it |
| 2 | a wrong command line |
| 130 | interrupted with Ctrl-C |
| 143, 129 | ended by SIGTERM, by SIGHUP |

A failure, Ctrl-C, SIGTERM or SIGHUP leaves no half-written file or folder. A fault of qcut's own is one line too;
`QCUT_TRACEBACK=1` shows where it came from.

## Completion

`qcut completion bash` prints a script for the shell, `zsh` and `fish` likewise; it needs shtab:
`{}`.
"""


def manual() -> str:
    """The page as Markdown."""
    (commands,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return "\n".join(
        [_HEAD.format(install("completion")), *(_command(name, each) for name, each in commands.choices.items())]
    )


def _command(name: str, command: argparse.ArgumentParser) -> str:
    defaults = command._defaults
    lines = [f"## qcut {name}", "", *_paragraphs(command.description or ""), "```", defaults["example"], "```", ""]
    for group in command._action_groups:
        actions = [action for action in group._group_actions if action.dest not in ("help", "json")]
        if not actions:
            continue
        title = "argument" if group.title == "positional arguments" else "option"
        if group.title not in ("positional arguments", "options"):
            lines += [f"{(group.title or '').capitalize()}:", ""]
        lines += [f"| {title} | meaning |", "|---|---|"]
        lines += [f"| {_spelling(action)} | {_cell(_help(action))} |" for action in actions]
        lines.append("")
    lines += [f"With `--json`, `qcut.{name}/1`:", "", "| field | meaning |", "|---|---|"]
    for fields, meaning in defaults["fields"].items():
        lines.append(f"| {', '.join(f'`{field}`' for field in fields.split(', '))} | {_cell(meaning)} |")
    return "\n".join([*lines, ""])


def _paragraphs(text: str) -> list[str]:
    """A description as Markdown, one line per paragraph."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\n+", text.strip()):
        lines += [_cell(paragraph.replace("\n", " ")), ""]
    return lines


def _spelling(action: argparse.Action) -> str:
    value = _value(action)
    if not action.option_strings:
        return f"`{value}`"
    (option,) = (each for each in action.option_strings if not each.startswith("--no-") or each == "--no-probe")
    words = f"{option} {value}" if value else option
    return f"`{words}`" + (" (required)" if action.required else "")


def _value(action: argparse.Action) -> str:
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return ""
    shown = action.metavar or f"{{{','.join(map(str, action.choices or ()))}}}"
    return f"{shown} …" if action.nargs in ("+", "*") else str(shown)


def _help(action: argparse.Action) -> str:
    return (action.help or "").replace("%%", "%")


def _cell(text: str) -> str:
    """Text as Markdown: options as code, everything else escaped."""
    parts = text.replace("|", "\\|").split("`")
    for i in range(0, len(parts), 2):
        plain = re.sub(r"([*<[])", r"\\\1", parts[i])
        parts[i] = re.sub(r"(?<![\w-])(--[a-z][\w-]*)", r"`\1`", plain)
    return "`".join(parts)


if __name__ == "__main__":
    print(manual(), end="")
