"""Where compilers work: nothing of a path reaches a shell, faults name the directory, and nothing is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from qcut.errors import BuildError, ToolchainError
from qcut.jit import build, folders, scratch, toolchain
from tests.jit.test_build import HOSTED
from tests.support import ROOT

builder = import_module("qcut.jit.build")
SMALL = replace(HOSTED, host_text=None, includes=("qcut",), text='extern "C" __global__ void scale() {}')


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QCUT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(builder, "_memory", {})
    toolchain.reset()


HARMLESS = ["a b", "o'clock", "x;touch ../../planted", "(y)&", "ü*?~"]
UNSAFE = ["$(touch ../../planted)", "`touch ../../planted`", 'a"; touch ../../planted; "', "back\\slash", "a\nb"]


@pytest.mark.parametrize("name", [*HARMLESS, *UNSAFE])
def test_no_name_of_a_directory_reaches_a_shell(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = name.replace("../../planted", "planted")
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    with scratch.scratch_folder() as place:
        assert place.is_relative_to(folder if scratch.unsafe_character(name) is None else tmp_path / "cache")
    assert build(replace(SMALL, name="kernel")).cubin.startswith(b"\x7fELF")
    assert not list(tmp_path.rglob("planted"))
    assert list(folder.iterdir()) == list((tmp_path / "cache").glob("scratch/*")) == []


def test_no_safe_path_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "$(touch planted)"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("QCUT_CACHE_DIR", str(folder / "cache"))
    with pytest.raises(BuildError, match=r"has the character '\$', on which the shell.*cache directory.*set TMPDIR"):
        build(SMALL)
    assert list(folder.iterdir()) == []


def test_unsafe_paths_of_the_toolchain_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = toolchain.find_cuda_include(toolchain.find_nvcc().root)
    moved = replace(real, paths=(Path("/opt/`id`/include"), *real.paths))
    monkeypatch.setattr(toolchain, "find_cuda_include", lambda root=None: moved)
    with pytest.raises(ToolchainError, match="the path '/opt/`id`/include' has the character '`'"):
        build(SMALL)


def test_unsafe_path_of_nvcc_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "$(id)"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "nvcc").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (home / "bin" / "nvcc").chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(toolchain, "SYSTEM_CUDA", tmp_path / "none")
    monkeypatch.setattr(toolchain, "_pypi_roots", toolchain.once(lambda: ()))
    with pytest.raises(ToolchainError, match=r"has the character '\$', on which the shell beneath nvcc would act"):
        toolchain.find_nvcc()
    assert not (tmp_path / "ran").exists()


def test_missing_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every use: the search for nvcc, a build, and the question whether nvcc works, which is no no."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    for use in (toolchain.find_nvcc, lambda: build(SMALL), lambda: builder.missing_toolchain("nvcc")):
        with pytest.raises(BuildError, match=rf"{tmp_path}/absent: No such file or directory; set TMPDIR") as error:
            use()
        assert not isinstance(error.value, ToolchainError)


def test_a_file_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=f"{tmp_path}/file: Not a directory"):
        build(SMALL)


def test_no_more_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    (tmp_path / "full").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "full"))
    toolchain.find_nvcc()
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(BuildError, match=f"kernel hosted: no scratch space .*{tmp_path}/full: No space left on device"):
        build(SMALL)
    assert list((tmp_path / "full").iterdir()) == []


def refused(folder: Path, options: str) -> str:
    """What a build reports with a small file system as TMPDIR, mounted with options; skips where nothing is mounted."""
    folder.mkdir()
    mount = ("unshare", "--mount", "--map-root-user", "sh", "-c", f'mount -t tmpfs -o {options} tmpfs {folder} && "$@"')
    if not shutil.which("unshare") or subprocess.run([*mount, "sh", "true"], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs user namespaces, which this machine refuses")
    script = (
        "from tests.jit.test_build import HOSTED\nfrom qcut.jit import build\nfrom qcut.errors import BuildError\n"
        "try:\n  build(HOSTED)\nexcept BuildError as error:\n  print('refused', error)\n"
    )
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*mount, "sh", sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_read_only_directory_is_named(tmp_path: Path) -> None:
    found = refused(tmp_path / "closed", "ro")
    assert f"{tmp_path}/closed: Read-only file system; set TMPDIR" in found


def test_full_disk(tmp_path: Path) -> None:
    """The compiler fails, says why, and nothing is kept as a kernel."""
    found = refused(tmp_path / "small", "size=128k")
    assert found.startswith("refused kernel hosted: ")
    assert "No space left on device" in found
    assert not list((tmp_path / "cache").glob("kernels/*"))


def test_others_may_not_change_what_compilers_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "open"))
    (tmp_path / "open").chmod(0o777)
    with (
        pytest.raises(BuildError, match=rf"{tmp_path}/open can be written by others \(mode 0777"),
        scratch.scratch_folder(),
    ):
        pass
    (tmp_path / "open").chmod(0o1777)
    with scratch.scratch_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_only_dead_processes_leftovers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    script = (
        "from qcut.jit.scratch import scratch_folder\nimport sys\n"
        "with scratch_folder() as folder:\n  (folder / 'device.cu').touch()\n"
        "  print(folder, flush=True)\n  sys.stdin.readline()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    (tmp_path / "qcut-model").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        with scratch.scratch_folder():
            assert (folder / "device.cu").exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert folder.exists()
    with scratch.scratch_folder() as mine:
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([mine.name, "qcut-model"])
    (tmp_path / f"qcut-build.{folders.host_tag()}.0123456789abcdef").mkdir()  # killed before the lock was made
    with scratch.scratch_folder():
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["qcut-model"]
    elsewhere = tmp_path / "qcut-build.00000000.0123456789abcdef"  # another machine's, whose locks may not reach here
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    for age, remains in ((3600, True), (2 * 86400, False)):
        os.utime(elsewhere, (time.time() - age,) * 2)
        with scratch.scratch_folder():
            assert elsewhere.exists() == remains


def test_a_compiler_that_writes_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "nvcc"
    fake.write_text("#!/bin/sh\necho text > device.cubin\n")
    fake.chmod(0o755)
    real = toolchain.find_nvcc()
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: replace(real, path=fake))
    with pytest.raises(BuildError, match=r"nvcc ended well and left no code in device.cubin \(5 bytes\)"):
        build(SMALL)
    fake.unlink()
    with pytest.raises(ToolchainError, match="nvcc cannot be started: No such file or directory"):
        build(SMALL)
