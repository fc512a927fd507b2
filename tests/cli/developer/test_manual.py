"""Help, docs/cli.md, JSON and completion agree with the parsers."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from qcut.cli import main as cli
from qcut.cli.completion import SHELLS
from qcut.cli.developer.manual import manual
from tests.cli.commands import DEMO, run
from tests.support import ROOT


def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(found.choices)


def options() -> list[tuple[str, argparse.Action]]:
    return [
        (name, action)
        for name, command in commands().items()
        for action in command._actions
        if action.option_strings and action.dest != "help"
    ]


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "cli.md").read_text() == manual(), "python -m qcut.cli.developer.manual > docs/cli.md"


def test_every_command_explains_itself() -> None:
    for name, command in commands().items():
        text = command.format_help()
        assert f"qcut {name}" in command._defaults["example"], name
        assert "example:" in text
        first = (command.description or "").split(".")[0]
        assert len(first.split()) >= 5, name
        assert max(map(len, (command.description or "").splitlines())) <= 120


def test_every_option_says_what_happens_without_it() -> None:
    goes_without_saying = {"--scheme", "--plan", "--llama2c", "--tokenizer", "--tile"}
    for name, action in options():
        text, flag = action.help or "", action.nargs == 0
        assert len(text) > 10, f"{name} {action.option_strings}"
        if not (flag or action.required or set(action.option_strings) & goes_without_saying or name == "gemm"):
            assert "default" in text, f"{name} {action.option_strings}"


def test_an_option_means_the_same_everywhere() -> None:
    """Options of one name take one kind of value; the three that measure GPUs name their own things."""
    kinds: dict[str, set[object]] = {}
    for name, action in options():
        if name not in ("tune", "gemm", "doctor"):
            for option in action.option_strings:
                kinds.setdefault(option, set()).add((action.type, type(action.const)))
    assert {option for option, found in kinds.items() if len(found) > 1} == set()
    assert all("--json" in command.format_help() for command in commands().values())


def test_examples_are_valid_command_lines() -> None:
    for command in commands().values():
        for line in command._defaults["example"].splitlines():
            words = shlex.split(line.partition(" > ")[0], comments=True)
            assert words[0] == "qcut"
            cli.parser().parse_args(words[1:])


def test_answers_have_the_documented_fields(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("An import statement names a module.\n" * 20)
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    cpu = ("--device", "cpu")
    few = ("--window", "16", "--max-windows", "1", "--include", "h.0.attn.*", *cpu)
    lines: list[tuple[Any, ...]] = [
        ("info", DEMO),
        ("quantize", DEMO, "--scheme", "w8a8", "--out", out, *cpu),
        ("plan", DEMO, "--calibrate", text, "--measure", "layer", "--out", plan, *few),
        ("generate", DEMO, "--prompt", "a", "--steps", 1, *cpu),
        ("eval", DEMO, "--text", text, "--window", 16, "--max-windows", 1, *cpu),
        ("bench", DEMO, "--schemes", "w8a8", "--window", 16, "--max-windows", 1, "--new", 2, *cpu),
        ("doctor", "--no-probe"),
        ("precompile", "--arch", "sm_80", "--list"),
        ("gemm", 16, 16, 16),
    ]
    for words in lines:
        name = words[0]
        fields = {f for key in commands()[name]._defaults["fields"] for f in key.split(", ")}
        status, printed, _ = run(capfd, *words, "--json")
        answer = json.loads(printed)
        assert set(answer) == fields | {"schema", "status"}, name
        assert (answer["schema"], answer["status"]) == (f"qcut.{name}/1", status)


# ── completion ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_scripts(shell: str, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert cli.main(["completion", shell]) == 0
    script = capfd.readouterr().out
    for word in ("quantize", "plan", "info", "--scheme" if shell != "fish" else "scheme"):
        assert word in script
    if shutil.which(shell):
        done = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_bash_completes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    if not shutil.which("bash"):
        pytest.skip("there is no bash")
    assert cli.main(["completion", "bash"]) == 0
    script = capfd.readouterr().out
    (function,) = re.findall(r"complete .*-F (\w+) qcut", script)
    ask = 'COMP_WORDS=(qcut {0}); COMP_CWORD={1}; {2} >/dev/null 2>&1; echo "${{COMPREPLY[@]}}"\n'
    lines = ask.format("quan", 1, function) + ask.format("generate --kv-cache ''", 3, function)
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(["bash"], input=script + lines, text=True, capture_output=True, env=environment, cwd=tmp_path)
    assert [line.split() for line in done.stdout.splitlines()[-2:]] == [
        ["quantize"],
        ["auto", "int8", "int4", "int8/int4"],
    ]


def test_completion_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(__import__("sys").modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 1
    assert (
        capfd.readouterr().err == "qcut: completion: shtab is not installed: pip install 'qcut-inference[completion]'\n"
    )
