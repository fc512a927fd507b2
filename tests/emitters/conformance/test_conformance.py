"""What every kernel keeps, whatever its family: one row of a table for each."""

from __future__ import annotations

import hashlib
import inspect
import json
import pkgutil
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from itertools import islice

import pytest

from qcut import emitters
from qcut.emitters.core.arch import ARCHITECTURES, architecture
from qcut.emitters.core.family import Grid, Kernel
from qcut.emitters.core.source import DType, EmitError, KernelSource, Param
from qcut.emitters.decoder.argmax import ArgmaxRows
from qcut.emitters.families import ALL_FAMILIES, FAMILIES, SPELLINGS, TUNED_FAMILIES, family
from qcut.jit import Binary
from tests.architectures.reading import code_faults, report_faults
from tests.architectures.record import require_sound
from tests.emitters.conformance import attention, codebook, decoder, gemm, routing, stream
from tests.emitters.conformance.row import absent
from tests.support import GOLDEN
from tests.support.binaries import in_turns, instructions

ROWS = {
    **gemm.ROWS,
    **stream.ROWS,
    **codebook.ROWS,
    **attention.ROWS,
    **decoder.ROWS,
    **routing.ROWS,
}
TEXTS = GOLDEN / "kernel_texts.json"
ARCHS = ("sm_80", "sm_90a")


@cache
def sources(name: str, arch: str) -> list[KernelSource]:
    return list(ROWS[name].sources(arch))


def digest(name: str) -> str:
    """Of the names, texts, parameters and launches of a row's kernels."""
    found = hashlib.sha256()
    for arch in ARCHS:
        for s in (*ROWS[name].sources(arch), *ROWS[name].texts(arch)):
            facts = (s.name, s.entry, s.text, s.params, s.block, s.smem_bytes, s.host_text, s.defines, s.waits)
            found.update(repr(facts).encode())
    return found.hexdigest()[:16]


def test_every_emitter_has_a_row() -> None:
    emits: set[Callable[..., KernelSource]] = {family(name).emit for name in ALL_FAMILIES}
    for module in pkgutil.walk_packages(emitters.__path__, "qcut.emitters."):
        for _, kind in inspect.getmembers(import_module(module.name), inspect.isclass):
            if issubclass(kind, Kernel) and not inspect.isabstract(kind):
                emits.add(kind.emit)
    assert emits == {row.emit for row in ROWS.values()}
    assert set(ALL_FAMILIES) <= set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_text_is_the_golden_text(name: str) -> None:
    assert json.loads(TEXTS.read_text())[name] == digest(name), (
        f'{name}: a kernel\'s name, text or parameters changed; where that is meant, write "{name}": "{digest(name)}" '
        f"into {TEXTS.name}"
    )


def test_golden_texts_are_those_of_the_rows() -> None:
    assert list(json.loads(TEXTS.read_text())) == list(ROWS)


def test_names_are_unique_and_are_the_entries() -> None:
    found = [(s.name, s.entry) for name in ROWS for arch in ARCHS for s in sources(name, arch)]
    assert len(set(found)) == len(found)
    assert all(name.startswith("qcut_") and name == entry for name, entry in found)


# ── constraints ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ROWS)
def test_every_constraint_is_refused_by_name(name: str) -> None:
    row = ROWS[name]
    reasons = {constraint.name: constraint.reason for constraint in row.constraints}
    assert not reasons or {*row.refusals, *row.implied} == set(reasons), "each constraint has a case"
    for constraint, cases in row.refusals.items():
        message = f": {constraint}: {reasons[constraint]}" if reasons else constraint
        assert cases, constraint
        for case in cases:
            with pytest.raises(EmitError) as refused:
                row.emit(*case) if isinstance(case, tuple) else replace(row.legal, **case)
            assert re.match(r"(qcut_)?[a-z0-9_-]+: ", str(refused.value)), case
            assert message in str(refused.value), case


@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_families_build_what_is_legal_alone(name: str) -> None:
    kind, (problem, tile, arch) = family(name), ROWS[name].legal
    assert kind.emit(problem, tile, arch) == ROWS[name].emit(problem, tile, arch)
    for cases in ROWS[name].refusals.values():
        assert not any(kind.is_legal(*case) for case in cases)
    for act in (kind.emit, kind.validate):
        with pytest.raises(EmitError, match=rf"^qcut_{name}_sm75_\S+: architecture: (allowed are|is) .*sm_90a"):
            act(problem, tile, "sm_75")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_menus_and_search_spaces_are_distinct_and_legal(name: str, arch: str) -> None:
    kind, problem = family(name), ROWS[name].legal[0]
    menu, space = kind.menu(problem, arch), list(islice(kind.search_space(problem, arch), 20_000))
    assert (
        len({tile.name for tile in menu}) == len(menu) == len(list(kind.default_tiles(problem, arch)) if menu else [])
    )
    assert len(set(space)) == len(space)
    for tile in random.Random(0).sample(space, min(50, len(space))):
        kind.validate(problem, tile, arch)
    if name in TUNED_FAMILIES and menu:
        assert set(menu) & set(space)
        assert len(space) >= 19


# ── binaries ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ROWS)
def test_binaries_are_sound(name: str, arch: str) -> None:
    """No spill, no missing wait, what an SM has, and the instructions that the kernel was written for.

    Of kernels with the same parameters that must hold the same instructions, the first one's are read.
    """
    row, texts = ROWS[name], in_turns(lambda each: sources(name, each), arch)
    expected = {source.name: (row.spill(source), tuple(row.instructions(source))) for source in texts}
    read = set()

    def faults(source: KernelSource, binary: Binary) -> list[str]:
        spill, patterns = expected[source.name]
        wrong = report_faults(source, binary, spill)
        if (binary.host_so is None) != (source.host_text is None):
            wrong.append("has a launcher that it should not have, or the other way round")
        parameters = tuple(param.name for param in source.params)
        kind = (parameters, patterns, spill, source.waits, "__cluster_dims__" in source.text)
        if kind not in read:
            read.add(kind)
            wrong += code_faults(source, binary, spill) + absent(patterns, instructions(binary.cubin))
        return wrong

    require_sound(f"{name} {arch}", texts, faults, expected)


# ── names and launches ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_999", ""])
def test_unknown_architectures_are_refused(arch: str) -> None:
    with pytest.raises(EmitError, match=f"architecture '{arch}' is not one of sm_80"):
        architecture(arch)
    with pytest.raises(EmitError, match=f"^qcut_argmax_{arch.replace('_', '')}_f16: architecture '{arch}' is not"):
        ArgmaxRows(DType.F16, arch).emit()


def test_families_are_found_by_name_and_spelling() -> None:
    for spelling, name in SPELLINGS.items():
        assert family(spelling) is family(name)
    assert tuple(SPELLINGS.values()) == FAMILIES
    with pytest.raises(EmitError, match="family 'tpu' does not exist"):
        family("tpu")


def test_grids_grow_with_rows_up_to_their_most() -> None:
    assert [Grid(64, (3, 1, 1))(m) for m in (1, 64, 65)] == [(3, 1, 1), (3, 1, 1), (6, 1, 1)]
    assert [Grid(64, (4, 1, 1), most=6)(m) for m in (1, 65, 4096)] == [(4, 1, 1), (6, 1, 1), (6, 1, 1)]


def test_a_pointer_without_its_type_is_refused() -> None:
    with pytest.raises(EmitError, match="parameter 'x'"):
        Param("x", "ptr")
    with pytest.raises(EmitError, match="parameter 'n'"):
        Param("n", "i32", "float*")
