"""The command line: `qcut doctor` on machines of every kind, `qcut precompile`, exit statuses, messages."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from qcut.cli import doctor
from qcut.cli import main as cli
from qcut.dispatch import precompile
from qcut.emitters.core.source import KernelSource
from qcut.errors import DeviceError, LaunchError, ToolchainError
from qcut.jit import cache, device, packs, toolchain
from tests.cli.commands import run
from tests.support import ROOT

H200 = device.Device(0, "NVIDIA H200", (9, 0), 132, 139 << 30)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QCUT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def give_gpus(monkeypatch: pytest.MonkeyPatch, *gpus: device.Device, version: str = "13.0") -> None:
    monkeypatch.setattr(device, "devices", lambda: list(gpus))
    monkeypatch.setattr(device, "driver_version", lambda: version)


def without_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> str:
        raise DeviceError("no NVIDIA driver (libcuda.so.1: not found)")

    monkeypatch.setattr(device, "driver_version", absent)


def lose(monkeypatch: pytest.MonkeyPatch, *finders: str) -> None:
    def absent(*_: object) -> None:
        raise ToolchainError("gone: pip install it")

    for finder in finders:
        monkeypatch.setattr(toolchain, finder, absent)


def states(findings: list[doctor.Finding]) -> dict[str, str]:
    return {finding.topic: finding.state for finding in findings}


def test_doctor_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    without_driver(monkeypatch)
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "[MISS] driver" in text
    assert "-> to run kernels, install the NVIDIA driver" in text
    for topic in ("packages", "NVRTC", "CUDA headers", "nvcc", "g++", "CUTLASS", "cache"):
        assert f"[ok  ] {topic}" in text
    assert "raw kernels    compiled a probe for sm_90a" in text
    assert "CUTLASS route  compiled a probe for sm_90a" in text
    assert text.rstrip().endswith("(`qcut precompile --arch` works without one).")
    assert cli.main(["doctor", "--no-probe"]) == 0
    assert "compiled a probe" not in capsys.readouterr().out


def test_doctor_with_a_gpu_launches_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []

    class Kernel:
        def launch(self, *args: Any) -> None:
            launches.append(args)

    give_gpus(monkeypatch, replace(H200, cc=(8, 9)))
    monkeypatch.setattr(doctor.launch, "load", lambda binary, source, ordinal: Kernel())
    findings = doctor.examine()
    assert set(states(findings).values()) == {"ok"}
    assert launches == [((1, 1, 1), (0,), 0)]
    assert any("for sm_89 in" in finding.text for finding in findings)
    assert doctor.report(findings).endswith("Every kernel can be built here.")


def test_doctor_says_whose_table_is_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, sm_count, says in (
        ("NVIDIA H200", 132, "shipped nvidia_h200.json"),
        ("NVIDIA H100 80GB HBM3", 132, "tuned for NVIDIA H200, used as a start for NVIDIA H100 80GB HBM3"),
        ("NVIDIA H100 PCIe", 114, "a cost model chooses its kernels, for 114 SMs at 1.75 GHz, 2,039 GB/s"),
    ):
        give_gpus(monkeypatch, replace(H200, name=name, sm_count=sm_count))
        findings = {finding.topic: finding for finding in doctor.examine(compile_probe=False)}
        assert says in str(findings["tuned table"])
        assert ("`qcut tune` measures" in findings["tuned table"].advice) == (name != "NVIDIA H200")


def test_doctor_when_the_probe_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise LaunchError("code does not load")

    give_gpus(monkeypatch, H200, version="12.4")
    monkeypatch.setattr(doctor.launch, "load", load)
    findings = doctor.examine()
    assert states(findings)["launch"] == "missing"
    assert states(findings)["driver"] == "warn"
    assert "driver 580 or newer" in doctor.report(findings)
    assert "no usable GPU" in doctor.report(findings)
    assert states(findings)["raw kernels"] == "ok"
    assert not doctor.is_healthy(findings)


def test_doctor_names_old_and_hidden_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    give_gpus(monkeypatch, replace(H200, name="Tesla T4", cc=(7, 5)))
    monkeypatch.setattr(doctor.metadata, "version", lambda package: "3.7.1")
    findings = doctor.examine(compile_probe=False)
    assert states(findings)["layers"] == "warn"
    assert "Triton back end on cuda:0 (Tesla T4, sm_75): triton 3.7.1 (GPU Tesla T4 has" in doctor.report(findings)
    assert "qcut's kernels run on 8.0" in doctor.report(findings)

    def missing(package: str) -> str:
        raise doctor.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(doctor.metadata, "version", missing)
    findings = doctor.examine(compile_probe=False)
    assert states(findings)["layers"] == "missing"
    assert not doctor.is_healthy(findings)
    assert "none on cuda:0 (Tesla T4, sm_75)" in doctor.report(findings)
    give_gpus(monkeypatch, H200)
    assert "CUDA back end on cuda:0 (NVIDIA H200, sm_90)" in doctor.report(doctor.examine(compile_probe=False))
    give_gpus(monkeypatch)
    assert "CUDA_VISIBLE_DEVICES" in doctor.report(doctor.examine(compile_probe=False))


@pytest.mark.parametrize(
    ("lost", "verdict"),
    [
        (["find_nvcc"], "Raw kernels can be built here, CUTLASS kernels cannot"),
        (["find_gxx"], "Raw kernels can be built here, CUTLASS kernels cannot"),
        (["find_cutlass_include"], "Raw kernels can be built here, CUTLASS kernels cannot"),
        (["find_nvrtc", "find_nvcc"], "CUDA kernels cannot be built here"),
        (["find_cuda_include"], "CUDA kernels cannot be built here"),
    ],
)
def test_doctor_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lost: list[str], verdict: str
) -> None:
    without_driver(monkeypatch)
    lose(monkeypatch, *lost)
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "gone: pip install it" in text
    assert verdict in text


@pytest.mark.parametrize(
    ("module", "topic", "command", "fine"),
    [
        ("", "g++", "apt-get install g++", {"nvcc", "NVRTC", "CUTLASS"}),
        ("cuda", "NVRTC", "pip install 'cuda-python>=13,<14' cuda-core", {"nvcc", "g++", "CUTLASS"}),
        ("cutlass_library", "CUTLASS", "pip install nvidia-cutlass==", {"nvcc", "g++", "NVRTC"}),
        ("transformers", "packages", "pip install 'qcut-inference[hf]'", {"nvcc", "g++", "NVRTC", "CUTLASS"}),
    ],
    ids=["no g++", "no cuda-python", "no nvidia-cutlass", "no transformers"],
)
def test_doctor_names_the_one_tool_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, module: str, topic: str, command: str, fine: set[str]
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if not module:  # the programs on the path are others
        for program in ("sh", "sed"):
            (tmp_path / program).symlink_to(str(shutil.which(program)))
        monkeypatch.setenv("PATH", str(tmp_path))
    for name in [name for name in sys.modules if name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    toolchain.reset()
    found = {each["topic"]: each for each in json.loads(run(capfd, "doctor", "--no-probe", "--json")[1])["findings"]}
    toolchain.reset()
    assert found[topic]["state"] in ("warn", "missing")
    assert command in found[topic]["text"] + found[topic]["advice"]
    assert {name for name in fine if found[name]["state"] == "ok"} == fine


def test_doctor_finds_a_compiler_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    real = toolchain.find_nvcc()
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: replace(real, path=Path("/bin/false")))
    findings = {finding.topic: finding for finding in doctor.examine()}
    assert findings["nvcc"].state == "ok"
    assert findings["CUTLASS route"].state == "missing"
    assert "false ended with 1" in findings["CUTLASS route"].text


def test_doctor_never_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither where no cache and no table can be found, nor where compilers have nowhere to work."""
    gpu = doctor.device.Device(0, "NVIDIA H200", (9, 0), 132, 8 << 30)
    monkeypatch.setattr(doctor.device, "devices", lambda: [gpu])
    monkeypatch.setattr(doctor.device, "driver_version", lambda: "13.0")
    monkeypatch.setenv("QCUT_CACHE_DIR", "relative")
    doctor.tuned.forget()
    toolchain.reset()
    (tmp_path / "$").mkdir()
    for place in ("$", "absent"):
        monkeypatch.setenv("TMPDIR", str(tmp_path / place))
        found = states(doctor.examine())
        assert [found[topic] for topic in ("tuned table", "cache", "nvcc", "CUTLASS route")] == ["missing"] * 4
        assert found["NVRTC"] == found["raw kernels"] == "ok"
    doctor.tuned.forget()


