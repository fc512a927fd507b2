"""The ``qcut`` command."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from qcut.cli import completion, doctor, evaluate, generate, info, plan, quantize, serve
from qcut.cli.bench import command as bench
from qcut.cli.command import Answer, Parser, UsageError, write_json
from qcut.cli.developer import precompile, tune
from qcut.cli.developer.gemm import command as gemm
from qcut.common.failures import is_memory
from qcut.common.versions import refuse_other_distribution
from qcut.emitters.core.source import EmitError
from qcut.errors import QcutError, UnsupportedError

TRACEBACK = "QCUT_TRACEBACK"
"""Environment variable that enables the traceback of a fault."""

ENDING = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
"""Signals after which a command removes unfinished files, and the message of each. The exit status is 128 plus the
signal's number, as in shells."""


class Ended(KeyboardInterrupt):
    """A signal ends the command.

    Attributes:
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
        self.number = signal.Signals(number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None takes those of the process.

    Returns:
        Exit status: 0 on success, 1 if something is missing or failed, 130 after Ctrl-C, 143 after SIGTERM, 129 after
        SIGHUP.

    Raises:
        SystemExit: with status 2 for a wrong command line, 0 after ``--help`` and ``--version``.
    """
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None:  # closed by the shell
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):  # a terminal without UTF-8, or a file name that is not UTF-8
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if argv is None else argv)
    as_json, out = "--json" in words, sys.stdout
    try:
        try:
            # With --json, standard output holds only the result; other prints of commands go to standard error.
            with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext(), _ended_by_signals():
                name, answer, error = _run(words)
                if answer.text and not as_json:
                    print(answer.text)
        except KeyboardInterrupt as ended:
            name, answer, error = _failed(ended, "")
        except UsageError as problem:
            _tell(f"{problem.parser.format_usage()}{problem.parser.prog}: error: {problem}")
            if as_json:
                write_json(out, "error", 2, {"error": {"kind": "UsageError", "message": str(problem)}})
            raise SystemExit(2) from None
        if error:
            _tell(f"qcut: {error}")
        if as_json:
            write_json(out, name, answer.status, answer.data)
        out.flush()
        return answer.status
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        _forget(out)
        return 1
    except OSError as problem:
        _tell(f"qcut: standard output cannot be written: {problem.strerror}")
        _forget(out)
        return 1


def _tell(text: str) -> None:
    """Write to standard error, if possible."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr)


def _run(words: Sequence[str]) -> tuple[str, Answer, str]:
    """Run the command; returns the name of its result, the result, and the error message."""
    try:
        refuse_other_distribution(Path(__file__).parents[1])  # an imported package may have replaced the hook
    except UnsupportedError as error:
        return _failed(error, str(error))
    arguments = parser().parse_args(words)
    try:
        answer = arguments.command(arguments)
        return arguments.name, answer if isinstance(answer, Answer) else Answer(status=int(answer)), ""
    except (UsageError, BrokenPipeError):
        raise
    except (QcutError, EmitError) as error:
        return _failed(error, str(error))
    except OSError as error:
        if error.filename is None:  # standard output's
            raise
        return _failed(error, f"{os.fsdecode(error.filename)}: {error.strerror or error}")
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, of a GPU
            return _failed(error, f"the GPU has not enough memory: {_first_line(error)}")
        if is_memory(error):
            return _failed(error, f"there is not enough memory: {_first_line(error)}".removesuffix(": "))
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        kind = type(error).__name__
        told = f"this is a fault in qcut, please report it: {kind}: {_first_line(error)} ({_place(error)})"
        return _failed(error, told if os.environ.get(TRACEBACK) else f"{told}; {TRACEBACK}=1 shows more")


def _signal_of(error: KeyboardInterrupt) -> signal.Signals:
    return error.number if isinstance(error, Ended) else signal.SIGINT


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Make the signals of `ENDING` raise `Ended` in a block, unless they have handlers already."""
    in_hook = False

    def end(number: int, frame: object) -> None:
        torch = sys.modules.get("torch")
        # An exception in torch's C++ would abort, and one in the hook would be lost.
        if in_hook or getattr(getattr(torch, "__spec__", None), "_initializing", False):
            send_again(number)
        else:
            raise Ended(number)

    def send_again(number: int) -> None:
        timers.append(threading.Timer(0.01, os.kill, (os.getpid(), number)))
        timers[-1].start()

    def dropped(problem: Any) -> None:
        nonlocal in_hook
        if isinstance(problem.exc_value, KeyboardInterrupt):  # raised while an object was deleted
            in_hook = True
            send_again(_signal_of(problem.exc_value))
            in_hook = False
        else:
            report(problem)

    report, timers = sys.unraisablehook, list[threading.Timer]()
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        sys.unraisablehook = dropped
        found = {one: signal.getsignal(one) for one in ENDING}
        untouched = (signal.SIG_DFL, signal.default_int_handler)  # nohup ignores SIGHUP
        before = {one: handler for one, handler in found.items() if handler in untouched}
    for one in before:
        signal.signal(one, end)
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        if sys.unraisablehook is dropped:
            sys.unraisablehook = report
        for one, handler in before.items():
            signal.signal(one, handler)


def _failed(error: BaseException, message: str) -> tuple[str, Answer, str]:
    status, inner = 1, error
    while inner.__context__ and not isinstance(inner, KeyboardInterrupt):
        inner = inner.__context__
    if isinstance(inner, KeyboardInterrupt):  # or what failed because a signal ended it
        error, number = inner, _signal_of(inner)
        message, status = ENDING[number], 128 + number
    data = {"error": {"kind": type(error).__name__, "message": message}}
    return "error", Answer(data, status=status), message


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]


def _place(error: BaseException) -> str:
    """File and line of the innermost frame of qcut in the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}qcut{os.sep}" in frame.filename] or frames
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}"


def _forget(stream: Any) -> None:
    """Redirect standard output to /dev/null, since Python flushes once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


EPILOG = """\
`qcut COMMAND --help` explains a command, with an example.

exit status:
  0    done
  1    a failure or a problem found; one line starts with `qcut:` and names it
  2    a wrong command line
  130  interrupted with Ctrl-C
  143  ended by SIGTERM; 129 by SIGHUP"""


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    from qcut import __version__

    top = Parser(
        prog="qcut",
        description="Quantizes transformer models to 8-bit integers or 2 to 4 bits a weight, and runs them.",
        epilog=EPILOG,
    )
    top.add_argument("--version", action="version", version=f"qcut {__version__}", help="print the version and exit")
    top.set_defaults(top=top)
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (quantize, plan, info, generate, serve, evaluate, bench, doctor, precompile, gemm, tune, completion):
        module.COMMAND.add_to(commands, module.run)
    return top
