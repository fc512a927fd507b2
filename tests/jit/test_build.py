"""Building: both toolchains for real, what the key depends on, failures, and many kernels at once."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from qcut.emitters.core.arch import ARCHITECTURES
from qcut.emitters.core.source import DType, KernelSource, Param
from qcut.emitters.decoder.argmax import ArgmaxRows
from qcut.errors import BuildError, ToolchainError
from qcut.jit import Binary, Resources, build, build_many, cache, compilers, toolchain
from tests.support.environments import Terminal

builder = import_module("qcut.jit.build")  # qcut.jit.build is the function

TEXT = """#include <cuda_fp16.h>
extern "C" __global__ void scale(__half* x, int n) {
  __shared__ float s[64];
  s[threadIdx.x] = __half2float(x[threadIdx.x]);
  __syncthreads();
  if (threadIdx.x < n) x[threadIdx.x] = __float2half(s[n - threadIdx.x]);
}
"""
HOST_TEXT = """#include <cuda.h>
#include <cutlass/cutlass.h>
#include <cutlass/version.h>
extern "C" int qcut_launch(const void* args, void*, void*, int flags) { return *(const int*)args + flags; }
extern "C" long qcut_query(int what, const void*) { return what + CUTLASS_MAJOR; }
"""
RAW = KernelSource("scale", TEXT, "scale", (Param("x", "ptr", "float*"), Param("n", "i32")), "sm_80", block=64)
HOSTED = replace(RAW, name="hosted", toolchain="nvcc", host_text=HOST_TEXT, includes=("qcut", "cutlass"))


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QCUT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(builder, "_memory", {})


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels a compiler was started for."""
    started: list[str] = []
    real: Callable[..., tuple[bytes, bytes | None, str]] = builder.compile_text

    def compile_text(source: KernelSource, *, device: bool = True) -> tuple[bytes, bytes | None, str]:
        started.append(source.name if device else f"host of {source.name}")
        return real(source, device=device)

    monkeypatch.setattr(builder, "compile_text", compile_text)
    return started


def forget_memory() -> None:
    builder._memory.clear()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_nvrtc_builds_for_every_architecture(arch: str) -> None:
    binary = build(replace(RAW, arch=arch))
    assert binary.cubin.startswith(b"\x7fELF")
    assert b"scale" in binary.cubin
    assert f"sm_{arch.removeprefix('sm_')}".encode() in binary.cubin
    assert binary.host_so is None
    assert binary.resources is not None
    assert binary.resources.smem_bytes == 256
    assert 0 < binary.resources.registers < 64
    assert binary.resources.spill_store_bytes == binary.resources.stack_bytes == 0


def test_nvcc_builds_device_and_host(tmp_path: Path) -> None:
    binary = build(HOSTED)
    assert binary.cubin.startswith(b"\x7fELF")
    assert binary.resources is not None
    assert binary.resources.smem_bytes == 256
    assert binary.host_so is not None
    (tmp_path / "host.so").write_bytes(binary.host_so)
    host = ctypes.CDLL(str(tmp_path / "host.so"))
    assert host.qcut_launch(ctypes.byref(ctypes.c_int(40)), None, None, 2) == 42
    assert host.qcut_query(3, None) == 7


def test_contraction_is_off() -> None:
    """``x * y + z`` must be the code of the two rounded intrinsics, not of a fused multiply-add."""

    def code(expression: str, toolchain_name: str) -> bytes:
        text = f'extern "C" __global__ void f(float* p) {{ float x = p[0], y = p[1], z = p[2]; p[3] = {expression}; }}'
        return build(KernelSource("f", text, "f", (), "sm_80", toolchain=toolchain_name)).cubin  # type: ignore[arg-type]

    for name in ("nvrtc", "nvcc"):
        assert code("x * y + z", name) == code("__fadd_rn(__fmul_rn(x, y), z)", name)
        assert code("x * y + z", name) != code("__fmaf_rn(x, y, z)", name)


def test_memory_then_disk_then_compiler(compilations: list[str]) -> None:
    first = build(RAW)
    assert build(RAW) is first
    forget_memory()
    again = build(RAW)
    assert again == first
    assert again is not first
    assert compilations == ["scale"]
    path = cache.entry_path(RAW.name, first.key)
    assert path is not None
    path.write_bytes(path.read_bytes()[:-1])
    forget_memory()
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert build(RAW).cubin == first.cubin
    assert compilations == ["scale", "scale"]
    assert builder.rebuild(RAW).cubin == first.cubin
    assert compilations == ["scale"] * 3


