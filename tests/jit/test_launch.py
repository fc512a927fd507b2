"""Launching against a stand-in driver (libcuda.c): packing, contexts, errors, threads.

The stand-in keeps the driver's rules: no current context is error 201, a function of another context is
error 400, loading code is refused while a capture forbids it, and handles do not fit in 32 bits.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import threading
import timeit
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qcut.emitters.core.source import KernelSource, Param
from qcut.errors import DeviceError, LaunchError
from qcut.jit import Binary, Kernel, device, launch, load, toolchain
from tests.support import ROOT
from tests.support.fakes.driver import Fake, compile_c

FAKE_SOURCE = ROOT / "tests" / "support" / "fakes" / "libcuda.c"
STREAM = 0x5500_1234_5678
POINTER = 0x7F12_3456_7890

RAW = KernelSource(
    name="raw_kernel",
    text="",
    entry="raw",
    params=(
        Param("n", "i32"),
        Param("x", "ptr", "float*"),
        Param("s", "f32"),
        Param("stride", "i64"),
        Param("flag", "i32"),
    ),
    arch="sm_90a",
    block=192,
    smem_bytes=100_000,
)
ARGS = (-7, POINTER, 0.1, -(1 << 40), 3)
# The layout a C compiler gives `struct {int n; void* x; float s; long long stride; int flag;}`.
LAYOUT = [(0, 4), (8, 8), (16, 4), (24, 8), (32, 4)]

HOST_TEXT = """
#include <stdint.h>
int LAUNCH(void*, void*, void**, void**);
struct Arguments { int n; void* x; float s; long long stride; int flag; };
struct Params { struct Arguments a; int flags; void* stream; };
struct Config { unsigned v[7]; void* stream; void* attributes; unsigned count; };
int qcut_launch(const void* args, void* function, void* stream, int flags) {
  struct Params params = {*(const struct Arguments*)args, flags, stream};
  struct Config config = {{5, 1, 1, 384, 1, 1, 200}, stream, 0, 0};
  void* list[] = {&params};
  return LAUNCH(&config, function, list, 0);
}
long qcut_query(int what, const void* args) {
  if (what == 2) return ((const struct Arguments*)args)->stride;
  return what == 0 ? 150000 : what == 1 ? sizeof(struct Params) : what == 3 ? 384 : -1;
}
"""
HOST_PARAM_BYTES = 56


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_c(FAKE_SOURCE.read_text(), tmp_path_factory.mktemp("driver") / "libcuda-fake.so")


@pytest.fixture(scope="session")
def host_so(library: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    # Linked to the stand-in by a name of its own: with a real driver the usual one may mean that.
    path = tmp_path_factory.mktemp("host") / "host.so"
    return compile_c(HOST_TEXT, path, "-DLAUNCH=fake_cuLaunchKernelEx", libraries=(str(library),)).read_bytes()


@pytest.fixture
def fake(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    def forget() -> None:
        for cached in (device.device, device.primary_context, device._initialised):
            cached.cache_clear()
        launch._kernels.clear()
        launch._hosts.clear()

    forget()
    local = ctypes.CDLL(str(library))  # RTLD_LOCAL: kernels that this process really launches must not find it
    monkeypatch.setattr(toolchain, "driver", lambda: local)
    driver = Fake(local)
    driver.params(LAYOUT)
    driver.set(launches=0, loaded=0, smem=0, capture_mode=0, device_count=2)
    driver.set(load_failures=0, load_status=200, launch_status=0)
    driver.context(0)
    yield driver
    driver.context(0)
    forget()


def binary(source: KernelSource = RAW, key: str = "k", host_so: bytes | None = None) -> Binary:
    return Binary(source.name, source.entry, source.arch, key, b"\x7fELF cubin", host_so, "", None)


@pytest.fixture
def raw(fake: Fake) -> Kernel:
    return load(binary(), RAW, 0)


@pytest.fixture
def hosted(fake: Fake, host_so: bytes) -> Kernel:
    fake.params([(0, HOST_PARAM_BYTES)])
    return load(binary(key="hosted", host_so=host_so), RAW, 0)


def test_load_prepares_everything_and_leaves_the_context_alone(fake: Fake, raw: Kernel) -> None:
    assert (fake.loaded, fake.smem, fake.capture_mode) == (1, 100_000, 0)
    assert device.current_context() == 0
    assert (ctypes.c_char * 256).in_dll(fake.lib, "fake_entry").value == b"raw"


def test_load_is_memoized_per_device(fake: Fake, raw: Kernel) -> None:
    assert load(binary(), RAW, 0) is raw
    other = load(binary(), RAW, 1)
    assert other is not raw
    assert other.device == 1
    other.launch((1, 1, 1), ARGS, STREAM)
    assert fake.last.context == 0x1001


def test_launch_passes_every_argument(fake: Fake, raw: Kernel) -> None:
    fake.context(0x1000)
    raw.launch((3, 65535, 2), ARGS, STREAM)
    last = fake.last
    assert tuple(last.grid) == (3, 65535, 2)
    assert (last.block, last.smem, last.stream, last.pdl) == (192, 100_000, STREAM, 0)
    assert fake.unpacked("@iPfqi") == (-7, POINTER, struct.unpack("f", struct.pack("f", 0.1))[0], -(1 << 40), 3)


def test_launches_are_logged(fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("QCUT_DEBUG", "launch")
    kernel = load(binary(key="logged"), RAW, 0)
    fake.context(0x1000)
    kernel.launch((3, 1, 1), ARGS, STREAM)
    sizes = f"n=-7, s=0.1, stride={-(1 << 40)}, flag=3"
    line = f"qcut: launch: {RAW.name} on (3, 1, 1) x 192, stream {STREAM:#x}: {sizes}\n"
    assert capsys.readouterr().err == line
    assert tuple(fake.last.grid) == (3, 1, 1)


def test_dependent_launch_sets_the_attribute_and_only_then(fake: Fake, raw: Kernel) -> None:
    fake.context(0x1000)
    for pdl in (False, True, False):
        raw.launch((1, 1, 1), ARGS, 0, pdl=pdl)
        assert fake.last.pdl == int(pdl)
        assert fake.last.stream == 0


def test_param_offsets_are_those_of_c() -> None:
    assert launch.param_offsets(RAW) == [offset for offset, _ in LAYOUT]


def test_host_launcher(fake: Fake, hosted: Kernel) -> None:
    assert (hosted.block, hosted.smem_bytes, fake.smem) == (384, 150_000, 150_000)
    assert hosted.query(launch.QUERY_WORKSPACE_BYTES, ARGS) == -(1 << 40)
    fake.context(0x1000)
    for pdl in (False, True):
        hosted.launch((0, 0, 0), ARGS, STREAM, pdl=pdl)
        assert fake.last.stream == STREAM
        value = struct.unpack("f", struct.pack("f", 0.1))[0]
        assert fake.unpacked("@iPfqi4xiP") == (-7, POINTER, value, -(1 << 40), 3, int(pdl), STREAM)


def test_host_launchers_do_not_mix(fake: Fake, host_so: bytes, tmp_path: Path) -> None:
    text = (
        "int qcut_launch(const void* a, void* f, void* s, int g) { return 0; } long qcut_query(int w, const void* a) "
    )
    answers = {}
    for answer in (1000, 2000):
        so = compile_c(text + f"{{ return w == 1 ? 56 : {answer}; }}", tmp_path / f"{answer}.so").read_bytes()
        fake.params([(0, 56)])
        answers[answer] = load(binary(key=str(answer), host_so=so), RAW, 0).smem_bytes
    assert answers == {1000: 1000, 2000: 2000}


def test_launch_without_a_context_or_with_another(fake: Fake, raw: Kernel, hosted: Kernel) -> None:
    fake.params(LAYOUT)
    for current in (0, 0x1001, 0xDEAD):
        fake.context(current)
        raw.launch((4, 1, 1), ARGS, STREAM, pdl=True)
        assert (fake.last.context, fake.last.pdl, fake.last.grid[0]) == (0x1000, 1, 4)
        assert device.current_context() == current
    fake.params([(0, HOST_PARAM_BYTES)])
    hosted.launch((0, 0, 0), ARGS, STREAM)
    assert fake.last.context == 0x1000
    assert fake.launches == 4


def test_launch_error_names_kernel_device_and_reason(fake: Fake, raw: Kernel, hosted: Kernel) -> None:
    fake.context(0x1000)
    fake.set(launch_status=700)
    pattern = (
        r"kernel raw_kernel: launch failed \(grid \(9, 8, 7\), block 192, 100000 bytes of shared memory\) on "
        r"cuda:0 \(Fake GPU, sm_90\): CUDA_ERROR_ILLEGAL_ADDRESS \(700\): an illegal memory access"
    )
    with pytest.raises(LaunchError, match=pattern):
        raw.launch((9, 8, 7), ARGS, STREAM)
    with pytest.raises(LaunchError, match=r"launch failed \(block 384, 150000 bytes.*ILLEGAL_ADDRESS"):
        hosted.launch((1, 1, 1), ARGS, STREAM)
    fake.set(launch_status=9999)
    with pytest.raises(LaunchError, match=r": error 9999$"):
        raw.launch((1, 1, 1), ARGS, STREAM)
    fake.set(launch_status=400)  # in the right context there is nothing to try again
    with pytest.raises(LaunchError, match=r"\(400\)"):
        raw.launch((1, 1, 1), ARGS, STREAM)


@pytest.mark.parametrize(
    ("grid", "args", "stream"),
    [
        ((1, 1, 1), ARGS[:-1], 0),
        ((1, 1, 1), (*ARGS, 1), 0),
        ((1, 1, 1), ("a", *ARGS[1:]), 0),
        ((1, 1, 1), (1 << 31, *ARGS[1:]), 0),
        ((1, 1, 1), (1.5, *ARGS[1:]), 0),
        ((1, 1, 1), (None, *ARGS[1:]), 0),
        ((-1, 1, 1), ARGS, 0),
        ((1, 1), ARGS, 0),
        ((1, 1, 1), ARGS, "stream"),
    ],
)
def test_arguments_that_do_not_fit(fake: Fake, raw: Kernel, grid: Any, args: Any, stream: Any) -> None:
    fake.context(0x1000)
    with pytest.raises(LaunchError, match=r"kernel raw_kernel: arguments .*parameters are \(n:i32, x:ptr, s:f32"):
        raw.launch(grid, args, stream)
    assert fake.launches == 0


def test_host_launcher_refuses_arguments_that_do_not_fit(fake: Fake, hosted: Kernel) -> None:
    fake.context(0x1000)
    for args, stream in ((ARGS[:-1], 0), (ARGS, "stream")):
        with pytest.raises(LaunchError, match="kernel raw_kernel: arguments"):
            hosted.launch((1, 1, 1), args, stream)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="kernel raw_kernel: arguments"):
        hosted.query(2, ARGS[:-1])
    assert fake.launches == 0


def test_query_of_a_raw_kernel(raw: Kernel) -> None:
    with pytest.raises(LaunchError, match="a raw kernel has no host launcher"):
        raw.query(0)


@pytest.mark.parametrize(
    "layout",
    [LAYOUT[:-1], [*LAYOUT, (40, 8)], [(0, 4), (8, 8), (16, 4), (20, 4), (24, 4)]],
    ids=["fewer", "more", "other"],
)
def test_parameters_unlike_the_sources_are_refused(fake: Fake, layout: list[tuple[int, int]]) -> None:
    fake.params(layout)
    with pytest.raises(LaunchError, match=r"its parameters lie at \(offset, bytes\) .* a launch would pack"):
        load(binary(), RAW, 0)


def test_parameter_block_of_another_size_is_refused(fake: Fake, host_so: bytes) -> None:
    fake.params([(0, 1792)])
    with pytest.raises(LaunchError, match=r"\[\(0, 1792\)\], a launch would pack \[\(0, 56\)\]"):
        load(binary(host_so=host_so), RAW, 0)


def test_missing_entry_and_too_much_shared_memory(fake: Fake) -> None:
    with pytest.raises(LaunchError, match=r"kernel raw_kernel: no such entry .*\(500\)"):
        load(binary(replace(RAW, entry="absent")), replace(RAW, entry="absent"), 0)
    with pytest.raises(LaunchError, match=r"cannot have 300000 bytes of shared memory per CTA on cuda:0"):
        load(binary(), replace(RAW, smem_bytes=300_000), 0)


@pytest.fixture
def rebuilt(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were built again, and what the new binary is."""
    names: list[str] = []

    def rebuild(source: KernelSource) -> Binary:
        names.append(source.name)
        return binary(source)

    monkeypatch.setattr(launch, "rebuild", rebuild)
    return names


