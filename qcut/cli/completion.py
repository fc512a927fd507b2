"""``qcut completion``: a shell script that completes qcut's commands and options."""

from __future__ import annotations

import argparse

from qcut.cli.command import Answer, Command
from qcut.common.versions import install
from qcut.errors import UnsupportedError

SHELLS = ("bash", "zsh", "fish")

FIELDS = {"shell": "the shell", "script": "the script"}


parser = COMMAND = Command(
    "completion",
    f"SHELL {'|'.join(SHELLS)}\n    one of {', '.join(SHELLS)}",
    help="print a script that completes qcut's commands in your shell",
    description="Prints a script with which the Tab key completes qcut's commands, options and their values.\n"
    f"Needs the package shtab: {install('completion')}.",
    example="qcut completion bash > ~/.local/share/bash-completion/completions/qcut\n"
    "qcut completion zsh > ~/.zfunc/_qcut     # in a folder of $fpath\n"
    "qcut completion fish > ~/.config/fish/completions/qcut.fish",
    fields=FIELDS,
)


def run(arguments: argparse.Namespace) -> Answer:
    """Run the command."""
    try:
        import shtab
    except ImportError as error:
        raise UnsupportedError(f"completion: shtab is not installed: {install('completion')}") from error
    top = arguments.top
    for action in _actions(top):
        if action.type is not None and getattr(action.type, "__name__", "") == "Path":
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.dest == "model":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    script = shtab.complete(top, shell=arguments.shell)
    return Answer({"shell": arguments.shell, "script": script}, script)


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The arguments of a parser and of its subparsers."""
    found: list[argparse.Action] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                found += _actions(command)
        else:
            found.append(action)
    return found
