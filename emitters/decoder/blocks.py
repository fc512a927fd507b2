"""All blocks of a decoder's step for one token, in one kernel that stays on every multiprocessor.

Device code: ``include/qcut/decoder/blocks.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass

from qcut.emitters.core.arch import architecture
from qcut.emitters.core.constraints import Constraint, check
from qcut.emitters.core.source import DType, KernelSource, Param
from qcut.emitters.core.text import flag, include, kernel_source

_WARPS = 16
_PIECE_COLUMNS, _PIECE_BYTES = 64 * _WARPS, 16 * (64 * _WARPS + 64)
_MOST_RING = 12

CONSTRAINTS = (
    Constraint("arch", "has clusters: bulk copies and their barriers come with them", lambda k: architecture(k.arch).clusters),
    Constraint("x", "is f16 or bf16", lambda k: k.x in (DType.F16, DType.BF16)),
    Constraint("head", "is 64 or 128 columns", lambda k: k.head in (64, 128)),
    Constraint(
        "group",
        "is 1 to 16 queries, which with a key and a value have at most 1024 columns",
        lambda k: 1 <= k.group <= 16 and (k.group + 2) * k.head <= 1024,
    ),
    Constraint("keys", "are at most the CTAs, each of which attends for one", lambda k: 1 <= k.keys <= k.ctas),
    Constraint(
        "columns",
        "of all products are multiples of 64",
        lambda k: all(n % 64 == 0 and n > 0 for n in (k.hidden, k.inner, k.queries)),
    ),
    Constraint("ring", "has 2 pieces of a product at least", lambda k: k.ring >= 2),
)
"""What `DecodeBlocks` can be."""


@dataclass(frozen=True)
class DecodeBlocks:
    """The blocks of a decoder with RMSNorms, codebook weights of 4 bits in groups of 128, and a gated MLP.

    Attributes:
        x: element type.
        hidden: columns of a row.
        inner: columns within the MLP.
        keys: heads of keys.
        group: queries for each head of keys.
        head: columns of a head.
        ctas: of the launch: one for each multiprocessor.
        arch: real architecture.

    Exactness: results are rounded to x's type where the kernels of single operators round them; sums are float32, in an
    order that sizes and ``ctas`` fix.
    """

    x: DType
    hidden: int
    inner: int
    keys: int
    group: int
    head: int
    ctas: int
    arch: str
    layer: bool = False
    gated: bool = True
    rotary: bool = True

    def __post_init__(self) -> None:
        check(self.name, CONSTRAINTS, self)

    @property
    def name(self) -> str:
        """``qcut_decode_blocks_{arch}_{x}_h{hidden}i{inner}k{keys}g{group}d{head}_c{ctas}``."""
        sizes = f"h{self.hidden}i{self.inner}k{self.keys}g{self.group}d{self.head}"
        flags = "_layer" * self.layer + "_gated" * self.gated + "_rope" * self.rotary
        return f"qcut_decode_blocks_{self.arch.replace('_', '')}_{self.x.value}_{sizes}_c{self.ctas}{flags}"

    @property
    def queries(self) -> int:
        """Columns of all queries."""
        return self.keys * self.group * self.head

    @property
    def parts(self) -> int:
        """CTAs that share a head of keys."""
        return min(16, self.ctas // self.keys)

    @property
    def block(self) -> int:
        """Threads of a CTA."""
        return 32 * _WARPS

    @property
    def _qkv(self) -> int:
        return self.queries + 2 * self.keys * self.head

    def _rows(self, n: int) -> int:
        return 16 * -(-n // 16 // self.ctas)

    def _bytes(self, ring: int) -> int:
        ups = 2 if self.gated else 1
        rows = max(self._rows(self._qkv), self._rows(self.hidden), ups * self._rows(self.inner))
        before = 2 * self.hidden + max(self.hidden, self.inner, self.queries) + 2 * (self.group + 2) * self.head
        before += 4 * 8 * 16 + 3 * 4 * _WARPS + 16 * ring + 4 * _WARPS * max(rows + 2, self.head + 4)
        return -(-before // 128) * 128 + ring * _PIECE_BYTES

    @property
    def ring(self) -> int:
        """Pieces of weights that shared memory holds; those of two blocks at most."""
        ups = 2 if self.gated else 1
        products = ((self._qkv, self.hidden), (self.hidden, self.queries), (self.hidden, self.inner))
        pieces = sum(n // 16 // self.ctas * -(-k // _PIECE_COLUMNS) for n, k in products)
        pieces += ups * (self.inner // 16 // self.ctas) * -(-self.hidden // _PIECE_COLUMNS)
        most = architecture(self.arch).smem_bytes
        return max((n for n in range(min(_MOST_RING, 2 * pieces) + 1) if self._bytes(n) <= most), default=0)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self._bytes(self.ring)

    @property
    def packets(self) -> int:
        """8-byte words of memory through which CTAs exchange vectors."""
        vectors = self._qkv + self.queries + 2 * self.hidden + self.inner
        return vectors // 2 + self.keys * self.parts * self.group * (self.head + 2)

    def params(self) -> tuple[Param, ...]:
        """Arguments, in order.

        ``x`` ``[hidden]``; ``blocks``, of each block the addresses of units, norms, scales and signs of four products and of
        the weights of two norms; ``cos, sin`` ``[places, head]``; ``position, slot``; ``keys, values`` of the
        sequence in the first block; ``packets`` and ``epoch``, zero at first; the results ``sum, last``, each
        ``[hidden]``; ``layer_stride, head_stride`` of keys and values in elements; ``layers``; ``places`` of the cache;
        ``scale * log2(e)``; ``eps``; words of the codebook.
        """
        x = self.x.cpp
        return (
            Param("x", "ptr", f"const {x}*"),
            Param("blocks", "ptr", "const void*"),
            Param("cos", "ptr", f"const {x}*"),
            Param("sin", "ptr", f"const {x}*"),
            Param("position", "ptr", "const int*"),
            Param("slot", "ptr", "const int*"),
            Param("keys", "ptr", f"{x}*"),
            Param("values", "ptr", f"{x}*"),
            Param("packets", "ptr", "unsigned long long*"),
            Param("epoch", "ptr", "uint32_t*"),
            Param("sum", "ptr", f"{x}*"),
            Param("last", "ptr", f"{x}*"),
            Param("layer_stride", "i64"),
            Param("head_stride", "i64"),
            Param("layers", "i32"),
            Param("places", "i32"),
            Param("scale", "f32"),
            Param("eps", "f32"),
        )


def emit_decode_blocks(desc: DecodeBlocks) -> KernelSource:
    """Text of one kernel; arguments are ``desc.params()``. All its CTAs have to be resident at once."""
    x, params = desc.x.cpp, desc.params()
    names = [param.name for param in params]
    names[1] = f"static_cast<const qcut::DecodeBlock<{x}>*>(blocks)"
    form = f"qcut::BlocksForm<{flag(desc.layer)}, {flag(desc.gated)}, {flag(desc.rotary)}>"
    sizes = (desc.hidden, desc.inner, desc.keys, desc.group, desc.head, desc.ctas, desc.ring)
    return kernel_source(
        desc.name,
        desc.arch,
        params,
        f"using Shape = qcut::BlocksShape<{x}, {form}, {', '.join(map(str, sizes))}>;",
        f'static_assert(Shape::kBytes == {desc.smem_bytes}, "the launch\'s shared memory");',
        f'static_assert(Shape::kPackets == {desc.packets}, "the launch\'s packets");',
        f"const qcut::DecodeStep<{x}> step{{{', '.join(names)}}};",
        f"qcut::decode_blocks<Shape>(step);",
        device_code=include("decoder/blocks.cuh"),
        block=desc.block,
        ctas_per_sm=1,
        waits=False,
        cooperative=True,
        smem_bytes=desc.smem_bytes,
    )
