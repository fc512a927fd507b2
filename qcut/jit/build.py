"""Turns a `KernelSource` into a `Binary`, taken from memory, from a wheel's pack, from disk, or from a compiler.

No kernel is built twice: the key of a kernel is a digest of everything its binary depends on. The cubin
and the host launcher have a key each, so that a cubin built on one machine serves another machine with another C
library or g++. Building never launches, never sees a tensor and needs no GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

from qcut.common.progress import progress_bar
from qcut.emitters.core.source import INCLUDE_DIR, EmitError, KernelSource
from qcut.errors import BuildError, ToolchainError
from qcut.jit import cache, debug, packs, toolchain
from qcut.jit.compilers import Resources, compile_text, device_flags, headers, host_flags, parse_resources
from qcut.jit.dump import dump

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', re.MULTILINE)
_COMMENT_LINE = re.compile(rb"^[ \t]*//.*(?<!\\)\n", re.MULTILINE)
# Environment variables that change what nvcc or g++ produces from the same command line.
_COMPILER_ENVIRONMENT = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CPATH", "CPLUS_INCLUDE_PATH", "GCC_EXEC_PREFIX")
_BYTES_PER_JOB = 3 << 29
_RESOURCES = {field.name for field in fields(Resources)}


@dataclass(frozen=True)
class Binary:
    """One built kernel.

    Attributes:
        name: procedural name of its source.
        entry: kernel symbol in the cubin.
        arch: architecture the cubin runs on.
        key: digest of everything that went into it.
        cubin: device code.
        host_so: shared object of the host launcher, or None for a raw kernel.
        log: output of the compilers.
        resources: registers and memory as ptxas reported them, or None if the report was not understood.
    """

    name: str
    entry: str
    arch: str
    key: str
    cubin: bytes
    host_so: bytes | None
    log: str
    resources: Resources | None


_memory: dict[str, Binary] = {}


def build(source: KernelSource) -> Binary:
    """Return the binary of a kernel, compiling it if neither memory nor pack nor disk has it.

    A pack comes before the disk: what it holds is the same, and it is found without asking compilers for versions.

    Threads and processes that ask for one kernel at once compile it once.

    Args:
        source: text, target and toolchain.

    Returns:
        The binary.

    Raises:
        ToolchainError: the compiler or its headers are missing.
        BuildError: the compiler failed; carries its command and log. Or the installed pack is damaged.
    """
    if (binary := find(source)) is None:
        key = fingerprint(source)
        with cache.locked(key):
            if (binary := _lookup(source, key)) is None:
                binary = _compile_and_store(source, key, _read_device(source))
    dump(source, key=binary.key, cubin=binary.cubin, log=binary.log)
    return binary


def find(source: KernelSource) -> Binary | None:
    """The binary of a kernel from memory, pack or disk; None if `build` would compile it.

    Raises:
        ToolchainError: the kernel is in none of these, and the compiler or its headers are missing.
        BuildError: the installed pack is damaged.
    """
    return _packed(source) or _lookup(source, _key_to_build(source))


def rebuild(source: KernelSource) -> Binary:
    """Compile a kernel again, since its stored binary turned out to be unusable, and replace the binary.

    Raises:
        BuildError: as `build`.
    """
    key = fingerprint(source)
    with cache.locked(key):
        return _compile_and_store(source, key, None)


def remember(binary: Binary) -> None:
    """Keep a binary that another process built, for the life of this one."""
    _memory[binary.key] = binary


def _compile_and_store(source: KernelSource, key: str, stored: cache.Entry | None) -> Binary:
    begin = time.monotonic()
    binary = compile_source(source, stored)
    debug.log("build", f"{source.name} in {time.monotonic() - begin:.1f} s, {binary.resources}, key {key[:16]}")
    for part, entry in _to_entries(binary, source):
        if part != device_fingerprint(source) or stored is None:
            cache.write(source.name, part, entry)
    _memory[key] = binary
    return binary


def build_many(
    sources: Iterable[KernelSource], jobs: int | None = None, progress: bool = True
) -> dict[str, Binary | BuildError]:
    """Build kernels in parallel. A kernel that fails to build does not stop the others.

    Args:
        sources: kernels; sources of the same name are one kernel.
        jobs: compilers to run at a time; None runs one per core, fewer if memory is short.
        progress: show a bar on stderr while something compiles.

    Returns:
        Binaries by kernel name, or the error with which a build ended, in the order of ``sources``.
    """
    wanted = {source.name: source for source in sources}
    results: dict[str, Binary | BuildError] = {}
    missing = []
    for name, source in wanted.items():
        try:
            binary = find(source)
        except BuildError as error:
            results[name] = error
            continue
        if binary is None:
            missing.append(source)
        else:
            results[name] = binary
    if missing:
        results |= _build_missing(missing, jobs or default_jobs(), progress)
    return {name: results[name] for name in wanted}


def _build_missing(sources: list[KernelSource], jobs: int, progress: bool) -> dict[str, Binary | BuildError]:
    results: dict[str, Binary | BuildError] = {}
    pool = ThreadPoolExecutor(min(jobs, len(sources)), thread_name_prefix="qcut-build")
    try:
        with progress_bar(len(sources), "building kernels", "kernel", shown=progress) as advance:

            def work(source: KernelSource) -> Binary:
                advance(0, now=source.name.removeprefix("qcut_"))
                return build(source)

            # CUTLASS kernels take longest, so they start first.
            ordered = sorted(sources, key=lambda s: s.toolchain != "nvcc")
            futures = {pool.submit(work, source): source.name for source in ordered}
            for future in as_completed(futures):
                try:
                    results[futures[future]] = future.result()
                except BuildError as error:
                    results[futures[future]] = error
                advance(1)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return results


def fingerprint(source: KernelSource) -> str:
    """Digest of everything a kernel's binary, cubin and host launcher together, depends on.

    Raises:
        ToolchainError: a compiler or its headers are missing.
    """
    if source.host_text is None:
        return device_fingerprint(source)
    return _digest([device_fingerprint(source), host_fingerprint(source)])


def device_fingerprint(source: KernelSource) -> str:
    """Digest of everything the cubin depends on.

    The digest covers the cache's schema, the source without its launcher, the qcut headers it includes (transitively),
    the versions of compiler, CUDA headers and CUTLASS, flags, architecture, and the compiler's environment
    variables. Paths are left out: one cache serves several virtual environments.

    Raises:
        ToolchainError: the compiler or its headers are missing.
    """
    device = replace(source, host_text=None, libraries=())
    return _digest(
        ["device", asdict(device), *_surroundings(device), _device_tool(source).version, device_flags(source)]
    )


def host_fingerprint(source: KernelSource) -> str:
    """Digest of everything the host launcher depends on; the machine and its C library are part of it.

    Raises:
        ToolchainError: g++ or the headers are missing.
    """
    if source.host_text is None:
        return _digest(["host", None])
    machine = [toolchain.find_gxx().version, platform.machine(), platform.libc_ver(), host_flags(source)]
    return _digest(["host", asdict(source), *_surroundings(source), *machine])


def _surroundings(source: KernelSource) -> list[object]:
    return [
        header_digests(source),
        [(package.name, package.version) for package in headers(source)],
        [(name, os.environ[name]) for name in _COMPILER_ENVIRONMENT if name in os.environ],
    ]


def _digest(facts: object) -> str:
    return hashlib.sha256(json.dumps([cache.SCHEMA, facts], sort_keys=True).encode()).hexdigest()


def header_digests(source: KernelSource) -> dict[str, str]:
    """SHA-256 of every qcut header that a kernel's texts include, directly or through another header.

    Comment lines are left out. Conditional includes count as taken; an include through a macro is not seen.
    """
    digests: dict[str, str] = {}
    pending = [(str(INCLUDE_DIR), name) for name in _INCLUDE.findall(source.text + "\n" + (source.host_text or ""))]
    while pending:
        folder, name = pending.pop()
        for path in (os.path.join(INCLUDE_DIR, name), os.path.join(folder, name)):
            with contextlib.suppress(OSError):
                status = os.stat(path)
                if (header := _read_header(path, INCLUDE_DIR, status.st_mtime_ns, status.st_size)) is not None:
                    relative, digest, inner = header
                    if relative not in digests:
                        digests[relative] = digest
                        pending += [(os.path.dirname(path), name) for name in inner]
                    break
    return digests


@lru_cache(maxsize=1 << 10)  # read at every look-up; a changed file has another time
def _read_header(path: str, root: Path, mtime_ns: int, size: int) -> tuple[str, str, tuple[str, ...]] | None:
    """Name below the root, digest and inner includes of a header; None if the path leads out of the root."""
    real = Path(path).resolve()
    if root not in real.parents:
        return None
    text = real.read_bytes()
    digest = hashlib.sha256(_COMMENT_LINE.sub(b"", text)).hexdigest()
    return str(real.relative_to(root)), digest, tuple(_INCLUDE.findall(text.decode(errors="replace")))


def _device_tool(source: KernelSource) -> toolchain.Tool:
    return toolchain.find_nvcc() if source.toolchain == "nvcc" else toolchain.find_nvrtc()


def _packed(source: KernelSource) -> Binary | None:
    """The binary that the installed pack has of a kernel."""
    if packs.installed(source.arch) is None or debug.has_line_numbers():  # a pack's kernels have none
        return None
    key = packs.key_of(source).hex()
    if (binary := _memory.get(key)) is None and (packed := packs.find(source)) is not None:
        facts = (source.name, source.entry, source.arch, key)
        _memory[key] = binary = Binary(*facts, packed.cubin, packed.host_so, "", packed.resources)
    return binary


def _key_to_build(source: KernelSource) -> str:
    """`fingerprint` of a kernel that is in no pack; an error also names the pack that lacks the kernel."""
    try:
        return fingerprint(source)
    except (ToolchainError, EmitError) as error:
        lacking = packs.lacking(source)
        if lacking or isinstance(error, EmitError):
            raise ToolchainError(f"{lacking}{error}", kernel=source.name) from error
        raise


def _lookup(source: KernelSource, key: str) -> Binary | None:
    if (binary := _memory.get(key)) is not None:
        return binary
    if (device := _read_device(source)) is None:
        return None
    host_so = None
    if source.host_text is not None:
        part = host_fingerprint(source)
        if (host := cache.read(source.name, part)) is None:
            return None
        if (host_so := host.blobs.get("host_so")) is None:
            cache.refuse(source.name, part, "holds no host launcher")
            return None
    _memory[key] = binary = _assemble(source, key, device, host_so)
    return binary


def _read_device(source: KernelSource) -> cache.Entry | None:
    """The entry of a kernel's cubin; None if there is none, or, with a warning, if the entry holds no cubin."""
    part = device_fingerprint(source)
    if (entry := cache.read(source.name, part)) is None:
        return None
    log, resources = entry.meta.get("log"), entry.meta.get("resources", ())
    figures = resources if isinstance(resources, dict) else {}
    known = not figures or (set(figures) == _RESOURCES and all(type(value) is int for value in figures.values()))
    if "cubin" in entry.blobs and isinstance(log, str) and (resources is None or figures) and known:
        return entry
    cache.refuse(source.name, part, "holds no cubin with its log and resources")
    return None


