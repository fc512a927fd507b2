"""Names of models: the disk is looked at first, and the hub is asked once and briefly."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import qcut
from qcut.checkpoints import hub
from qcut.cli.main import main
from qcut.errors import CheckpointError


class FakeHub(BaseHTTPRequestHandler):
    """Has one model, ``someone/there``, and counts what is asked."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self.asked.append(self.path)
        there = self.path.startswith("/someone/there/")
        self.send_response(200 if there else 404)
        self.send_header("X-Error-Code", "" if there else "RepoNotFound")
        for header in ("ETag", "X-Repo-Commit"):
            self.send_header(header, "0" * 40)
        self.send_header("Content-Length", "2")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a hub of this machine is asked, in an empty folder and with an empty cache."""
    paths: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Hub", (FakeHub,), {"asked": paths}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    use(f"http://127.0.0.1:{server.server_port}", tmp_path, monkeypatch)
    yield paths
    server.shutdown()
    server.server_close()


def use(endpoint: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.chdir(folder)


def cached(folder: Path, owner: str, model: str) -> None:
    repository = folder / "cache" / f"models--{owner}--{model}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (repository / "snapshots" / ("0" * 40) / "config.json").write_text("{}")


PATHS = [
    "",
    "./nowhere",
    "../nowhere",
    "/nowhere",
    "~/nowhere",
    "a/b/c",
    "nowhere/",
    "a\\b",
    "model.gguf",
    "here/nowhere",
]


@pytest.mark.parametrize("name", PATHS)
def test_a_path_is_never_asked_for(name: str, tmp_path: Path, asked: list[str]) -> None:
    (tmp_path / "here").mkdir()
    with pytest.raises(CheckpointError, match="not a directory"):
        hub.answers(name)
    assert asked == []


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "./nowhere", "--prompt", "a"),
        ("eval", "here/nowhere", "--text", "here/text"),
        ("quantize", "here/nowhere", "--out", "new", "--scheme", "w8a8"),
        ("plan", "/nowhere", "--calibrate", "here/text", "--bits", "4", "--out", "plan.json"),
        ("info", "nowhere/at/all"),
    ],
    ids=lambda command: command[0],
)
def test_commands_never_ask_for_a_path(
    command: tuple[str, ...], tmp_path: Path, asked: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "text").write_text("a text " * 9)
    assert main(command) == 1
    assert "not a directory" in capfd.readouterr().err
    assert asked == []


@pytest.mark.parametrize("name", ["nosuchdir", "nobody/nothing"])
def test_a_missing_name_is_asked_for_once(name: str, asked: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", name, "--prompt", "a"]) == 1
    error = capfd.readouterr().err
    assert f"{name}: not a directory here, not in the hub's cache on this disk, and of the hub: 404" in error
    assert asked == [f"/{name}/resolve/main/config.json"]


def test_loading_asks_for_names_with_an_owner_alone(asked: list[str]) -> None:
    with pytest.raises(CheckpointError, match="nobody/nothing: not a directory here"):
        qcut.load("nobody/nothing")
    with pytest.raises(CheckpointError, match="nosuchdir"):
        qcut.load("nosuchdir")
    with pytest.raises(CheckpointError, match="nobody/other: not a directory here"):
        qcut.foreign_config("nobody/other")
    assert [path.split("/")[2] for path in asked] == ["nothing", "other"]


def test_a_model_of_the_hub_is_found(asked: list[str]) -> None:
    assert hub.answers("someone/there")
    assert len(asked) == 1


def test_a_silent_hub_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path, monkeypatch)
        start = time.monotonic()
        with pytest.raises(CheckpointError, match=r"nobody/nothing: not a directory here.*of the hub"):
            hub.answers("nobody/nothing")
        assert time.monotonic() - start < hub.ASK_S + 2


def test_a_cached_model_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use("http://127.0.0.1:9", tmp_path, monkeypatch)
    cached(tmp_path, "someone", "small")
    assert not hub.answers("someone/small")
    (tmp_path / "someone").mkdir()
    assert not hub.answers("someone/small")
    assert not hub.answers("someone/small", local_files_only=True)
    with pytest.raises(CheckpointError, match="was not to be asked"):
        hub.answers("anyone/small", local_files_only=True)


def test_folder_is_never_taken_for_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub.is_name("someone/small")
    (tmp_path / "someone").mkdir()
    (tmp_path / "someone" / "small").write_text("a file")
    assert not hub.is_name("someone/small")