def test_cached_cubin_gets_a_launcher_built_here(compilations: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    there = build(HOSTED)
    forget_memory()
    monkeypatch.setattr(builder.platform, "libc_ver", lambda: ("musl", "9"))
    here = build(HOSTED)
    assert compilations == [HOSTED.name, f"host of {HOSTED.name}"]
    assert here.key != there.key
    assert (here.cubin, here.resources, here.log) == (there.cubin, there.resources, there.log)
    assert here.host_so is not None
    forget_memory()
    assert build(HOSTED) == here
    assert len(compilations) == 2


def test_threads_compile_once(compilations: list[str]) -> None:
    results: list[Binary] = []
    threads = [threading.Thread(target=lambda: results.append(build(RAW))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compilations == ["scale"]
    assert len({id(binary) for binary in results}) == 1


CHANGES = {
    "name": {"name": "other"},
    "text": {"text": TEXT + " "},
    "entry": {"entry": "other"},
    "params": {"params": (Param("x", "ptr", "float*"),)},
    "arch": {"arch": "sm_86"},
    "toolchain": {"toolchain": "nvrtc", "host_text": None},
    "block": {"block": 128},
    "smem_bytes": {"smem_bytes": 1024},
    "host_text": {"host_text": HOST_TEXT + " "},
    "defines": {"defines": ("A=1",)},
    "includes": {"includes": ("qcut",)},
    "libraries": {"libraries": ("-lm",)},
    "waits": {"waits": True},
}


def test_every_field_of_the_source_has_a_change() -> None:
    assert set(CHANGES) == set(KernelSource.__dataclass_fields__)


@pytest.mark.parametrize("field", CHANGES)
def test_key_depends_on_the_source(field: str) -> None:
    assert builder.fingerprint(HOSTED) == builder.fingerprint(replace(HOSTED))
    assert builder.fingerprint(HOSTED) != builder.fingerprint(replace(HOSTED, **CHANGES[field]))  # type: ignore[arg-type]


TOOLS = {
    "find_nvcc": {"find_nvcc": lambda version: f"{version}.99"},
    "find_gxx": {"find_gxx": lambda version: "99.1"},
    "find_cutlass_include": {"find_cutlass_include": lambda version: "99.1"},
    # nvcc and its headers are of one release, or refused.
    "find_cuda_include": dict.fromkeys(("find_nvcc", "find_cuda_include"), lambda version: "99.1"),
}


@pytest.mark.parametrize("changes", TOOLS.values(), ids=TOOLS)
def test_key_depends_on_versions(changes: dict[str, Callable[[str], str]], monkeypatch: pytest.MonkeyPatch) -> None:
    before = builder.fingerprint(HOSTED)
    for name, change in changes.items():
        found = getattr(toolchain, name)()
        other = replace(found, version=change(found.version))
        monkeypatch.setattr(toolchain, name, lambda *args, other=other: other)
    assert builder.fingerprint(HOSTED) != before


def test_key_depends_on_nvrtc_flags_schema_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {builder.fingerprint(RAW)}
    with monkeypatch.context() as patch:
        tool = toolchain.find_nvrtc()
        patch.setattr(toolchain, "find_nvrtc", lambda: replace(tool, version="13.1.0"))
        seen.add(builder.fingerprint(RAW))
    with monkeypatch.context() as patch:
        patch.setattr(builder, "device_flags", lambda source: ["-O1"])
        seen.add(builder.fingerprint(RAW))
    with monkeypatch.context() as patch:
        patch.setattr(cache, "SCHEMA", cache.SCHEMA + 1)
        seen.add(builder.fingerprint(RAW))
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    seen.add(builder.fingerprint(RAW))
    assert len(seen) == 5


def test_key_does_not_depend_on_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    before = builder.fingerprint(HOSTED)
    real = toolchain.find_nvcc()
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: replace(real, path=Path("/elsewhere/nvcc")))
    assert builder.fingerprint(HOSTED) == before


def test_key_follows_included_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = tmp_path / "include"
    (headers / "qcut").mkdir(parents=True)
    (headers / "qcut" / "outer.cuh").write_text('#pragma once\n  #  include "inner.cuh"\n#include <cuda_fp16.h>\n')
    (headers / "qcut" / "inner.cuh").write_text("#pragma once\n#include <qcut/outer.cuh>\n")
    (headers / "qcut" / "unused.cuh").write_text("")
    monkeypatch.setattr(builder, "INCLUDE_DIR", headers)
    source = replace(RAW, text="#include <qcut/outer.cuh>\n" + TEXT)
    assert set(builder.header_digests(source)) == {"qcut/outer.cuh", "qcut/inner.cuh"}
    before = builder.fingerprint(source)
    (headers / "qcut" / "unused.cuh").write_text("int changed;")
    assert builder.fingerprint(source) == before
    inner = (headers / "qcut" / "inner.cuh").read_text()
    (headers / "qcut" / "inner.cuh").write_text("// a comment\n" + inner.replace("\n", "\n  // another\n"))
    assert builder.fingerprint(source) == before
    for changed in ("int changed;", "// a comment that goes on \\\nint changed;\n", "int a; // same line\n"):
        (headers / "qcut" / "inner.cuh").write_text(changed)
        assert builder.fingerprint(source) != before
    hosted = replace(HOSTED, host_text="#include <qcut/unused.cuh>\n" + HOST_TEXT)
    assert set(builder.header_digests(hosted)) == {"qcut/unused.cuh"}


def test_key_covers_the_projects_own_headers() -> None:
    """In a checkout the package ``qcut.emitters`` is a link; a header must be found behind it."""
    source = ArgmaxRows(DType.F16, "sm_80").emit()
    headers = {"qcut/decoder/argmax.cuh", "qcut/core/cluster.cuh", "qcut/core/common.cuh"}
    assert set(builder.header_digests(source)) == headers


def test_nvrtc_error_names_kernel_command_and_line() -> None:
    with pytest.raises(BuildError, match=r"kernel scale: NVRTC failed\ncommand: nvrtc .*--fmad=false(?s:.*)oops") as e:
        build(replace(RAW, text=TEXT + "oops"))
    assert e.value.kernel == "scale"
    assert "\0" not in e.value.log


def test_nvcc_error_names_kernel_command_and_line() -> None:
    with pytest.raises(BuildError, match=r"kernel hosted: nvcc ended with \d+\ncommand: .*nvcc.*compute_80(?s:.*)oops"):
        build(replace(HOSTED, text=TEXT + "oops"))
    with pytest.raises(BuildError, match=r"kernel hosted: g\+\+ ended with 1\ncommand: .*g\+\+(?s:.*)oops"):
        build(replace(HOSTED, host_text=HOST_TEXT + "oops"))


def test_bad_sources_are_refused() -> None:
    with pytest.raises(BuildError, match="kernel scale: a host launcher needs toolchain 'nvcc'"):
        build(replace(RAW, host_text=HOST_TEXT))
    with pytest.raises(BuildError, match=r"unknown include roots \['boost'\]"):
        build(replace(RAW, includes=("qcut", "boost")))


def test_compiler_killed_by_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "nvcc"
    fake.write_text("#!/bin/sh\nkill -KILL $$\n")
    fake.chmod(0o755)
    real = toolchain.find_nvcc()
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: replace(real, path=fake))
    with pytest.raises(BuildError, match="nvcc was killed by signal 9"):
        build(HOSTED)


def test_nothing_is_left_in_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    build(HOSTED)
    with pytest.raises(BuildError):
        build(replace(HOSTED, text="oops"))
    assert os.listdir(tmp_path / "scratch") == []


def test_build_many(compilations: list[str]) -> None:
    broken = replace(RAW, name="broken", text="oops")
    build(RAW)
    with contextlib.redirect_stderr(Terminal()) as terminal:
        results = build_many([broken, RAW, HOSTED, RAW], jobs=2)
    assert list(results) == ["broken", "scale", "hosted"]
    assert isinstance(results["broken"], BuildError)
    assert results["scale"] == build(RAW)
    assert results["hosted"] == build(HOSTED)
    assert sorted(compilations) == ["broken", "hosted", "scale"]
    assert "building kernels" in terminal.getvalue()
    with contextlib.redirect_stderr(Terminal()) as terminal:
        assert build_many([RAW, HOSTED]) == {"scale": build(RAW), "hosted": build(HOSTED)}
    assert terminal.getvalue() == ""  # no bar where nothing is built
    assert build_many([]) == {}


def test_build_many_without_a_toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise ToolchainError("no working nvcc")

    monkeypatch.setattr(toolchain, "find_nvcc", absent)
    results = build_many([HOSTED, RAW], progress=False)
    assert isinstance(results["hosted"], ToolchainError)
    assert isinstance(results["scale"], Binary)
    assert not builder.is_toolchain_available("nvcc")
    assert builder.is_toolchain_available("nvrtc")


def test_build_many_runs_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3, timeout=20)

    def compile_text(source: KernelSource, *, device: bool = True) -> tuple[bytes, None, str]:
        together.wait()  # breaks unless all three are compiled at once
        return b"\x7fELF", None, ""

    monkeypatch.setattr(builder, "compile_text", compile_text)
    results = build_many([replace(RAW, name=f"k{i}") for i in range(3)], jobs=3, progress=False)
    assert all(isinstance(result, Binary) for result in results.values())


def test_resources_of_one_kernel_among_others() -> None:
    log = """ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    48 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 1024 bytes smem, 400 bytes cmem[0]
"""
    assert compilers.parse_resources(log, "first") == Resources(10, 0, 0, 0, 0)
    assert compilers.parse_resources(log, "second") == Resources(168, 1024, 48, 16, 20)
    assert compilers.parse_resources(log, "third") is None
    assert compilers.parse_resources(log[:120], "first") is None
