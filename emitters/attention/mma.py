"""Attention of one new token of each sequence to the keys and values in a cache, on tensor cores.

Device code: ``include/qcut/attention/mma.cuh``. The kernels compute the function of
`qcut.emitters.attention.simt.AttentionDecode` for 16-bit queries: keys and values are the rows of
``mma.sync.m16n8k16``, and up to eight queries that share them are its columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from qcut.emitters.attention.scores import PLAIN, Scores
from qcut.emitters.attention.simt import attention_call, attention_params
from qcut.emitters.core.arch import CLUSTER_ARCHITECTURES
from qcut.emitters.core.constraints import HALF_X, Constraint, can_make
from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import DType, KernelSource, Param
from qcut.emitters.core.text import include
from qcut.emitters.decoder.cache import CACHE, SCALED, cache_bits, cache_name, cache_template, value_type

FAMILY = "attention_mma"
MAX_GROUP = 8
"""Largest number of queries of a CTA: the columns of a product."""
MAX_PARTS = 64
"""Largest number of parts of the context without a cluster."""
MAX_TILES = 4
"""Tiles of 16 keys that a warp holds at once."""
CLUSTERS = (1, 2, 4, 8)
TILE = 16
"""Keys of a product."""
SMEM_STATIC = 48 * 1024
"""Bytes of shared memory that a CTA has."""


def _piece(cache: DType, head: int, lanes: int) -> int:
    """Columns of a lane's pieces of a row: of 16 bytes, or less of 4-bit rows; see ``RowPieces``."""
    share = head * cache.bits // 8 // lanes
    return (share if cache is DType.U4 and share < 16 else 16) * 8 // cache.bits


