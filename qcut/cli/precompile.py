"""``qcut precompile``: every kernel of an architecture, built and packed."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import qcut
from qcut.dispatch import precompile
from qcut.emitters.core.source import KernelSource
from qcut.errors import BuildError, ConfigError
from qcut.jit import Binary, build_many, cache, packs
from qcut.storage.files import make_directory, write_bytes


def command(archs: list[str], folder: Path | None, jobs: int | None, only_list: bool) -> int:
    """Run the command.

    Args:
        archs: real architectures.
        folder: where the packs go; None: the folder of the cache directory in which qcut finds them.
        jobs: compilers at a time; None: one per core.
        only_list: print the kernels' names and build nothing.

    Returns:
        Exit status.

    Raises:
        ConfigError: the folder cannot be written.
    """
    sources = {arch: precompile.precompile_sources(arch) for arch in archs}
    if only_list:
        for source in (source for kernels in sources.values() for source in kernels):
            print(f"{source.toolchain:<6} {source.name}")
        return 0
    folder = _folder(folder)
    return max([_pack(arch, kernels, folder, jobs) for arch, kernels in sources.items()], default=0)


def _folder(folder: Path | None) -> Path:
    if folder is None:
        base = cache.directory()
        if base is None:
            raise ConfigError("there is no home directory; set QCUT_CACHE_DIR, or name a folder with --pack")
        folder = base / packs.CACHE_FOLDER
    try:
        make_directory(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made: {error.strerror or error}") from error
    return folder


def _pack(arch: str, sources: list[KernelSource], folder: Path, jobs: int | None) -> int:
    start = time.perf_counter()
    results = build_many(sources, jobs=jobs)
    built = {name: result for name, result in results.items() if isinstance(result, Binary)}
    for result in results.values():
        if isinstance(result, BuildError):
            print(f"qcut: {result}\n", file=sys.stderr)
    said = f"{len(built)} of {len(results)} kernels of {arch} ready ({time.perf_counter() - start:.1f} s)"
    if len(built) < len(results):
        print(f"{said}; none are packed before all are ready")
        return 1
    kernels = [
        (source.name, packs.key_of(source), packs.Packed(binary.cubin, binary.host_so, binary.resources))
        for source in sources
        for binary in (built[source.name],)
    ]
    needs = packs.library_versions(packed.host_so for _, _, packed in kernels if packed.host_so is not None)
    facts = {"arch": arch, "sources": packs.sources_digest(), "qcut": qcut.__version__, "needs": needs}
    path, data = folder / f"{arch}.qpack", packs.pack_bytes(kernels, facts, jobs or len(os.sched_getaffinity(0)))
    try:
        write_bytes(path, [data])
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
    print(f"{said}: {path}, {len(data) / 1e6:.2f} MB")
    return 0
