"""Options of all attention kernels: sliding windows, softcaps, sliding-window (ring) caches and sinks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from qcut.emitters.core.constraints import Constraint, check
from qcut.emitters.core.source import Param
from qcut.emitters.core.text import flag

CONSTRAINTS = (Constraint("ring", "goes with a window", lambda s: s.windowed or not s.ring),)
"""Constraints of `Scores`."""


@dataclass(frozen=True)
class Scores:
    """Options of a kernel's scores. An option that is not set adds no code.

    Attributes:
        windowed: a query at position p sees positions ``max(0, p + 1 - window)`` to p. No others are read, except
            those in a block of prefill keys that the window touches. ``window``, 1 and more, is an argument.
        capped: a score s is ``cap * tanh(s / cap)``. Then ``scale`` is ``2 log2(e) * scale / cap``, and ``softcap``,
            an argument, is ``cap * log2(e)``.
        ring: position p lies at row ``p % context`` of the cache, which holds a window and the tokens written with it.
            ``ring``, an argument, bounds positions as ``context`` does otherwise. A ring needs a window, and holds
            whole blocks of prefill keys.
        sinks: the sum of a head's weights has one more term, ``exp(sinks[h])`` without a value. ``sinks``, an argument,
            is float32 for each head of queries, not scaled and not capped.

    Exactness: a windowed kernel, with a ring or not, adds in the order of a kernel without a window over only these
    positions; capped scores are off by ``2**-20`` of the cap. A sink's term is added to the sum of all weights, within
    ``2**-22 (1 + |sink|)`` of itself if the largest score is exact.
    """

    windowed: bool = False
    capped: bool = False
    ring: bool = False
    sinks: bool = False

    def __post_init__(self) -> None:
        check(f"scores{self.suffix}", CONSTRAINTS, self)

    @property
    def suffix(self) -> str:
        """``_win``, ``_cap``, ``_ring`` and ``_sink``, in the names of kernels."""
        return "_win" * self.windowed + "_cap" * self.capped + "_ring" * self.ring + "_sink" * self.sinks

    def template(self, *more: bool, whole: bool = False) -> str:
        """Optional template arguments: ``more`` flags stand before that of sinks; ``whole``: all, others may follow."""
        if whole:
            return "".join(f", {flag(on)}" for on in (self.windowed, self.capped, self.ring, *more, self.sinks))
        flags = (self.windowed, self.capped, *((self.ring, *more) if self.ring or more or self.sinks else ()))
        flags += (True,) * self.sinks
        return "".join(f", {flag(value)}" for value in flags) if any(flags) else ""

    def params(self) -> tuple[Param, ...]:
        """Optional arguments of the kernel."""
        window, softcap, ring = Param("window", "i32"), Param("softcap", "f32"), Param("ring", "i32")
        sinks = Param("sinks", "ptr", "const float*")
        return (window,) * self.windowed + (softcap,) * self.capped + (ring,) * self.ring + (sinks,) * self.sinks

    def arguments(self, *more: str, whole: bool = False) -> str:
        """Optional arguments of the call: ``more`` stand before sinks; ``whole``: all, others may follow."""
        given = ["window" if self.windowed else "0", "softcap" if self.capped else "0.0f"]
        if self.ring or more or self.sinks:
            given += [
                "ring" if self.ring else "0",
                *more,
                *["sinks" if self.sinks else "nullptr"] * (self.sinks or whole),
            ]
        return "".join(f", {name}" for name in given) if more or self != PLAIN else ""


PLAIN = Scores()
"""No option."""
FORMS = (PLAIN, *(Scores(*flags) for flags in ((True,), (False, True), (True, True), (True, False, True), (True,) * 3)))
"""All legal combinations of options without sinks."""
SUNK = tuple(replace(form, sinks=True) for form in FORMS)
"""The same with sinks."""
