"""The experts that a router chooses for each token.

Device code: ``include/qcut/routing/route.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.core.constraints import FLOAT_X, Constraint
from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import DType, KernelSource, Param
from qcut.emitters.core.text import flag

KINDS = {"softmax": "kSoftmax", "sigmoid": "kSigmoid", "logits": "kLogits"}
"""Scores in C++, by their names in `qcut.ops.routing.RouteOp`."""
SCORES = tuple(KINDS)
"""Scores of `RouteTokens`."""
SLOTS = (2, 4, 8, 16, 32)
"""Experts of a lane."""

CONSTRAINTS = (
    FLOAT_X,
    Constraint("scores", f"are {', '.join(SCORES)}", lambda k: k.scores in SCORES),
    Constraint("slots", f"are {', '.join(map(str, SLOTS))}", lambda k: k.slots in SLOTS),
)
"""Constraints of `RouteTokens`."""


@dataclass(frozen=True)
class RouteTokens(Kernel):
    """The chosen experts of each token and their weights, as ``qcut.numerics.routing.route`` defines them.

    Attributes:
        x: element type of logits ``[m, count]``, which may start anywhere.
        scores: see `SCORES`.
        slots: experts of a lane; a token has up to 32 times as many.
        by_score: whether the choice compares scores, with a bias or in sums of two; otherwise it compares logits.
        arch: real architecture.

    Exactness: choices are bitwise for equal choice scores; ``expf`` is within 2 ulp, and divisions are rounded once.
    """

    x: DType
    scores: str
    slots: int
    by_score: bool
    arch: str

    constraints = CONSTRAINTS

    @property
    def name(self) -> str:
        """``qcut_route_{arch}_{x}_{scores}_e{experts}``, ``_s`` if it compares scores."""
        experts = f"e{32 * self.slots}" + "_s" * self.by_score
        return f"qcut_route_{self.arch.replace('_', '')}_{self.x.value}_{self.scores}_{experts}"

    @property
    def block(self) -> int:
        """Threads of a CTA: a warp for each of four tokens."""
        return 128

    def grid(self, m: int) -> tuple[int, int, int]:
        """CTAs for m tokens."""
        return (-(-m * 32 // self.block), 1, 1)

    def params(self) -> tuple[Param, ...]:
        """``logits``; ``bias``, float32 ``[count]`` or null; ``weights``, float32 ``[m, top_k]``; ``experts``, int32.

        Then ``stride`` of rows in elements, and the sizes and options of `qcut.ops.routing.RouteOp`; ``top2`` is 1 if a
        group's score is the sum of its two largest.
        """
        return (
            Param("logits", "ptr", f"const {self.x.cpp}*"),
            Param("bias", "ptr", "const float*"),
            Param("weights", "ptr", "float*"),
            Param("experts", "ptr", "int*"),
            Param("stride", "i64"),
            *(Param(name, "i32") for name in ("m", "count", "top_k", "groups", "top_groups", "top2", "renormalize")),
            *(Param(name, "f32") for name in ("eps", "min_sum", "scaling")),
        )

    def emit(self) -> KernelSource:
        """Text of the kernel."""
        scores = f"qcut::Scores::{KINDS[self.scores]}"
        options = f"{self.slots}, {flag(self.by_score)}, {self.block}"
        return self._call(f"route_tokens<{self.x.cpp}, {scores}, {options}>", "routing/route.cuh")


def slots_for(experts: int) -> int:
    """Experts of a lane, of a router with so many experts."""
    return next(slots for slots in SLOTS if 32 * slots >= experts)
