"""Finding compilers and headers: the order, what is rejected, and what the message names to install."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qcut.emitters.core.source import KernelSource
from qcut.errors import DeviceError, ToolchainError
from qcut.jit import compilers, toolchain
from tests.support import ROOT


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    toolchain.reset()
    yield
    toolchain.reset()


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nothing on PATH, no CUDA_HOME and no wheels."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolchain, "SYSTEM_CUDA", tmp_path / "none")
    wheels: Callable[[], tuple[Path, ...]] = toolchain.once(lambda: ())
    monkeypatch.setattr(toolchain, "_pypi_roots", wheels)
    return tmp_path


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def fake_nvcc(root: Path, version: str, cicc: bool = True) -> Path:
    if cicc:
        script(root / "nvvm" / "bin" / "cicc", "")
    return script(
        root / "bin" / "nvcc",
        f"""case "$1" in
--version) echo "Cuda compilation tools, release {version[:4]}, V{version}" ;;
--dryrun) echo "#$ TOP={root}/bin/.." ;;
esac""",
    )


def fake_headers(root: Path, *names: str) -> None:
    for name in names or ("cuda_fp16.h", "crt/host_defines.h", "cccl/nv/target"):
        (root / "include" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "include" / name).touch()


def test_importing_finds_nothing() -> None:
    code = (
        "import sys, qcut, qcut.jit\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "heavy = loaded & {'torch', 'cuda', 'cutlass_library', 'cutlass_cppgen'}\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert not heavy, heavy\n"
        "assert 'libcuda' not in maps and 'nvrtc' not in maps, maps\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_this_machine_has_nvrtc() -> None:
    tool = toolchain.find_nvrtc()
    assert tool.path.is_file()
    assert tool.version.startswith("13.")
    assert toolchain.find_nvrtc() is tool


def test_nvrtc_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda import pathfinder

    def absent(name: str) -> None:
        raise pathfinder.DynamicLibNotFoundError(f"{name} is not here")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", absent)
    with pytest.raises(ToolchainError, match=r"nvrtc is not here.*pip install 'cuda-toolkit"):
        toolchain.find_nvrtc()


def test_wheels_come_before_the_toolkit(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvcc(bare / "toolkit", "12.4.131")
    monkeypatch.setenv("CUDA_HOME", str(bare / "toolkit"))
    assert toolchain.find_nvcc().version == "12.4.131"
    assert toolchain.find_nvcc().root == bare / "toolkit"
    wheel = fake_nvcc(bare / "wheels" / "cu13", "13.0.88")
    toolchain.reset()
    monkeypatch.setattr(toolchain, "_pypi_roots", toolchain.once(lambda: (bare / "wheels" / "cu13",)))
    assert toolchain.find_nvcc() == toolchain.Tool("nvcc", wheel, "13.0.88", bare / "wheels" / "cu13")


def test_nvcc_on_path_may_be_a_wrapper(bare: Path) -> None:
    real = fake_nvcc(bare / "toolkit", "13.0.88")
    wrapper = script(bare / "bin" / "nvcc", f'exec {real} "$@"')
    assert toolchain.find_nvcc() == toolchain.Tool("nvcc", wrapper, "13.0.88", bare / "toolkit")


def test_nvcc_missing_or_incomplete(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ToolchainError, match="no working nvcc; CUTLASS kernels need it: pip install 'cuda-toolkit"):
        toolchain.find_nvcc()
    fake_nvcc(bare / "a", "13.0.88", cicc=False)
    script(bare / "b" / "bin" / "nvcc", "exit 1")
    monkeypatch.setenv("CUDA_HOME", str(bare / "a"))
    monkeypatch.setenv("CUDA_PATH", str(bare / "b"))
    with pytest.raises(
        ToolchainError, match=r"a/bin/nvcc has no cicc: pip install nvidia-nvvm==13.0.88; .*b/bin/nvcc "
    ):
        toolchain.find_nvcc()
    fake_nvcc(bare / "b", "13.0.88")
    assert toolchain.find_nvcc().root == bare / "b"


def test_gxx(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ToolchainError, match=r"no g\+\+; CUTLASS kernels and the C.. operators need it: apt-get"):
        toolchain.find_gxx()
    clang = script(bare / "clang++", 'echo "clang version 18.1.3 (1)"')
    monkeypatch.setenv("CXX", str(clang))
    with pytest.raises(ToolchainError, match=r"clang\+\+ is no working g\+\+"):
        toolchain.find_gxx()
    gxx = script(bare / "bin" / "g++", 'echo "g++ (Debian 12.2.0-14) 12.2.0"; echo "(C) 2022 Free Software Foundation"')
    assert toolchain.find_gxx() == toolchain.Tool("g++", gxx, "12.2.0")
    other = script(bare / "g++-13", 'echo "g++-13 (x) 13.3.0"; echo "(C) 2023 Free Software Foundation"')
    monkeypatch.setenv("CXX", str(other))
    toolchain.reset()
    assert toolchain.find_gxx().version == "13.3.0"


def test_cuda_headers(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ToolchainError, match=r"cuda_fp16.h \(of nvidia-cuda-runtime\).*pip install 'cuda-toolkit.*CUDA_HOME"
    ):
        toolchain.find_cuda_include()
    fake_headers(bare / "a", "cuda_fp16.h")
    monkeypatch.setenv("CUDA_HOME", str(bare / "a"))
    with pytest.raises(ToolchainError, match=r"found: crt/host_defines.h \(of nvidia-cuda-crt\), nv/target "):
        toolchain.find_cuda_include()
    fake_headers(bare / "b", "crt/host_defines.h", "nv/target")
    monkeypatch.setenv("CUDA_PATH", str(bare / "b"))
    assert toolchain.find_cuda_include().paths == (bare / "a" / "include", bare / "b" / "include")
    fake_headers(bare / "c")
    (bare / "c" / "include" / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  13010\n")
    monkeypatch.setenv("CUDA_PATH", str(bare / "c"))
    toolchain.reset()
    whole = toolchain.find_cuda_include()
    assert whole.paths == (bare / "c" / "include", bare / "c" / "include" / "cccl")
    assert whole.version == "13.1"
    fake_headers(bare / "d")
    assert toolchain.find_cuda_include(bare / "d").paths[0] == bare / "d" / "include"


def test_nvcc_takes_headers_of_its_own_release_alone(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvcc(bare / "a", "13.0.88")
    fake_headers(bare / "a")
    version = bare / "a" / "include" / "cuda_runtime_api.h"
    monkeypatch.setenv("CUDA_HOME", str(bare / "a"))
    version.write_text("#define CUDART_VERSION  13000\n")
    assert toolchain.find_nvcc_headers().version == "13.0"
    toolchain.reset()
    version.write_text("#define CUDART_VERSION  13020\n")
    source = KernelSource("f", "", "f", (), "sm_90a", toolchain="nvcc")
    with pytest.raises(ToolchainError, match=r"nvcc is of CUDA 13.0, the headers in .* are of 13.2; .*==13.2.\*'"):
        compilers.headers(source)


def test_cutlass_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = toolchain.find_cutlass_include()
    assert found.version == "4.2.0"
    assert (found.paths[0] / "cutlass" / "cutlass.h").is_file()
    toolchain.reset()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ToolchainError, match=r"pip install nvidia-cutlass==4.2.0.0"):
        toolchain.find_cutlass_include()


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "LIBCUDA", "libcuda-absent.so.1")
    with pytest.raises(DeviceError, match=r"no NVIDIA driver \(libcuda-absent.so.1"):
        toolchain.driver()


def test_nvcc_is_found_without_its_host_compiler(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvcc calls g++ before it says where it lives: only g++ is missing."""
    ends = 'echo "nvcc fatal : Failed to preprocess host compiler properties."; exit 1'
    nvcc = fake_nvcc(bare / "toolkit", "13.0.88")
    nvcc.write_text(nvcc.read_text().replace("--dryrun)", f'--dryrun) test "$2" = -ccbin || {{ {ends}; }}; '))
    monkeypatch.setenv("CUDA_HOME", str(bare / "toolkit"))
    with pytest.raises(ToolchainError, match=r"no g\+\+; .*apt-get install g\+\+"):
        toolchain.find_gxx()
    assert toolchain.find_nvcc() == toolchain.Tool("nvcc", nvcc, "13.0.88", bare / "toolkit")
    toolchain.reset()
    script(bare / "bin" / "g++", 'echo "g++ (Debian 12.2.0-14) 12.2.0"; echo "(C) 2022 Free Software Foundation"')
    assert toolchain.find_nvcc() == toolchain.Tool("nvcc", nvcc, "13.0.88", bare / "toolkit")
    toolchain.reset()
    script(bare / "toolkit" / "bin" / "nvcc", nvcc.read_text().partition("\n")[2].replace('"$2" = -ccbin', "1 = 2"))
    with pytest.raises(ToolchainError, match="nvcc does not run: it ended with 1: nvcc fatal"):
        toolchain.find_nvcc()
