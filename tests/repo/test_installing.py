"""An installed qcut: its wheels, with and without kernels, in an environment that has no checkout."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import qcut
from tests.support import ROOT

PROGRAM = """
import sys
from importlib import metadata

import torch
from transformers import AutoModelForCausalLM

import qcut
from qcut.jit import packs

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
report = qcut.quantize(model, "w8a8", progress=False)
(result,) = qcut.Engine(model, context=32).generate([[10, 20, 30]], 4)
print(qcut.__file__, metadata.version("qcut-inference"), len(report.layers), len(result.tokens))
"""


@dataclass(frozen=True)
class Installed:
    """A virtual environment with a wheel, and the other packages of this environment."""

    folder: Path
    with_kernels: bool

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.folder),
            "QCUT_CACHE_DIR": str(self.folder / "cache"),
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        program = str(self.folder / "bin" / command[0])
        return subprocess.run(
            [program, *command[1:]], cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )


@pytest.fixture(scope="module", params=["wheel", "wheel_without_kernels"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    wheel = str(request.getfixturevalue(request.param))
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Links, not a path in a .pth file: CUDA's libraries are looked for in the environment's own folder.
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("qcut", "__editable__")):
            (packages / path.name).symlink_to(path)
    return Installed(folder, request.param == "wheel")


def test_installed_wheel_quantizes_and_generates(installed: Installed) -> None:
    done = installed.run("python", "-c", PROGRAM, str(ROOT / "models" / "gpt2-5m"))
    assert done.returncode == 0, done.stderr
    file, *rest = done.stdout.split()
    assert Path(file).is_relative_to(installed.folder)
    assert rest == [qcut.__version__, "16", "4"]


def test_installed_doctor_finds_the_kernels(installed: Installed) -> None:
    done = installed.run("qcut", "doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    findings = {one["topic"]: one for one in json.loads(done.stdout)["findings"]}
    assert f"qcut {qcut.__version__}" in findings["packages"]["text"]
    found = {topic: one["text"] for topic, one in findings.items() if topic.startswith("pack ")}
    assert list(found) == (["pack sm_90a"] if installed.with_kernels else [])
    assert all(text.startswith("1 kernels, ") and str(installed.folder) in text for text in found.values())


def test_both_wheels_hold_the_same_files(wheel: Path, wheel_without_kernels: Path) -> None:
    packed, plain = (set(zipfile.ZipFile(path).namelist()) for path in (wheel, wheel_without_kernels))
    assert packed - plain == {"qcut/binaries/sm_90a.qpack"}
    assert plain <= packed
