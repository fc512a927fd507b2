"""Every command and every snippet of README and docs runs, or is listed here with the reason why not."""

from __future__ import annotations

import http.client
import json
import os
import pydoc_data.topics
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import qcut
from qcut.cli import main as cli
from tests.checkpoints.formats.samples import CHECKPOINTS
from tests.support import ROOT
from tests.support.zoo import small_demo

PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
RECIPES = [page for page in PAGES if page.startswith("docs/recipes/")]
BY_THEMSELVES = ("docs/server.md", *RECIPES)
"""Pages with commands and snippets that run together."""
PATIENCE_S = 120

ELSEWHERE = {
    "README.md": "tests/repo/test_documents.py",
    "docs/batching.md": "tests/repo/test_documents.py",
    "docs/lora.md": "tests/repo/test_documents.py",
    "docs/transformers.md": "tests/repo/test_documents.py",
    "docs/walkthrough.md": "tests/repo/test_documents.py",
    "docs/adding.md": "tests/repo/test_documents.py compares its quotes with the code",
}
"""Pages with Python that another test runs."""
NOT_RUN = {
    "docs/foreign-checkpoints.md": "files of 5 GB from a hub; tests/checkpoints/formats reads small ones",
    "docs/serving.md": "needs vLLM; tests/integrations/vllm makes the same calls",
}
"""Pages with Python that cannot run here."""
NEEDED = {"llama-nf4": "bitsandbytes", "llama-gguf": "gguf"}
"""Folders that recipes name, and which library's checkpoint each holds."""
COMMANDS_NOT_RUN = {
    r"pip install": "installs packages; tests/repo/test_packaging.py builds the wheel",
    r"make ": "runs suites; the Makefile is CI's",
    r"python (benchmarks|-m)": "measures or tests for minutes",
    r"vllm serve": "needs vLLM; tests/integrations/vllm serves",
    r"curl localhost:8000/v1/completions .*models/gpt2-5m": "asks vLLM's server",
    r"torchrun ": "needs two GPUs; tests/integrations/transformers/test_parallel.py runs two processes",
    r"lm_eval ": "downloads a data set; tests/server/clients scores with the same model class",
    r"qcut (plan |quantize .*(--plan|--bits))": "plans for minutes; tests/cli/test_plan.py plans small models",
    r"qcut (info|eval|generate) gpt2-mixed": "what such a plan has made",
    r"qcut doctor": "builds a kernel of each family; tests/cli/test_selftest.py",
    r"qcut precompile": "builds kernels for minutes; tests/dispatch/test_precompile.py",
    r"qcut (gemm|tune) ": "needs a GPU; tests/gpu",
    r"qcut generate --llama2c": "a file from elsewhere; tests/checkpoints/test_llama2c.py writes a small one",
    r"qcut serve (folder|gpt2-int8|chat-4bit)": "serves as the command above it does, and until it is ended",
}
"""Commands that cannot run here: the beginning of each, and why."""


def blocks(page: str) -> list[tuple[str, str]]:
    """Kind and text of the blocks of code of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[str]:
    """The commands of a page, in order."""
    return [command for kind, text in blocks(page) if kind in ("", "sh") for command in commands_in(text)]


def commands_in(text: str) -> list[str]:
    """The commands of a block; a text that the shell passes on (``<<``) belongs to its command."""
    found = []
    lines = iter(text.replace("\\\n", "").splitlines())
    for line in lines:
        if not re.match(r"(cat|curl|lm_eval|make|pip|python|qcut|torchrun|vllm) ", line):
            continue
        end = re.search(r"<<'(\w+)'", line)
        found += [line] if end else re.sub(r"\s+# .*", "", line).split(" && ")
        for one in lines if end else ():
            found[-1] += f"\n{one}"
            if end is not None and one == end[1]:
                break
    return [command.strip() for command in found]


def reason_not_to_run(command: str) -> str | None:
    return next((why for start, why in COMMANDS_NOT_RUN.items() if re.match(start, command)), None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with what the pages presuppose: the examples, a text, and a model that is soon quantized."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    small_demo(tmp_path / "models" / "gpt2-5m")
    (tmp_path / "book.txt").write_text("\n\n".join(list(pydoc_data.topics.topics.values()))[:5_000])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def run(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a command of ``qcut`` in this process."""
    if command.startswith("cat >"):
        assert subprocess.run(["bash", "-ec", command], cwd=folder, check=False).returncode == 0, command
        return
    words = shlex.split(command, comments=True)
    target = words.index(">") if ">" in words else len(words)
    assert words[0] == "qcut", f"{command}: neither run nor listed"
    again = ["--overwrite"] if "--out" in words and Path(words[words.index("--out") + 1]).exists() else []
    assert cli.main([*words[1:target], *again]) == 0, command
    printed = capsys.readouterr().out
    assert printed, f"{command} prints nothing"
    for path in words[target + 1 :]:
        file = Path(path.replace("~", str(folder)))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(printed)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in BY_THEMSELVES and commands(page)])
