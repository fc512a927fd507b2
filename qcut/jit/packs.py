"""Packs: all kernels of an architecture in one compressed file, as a wheel or ``qcut precompile`` brings them.

A wheel's are ``qcut/binaries/{arch}.qpack``, the user's own ``packs/{arch}.qpack`` in the cache directory.

A kernel of a pack needs no compiler, no CUDA headers and no nvidia-cutlass. It is found by its name and text among the
kernels that the very same sources of qcut were built to; a pack of other sources is not used, with a warning.

A pack holds, in this order: a magic line, the SHA-256 of the index, the index's size, the index, blocks. The index has
facts as JSON, one `_BLOCK` for each block, and one `_KERNEL` for each kernel, sorted by key. A block is some megabytes
of kernels, which are much alike, under LZMA; its SHA-256 is in the index. A kernel is read, with its block, when it is
first asked for.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import lzma
import os
import re
import struct
import warnings
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from qcut.common.locks import Lock, once
from qcut.common.schema import file_size, open_regular, parse_json, read_up_to
from qcut.emitters.core.source import INCLUDE_DIR, DeferredSource, KernelSource
from qcut.errors import BuildError
from qcut.jit import folders
from qcut.jit.compilers import Resources

FOLDER = Path(__file__).resolve().parents[1] / "binaries"
"""Where an installed wheel has its packs. A checkout has none."""
CACHE_FOLDER = "packs"
"""The folder of the cache directory with the user's own."""

MAX_PACK_BYTES = 1 << 30
"""Largest pack that is read."""
BLOCK_BYTES = 8 << 20
"""Bytes of kernels in a block, from which a block is closed: 10 to 60 ms to unpack. Blocks of 2 MB take 5 to 13 ms and
a pack of them is a third larger."""
_MAX_BLOCK_BYTES = 64 << 20
_MAX_INDEX_BYTES = 64 << 20
_MAGIC = b"qcut-pack 1\n"
_HEAD = struct.Struct(f"<{len(_MAGIC)}s32sQ")
_COUNTS = struct.Struct("<III")  # bytes of JSON, blocks, kernels
_BLOCK = struct.Struct("<QII32s")  # offset behind the index, bytes, unpacked bytes, SHA-256 of the packed bytes
_KERNEL = struct.Struct("<16s5I5i")  # key, block, offset and size of cubin and of launcher, resources (-1: unknown)
_KEY_BYTES = 16
# Instructions are 16 bytes, so that their bytes are predicted by their place among 16.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 24, "lc": 0, "pb": 4}]
_KEPT_BLOCKS = 6
_ADVICE = "install the wheel again, or run `qcut precompile`"


@dataclass(frozen=True)
class Packed:
    """One kernel of a pack.

    Attributes:
        cubin: device code.
        host_so: shared object of the host launcher, or None for a raw kernel.
        resources: registers and memory as ptxas reported them, or None if that is not known.
    """

    cubin: bytes
    host_so: bytes | None
    resources: Resources | None


