"""What attention kernels do with scores beside scaling them: windows and softcaps, options of every form."""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.core.source import Param
from qcut.emitters.core.text import flag


@dataclass(frozen=True)
class Scores:
    """Options that add code where they are set; a kernel without them has the text of kernels that know none.

    Attributes:
        windowed: a query at place p sees the places from ``max(0, p + 1 - window)`` to p; no other is read, but for
            those that share a block of a prompt's keys with one that is. ``window``, 1 and more, is an argument.
        capped: a score s is ``cap * tanh(s / cap)``. Then ``scale`` is ``2 log2(e) * scale / cap``, and ``softcap``,
            an argument, is ``cap * log2(e)``.

    Exactness: a windowed kernel adds what it reads in the order of a kernel without a window over these places alone;
    capped scores are off by ``2**-20`` of the cap.
    """

    windowed: bool = False
    capped: bool = False

    @property
    def suffix(self) -> str:
        """``_win`` and ``_cap``, in the names of kernels."""
        return "_win" * self.windowed + "_cap" * self.capped

    @property
    def template(self) -> str:
        """Template arguments that follow those of all kernels."""
        return f", {flag(self.windowed)}, {flag(self.capped)}" if self.windowed or self.capped else ""

    def params(self) -> tuple[Param, ...]:
        """Arguments that follow those of all kernels."""
        window, softcap = Param("window", "i32"), Param("softcap", "f32")
        return (window,) * self.windowed + (softcap,) * self.capped

    @property
    def arguments(self) -> str:
        """The same in a call."""
        if not self.template:
            return ""
        return f", {'window' if self.windowed else '0'}, {'softcap' if self.capped else '0.0f'}"


PLAIN = Scores()
"""Neither window nor softcap."""
FORMS = (PLAIN, Scores(windowed=True), Scores(capped=True), Scores(True, True))
"""All there are."""