def test_stored_code_that_fails_to_load_is_rebuilt(fake: Fake, rebuilt: list[str]) -> None:
    fake.set(load_failures=1)
    load(binary(), RAW, 0).launch((1, 1, 1), ARGS, 0)
    assert rebuilt == ["raw_kernel"]
    fake.set(load_failures=2)
    with pytest.raises(LaunchError, match=r"sm_90a code does not load on cuda:1 .*\(200\)"):
        load(binary(), RAW, 1)
    assert rebuilt == ["raw_kernel"] * 2


def test_code_for_another_gpu_is_not_built_again(fake: Fake, rebuilt: list[str]) -> None:
    fake.set(load_failures=1, load_status=209)
    with pytest.raises(LaunchError, match=r"sm_90a code does not load on cuda:0 \(Fake GPU, sm_90\): .*\(209\)"):
        load(binary(), RAW, 0)
    assert rebuilt == []


def test_host_launcher_that_fails_to_load_is_rebuilt(fake: Fake, rebuilt: list[str], tmp_path: Path) -> None:
    load(binary(host_so=b"not a shared object"), RAW, 0)
    without = compile_c("int qcut_launch(void) { return 0; }", tmp_path / "x.so").read_bytes()
    load(binary(key="k2", host_so=without), RAW, 0)
    unresolved = compile_c(HOST_TEXT, tmp_path / "y.so", "-DLAUNCH=cudaNowhere")
    load(binary(key="k3", host_so=unresolved.read_bytes()), RAW, 0)
    assert rebuilt == ["raw_kernel"] * 3
    with pytest.raises(LaunchError, match=r"its host launcher does not load: .*undefined symbol: cudaNowhere"):
        launch._load_host(binary(key="k4", host_so=unresolved.read_bytes()))
    for _ in range(2):  # what did not load is not remembered under its key, which the next build has too
        with pytest.raises(LaunchError, match=r"its host launcher does not load: .*qcut_query"):
            launch._load_host(binary(key="k5", host_so=without))


