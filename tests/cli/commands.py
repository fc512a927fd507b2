"""Runs the command line on the CPU, for tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qcut.cli import main as cli
from tests.support import ROOT

DEMO = ROOT / "models" / "gpt2-5m"
PROMPT = "The import statement"


def run(capfd: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """The exit status, standard output and standard error of a command."""
    capfd.readouterr()  # a test may have loaded a model itself, with progress bars
    try:
        status = cli.main([*map(str, words)])
    except SystemExit as ended:  # a wrong command line
        status = int(str(ended.code))
    out, err = capfd.readouterr()
    return status, out, err


def on_cpu(capfd: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """`run` with ``--device cpu``."""
    return run(capfd, *words, "--device", "cpu")


def answer(capfd: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """The JSON that a command answers with."""
    status, out, err = run(capfd, *words, "--json")
    assert status == 0, err
    data: dict[str, Any] = json.loads(out)
    return data
