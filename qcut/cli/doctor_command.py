"""The arguments of ``qcut doctor``."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from qcut.cli.answer import Answer
from qcut.cli.arguments import add_command, natural
from qcut.errors import ConfigError

FIELDS = {
    "healthy": "true where nothing but a GPU is missing; with --selftest, where nothing differs",
    "findings": "list of {topic, state: ok, warn or missing, text, advice}; empty with --selftest",
    "verdict": "what this machine can do, in a sentence; empty with --selftest",
    "selftest": "list of {gpu, family, shape, kernels, problem, skipped}; empty without --selftest",
}


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of ``qcut``."""
    parser = add_command(
        commands,
        "doctor",
        help="check GPUs, driver, compilers and cache of this machine, and advise where one is missing",
        description="Says what of GPUs, driver, compilers, headers and the kernel cache this machine has, and what to\n"
        "do about the rest. Compiles one small kernel with each toolchain. The exit status is 1 if anything but a GPU\n"
        "is missing.",
        example="qcut doctor\nqcut doctor --selftest",
        fields=FIELDS,
    )
    parser.add_argument("--no-probe", action="store_true", help="do not compile anything")
    parser.add_argument(
        "--selftest",
        action="store_true",
        help="instead, run every family of kernels once on each GPU beside the CPU's reference, and name what differs; "
        "exit status 1 if anything does, or without a GPU",
    )
    parser.add_argument("--device", type=natural, metavar="N", help="the one GPU that --selftest tests (default: all)")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> Answer:
    """Run the command."""
    from qcut.cli import doctor

    if arguments.selftest:
        from qcut.cli.selftest import run as selftest

        verdicts: list[dict[str, Any]] = []
        status = selftest.command(arguments.device, record=verdicts)
        return Answer({"healthy": not status, "findings": [], "verdict": "", "selftest": verdicts}, status=status)
    if arguments.device is not None:
        raise ConfigError("doctor: --device goes with --selftest")
    findings = doctor.examine(compile_probe=not arguments.no_probe)
    text, healthy = doctor.report(findings), doctor.is_healthy(findings)
    data = {"findings": [asdict(finding) for finding in findings], "verdict": text.splitlines()[-1], "selftest": []}
    return Answer({"healthy": healthy, **data}, text, 0 if healthy else 1)