def test_no_such_device(fake: Fake) -> None:
    with pytest.raises(DeviceError, match="device 2"):
        load(binary(), RAW, 2)


def test_host_launchers_find_the_driver(library: Path, tmp_path: Path) -> None:
    """The real arrangement, in a fresh process: an undefined symbol, met by a driver loaded beforehand."""
    script = """
import ctypes, sys
from tests.support.fakes import driver
from tests.jit import test_launch as t
from qcut.jit import load, toolchain
toolchain.LIBCUDA = sys.argv[1]
fake = driver.Fake(toolchain.driver())
fake.params([(0, t.HOST_PARAM_BYTES)])
with open(sys.argv[2], "rb") as file:
    kernel = load(t.binary(host_so=file.read()), t.RAW, 0)
kernel.launch((0, 0, 0), t.ARGS, t.STREAM)
assert fake.launches == 1 and fake.last.stream == t.STREAM
"""
    host = compile_c(HOST_TEXT, tmp_path / "host.so", "-DLAUNCH=cuLaunchKernelEx")
    command = [sys.executable, "-c", script, str(library), str(host)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain.driver.cache_clear()
    monkeypatch.setattr(toolchain, "LIBCUDA", "libcuda-absent.so.1")
    with pytest.raises(DeviceError, match="no NVIDIA driver"):
        load(binary(key="nowhere"), RAW, 0)


def test_threads_pack_into_buffers_of_their_own(fake: Fake, library: Path, tmp_path: Path) -> None:
    """Every launch reads its arguments back: a shared buffer would mix those of two threads."""
    source = replace(RAW, params=tuple(Param(f"p{i}", "i64") for i in range(16)), smem_bytes=0)
    text = """
    #include <unistd.h>
    int qcut_launch(const void* args, void* function, void* stream, int flags) {
      const long long* p = (const long long*)args;
      long long first = p[0];
      usleep(200);  // the GIL is free here: the other threads pack now
      for (int i = 0; i < 16; ++i) if (p[i] != first) return 1;
      return 0;
    }
    long qcut_query(int what, const void* args) { return what == 1 ? 128 : 0; }
    """
    fake.params([(0, 128)])
    so = compile_c(text, tmp_path / "slow.so").read_bytes()
    kernel = load(binary(source, host_so=so), source, 0)
    failures: list[Exception] = []

    def run(value: int) -> None:
        try:
            for _ in range(50):
                kernel.launch((1, 1, 1), (value,) * 16, 0)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(value,)) for value in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_rates_are_the_drivers_or_0(fake: Fake) -> None:
    stated = {"clock_khz": 1_980_000, "memory_khz": 3_201_000, "bus_bits": 6144, "l2_bytes": 0}
    assert device.rates(1) == stated


def test_devices(fake: Fake) -> None:
    assert [str(gpu) for gpu in device.devices()] == ["cuda:0 (Fake GPU, sm_90)", "cuda:1 (Fake GPU, sm_90)"]
    assert device.devices()[0] == device.Device(0, "Fake GPU", (9, 0), 132, 8 << 30)
    assert device.driver_version() == "13.0"


def test_launch_is_cheap(fake: Fake, raw: Kernel, hosted: Kernel) -> None:
    """3 µs is the target on an idle core; the bound leaves room for a busy machine."""
    fake.context(0x1000)

    def once(kernel: Kernel) -> Callable[[], None]:
        return lambda: kernel.launch((128, 4, 1), ARGS, STREAM, True)

    for kernel, layout in ((raw, LAYOUT), (hosted, [(0, HOST_PARAM_BYTES)])):
        fake.params(layout)
        best = min(timeit.repeat(once(kernel), number=2000, repeat=20)) / 2000
        assert best < 10e-6