def test_doctor_on_the_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def finding() -> doctor.Finding:
        return doctor.examine(compile_probe=False)[-1]

    assert (finding().topic, finding().state) == ("cache", "ok")
    cache.write("kernel", "ab" * 32, cache.Entry({}, {"cubin": b"x" * (1 << 20)}))
    assert "1 kernels, 1.0 MiB" in finding().text
    monkeypatch.setattr(doctor, "LOW_DISK_BYTES", 1 << 62)
    assert finding().state == "warn"
    (folder / "file").touch()
    monkeypatch.setenv("QCUT_CACHE_DIR", str(folder / "file"))
    assert finding().state == "warn"
    assert "cannot be written" in finding().text
    assert "QCUT_CACHE_DIR" in finding().advice
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    monkeypatch.setenv("QCUT_CACHE_DIR", str(folder / "open"))
    assert finding().state == "warn"
    assert "can be written by others (mode 0777; chmod -R go-w mends this)" in finding().text
    monkeypatch.setenv("QCUT_CACHE_DIR", "relative")
    assert finding().state == "missing"
    assert finding().text.startswith("QCUT_CACHE_DIR is 'relative', a relative path")
    monkeypatch.setattr(cache, "directory", lambda: None)
    assert finding().text == "no home directory"


TEXT = 'extern "C" __global__ void f(int) {}'


