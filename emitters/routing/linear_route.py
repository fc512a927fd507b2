"""A router of few tokens in one kernel: logits of all experts, and the choice of experts by them.

Device code: ``include/qcut/routing/linear_route.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.core.arch import CLUSTER_ARCHITECTURES, architecture
from qcut.emitters.core.constraints import HALF_X, Constraint
from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import DType, KernelSource, Param
from qcut.emitters.core.text import flag, include
from qcut.emitters.routing.route import KINDS, SCORES

CTAS = 8
"""CTAs of a cluster, among which experts are divided."""
TOKENS = (1, 2, 4)
"""Tokens of a cluster."""
MAX_COLUMNS = 32_768
"""Columns of a token."""
_MAX_EXPERTS = 1024
_MAX_THREADS = 512
_MAX_VECTORS = {1: 16, 2: 16, 4: 8}
"""Vectors of weights that a thread holds, by the tokens of a cluster: up to 64 registers, and up to 32 of sums."""

CONSTRAINTS = (
    HALF_X,
    Constraint("weight", "is of the type of x, or f32", lambda k: k.weight in (k.x, DType.F32)),
    Constraint("logits", "are f32, or of the type of x and the weight", lambda k: k.logits in (k.weight, DType.F32)),
    Constraint("bias", "of logits is f32 or of the weight's type", lambda k: k.bias in (None, k.weight, DType.F32)),
    Constraint("scores", f"are {', '.join(SCORES)}", lambda k: k.scores in SCORES),
    Constraint("count", f"is 1 to {_MAX_EXPERTS}", lambda k: 1 <= k.count <= _MAX_EXPERTS),
    Constraint(
        "columns",
        f"are eights, whole vectors of 16 bytes, up to {MAX_COLUMNS}",
        lambda k: 1 <= k.columns <= MAX_COLUMNS and k.columns % 8 == 0,
    ),
    Constraint("tokens", f"are {', '.join(map(str, TOKENS))}", lambda k: k.tokens in TOKENS),
    Constraint(
        "clusters",
        f"CTAs exchange logits in thread-block clusters: {', '.join(CLUSTER_ARCHITECTURES)}",
        lambda k: architecture(k.arch).clusters,
    ),
)
"""Constraints of `LinearRoute`."""


@dataclass(frozen=True)
class LinearRoute(Kernel):
    """The chosen experts of each token and their weights, as ``qcut.ops.routing.LinearRouteOp`` defines them.

    Attributes:
        x: element type of tokens ``[m, columns]``; rows start at multiples of 16 bytes.
        weight: element type of the weight ``[count, columns]``, which starts at a multiple of 16 bytes.
        logits: element type that logits are rounded to.
        scores: see `SCORES`.
        by_score: whether the choice compares scores, with a bias or in sums of two; otherwise it compares logits.
        count: number of experts.
        columns: of a token.
        tokens: of a cluster; each has the same result whatever their number.
        arch: real architecture.
        early_read: whether the weight is read before the last kernel's end.
        bias: element type of the logits' bias ``[count]``, which is read after the last kernel's end; or None.

    Exactness: logits are float32 sums in an order that depends on ``weight``, ``count`` and ``columns``. For given
    logits, that of `qcut.emitters.routing.route.RouteTokens`.
    """

    x: DType
    weight: DType
    logits: DType
    scores: str
    by_score: bool
    count: int
    columns: int
    tokens: int
    arch: str
    early_read: bool = False
    bias: DType | None = None

    constraints = CONSTRAINTS

    @property
    def name(self) -> str:
        """``qcut_linear_route_{arch}_{x}_{weight}_{logits}_{scores}_{count}x{columns}_t{tokens}``.

        ``_s`` if it compares scores, ``_early`` if it reads the weight early, ``_b{bias}`` with a bias of logits.
        """
        types = f"{self.x.value}_{self.weight.value}_{self.logits.value}"
        flags = "_s" * self.by_score + "_early" * self.early_read + (f"_b{self.bias.value}" if self.bias else "")
        shape = f"{self.count}x{self.columns}_t{self.tokens}{flags}"
        return f"qcut_linear_route_{self.arch.replace('_', '')}_{types}_{self.scores}_{shape}"

    @property
    def passes(self) -> int:
        """Vectors of a thread in one expert's weight."""
        return -(-self._vectors // _MAX_THREADS)

    @property
    def block(self) -> int:
        """Threads of a CTA, each with the same number of vectors."""
        return -(-self._vectors // (32 * self.passes)) * 32

    @property
    def experts(self) -> int:
        """Experts with logits that a CTA computes at once, a power of two."""
        held = max(1, _MAX_VECTORS[self.tokens] // self.passes)
        return min(1 << (held.bit_length() - 1), 1 << (-(-self.count // CTAS) - 1).bit_length())

    @property
    def _vectors(self) -> int:
        """Vectors of 16 bytes in one expert's weight."""
        return self.columns * self.weight.bits // 128

    def grid(self, m: int) -> tuple[int, int, int]:
        """CTAs for m tokens."""
        return (CTAS, -(-m // self.tokens), 1)

    def params(self) -> tuple[Param, ...]:
        """``x``; ``weight``; ``bias``, float32 ``[count]`` or null; ``weights``, float32 ``[m, top_k]``; ``experts``.

        Then ``stride`` of the rows of x in elements, ``m``, and the options of `qcut.ops.routing.RouteOp`; ``top2`` is
        1 if a group's score is the sum of its two largest. ``logits_bias`` comes last.
        """
        return (
            Param("x", "ptr", f"const {self.x.cpp}*"),
            Param("weight", "ptr", f"const {self.weight.cpp}*"),
            Param("bias", "ptr", "const float*"),
            Param("weights", "ptr", "float*"),
            Param("experts", "ptr", "int*"),
            Param("stride", "i64"),
            *(Param(name, "i32") for name in ("m", "top_k", "groups", "top_groups", "top2", "renormalize")),
            *(Param(name, "f32") for name in ("eps", "min_sum", "scaling")),
            *((Param("logits_bias", "ptr", f"const {self.bias.cpp}*"),) if self.bias else ()),
        )

    def emit(self) -> KernelSource:
        """Text of the kernel."""
        types = f"{self.x.cpp}, {self.weight.cpp}, {self.logits.cpp}"
        choice = f"qcut::Scores::{KINDS[self.scores]}, {flag(self.by_score)}"
        tile = f"{self.tokens}, {self.experts}, {self.passes}, {self.block}, {flag(self.early_read)}"
        tile += f", {self.bias.cpp}" if self.bias else ""
        arguments = ", ".join(param.name for param in self.params())
        return self._source(
            f"qcut::linear_route<{types}, {choice}, {self.count}, {self.columns}, {tile}>(\n      {arguments});",
            device_code=include("routing/linear_route.cuh"),
            # 128 registers of a thread, so that CTAs begin while others run.
            ctas_per_sm=_MAX_THREADS // self.block,
            cluster=CTAS,
        )
