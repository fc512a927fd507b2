"""The parser of the command line, types of its arguments, and options that several commands share."""

from __future__ import annotations

import argparse
import math
import re
import textwrap
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

_DIGITS = 18
"""Most digits of a whole number: more may not fit torch's 63 bits."""

MODEL_HELP = "a folder with a model, or a model's name on the hub"


class UsageError(Exception):
    """A wrong command line.

    Args:
        parser: of the command.
        message: what is wrong.
    """

    def __init__(self, parser: argparse.ArgumentParser, message: str) -> None:
        super().__init__(message)
        self.parser = parser


class Help(argparse.HelpFormatter):
    """Fills paragraphs to the terminal's width; one with indented lines, an example or a list, stays as it is."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=26, **options)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = re.split(r"\n\n+", text)
        return "\n\n".join(part if "\n  " in part else "\n".join(self._split_lines(part, width)) for part in parts)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Words stay whole: a hyphen is a part of options and of column-major."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviated options, raises `UsageError`, and says which command may have been meant."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", Help)
        super().__init__(allow_abbrev=False, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the command line; what is left over is an error of the command, and no other is told of it."""
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

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = get_close_matches(str(value), [str(choice) for choice in action.choices or ()], 1)
            if near:
                error.message = f"did you mean {near[0]}? {error.message}"
            raise


def add_command(
    commands: Any, name: str, *, help: str, description: str, example: str, fields: Mapping[str, str], **options: Any
) -> argparse.ArgumentParser:
    """Add a command that answers with ``--json`` too.

    Args:
        commands: the subparsers of ``qcut``.
        name: of the command.
        help: one line for the list of commands.
        description: the first sentence says what the command is for.
        example: command lines, one or more.
        fields: the JSON answer's fields with their meaning, for `qcut.cli.developer.manual`.
        options: of the parser.
    """
    lines = "\n".join(f"  {line}" for line in example.strip().splitlines())
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help, description=description.strip(), epilog=f"example:\n{lines}", **options
    )
    parser.set_defaults(parser=parser, name=name, fields=fields, example=example.strip())
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def positive(text: str) -> int:
    """A whole number from 1 up, of at most 18 digits."""
    value = natural(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a whole number from 1 up")
    return value


def natural(text: str) -> int:
    """A whole number from 0 up, of at most 18 digits."""
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


def add_device_options(parser: argparse.ArgumentParser, dtype: str) -> None:
    """Add ``--device`` and ``--dtype``.

    Args:
        parser: of the command.
        dtype: what ``--dtype auto`` means, for the help.
    """
    parser.add_argument(
        "--device",
        default="auto",
        metavar="D",
        help="where to compute: cpu, cuda, cuda:1, …, or auto, a GPU where there is one (default: auto)",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float16", "bfloat16", "float32"),
        default="auto",
        help=f"type of the weights that are not quantized, and of activations (default: auto, {dtype})",
    )


def add_quantizing_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a model is quantized; `qcut.cli.quantizing.Quantizing` reads them."""
    group = parser.add_argument_group("how to quantize")
    ways = group.add_mutually_exclusive_group()
    ways.add_argument("--scheme", metavar="NAME", help="one scheme for all layers, such as w8a8, w8a16 or codebook4")
    ways.add_argument("--plan", type=Path, metavar="FILE", help="a scheme for each layer, from a file of `qcut plan`")
    ways.add_argument(
        "--bits",
        type=positive_float,
        metavar="B",
        help="a scheme for each layer, chosen by the text of --calibrate as `qcut plan --bits` does: bits a weight "
        "allowed on average, norms and scales counted (default: none)",
    )
    group.add_argument(
        "--smooth",
        type=float,
        metavar="A",
        help="move outliers of activations into the weights first, with SmoothQuant's alpha A between 0 and 1; "
        "0.5 is usual (default: do not)",
    )
    group.add_argument(
        "--fit",
        action="store_true",
        help="fit the indices of codebooks to the text, which loses less than rounding to the nearest",
    )
    group.add_argument(
        "--refine",
        type=positive,
        metavar="N",
        help="tune codebook layers and norms toward the float model's predictions on the whole text, in N steps of a "
        "few windows each; 1500 are usual (default: do not)",
    )
    group.add_argument(
        "--embeddings",
        metavar="NAME",
        help="scheme of the token table and of the classifier, such as w8a16 (default: both stay in float)",
    )
    group.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="hold each quantized layer to its float weight, and the model to the float one, before anything is "
        "written: on a part of the text of --calibrate or, without one, on 16 tokens of the vocabulary; of a model "
        "that reads images or sound, the layers alone; --no-verify leaves it out (default: do)",
    )
    use = "what is derived from data: the ranges of w8a8_static, --bits, --smooth, --fit and --refine (default: none)"
    add_data_options(group, use, "lm_head; with --plan, none")


def add_data_options(parser: Any, use: str, skipped: str, *, required: bool = False) -> None:
    """Add ``--calibrate``, ``--include`` and ``--skip``: the text that a model is quantized by, and the layers.

    Args:
        parser: of the command, or a group of it.
        use: what the text is for.
        skipped: the layers that ``--skip`` skips by default.
        required: whether there has to be a text.
    """
    parser.add_argument(
        "--calibrate",
        type=Path,
        required=required,
        metavar="TEXT",
        help=f"UTF-8 text like that which the model will read, for {use}",
    )
    parser.add_argument(
        "--include",
        nargs="+",
        metavar="GLOB",
        help="take only layers whose name, or the end of it, matches, such as '*.mlp.*' (default: all)",
    )
    parser.add_argument(
        "--skip",
        nargs="+",
        metavar="GLOB",
        help=f"leave layers whose name, or the end of it, matches in float (default: {skipped})",
    )


def add_window_options(parser: Any, most: int | None, batch: int) -> None:
    """Add the options that cut a text into windows.

    Args:
        parser: of the command, or a group of it.
        most: default of ``--max-windows``; None: all.
        batch: default of ``--batch``.
    """
    parser.add_argument(
        "--window",
        type=positive,
        metavar="N",
        help="cut the text into pieces of N tokens (default: 512, or the model's context where that is shorter)",
    )
    parser.add_argument(
        "--max-windows",
        type=positive,
        default=most,
        metavar="N",
        help=f"use only the first N windows of the text (default: {most or 'all'})",
    )
    parser.add_argument(
        "--batch", type=positive, default=batch, metavar="N", help=f"windows computed at a time (default: {batch})"
    )


def add_making_options(
    parser: argparse.ArgumentParser, out: str, out_help: str, *, most: int, batch: int, dtype: str
) -> None:
    """Add what commands take that make a file or a folder of a float model, by a text: all but how they make it.

    Args:
        parser: of the command.
        out: how the help calls what is written: FILE or DIR.
        out_help: the help of ``--out``.
        most: default of ``--max-windows``.
        batch: default of ``--batch``.
        dtype: what ``--dtype auto`` means, for the help.
    """
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--out", type=Path, required=True, metavar=out, help=out_help)
    parser.add_argument("--overwrite", action="store_true", help="replace what is there (default: refuse)")
    add_window_options(parser.add_argument_group("the text of --calibrate"), most, batch)
    add_device_options(parser, dtype)