def test_commands_of_a_page_run(page: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in dict.fromkeys(commands(page)):
        if command.startswith("qcut serve models") or reason_not_to_run(command) is not None:
            continue
        run(command, folder, capsys)


@pytest.mark.parametrize("page", [page for page in PAGES if any(kind == "python" for kind, _ in blocks(page))])
def test_python_of_a_page_runs(page: str, folder: Path) -> None:
    if page in ELSEWHERE or page in NOT_RUN or page in BY_THEMSELVES:
        return
    names: dict[str, Any] = {"qcut": qcut}
    for kind, text in blocks(page):
        if kind == "python":
            exec(compile(text, page, "exec"), names)


@pytest.mark.parametrize("page", [page for page in RECIPES if any(kind != "text" for kind, _ in blocks(page))])
def test_recipe_runs(page: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands and snippets in the order of the page, next to the checkpoints that it names."""
    whole = (ROOT / page).read_text()
    if "from peft import" in whole:
        pytest.importorskip("peft")
    for name, method in NEEDED.items():
        if f'"{name}' in whole:
            (folder / name).mkdir()
            CHECKPOINTS[method](folder / name)
    names: dict[str, Any] = {}
    for kind, text in blocks(page):
        if kind == "python":
            code = text.replace('"/tmp/', f'"{folder}/')
            exec(compile(code, page, "exec", dont_inherit=True), names)
            continue
        assert kind in ("", "sh", "text"), kind
        for command in commands_in(text) if kind != "text" else ():
            if reason_not_to_run(command) is None:
                run(command, folder, capsys)


def test_nothing_is_listed_that_no_page_has() -> None:
    every = [command for page in PAGES for command in commands(page)]
    assert [start for start in COMMANDS_NOT_RUN if not any(re.match(start, command) for command in every)] == []
    with_python = {page for page in PAGES if any(kind == "python" for kind, _ in blocks(page))}
    assert {*ELSEWHERE, *NOT_RUN} <= with_python
    assert all(any(f'"{name}' in (ROOT / page).read_text() for page in RECIPES) for name in NEEDED)
    for reason in (*ELSEWHERE.values(), *NOT_RUN.values(), *COMMANDS_NOT_RUN.values()):
        assert all((ROOT / path).exists() for path in re.findall(r"tests/[\w/.]*\w", reason)), reason


# ── the server's page ────────────────────────────────────────────────────────────────────────────


def request(port: int, command: str) -> Any:
    """The JSON that a command of ``curl`` gets."""
    words = shlex.split(command)
    headers = dict(words[i + 1].split(": ", 1) for i, word in enumerate(words) if word == "-H")
    body = words[words.index("-d") + 1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("POST", words[1].removeprefix("localhost:8000"), body, headers)
    answer = connection.getresponse()
    assert answer.status == 200, command
    return json.loads(answer.read())


def test_the_server_s_page_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its clients against the server that it starts."""
    pytest.importorskip("openai")
    (served, *more) = [command for command in commands("docs/server.md") if command.startswith("qcut serve")]
    assert not more
    log = folder / "log"
    options = [*shlex.split(served, comments=True)[1:], "--port", "0", "--device", "cpu", "--context", "96"]
    with log.open("w") as out:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen([sys.executable, "-m", "qcut", *options], stdout=out, stderr=out, env=environment)
    try:
        end = time.monotonic() + PATIENCE_S
        while not (found := re.search(r"^http://\S+:(\d+) serves", log.read_text(), re.MULTILINE)):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        for command in commands("docs/server.md"):
            if command.startswith("curl"):
                assert request(int(found[1]), command)["choices"][0]["text"]
            else:
                assert command == served or reason_not_to_run(command) is not None, command
        capsys.readouterr()
        for kind, text in blocks("docs/server.md"):
            if kind == "python":
                code = text.replace("localhost:8000", f"127.0.0.1:{found[1]}")
                exec(compile(code, "docs/server.md", "exec", dont_inherit=True), {})
        assert len(capsys.readouterr().out) > 20
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