def _share(cache: DType, head: int, lanes: int) -> int:
    """Columns of a row that a lane holds."""
    piece = _piece(cache, head, lanes)
    return -(-(head // piece) // lanes) * piece


def _tile_registers(kernel: AttentionMma) -> int:
    """Registers of a lane for 16 keys and values: 4 lanes share a key and 8 share a value, as in `TensorAttention`."""
    keys, values = kernel.cache, value_type(kernel.cache, kernel.values)
    of_keys = -(-_share(keys, kernel.head, 4) * keys.bits // 32)
    return 2 * of_keys + 4 * -(-_share(values, kernel.head, 8) * values.bits // 32)


def _registers(kernel: AttentionMma) -> int:
    """Estimate a thread's registers: keys, values and scores, queries, weighted values, and the rest.

    With 4-bit keys a lane also keeps the addresses of its pieces, and the values of the KV calibration.
    """
    tile = _tile_registers(kernel) + (12 if kernel.cache in SCALED else 8)
    queries = _share(kernel.cache, kernel.head, 4) // 2
    values = _share(value_type(kernel.cache, kernel.values), kernel.head, 8) * 2
    return kernel.tiles * tile + queries + values + (38 if kernel.cache is DType.U4 else 22)


def smem_bytes(kernel: AttentionMma, columns: int) -> int:
    """Bytes of shared memory in which a CTA of so many columns of products merges its results."""
    records = 4 * kernel.warps * columns * (kernel.head + 4)
    received = 4 * (columns * kernel.head + 4 * kernel.cluster) if kernel.cluster > 1 else 16
    parts = 8 * columns * (kernel.cluster if kernel.cluster > 1 else MAX_PARTS)
    return records + received + parts + 24 + 32 * kernel.scores.sinks


CONSTRAINTS = (
    HALF_X,
    CACHE,
    Constraint(
        "head",
        "is 16 to 256 columns, in whole vectors of 16 bytes of the cache",
        lambda k: 16 <= k.head <= 256 and k.head % _piece(k.cache, k.head, 4) == 0,
    ),
    Constraint("group", f"is 1 to {MAX_GROUP} queries", lambda k: 1 <= k.group <= MAX_GROUP),
    Constraint("warps", "are 1 to 8", lambda k: 1 <= k.warps <= 8),
    Constraint("tiles", f"are 1 to {MAX_TILES} of 16 keys", lambda k: 1 <= k.tiles <= MAX_TILES),
    Constraint("cluster", "is 1, 2, 4 or 8 parts: a portable cluster", lambda k: k.cluster in CLUSTERS),
    Constraint(
        "clusters",
        f"need {', '.join(CLUSTER_ARCHITECTURES)}",
        lambda k: k.cluster == 1 or k.arch in CLUSTER_ARCHITECTURES,
    ),
    Constraint("registers", "hold keys, values and queries: a thread's 255", lambda k: _registers(k) <= 255),
    Constraint(
        "shared_memory",
        "holds a record of each warp and query: 48 KB",
        lambda k: smem_bytes(k, k.group) <= SMEM_STATIC,
    ),
)
"""Constraints of `AttentionMma`."""


@dataclass(frozen=True)
class AttentionMma(Kernel):
    """``out[b, h] = softmax_t(scale * q[b, h] . K[b, h / queries, t]) . V[b, h / queries, t]``, t to ``positions[b]``.

    Operands are those of `qcut.emitters.attention.simt.AttentionDecode`; out starts at a multiple of 8 bytes.

    Attributes:
        x: element type of queries and results, f16 or bf16.
        cache: of keys: x, s8, or u4 (queries are then rotated).
        head: columns of a head.
        group: queries of a CTA, of those that share a head of keys.
        arch: real architecture.
        warps: of a CTA.
        tiles: tiles of 16 keys that a warp holds.
        cluster: parts of the context, added up in the shared memory of a cluster; 1: any number of parts, added up in
            a workspace.
        values: type of values; None: that of keys.
        scores: a window, a softcap, sinks.

    Exactness: scores and sums are float32, in an order that the length and the number of parts fix; exponentials have
    4 ulp. A weight ``2**(score - largest)``, with s8 or u4 times its value's scale and relative to the largest product
    of the two, is rounded to x's type: by 2**-11 of itself and, below 2**-14, by 2**-25 at most (f16), by 2**-8 of
    itself (bf16). The sum that divides adds rounded weights, with s8 and u4 the float32 ones before scales. The
    term of u4 values' zero points, equal for all columns of a rotated row, is float32. A sequence's result does not
    depend on the others, nor on what the cache holds past its end. NaN in a key or value that is read, or in q,
    reaches the results.
    """

    x: DType
    cache: DType
    head: int
    group: int
    arch: str
    warps: int = 4
    tiles: int = 2
    cluster: int = 1
    values: DType | None = None
    scores: Scores = PLAIN

    constraints = CONSTRAINTS

    @classmethod
    def for_shape(
        cls,
        x: DType,
        cache: DType,
        head: int,
        queries: int,
        arch: str,
        cluster: int = 1,
        values: DType | None = None,
        scores: Scores = PLAIN,
    ) -> AttentionMma:
        """Return the kernel for a number of queries per head of keys, with as many loads in flight as registers allow.

        Raises:
            EmitError: see `CONSTRAINTS`.
        """
        group = -(-queries // -(-queries // MAX_GROUP))
        shape = (x, cache, head, group, arch)
        most = MAX_TILES - (scores.windowed and cache in SCALED)  # a window's places take the last registers
        fitting = (n for n in range(most, 1, -1) if cls.is_legal(*shape, tiles=n, cluster=cluster, values=values))
        return cls(*shape, tiles=next(fitting, 1), cluster=cluster, values=values, scores=scores)

    def shortened(self, tokens: int) -> AttentionMma:
        """The kernel for a part of the context of this many tokens: without tiles that no warp would use.

        Fetching their code takes longer than a short context does.
        """
        return replace(self, tiles=min(self.tiles, max(1, -(-tokens // (TILE * self.warps)))))

    @classmethod
    def is_legal(
        cls,
        x: DType,
        cache: DType,
        head: int,
        group: int,
        arch: str,
        *,
        tiles: int = 1,
        cluster: int = 1,
        values: DType | None = None,
    ) -> bool:
        """Whether there is such a kernel."""
        return can_make(cls, x, cache, head, group, arch, tiles=tiles, cluster=cluster, values=values)

    @property
    def name(self) -> str:
        """``qcut_attention_mma_{arch}_{shape}``."""
        return f"qcut_{FAMILY}_{self.arch.replace('_', '')}_{self.shape}"

    @property
    def shape(self) -> str:
        """``{x}_{cache}_h{head}g{group}_w{warps}t{tiles}``, ``_c{cluster}`` with one, and `Scores.suffix`."""
        cluster = f"_c{self.cluster}" if self.cluster > 1 else ""
        cache = cache_name(self.cache, self.values)
        return (
            f"{self.x.value}_{cache}_h{self.head}g{self.group}_w{self.warps}t{self.tiles}{cluster}{self.scores.suffix}"
        )

    @property
    def template(self) -> str:
        """Arguments of the device code's templates, which those of `Scores` follow."""
        sizes = (self.head, self.group, self.warps, self.tiles, self.cluster)
        return f"{self.x.cpp}, {cache_template(self.cache, self.values)}, {', '.join(map(str, sizes))}"

    @property
    def block(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps

    @property
    def resident(self) -> int:
        """CTAs that an SM's registers hold."""
        return max(1, 65_536 // (self.block * min(256, _registers(self) + 8)))

    @property
    def flight_bytes(self) -> int:
        """Bytes of keys and values that a CTA has in flight."""
        return self.warps * self.tiles * TILE * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a key and a value of a head."""
        return self.head * cache_bits(self.cache, self.values) // 8

    def places(self, batch: int, kv_heads: int, queries: int) -> int:
        """CTAs of a part of the context."""
        return batch * kv_heads * -(-queries // self.group)

    def grid(self, batch: int, kv_heads: int, queries: int, parts: int) -> tuple[int, int, int]:
        """CTAs of a launch; with a cluster, ``parts`` is the cluster's size."""
        return (parts, kv_heads * -(-queries // self.group), batch)

    def workspace_floats(self, batch: int, kv_heads: int, queries: int, parts: int) -> int:
        """float32 of workspace: a record of each part and query; none for one part, or with a cluster."""
        alone = parts == 1 or self.cluster > 1
        return 0 if alone else self.places(batch, kv_heads, queries) * parts * self.group * (self.head + 4)

    def params(self) -> tuple[Param, ...]:
        """Arguments, in order: see `qcut.emitters.attention.simt.attention_params`."""
        return attention_params(self.x, self.cache, self.values, self.scores)

    def emit(self) -> KernelSource:
        """Text of the kernel. Everything is read after the previous kernel's end."""
        params = self.params()
        return self._source(
            attention_call(f"TensorAttention<{self.template}{self.scores.template()}>", params, self.scores),
            device_code=include("attention/mma.cuh"),
            ctas_per_sm=self.resident,
            cluster=self.cluster,
        )