def _assemble(source: KernelSource, key: str, device: cache.Entry, host_so: bytes | None) -> Binary:
    resources = device.meta["resources"]
    return Binary(
        name=source.name,
        entry=source.entry,
        arch=source.arch,
        key=key,
        cubin=device.blobs["cubin"],
        host_so=host_so,
        log=device.meta["log"],
        resources=Resources(**resources) if resources else None,
    )


def _to_entries(binary: Binary, source: KernelSource) -> list[tuple[str, cache.Entry]]:
    resources = asdict(binary.resources) if binary.resources else None
    device = cache.Entry({"log": binary.log, "resources": resources}, {"cubin": binary.cubin})
    entries = [(device_fingerprint(source), device)]
    if binary.host_so is not None:
        entries.append((host_fingerprint(source), cache.Entry({}, {"host_so": binary.host_so})))
    return entries


def compile_source(source: KernelSource, device: cache.Entry | None = None) -> Binary:
    """Compile a kernel without reading or writing memory or the disk cache.

    Args:
        source: text, target and toolchain.
        device: an entry that holds the cubin already: only the host launcher is compiled; None compiles both.

    Raises:
        BuildError: as `build`.
    """
    cubin, host_so, log = compile_text(source, device=device is None)
    if device is None:
        resources = parse_resources(log, source.entry)
        device = cache.Entry({"log": log, "resources": asdict(resources) if resources else None}, {"cubin": cubin})
    return _assemble(source, fingerprint(source), device, host_so)


def default_jobs() -> int:
    """Compilers to run at a time: one per core, fewer if memory is short."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        if match := re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE):
            return max(1, min(cores, int(match.group(1)) * 1024 // _BYTES_PER_JOB))
    return cores


def is_toolchain_available(kind: str) -> bool:
    """Whether kernels of a toolchain can be built here; see `missing_toolchain`."""
    return missing_toolchain(kind) is None


def missing_toolchain(kind: str) -> str | None:
    """The reason why kernels of a toolchain cannot be built here, with what to install; None if they can.

    Args:
        kind: ``nvrtc`` for raw kernels, or ``nvcc`` for CUTLASS kernels, which need nvcc, g++ and CUTLASS headers.

    Raises:
        BuildError: there is no scratch space to try the compiler in.
    """
    try:
        if kind == "nvrtc":
            toolchain.find_cuda_include()
            toolchain.find_nvrtc()
        else:
            root = toolchain.find_nvcc().root
            toolchain.find_gxx()
            toolchain.find_cuda_include(root)
            toolchain.find_cutlass_include()
    except ToolchainError as error:
        return str(error)
    return None
