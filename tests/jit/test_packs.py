"""Packs: kernels that are found without any compiler, and files that are refused."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from qcut.emitters.core.arch import ARCHITECTURES
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.decoder.argmax import ArgmaxRows
from qcut.emitters.families import INT8_CUTLASS
from qcut.emitters.gemm.problem import GemmProblem
from qcut.errors import BuildError
from qcut.jit import Resources, build, find, packs, require
from qcut.jit.packs import Pack, Packed, pack_bytes
from qcut.jit.waiting import dry_run, unbuilt_kernel

builder = import_module("qcut.jit.build")  # qcut.jit.build is the function

ARCH = "sm_90a"
RESOURCES = Resources(40, 1024, 0, 0, 0)


def argmax(x: DType, advances: bool = False) -> KernelSource:
    return ArgmaxRows(x, ARCH, advances).emit()


def cutlass(tile: int = 0) -> KernelSource:
    problem = GemmProblem()
    return INT8_CUTLASS.emit(problem, INT8_CUTLASS.menu(problem, ARCH)[tile], ARCH)


def facts(arch: str = ARCH) -> dict[str, str]:
    return {"arch": arch, "sources": packs.sources_digest()}


def kernels() -> list[tuple[KernelSource, Packed]]:
    return [
        (argmax(DType.F16), Packed(b"\x7fELF first", None, RESOURCES)),
        (argmax(DType.F32), Packed(b"\x7fELF second", None, None)),
        (cutlass(), Packed(b"\x7fELF device", b"\x7fELF host", RESOURCES)),
    ]


def keyed() -> list[tuple[str, bytes, Packed]]:
    return [(source.name, packs.key_of(source), packed) for source, packed in kernels()]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in the place of the installation's packs."""
    monkeypatch.setenv("QCUT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(packs, "FOLDER", tmp_path)
    monkeypatch.setattr(builder, "_memory", {})
    packs.installed.cache_clear()
    yield tmp_path
    packs.installed.cache_clear()


def test_every_kernel_comes_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "BLOCK_BYTES", 1)  # each in a block of its own
    (folder / "x.qpack").write_bytes(pack_bytes(keyed(), facts(), jobs=2))
    pack = Pack(folder / "x.qpack")
    assert len(pack) == 3
    assert pack.facts == facts()
    for source, packed in kernels():
        assert source in pack
        assert pack.read(source) == packed
    for other in (argmax(DType.BF16), argmax(DType.F16, advances=True), replace(argmax(DType.F16), text="other")):
        assert other not in pack
        assert pack.read(other) is None


def test_a_pack_without_kernels(folder: Path) -> None:
    (folder / "x.qpack").write_bytes(pack_bytes([], facts()))
    assert argmax(DType.F16) not in Pack(folder / "x.qpack")


def test_a_pack_comes_before_compilers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("asked for a compiler")

    monkeypatch.setattr(builder, "fingerprint", refuse)
    (folder / f"{ARCH}.qpack").write_bytes(pack_bytes(keyed(), facts()))
    for source, packed in kernels():
        binary = build(source)
        assert (binary.cubin, binary.host_so, binary.resources) == (packed.cubin, packed.host_so, packed.resources)
        assert (binary.name, binary.entry, binary.arch) == (source.name, source.entry, ARCH)
        assert build(source) is find(source) is binary
        assert require([source], wait=False) == {source.name: binary}
        with dry_run():
            assert unbuilt_kernel(source, 0) is None
    for lookup in (build, find):
        with pytest.raises(AssertionError, match="asked for a compiler"):
            lookup(argmax(DType.BF16))


def test_pickled_source_keeps_its_texts() -> None:
    source = cutlass()
    there = pickle.loads(pickle.dumps(source))
    assert (there.text, there.host_text) == (source.text, source.host_text)
    assert builder.fingerprint(there) == builder.fingerprint(source)


def test_a_text_that_was_changed_is_another_kernel(folder: Path) -> None:
    (folder / "x.qpack").write_bytes(pack_bytes(keyed(), facts()))
    source = cutlass()
    changed = replace(source, text=source.text + "// changed")
    assert source in Pack(folder / "x.qpack")  # written by now, and still what its name says
    assert changed not in Pack(folder / "x.qpack")


