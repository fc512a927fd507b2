"""A quarter of ``make architectures``: kernels of every family, on all six architectures together."""

from __future__ import annotations

import re
from functools import lru_cache

import pytest

from qcut.emitters.core.arch import ARCHITECTURES
from qcut.emitters.core.source import KernelSource
from tests.architectures.kernels import cutlass, raw_kernels
from tests.architectures.reading import faults
from tests.architectures.record import require_sound


def headers(sources: list[KernelSource]) -> set[str]:
    return {name for source in sources for name in re.findall(r"#include <qcut/(.*)>", source.text)}


@lru_cache
def quarter() -> dict[str, list[KernelSource]]:
    """Every fourth kernel of an architecture, each architecture beginning with another.

    Where a family of device code is in none of these, its first kernel is added.
    """
    found = {arch: raw_kernels(arch)[(i + 2) % 4 :: 4] for i, arch in enumerate(ARCHITECTURES)}
    seen = headers([source for sources in found.values() for source in sources])
    for arch in ARCHITECTURES:
        for source in raw_kernels(arch):
            if new := headers([source]) - seen:
                found[arch].append(source)
                seen |= new
    return found


def test_the_quarter_is_one_and_has_every_family() -> None:
    everything = [source for arch in ARCHITECTURES for source in raw_kernels(arch)]
    chosen = [source for sources in quarter().values() for source in sources]
    assert headers(chosen) == headers(everything)
    assert len(everything) / 4.2 < len(chosen) < len(everything) / 3.8
    assert len({source.name for source in everything}) == len(everything)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_are_sound_on(arch: str) -> None:
    require_sound(f"every family {arch}", quarter()[arch], faults)


def test_cutlass_is_sound_on_a_new_architecture() -> None:
    require_sound("cutlass sm_120", cutlass("sm_120"), faults)