@pytest.fixture
def menu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two kernels per architecture in place of dispatch's; the architectures that were asked for."""
    asked: list[str] = []

    def precompile_sources(arch: str) -> list[KernelSource]:
        asked.append(arch)
        return [KernelSource(f"{name}_{arch}", TEXT, "f", (), arch) for name in ("one", "two")]

    monkeypatch.setattr(precompile, "precompile_sources", precompile_sources)
    return asked


def test_precompile_fills_the_cache(menu: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["precompile", "--arch", "sm_80", "--arch", "sm_90a", "--arch", "sm_80", "--jobs", "2"]) == 0
    assert menu == ["sm_80", "sm_90a"]
    out = capsys.readouterr().out
    assert out.startswith("2 of 2 kernels of sm_80 ready (")
    assert len(list((folder / "kernels").iterdir())) == 4
    assert sorted(path.name for path in (folder / packs.CACHE_FOLDER).iterdir()) == ["sm_80.qpack", "sm_90a.qpack"]
    for arch in ("sm_80", "sm_90a"):
        packs.installed.cache_clear()
        pack = packs.installed(arch)
        assert pack is not None
        assert all(source in pack for source in precompile.precompile_sources(arch))
    packs.installed.cache_clear()


def test_a_pack_makes_a_machine_without_compilers_healthy(
    menu: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["precompile", "--arch", "sm_80"]) == 0
    packs.installed.cache_clear()
    missing = [doctor.Finding(topic, "missing", "nothing") for topic in ("NVRTC", "CUDA headers", "nvcc", "g++")]
    found = doctor._packs([])
    assert [finding.topic for finding in found] == ["pack sm_80"]
    assert found[0].text.startswith("2 kernels, 0.0 MB, ")
    assert doctor.is_healthy([*missing, *found])
    assert doctor.report([*missing, *found]).endswith("others cannot be built here.")
    other = doctor._pack("sm_90a")
    assert "qcut precompile --arch sm_90a" in str(other)
    assert not doctor.is_healthy([*missing, *found, other])
    packs.installed.cache_clear()


def test_precompile_packs_into_a_folder(
    menu: list[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And goes on where it was stopped: what is in the cache is not built again."""
    monkeypatch.setattr(import_module("qcut.jit.build"), "_memory", {})
    target = tmp_path / "wheel" / "binaries"
    assert cli.main(["precompile", "--arch", "sm_80", "--pack", str(target)]) == 0
    (built,) = (path.stat().st_mtime_ns for path in (folder / "kernels").glob("one*"))
    assert cli.main(["precompile", "--arch", "sm_80", "--pack", str(target)]) == 0
    assert [path.stat().st_mtime_ns for path in (folder / "kernels").glob("one*")] == [built]
    assert len(packs.Pack(target / "sm_80.qpack")) == 2


def test_precompile_lists(menu: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["precompile", "--arch", "sm_89", "--list"]) == 0
    assert capsys.readouterr().out == "nvrtc  one_sm_89\nnvrtc  two_sm_89\n"
    assert not folder.exists()


def test_closed_pipe_ends_the_command_silently() -> None:
    command = [sys.executable, "-m", "qcut", "completion", "zsh"]  # more than a buffer holds
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as qcut:
        assert qcut.stdout is not None
        qcut.stdout.close()
        _, errors = qcut.communicate()
    assert (qcut.returncode, errors) == (1, b"")


def test_precompile_reports_failures_and_builds_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [KernelSource("bad", "oops", "f", (), "sm_80"), KernelSource("good", TEXT, "f", (), "sm_80")]
    monkeypatch.setattr(precompile, "precompile_sources", lambda arch: sources)
    assert cli.main(["precompile", "--arch", "sm_80"]) == 1
    captured = capsys.readouterr()
    assert "qcut: kernel bad: NVRTC failed" in captured.err
    assert captured.out.startswith("1 of 2 kernels of sm_80 ready")
    assert "none are packed" in captured.out


def test_as_a_program() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "qcut", "--version"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("qcut ")