class Pack:
    """An open pack; threads may share it.

    Attributes:
        path: the file.
        facts: what the builder noted: ``arch``, ``sources`` (see `sources_digest`), ``qcut``, and ``needs``, the
            versions of C libraries that host launchers need.

    Raises:
        BuildError: the file is damaged, or no pack.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_regular(path, BuildError)
        try:
            size = file_size(self._file)
            if size > MAX_PACK_BYTES:
                raise self._refused(f"has {size} bytes; allowed: {MAX_PACK_BYTES}")
            index = self._read_index(self._file, size)
            self.facts, self._blocks, self._kernels = self._parse_index(index, size - _HEAD.size - len(index))
        except BaseException:
            self._file.close()
            raise
        self._start = _HEAD.size + len(index)
        self._unpacked: OrderedDict[int, bytes] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._kernels) // _KERNEL.size

    def __contains__(self, source: KernelSource) -> bool:
        return self._find(key_of(source)) is not None

    def read(self, source: KernelSource) -> Packed | None:
        """The kernel of a source; None if the pack does not have it.

        Raises:
            BuildError: the pack is damaged.
        """
        if (found := self._find(key_of(source))) is None:
            return None
        _, number, cubin, cubin_size, host, host_size, *figures = found
        with self._lock:
            block = self._block(number)
        if max(cubin + cubin_size, host + host_size) > len(block):
            raise self._refused(f"has kernel {source.name} beyond the end of block {number}")
        return Packed(
            block[cubin : cubin + cubin_size],
            block[host : host + host_size] if host_size else None,
            Resources(*figures) if figures[0] >= 0 else None,
        )

    def _find(self, key: bytes) -> tuple[Any, ...] | None:
        keys = _Keys(self._kernels)
        place = bisect.bisect_left(keys, key)
        if place == len(keys) or keys[place] != key:
            return None
        return _KERNEL.unpack_from(self._kernels, place * _KERNEL.size)

    def _block(self, number: int) -> bytes:
        if (block := self._unpacked.get(number)) is not None:
            self._unpacked.move_to_end(number)
            return block
        if number >= len(self._blocks):
            raise self._refused(f"has a kernel in block {number} of {len(self._blocks)}")
        offset, size, unpacked, digest = self._blocks[number]
        try:
            self._file.seek(self._start + offset)
            data = read_up_to(self._file, size)
        except OSError as error:
            raise self._refused(f"cannot be read: {error.strerror or error}") from error
        if hashlib.sha256(data).digest() != digest:
            raise self._refused(f"is damaged: the digest of block {number} does not match")
        try:
            block = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_FILTERS).decompress(data, unpacked)
        except lzma.LZMAError as error:
            raise self._refused(f"is no pack: block {number} does not unpack ({error})") from None
        if len(block) != unpacked:
            raise self._refused(f"is no pack: block {number} has {len(block)} bytes, not {unpacked}")
        self._unpacked[number] = block
        if len(self._unpacked) > _KEPT_BLOCKS:
            self._unpacked.popitem(last=False)
        return block

    def _read_index(self, file: BinaryIO, size: int) -> bytes:
        head = read_up_to(file, _HEAD.size)
        if len(head) < _HEAD.size or not head.startswith(_MAGIC):
            raise self._refused("is no pack of this version")
        _, digest, length = _HEAD.unpack(head)
        if length > min(size - _HEAD.size, _MAX_INDEX_BYTES):
            raise self._refused(f"is damaged: it has {size} bytes, and says that {length} of them are its index")
        index = read_up_to(file, length)
        if hashlib.sha256(index).digest() != digest:
            raise self._refused("is damaged: the digest of its index does not match")
        return index

    def _parse_index(self, index: bytes, rest: int) -> tuple[dict[str, Any], list[tuple[int, int, int, bytes]], bytes]:
        if len(index) < _COUNTS.size:
            raise self._refused("is no pack: its index ends early")
        json_bytes, blocks, kernels = _COUNTS.unpack_from(index)
        table = _COUNTS.size + json_bytes
        records = table + blocks * _BLOCK.size
        if records + kernels * _KERNEL.size != len(index):
            raise self._refused("is no pack: its index has another length than it says")
        facts = parse_json(index[_COUNTS.size : table], self.path, BuildError)
        if not isinstance(facts, dict) or not all(isinstance(value, str) for value in facts.values()):
            raise self._refused("is no pack: its facts are no texts")
        found = [_BLOCK.unpack_from(index, table + i * _BLOCK.size) for i in range(blocks)]
        for number, (offset, size, unpacked, _) in enumerate(found):
            if offset + size > rest or unpacked > _MAX_BLOCK_BYTES:
                raise self._refused(f"is damaged: block {number} ends beyond the file, or is too large")
        return facts, found, index[records:]

    def _refused(self, reason: str) -> BuildError:
        return BuildError(f"{self.path} {reason}; {_ADVICE}")


class _Keys:
    """The keys of an index's kernels, as a sequence."""

    def __init__(self, kernels: bytes) -> None:
        self._kernels = kernels

    def __len__(self) -> int:
        return len(self._kernels) // _KERNEL.size

    def __getitem__(self, place: int) -> bytes:
        start = place * _KERNEL.size
        return self._kernels[start : start + _KEY_BYTES]


# ── the installed packs ──────────────────────────────────────────────────────────────────────────


