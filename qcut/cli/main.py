"""The ``qcut`` command."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qcut.cli import evaluate as eval_command
from qcut.cli import generate as generate_command
from qcut.cli import tune as tune_command
from qcut.cli.arguments import positive
from qcut.cli.gemm import command as gemm_command
from qcut.emitters.core.arch import ARCHITECTURES
from qcut.emitters.core.source import EmitError
from qcut.errors import ConfigError, QcutError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None takes those of the process.

    Returns:
        Exit status: 0 on success, 1 if something is missing or failed, 2 for a wrong command line.
    """
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None:  # closed by the shell
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):  # a terminal without UTF-8, or a file name that is none
            stream.reconfigure(errors="backslashreplace")
    arguments = _parser().parse_args(argv)
    try:
        status = int(arguments.command(arguments))
        sys.stdout.flush()
        return status
    except (QcutError, EmitError) as error:
        print(f"qcut: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # a reader such as `head` has seen enough
        _forget_output()
        return 1
    except KeyboardInterrupt:
        print("qcut: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            return _own_fault()
        print(f"qcut: standard output cannot be written: {error.strerror}", file=sys.stderr)
        _forget_output()
        return 1
    except MemoryError:
        print("qcut: there is not enough memory", file=sys.stderr)
        return 1
    except Exception:
        return _own_fault()


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)


def _forget_output() -> None:
    """Point standard output at nothing: Python flushes once more as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _own_fault() -> int:
    traceback.print_exc()
    print("qcut: this is a fault in qcut; please report it with the lines above", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    from qcut import __version__

    parser = argparse.ArgumentParser(prog="qcut", description="Int8 and codebook inference for transformers.")
    parser.add_argument("--version", action="version", version=f"qcut {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    doctor = commands.add_parser(
        "doctor",
        help="check GPUs, driver, compilers and cache of this machine, and advise where one is missing",
        description="Looks at GPUs, driver, compilers, headers and the kernel cache, and compiles a probe with each "
        "toolchain. Exit status 1 if anything but a GPU is missing.",
    )
    doctor.add_argument("--no-probe", action="store_true", help="do not compile anything")
    doctor.add_argument(
        "--selftest",
        action="store_true",
        help="instead, run every family of kernels once on each GPU beside the CPU's reference, and name what differs; "
        "exit status 1 if anything does, or without a GPU",
    )
    doctor.add_argument("--device", type=int, metavar="N", help="the one GPU that --selftest tests (default: all)")
    doctor.set_defaults(command=_doctor)

    precompile = commands.add_parser(
        "precompile",
        help="build all kernels of an architecture; needs no GPU",
        description="Builds every kernel that a model can need on an architecture, and packs them into one file, with "
        "which nothing is built later and no compiler is asked for. Kernels that are built stay in the cache, so that "
        "the command goes on where it was stopped. Exit status 1 if a kernel fails.",
    )
    precompile.add_argument(
        "--arch",
        action="append",
        required=True,
        choices=ARCHITECTURES,
        metavar="ARCH",
        help=f"one of {', '.join(ARCHITECTURES)}; may be repeated",
    )
    precompile.add_argument(
        "--pack",
        type=Path,
        metavar="FOLDER",
        help="where the packs go (default: packs in $QCUT_CACHE_DIR, where qcut finds them)",
    )
    precompile.add_argument("--list", action="store_true", help="print the kernels' names and build nothing")
    precompile.add_argument("--jobs", type=positive, metavar="N", help="compilers at a time (default: one per core)")
    precompile.set_defaults(command=_precompile)

    generate_command.add_parser(commands)
    eval_command.add_parser(commands)
    gemm_command.add_parser(commands)
    tune_command.add_parser(commands)
    return parser


def _doctor(arguments: argparse.Namespace) -> int:
    from qcut.cli import doctor

    if arguments.selftest:
        from qcut.cli.selftest import run

        return run.command(arguments.device)
    if arguments.device is not None:
        raise ConfigError("doctor: --device goes with --selftest")
    findings = doctor.examine(compile_probe=not arguments.no_probe)
    print(doctor.report(findings))
    return 0 if doctor.is_healthy(findings) else 1


def _precompile(arguments: argparse.Namespace) -> int:
    from qcut.cli import precompile

    return precompile.command(list(dict.fromkeys(arguments.arch)), arguments.pack, arguments.jobs, arguments.list)
