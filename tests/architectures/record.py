"""Kernels with binaries that were found sound, by digest: a suite builds only those that have changed since.

A binary is a function of texts, headers, flags and pinned compilers. The digest covers all of them, and the rules by
which binaries are read. ``make architectures`` builds every kernel, whatever the record has.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

from qcut.emitters.core.source import KernelSource
from qcut.jit import Binary
from qcut.jit.build import header_digests
from qcut.jit.compilers import device_flags, host_flags
from tests.support import GOLDEN, ROOT
from tests.support.binaries import build

RECORD = GOLDEN / "sound_kernels.json"
"""By suite and architecture: the digest of kernels that were built and found sound."""
RULES = (Path(__file__).with_name("reading.py"), ROOT / "tests" / "support" / "binaries.py")


def digest(sources: Iterable[KernelSource], *expected: object) -> str:
    """Of kernels, of what builds them, and of what is expected of their binaries."""
    pins = re.findall(r"^(?:cuda|nvidia).*", (ROOT / "constraints-dev.txt").read_text(), re.MULTILINE)
    found = hashlib.sha256(repr([pins, expected, *(path.read_text() for path in RULES)]).encode())
    for s in sources:
        facts = (s.name, s.entry, s.arch, s.toolchain, s.text, s.host_text, s.params, s.block, s.smem_bytes, s.waits)
        found.update(repr((facts, device_flags(s), host_flags(s), sorted(header_digests(s).items()))).encode())
    return found.hexdigest()[:16]


def require_sound(
    key: str,
    sources: list[KernelSource],
    faults: Callable[[KernelSource, Binary], list[str]],
    *expected: object,
) -> None:
    """Build kernels and read their binaries, unless the record has them; what is sound enters the record.

    Args:
        key: of the record's entry.
        sources: the kernels.
        faults: what is wrong with one.
        expected: what ``faults`` compares with, apart from `RULES`.
    """
    now = digest(sources, *expected)
    with RECORD.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        if json.load(file).get(key) == now:
            return
    found = {s.name: wrong for s, binary in zip(sources, build(*sources), strict=True) if (wrong := faults(s, binary))}
    assert not found
    with RECORD.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        record = json.load(file) | {key: now}
        file.seek(0)
        file.truncate()
        file.write(json.dumps(record, indent=1, sort_keys=True) + "\n")
    warnings.warn(f"{key}: built and found sound; commit {RECORD.relative_to(ROOT)}, which says so now", stacklevel=2)
