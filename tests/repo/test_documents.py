"""README, docs and examples: snippets run, links have targets, the README stays short."""

from __future__ import annotations

import ast
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qcut
from examples import batch, chat, gpt2_int8, llama
from qcut import errors
from tests.repo.test_layering import FLOORS
from tests.support import ROOT
from tests.support.zoo import small_demo

PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
CITATION = re.compile(r"schemes\.md,? (sections? [\d, to and]+)")
"""How docstrings and device headers cite docs/schemes.md."""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded checkpoint must never need a network."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"a connection was opened: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[tuple[str, str]]:
    """File and anchor of each link of a page to another file of the repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if not target.startswith(("http://", "https://", "mailto:")):
            path, _, anchor = target.partition("#")
            yield path, anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for path, anchor in links(page):
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {path}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {path}#{anchor}"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_architecture_names_every_folder() -> None:
    folders = {path.parent.name for path in (ROOT / "qcut").glob("*/__init__.py")}
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert folders <= {name.split(".")[0] for name in re.findall(r"^\| `([\w.]+)` \|", page, flags=re.MULTILINE)}


def run_snippets(page: Path, folder: Path) -> dict[str, Any]:
    """Runs a page's Python one snippet after another; files that it writes under /tmp go to the folder."""
    names: dict[str, Any] = {}
    for snippet in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        exec(compile(snippet.replace('"/tmp/', f'"{folder}/'), str(page), "exec"), names)
    return names


def test_readme_snippet_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    run_snippets(ROOT / "README.md", tmp_path)
    assert "16 layers quantized" in capsys.readouterr().out


def test_walkthrough_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_demo(tmp_path / "models" / "gpt2-5m")
    monkeypatch.chdir(tmp_path)
    names = run_snippets(ROOT / "docs" / "walkthrough.md", tmp_path)
    assert names["again"] is not names["model"]


def test_the_page_on_lora_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.chdir(ROOT)
    names = run_snippets(ROOT / "docs" / "lora.md", tmp_path)
    assert names["served"].peft_config.keys() == {"default"}


def test_the_page_on_transformers_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run_snippets(ROOT / "docs" / "transformers.md", tmp_path)


def test_the_page_on_speculation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run_snippets(ROOT / "docs" / "speculation.md", tmp_path)


def test_the_page_on_batching_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names = run_snippets(ROOT / "docs" / "batching.md", ROOT)
    model, tokenizer = names["model"], names["tokenizer"]
    for text, answer in zip(names["texts"][1:], names["answers"], strict=True):
        (alone,) = qcut.Engine(model, context=128, tokenizer=tokenizer).generate(text, 12)
        assert answer == alone.text


def test_cited_sections_of_the_schemes_exist() -> None:
    sections = set(re.findall(r"^## (\d+)\.", (ROOT / "docs" / "schemes.md").read_text(), re.MULTILINE))
    cited = {
        number
        for folder in ("qcut", "emitters", "benchmarks")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cuh")
        for citation in CITATION.findall(path.read_text())
        for number in re.findall(r"\d+", citation)
    }
    assert len(cited) >= 4
    assert cited <= sections


def test_code_that_a_page_quotes_is_the_code() -> None:
    """A block of Python that starts with ``# path`` has lines of that file, in order; ``...`` stands for others."""
    quotes = re.findall(r"```python\n# (\S+)\n(.*?)```", (ROOT / "docs" / "adding.md").read_text(), re.DOTALL)
    assert len(quotes) >= 7
    for path, quote in quotes:
        lines = iter(line.strip() for line in (ROOT / path).read_text().splitlines())
        for quoted in filter(None, map(str.strip, quote.splitlines())):
            assert quoted in ("...", '"""') or quoted in lines, f"{path} has no line {quoted!r}, or not there"


def test_architecture_names_the_floors_of_the_code() -> None:
    line = re.search(r"`(errors ←.*?)`", (ROOT / "docs" / "architecture.md").read_text(), re.DOTALL)
    assert line is not None
    assert [frozenset(re.findall(r"[\w.]+", floor)) for floor in line[1].split("←")] == list(FLOORS)


def test_reference_has_every_public_name_and_operator() -> None:
    reference = ROOT / "docs" / "reference"
    public = sorted(set(qcut.__all__) - {"errors", "ops"})
    entry = re.compile(r"^\.\. auto(?:class|function):: (\w+)$", re.M)
    assert sorted(name for page in reference.glob("*.md") for name in entry.findall(page.read_text())) == public
    listed = re.findall(r"^ {3}(\w+)$", (reference / "index.md").read_text(), re.M)
    assert sorted(listed) == sorted([*public, *(name for name, found in vars(errors).items() if _is_error(found))])
    modules = set(re.findall(r"automodule:: qcut\.ops\.([\w.]+)", (reference / "operators.md").read_text()))
    root = ROOT / "qcut" / "ops"
    defining = [path for path in root.rglob("*.py") if re.search(r"^@operator\(", path.read_text(), re.M)]
    assert modules == {".".join(path.relative_to(root).with_suffix("").parts) for path in defining}


