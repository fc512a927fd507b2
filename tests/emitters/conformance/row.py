"""A row of the kernels' conformance suite, and the patterns of instructions that several rows share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qcut.emitters.core.constraints import Constraint
from qcut.emitters.core.source import KernelSource

Sources = Callable[[str], Iterable[KernelSource]]
STREAM = r"LDG\.E\.NA\.LTC(128|256)B\.128\.CONSTANT$"
"""The load of weights that no other CTA reads."""
COPY = r"LDGSTS\.E\.BYPASS"
PRODUCTS = {"f16": r"HMMA\.16816\.F32$", "bf16": r"HMMA\.16816\.F32\.BF16$", "s8": r"IMMA\.16832\.S8\.S8$"}
"""Of a warp, by the type of the tokens."""


@dataclass(frozen=True)
class Row:
    """One kind of kernel.

    Attributes:
        emit: a description, or (problem, tile, arch) → text.
        sources: kernels of an architecture (sm_80, sm_90a) to build: each type, each option, and those with the fewest
            registers to spare.
        constraints: each needs a case in ``refusals``.
        refusals: by a constraint's name, or by words of the message where there are no constraints: cases that must be
            refused so. A tuple is the arguments of ``emit``, a mapping is what differs from ``legal``.
        legal: a description, or (problem, tile, arch), that the emitter takes.
        implied: names of constraints that no case breaks without breaking an earlier one.
        instructions: patterns that begin an instruction of the binary each; with ``!``, that begin none.
        spill: bytes that a kernel may spill.
        texts: more kernels, to compare only their text, if building takes too long.
    """

    emit: Callable[..., KernelSource]
    sources: Sources
    constraints: Sequence[Constraint] = ()
    refusals: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    legal: Any = None
    implied: tuple[str, ...] = ()
    instructions: Callable[[KernelSource], Iterable[str]] = lambda source: ()
    spill: Callable[[KernelSource], int] = lambda source: 0
    texts: Sources = lambda arch: ()


def tokens_of(source: KernelSource) -> str:
    """The type of a product's tokens, out of the kernel's name."""
    found = re.search(r"_sm\d+a?_(?:(?:rows|given|none|floats)_)?(bf16|f16|s8)", source.name)
    assert found is not None, source.name
    return found[1]


def product_of(source: KernelSource) -> str:
    """The pattern of a warp's product."""
    return PRODUCTS[tokens_of(source)]


def absent(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The patterns that instructions do not keep."""
    names = list(names)
    return [p for p in patterns if any(re.match(p.lstrip("!"), name) for name in names) == p.startswith("!")]
