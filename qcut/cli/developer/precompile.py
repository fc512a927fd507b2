"""``qcut precompile``: every kernel of an architecture, built and packed."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import qcut
from qcut.cli.command import Answer, Command
from qcut.common.files import make_directory, write_bytes
from qcut.dispatch import precompile
from qcut.emitters.core.arch import ARCHITECTURES
from qcut.emitters.core.source import KernelSource
from qcut.errors import BuildError, ConfigError
from qcut.jit import Binary, build_many, cache, packs

FIELDS = {
    "architectures": "list of {arch, kernels, built, pack, bytes}: how many kernels there are and how many are ready, "
    "and the pack's path and size, null if none was written",
    "names": "with --list, names of the kernels; else empty",
}


COMMAND = Command(
    "precompile",
    f"""\
--arch ARCH {"|".join(ARCHITECTURES)}, again, required
    one of {", ".join(ARCHITECTURES)}; may be repeated
--pack FOLDER: Path
    where the packs go (default: packs in $QCUT_CACHE_DIR, where qcut finds them)
--list
    print the kernels' names and build nothing
--jobs N: positive
    compilers at a time (default: one per core)
""",
    help="build all kernels of an architecture ahead of time; needs no GPU",
    description="Builds every kernel that a model can need on an architecture, and packs them into one file, with\n"
    "which nothing is built later and no compiler is asked for. Kernels that are built stay in the cache, so that\n"
    "the command goes on where it was stopped. The exit status is 1 if a kernel fails.",
    example="qcut precompile --arch sm_90a",
    fields=FIELDS,
)


def run(arguments: argparse.Namespace) -> Answer:
    """Run the command.

    Raises:
        ConfigError: the folder of packs cannot be written.
    """
    sources = {arch: precompile.precompile_sources(arch) for arch in dict.fromkeys(arguments.arch)}
    if arguments.list:
        listed = [source for kernels in sources.values() for source in kernels]
        text = "\n".join(f"{source.toolchain:<6} {source.name}" for source in listed)
        return Answer({"architectures": [], "names": [source.name for source in listed]}, text)
    folder = _folder(arguments.pack)
    packed = [_pack(arch, kernels, folder, arguments.jobs) for arch, kernels in sources.items()]
    failed = any(each["built"] < each["kernels"] for each in packed)
    return Answer({"architectures": packed, "names": []}, status=int(failed))


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


def _pack(arch: str, sources: list[KernelSource], folder: Path, jobs: int | None) -> dict[str, Any]:
    start = time.perf_counter()
    results = build_many(sources, jobs=jobs)
    built = {name: result for name, result in results.items() if isinstance(result, Binary)}
    for result in results.values():
        if isinstance(result, BuildError):
            print(f"qcut: {result}\n", file=sys.stderr)
    done = {"arch": arch, "kernels": len(results), "built": len(built), "pack": None, "bytes": None}
    said = f"{len(built)} of {len(results)} kernels of {arch} ready ({time.perf_counter() - start:.1f} s)"
    if len(built) < len(results):
        print(f"{said}; none are packed before all are ready")
        return done
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
    return {**done, "pack": str(path), "bytes": len(data)}