def _is_error(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, Exception)


def test_example_quantizes_and_continues(capsys: pytest.CaptureFixture[str]) -> None:
    gpt2_int8.main(str(gpt2_int8.MODEL), "w8a16")
    printed = capsys.readouterr().out
    assert "16 layers quantized" in printed
    before, after = map(float, re.search(r"perplexity ([\d.]+) in .*?, ([\d.]+) in w8a16", printed).groups())  # type: ignore[union-attr]
    assert after == pytest.approx(before, rel=0.01)
    assert "The with statement" in printed


def test_chat_answers_each_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    stream = qcut.Engine.stream

    def listening(engine: qcut.Engine, messages: Any, *args: Any, **options: Any) -> Any:
        asked.append([message["content"] for message in messages])
        return stream(engine, messages, *args, **options)

    monkeypatch.setattr(qcut.Engine, "stream", listening)
    chat.main(iter(["What is a list?\n", "And a class?\n"]))
    answers = capsys.readouterr().out
    assert asked[0] == ["What is a list?"]
    assert asked[1][0::2] == ["What is a list?", "And a class?"]
    assert asked[1][1]
    assert answers.startswith(asked[1][1] + "\n")


# ── a model of Llama's shape ─────────────────────────────────────────────────────────────────────


def test_a_batch_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    texts = [f"Chapter {i}" for i in range(40)]
    prompts.write_text("".join(json.dumps({"id": i, "prompt": text}) + "\n" for i, text in enumerate(texts)))
    small_demo(tmp_path / "model")
    batch.main(str(prompts), str(answers), str(tmp_path / "model"))
    whole = answers.read_bytes()
    rows = [json.loads(line) for line in whole.splitlines()]
    assert [row["id"] for row in rows] == list(range(40))
    assert all(row["reason"] in ("length", "stop") and row["text"] for row in rows)
    end = whole.index(b"\n", len(whole) // 2) + 1
    answers.write_bytes(whole[: end + 9])  # died in the middle of a line
    batch.main(str(prompts), str(answers), str(tmp_path / "model"))
    again = [json.loads(line) for line in answers.read_bytes().splitlines()]
    assert answers.read_bytes().startswith(whole[:end])
    assert [row["id"] for row in again] == list(range(40))


def test_llama_runs_without_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert llama.main(["--new-tokens", "3", "--device", "cpu", "--scheme", "w8a8"]) == 0
    printed = capsys.readouterr().out
    before, after = re.search(r"([\d.,]+) MB, as w8a8 ([\d.,]+) MB", printed).groups()  # type: ignore[union-attr]
    assert float(after) < 0.4 * float(before)
    texts = [line.split() for line in printed.splitlines() if line and all(w.isdigit() for w in line.split())]
    assert [len(text) for text in texts] == [len(prompt) + 3 for prompt in llama.PROMPTS]
    assert "4 more in" in printed


def test_llama_continues_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(ROOT / "models" / "gpt2-5m"), "--new-tokens", "4", "--device", "cpu"]
    assert llama.main([*arguments, "--prompt", "The with statement", "--kv-cache", "int8"]) == 0
    assert "\nThe with statement" in capsys.readouterr().out


def test_llama_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert llama.main(["--model", str(tmp_path)]) == 1
    assert f"error: {tmp_path}" in capsys.readouterr().err
    assert llama.main(["--scheme", "fp3", "--device", "cpu"]) == 1
    assert "fp3" in capsys.readouterr().err


def _texts(node: ast.AST) -> Iterator[str]:
    """The texts of a module, with … for what is put into them."""
    for part in ast.walk(node):
        if isinstance(part, ast.JoinedStr):
            yield "".join(str(one.value) if isinstance(one, ast.Constant) else "…" for one in part.values)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def test_messages_of_the_troubleshooting_page_exist() -> None:
    texts = "\n".join(text for path in (ROOT / "qcut").rglob("*.py") for text in _texts(ast.parse(path.read_text())))
    rows = re.findall(r"^\| (?!message|---)(.*?) \| .*\|$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 50
    for message in messages:
        pieces = [re.escape(piece) for piece in re.split("[…%]+", message) if piece.strip()]
        assert "OutOfMemoryError" in pieces or re.search("[^\n]*".join(pieces), texts), message