@pytest.mark.parametrize("wrong", [{"arch": "sm_80"}, {"sources": "others"}])
def test_a_pack_of_other_sources_is_left_alone(folder: Path, wrong: dict[str, str]) -> None:
    (folder / f"{ARCH}.qpack").write_bytes(pack_bytes(keyed(), facts() | wrong))
    with pytest.warns(RuntimeWarning, match="built from other sources"):
        assert packs.find(argmax(DType.F16)) is None


def test_any_damage_is_refused(folder: Path) -> None:
    """A byte turned anywhere, or the end cut off anywhere, is found; a kernel is right or refused."""
    whole = pack_bytes(keyed(), facts())
    path = folder / "x.qpack"

    def reads() -> bool:
        """Whether all kernels come back as they were, or else none is wrong."""
        try:
            pack = Pack(path)
            return all(pack.read(source) == packed for source, packed in kernels())
        except BuildError as error:
            return str(path) not in str(error)

    path.write_bytes(whole)
    assert reads()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        assert not reads(), place
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        assert not reads(), length


def test_the_users_own_pack_is_in_the_cache(folder: Path) -> None:
    """Only of the user: one that others may write is not used."""
    own = folder / "cache" / packs.CACHE_FOLDER
    own.mkdir(parents=True)
    path = own / f"{ARCH}.qpack"
    path.write_bytes(pack_bytes(keyed(), facts()))
    path.chmod(0o666)
    with pytest.warns(RuntimeWarning, match="can be written by others"):
        assert packs.find(argmax(DType.F16)) is None
    packs.installed.cache_clear()
    path.chmod(0o600)
    assert packs.find(argmax(DType.F16)) == kernels()[0][1]
    packs.installed.cache_clear()
    (folder / f"{ARCH}.qpack").write_bytes(pack_bytes([], facts()))  # the wheel's comes first
    assert packs.find(argmax(DType.F16)) is None


def test_the_libraries_that_launchers_want() -> None:
    launchers = (b"..GLIBC_2.2.5\0GLIBC_2.34\0", b"\0GLIBC_2.4\0GLIBCXX_3.4.9\0GLIBCXX_3.4.21\0")
    assert packs.library_versions(launchers) == "GLIBC_2.34, GLIBCXX_3.4.21"
    assert packs.library_versions(()) == ""


def test_what_is_no_file_is_refused(folder: Path) -> None:
    (folder / f"{ARCH}.qpack").mkdir()
    with pytest.raises(BuildError, match="not a regular file"):
        packs.find(argmax(DType.F16))


HIDDEN = """
import sys
from pathlib import Path
from qcut import jit
from qcut.errors import QcutError
from qcut.jit import packs
from tests.jit.test_packs import DType, argmax, cutlass
from tests.support.environments import hide_compilers

hide_compilers()
packs.FOLDER = Path(sys.argv[1])
for source in (argmax(DType.F16), cutlass()):
    binary = jit.build(source)
    print(binary.cubin, binary.host_so)
for source in (argmax(DType.BF16), cutlass(1)):
    try:
        jit.build(source)
    except QcutError as error:
        print(type(error).__name__, "none of the 3 kernels of" in str(error))
"""


def test_a_process_without_any_compiler_finds_its_kernels(folder: Path) -> None:
    """nvcc, g++, NVRTC, the CUDA headers and nvidia-cutlass are all out of reach."""
    (folder / f"{ARCH}.qpack").write_bytes(pack_bytes(keyed(), facts()))
    environment = {"PATH": "", "QCUT_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN, str(folder)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines == [r"b'\x7fELF first' None", r"b'\x7fELF device' b'\x7fELF host'", *["ToolchainError True"] * 2]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_name_of_cutlass_kernel_decides_its_texts(arch: str) -> None:
    problem = GemmProblem()
    menu = INT8_CUTLASS.menu(problem, arch)
    sources = [INT8_CUTLASS.emit(problem, tile, arch) for tile in menu]
    assert len({source.name for source in sources}) == len({(source.text, source.host_text) for source in sources})
    again = [INT8_CUTLASS.emit(problem, tile, arch) for tile in menu]
    assert [(s.text, s.host_text) for s in sources] == [(s.text, s.host_text) for s in again]
