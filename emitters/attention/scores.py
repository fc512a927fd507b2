"""What attention kernels do beside scaling scores: windows, softcaps and rings, options of every form."""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.core.constraints import Constraint, check
from qcut.emitters.core.source import Param
from qcut.emitters.core.text import flag

CONSTRAINTS = (Constraint("ring", "goes with a window", lambda s: s.windowed or not s.ring),)
"""What `Scores` can be."""


@dataclass(frozen=True)
class Scores:
    """Options that add code where they are set; a kernel without them has the text of kernels that know none.

    Attributes:
        windowed: a query at place p sees the places from ``max(0, p + 1 - window)`` to p; no other is read, but for
            those that share a block of a prompt's keys with one that is. ``window``, 1 and more, is an argument.
        capped: a score s is ``cap * tanh(s / cap)``. Then ``scale`` is ``2 log2(e) * scale / cap``, and ``softcap``,
            an argument, is ``cap * log2(e)``.
        ring: what belongs to place p lies at row ``p % context`` of the cache, which has room for a window and for what
            is written with it. ``ring``, an argument, bounds places as ``context`` does otherwise. A ring goes with a
            window, and holds whole blocks of a prompt's keys.

    Exactness: a windowed kernel adds what it reads in the order of a kernel without a window over these places alone,
    in a ring or not; capped scores are off by ``2**-20`` of the cap.
    """

    windowed: bool = False
    capped: bool = False
    ring: bool = False

    def __post_init__(self) -> None:
        check(f"scores{self.suffix}", CONSTRAINTS, self)

    @property
    def suffix(self) -> str:
        """``_win``, ``_cap`` and ``_ring``, in the names of kernels."""
        return "_win" * self.windowed + "_cap" * self.capped + "_ring" * self.ring

    def template(self, *more: bool) -> str:
        """Template arguments that follow those of all kernels, and ``more`` flags behind them."""
        flags = (self.windowed, self.capped, *((self.ring, *more) if self.ring or more else ()))
        return "".join(f", {flag(value)}" for value in flags) if any(flags) else ""

    def params(self) -> tuple[Param, ...]:
        """Arguments that follow those of all kernels."""
        window, softcap, ring = Param("window", "i32"), Param("softcap", "f32"), Param("ring", "i32")
        return (window,) * self.windowed + (softcap,) * self.capped + (ring,) * self.ring

    def arguments(self, *more: str) -> str:
        """The same in a call, and ``more`` behind them."""
        given = ["window" if self.windowed else "0", "softcap" if self.capped else "0.0f"]
        if self.ring or more:
            given += ["ring" if self.ring else "0", *more]
        return "".join(f", {name}" for name in given) if more or self != PLAIN else ""


PLAIN = Scores()
"""None of them."""
FORMS = (PLAIN, *(Scores(*flags) for flags in ((True,), (False, True), (True, True), (True, False, True), (True,) * 3)))
"""All there are."""