@once
def installed(arch: str) -> Pack | None:
    """The pack of an architecture that came with the wheel, or else the user's own; None if there is none.

    A pack that other sources were built to, or that another user could have written, is not used; a warning says so.

    Raises:
        BuildError: the pack is damaged.
        ConfigError: see `qcut.jit.folders.directory`.
    """
    shipped = FOLDER / f"{arch}.qpack"
    path = shipped if shipped.exists() else _own(arch)
    if path is None:
        return None
    pack = Pack(path)
    if (pack.facts.get("arch"), pack.facts.get("sources")) != (arch, sources_digest()):
        warnings.warn(
            f"qcut: {path} was built from other sources than those installed, so it is not used; {_ADVICE}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return pack


def _own(arch: str) -> Path | None:
    """The user's pack, unless another user could have written it."""
    if (base := folders.directory()) is None:
        return None
    path = base / CACHE_FOLDER / f"{arch}.qpack"
    try:
        with folders.opened(base, CACHE_FOLDER) as folder:
            status = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
            if (error := folders.distrust(path, status)) is not None:
                raise error
    except FileNotFoundError:
        return None
    except OSError as error:
        problem = error if isinstance(error, folders.DistrustedError) else f"{path}: {error.strerror or error}"
        warnings.warn(f"qcut: {problem}, so that no pack is used", RuntimeWarning, stacklevel=3)
        return None
    return path


def find(source: KernelSource) -> Packed | None:
    """A kernel of the installed pack of its architecture; None if there is no pack, or none with the kernel.

    Raises:
        BuildError: the pack is damaged.
    """
    pack = installed(source.arch)
    return None if pack is None else pack.read(source)


def lacking(source: KernelSource) -> str:
    """For messages: that the installed pack lacks a kernel; empty if no pack is installed."""
    if (pack := installed(source.arch)) is None:
        return ""
    return f"it is none of the {len(pack)} kernels of {pack.path}, which are those of layers and engines; to build it: "


def key_of(source: KernelSource) -> bytes:
    """What identifies a kernel among those of the same sources of qcut: its name and, if it is written, its text."""
    described = isinstance(source, DeferredSource) and source.is_described
    texts = [] if described else [source.text, source.host_text]
    facts = [source.name, source.entry, source.arch, source.toolchain, *texts]
    return hashlib.sha256(json.dumps(facts).encode()).digest()[:_KEY_BYTES]


@once
def sources_digest() -> str:
    """SHA-256 of the files that decide what kernels there are and how they are built."""
    package = Path(__file__).resolve().parents[1]
    folders = {"emitters": INCLUDE_DIR.parent, "dispatch": package / "dispatch", "cuda": package / "backends" / "cuda"}
    digest = hashlib.sha256((package / "jit" / "compilers.py").read_bytes())
    for name, folder in folders.items():
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".cuh", ".json"):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                digest.update(f"{name}/{path.relative_to(folder)} {content}\n".encode())
    return digest.hexdigest()


# ── writing ──────────────────────────────────────────────────────────────────────────────────────


def library_versions(launchers: Iterable[bytes]) -> str:
    """The newest versions of the C libraries that host launchers need, such as ``GLIBC_2.34``."""
    newest: dict[bytes, tuple[int, ...]] = {}
    for code in launchers:
        for name, version in re.findall(rb"\b(GLIBC|GLIBCXX|CXXABI|GCC)_(\d+(?:\.\d+)*)\b", code):
            numbers = tuple(map(int, version.split(b".")))
            newest[name] = max(numbers, newest.get(name, ()))
    return ", ".join(f"{name.decode()}_{'.'.join(map(str, numbers))}" for name, numbers in sorted(newest.items()))


def pack_bytes(kernels: Iterable[tuple[str, bytes, Packed]], facts: dict[str, str], jobs: int = 1) -> bytes:
    """The content of a pack.

    Args:
        kernels: name, `key_of` and code of each, in any order; those of like names lie together, since they compress
            together.
        facts: see `Pack`.
        jobs: blocks to compress at a time.
    """
    raw, records = _blocks_of(sorted(kernels, key=lambda kernel: kernel[0]))
    with ThreadPoolExecutor(jobs, thread_name_prefix="qcut-pack") as pool:
        blocks = list(pool.map(lambda block: lzma.compress(block, lzma.FORMAT_RAW, filters=_FILTERS), raw))
    offsets = accumulate(map(len, blocks), initial=0)
    table = [
        _BLOCK.pack(offset, len(block), len(unpacked), hashlib.sha256(block).digest())
        for offset, block, unpacked in zip(offsets, blocks, raw, strict=False)
    ]
    noted = json.dumps(facts).encode()
    counts = _COUNTS.pack(len(noted), len(blocks), len(records))
    index = b"".join([counts, noted, *table, *sorted(records)])
    return b"".join([_HEAD.pack(_MAGIC, hashlib.sha256(index).digest(), len(index)), index, *blocks])


def _blocks_of(kernels: Iterable[tuple[str, bytes, Packed]]) -> tuple[list[bytes], list[bytes]]:
    """Blocks before they are packed, and the record of each kernel."""
    blocks: list[bytes] = []
    records: list[bytes] = []
    block = bytearray()
    for _, key, packed in kernels:
        places: list[int] = []
        for code in (packed.cubin, packed.host_so or b""):
            places += (len(block), len(code))
            block += code
        figures = astuple(packed.resources) if packed.resources else (-1,) * 5
        records.append(_KERNEL.pack(key, len(blocks), *places, *figures))
        if len(block) >= BLOCK_BYTES:
            blocks.append(bytes(block))
            block.clear()
    return ([*blocks, bytes(block)] if block else blocks), records
