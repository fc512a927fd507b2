"""What lies between a decoder's projections: norms, rotary positions and the cache, activations, argmax.

Device code: ``include/qcut/decoder/norm.cuh``, ``append.cuh``, ``activate_rows.cuh`` and ``argmax.cuh``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from qcut.emitters.core.constraints import Constraint, check
from qcut.emitters.core.source import DType, KernelSource, Param

_FLOATS = (DType.F16, DType.BF16, DType.F32)
_MAX_VECTORS = 4

_MANY_VECTORS = 5
MANY_ROWS = 1024
"""From so many rows on an SM has several at once."""
NORM_CONSTRAINTS = (
    Constraint("x", "is f16, bf16 or f32", lambda k: k.x in _FLOATS),
    Constraint("threads", "are 32 to 1024, a multiple of 32", lambda k: k.threads in range(32, 1025, 32)),
    Constraint(
        "vectors",
        f"of a thread are 1 to {_MAX_VECTORS}, or {_MANY_VECTORS} where a CTA has 512 threads at most",
        lambda k: 1 <= k.vectors <= (_MANY_VECTORS if k.threads <= 512 else _MAX_VECTORS),
    ),
)
"""What `NormRows` can be."""


@dataclass(frozen=True)
class NormRows:
    """RMSNorm or LayerNorm of rows ``[m, k]`` that a CTA's threads hold.

    ``s = x``, or ``rne(x + residual)``, which is written too. In float32, rounded to x's type where eager models do::

        rms    y = rne(rne(s * rsqrt(mean(s**2) + eps)) * weight)
        layer  y = rne((s - mean(s)) * rsqrt(mean((s - mean(s))**2) + eps) * weight + bias)

    With ``quantized`` y becomes int8 with a scale for each row, bitwise as
    `qcut.emitters.decoder.quantize.QuantizePerToken` does of y.

    Attributes:
        x: element type.
        layer: LayerNorm instead of RMSNorm; its bias may be a null pointer.
        arch: real architecture.
        residual: add one before.
        quantized: write int8 and scales.
        threads: of a row.
        vectors: of 16 bytes that a thread holds.
        aligned: rows, weight and bias start at multiples of 16 bytes. False loads single elements.

    Exactness: sums in a fixed order, with error at most ``k * 2**-24`` of the sum of their terms' sizes.
    """

    x: DType
    layer: bool
    arch: str
    residual: bool = False
    quantized: bool = False
    threads: int = 256
    vectors: int = 1
    aligned: bool = True

    def __post_init__(self) -> None:
        check(self.name, NORM_CONSTRAINTS, self)

    @classmethod
    def for_shape(
        cls,
        x: DType,
        layer: bool,
        arch: str,
        k: int,
        *,
        many: bool = False,
        residual: bool = False,
        quantized: bool = False,
        aligned: bool = True,
    ) -> NormRows:
        """The kernel for rows of k columns.

        A thread has one vector, so that a row takes no longer than it must; with ``many`` rows up to five, so that an
        SM has several rows on their way. Results are the same.

        Raises:
            EmitError: rows longer than 1024 threads hold; see `NORM_CONSTRAINTS`.
        """
        vectors = -(-k * x.bits // 128)
        each = -(-vectors // 1024)
        if many:
            each = max(each, min(_MANY_VECTORS, -(-vectors // 32)))
        threads = min(1024, math.ceil(vectors / each / 32) * 32)
        each = -(-vectors // threads)
        return cls(x, layer, arch, residual, quantized, threads, each, aligned)

    @property
    def name(self) -> str:
        """``qcut_norm_{arch}_{x}_{kind}``, ``_r``, ``_q``, ``_t{threads}v{vectors}``, and ``_u`` where unaligned."""
        kind = "layer" if self.layer else "rms"
        flags = "_r" * self.residual + "_q" * self.quantized
        return (
            f"qcut_norm_{self.arch.replace('_', '')}_{self.x.value}_{kind}{flags}_t{self.threads}v{self.vectors}"
            f"{'' if self.aligned else '_u'}"
        )

    @property
    def block(self) -> int:
        """Threads of a CTA."""
        return self.threads

    def grid(self, m: int) -> tuple[int, int, int]:
        """CTAs for m rows."""
        return (m, 1, 1)

    def params(self) -> tuple[Param, ...]:
        """Arguments, in order.

        ``x``; ``residual, sum`` (with one); ``weight``; ``bias`` (layer alone); ``y``; ``scale`` (quantized alone);
        ``x_stride`` in elements, ``k``, ``k_padded``, a multiple of 16 (quantized alone), ``eps``.
        """
        names = ["x", *["residual", "sum"] * self.residual, "weight", *["bias"] * self.layer, "y"]
        names += ["scale"] * self.quantized
        padded = (Param("k_padded", "i32"),) * self.quantized
        return (
            *(Param(name, "ptr") for name in names),
            Param("x_stride", "i64"),
            Param("k", "i32"),
            *padded,
            Param("eps", "f32"),
        )


def emit_norm(desc: NormRows) -> KernelSource:
    """Text of one kernel; arguments are ``desc.params()``. Weight and bias may be read before the last one ends."""
    x = desc.x.cpp
    types = dict.fromkeys(("x", "residual", "weight", "bias"), f"const {x}*")
    types |= {"sum": f"{x}*", "y": "void*", "scale": "float*", "x_stride": "long long", "eps": "float"}
    flags = ", ".join(str(flag).lower() for flag in (desc.layer, desc.residual, desc.quantized))
    template = f"{x}, {flags}, {desc.vectors}, {desc.threads}, {str(desc.aligned).lower()}"
    order = ("x", "residual", "sum", "weight", "bias", "y", "scale", "x_stride", "k", "k_padded", "eps")
    missing = {"k_padded": "0"}
    return _source(desc, desc.params(), types, f"norm_rows<{template}>", order, missing, "decoder/norm")


Rotary = Literal["none", "half", "interleaved"]
ROTARY: tuple[Rotary, ...] = ("none", "half", "interleaved")
"""Which columns rotary positions turn together: i and ``i + head / 2``, or 2 i and 2 i + 1."""
_PAIRS = {"none": "kNone", "half": "kHalves", "interleaved": "kNeighbours"}
MANY_TOKENS = 256
"""From so many on a thread has several heads of its token."""
ROPE_CONSTRAINTS = (
    Constraint("x", "is f16, bf16 or f32", lambda k: k.x in _FLOATS),
    Constraint("cache", "is x's type, or s8", lambda k: k.cache in (k.x, DType.S8)),
    Constraint("head", "is 2 to 256 columns, an even number", lambda k: 2 <= k.head <= 256 and k.head % 2 == 0),
    Constraint("rotary", f"is {', '.join(ROTARY)}", lambda k: k.rotary in ROTARY),
)
"""What `RotateAndAppend` can be."""


@dataclass(frozen=True)
class RotateAndAppend:
    """Rotary positions for queries, in place, and keys; keys and values of new tokens into the cache.

    q ``[tokens, heads, head]``, k and v ``[tokens, kv_heads, head]``, with strides between tokens; cos and sin
    ``[context, head]`` of x's type, at a column what rotates it: both of a pair have the same. Token i is sequence
    ``i // length``'s, at ``positions[i]`` of the tables and ``slots[i]`` of the cache
    ``[sequences, kv_heads, context, head]``.

    Attributes:
        x: element type of queries, keys, values and tables.
        cache: of the cache: x, or s8 with a float32 scale ``[sequences, kv_heads, context]`` for each token and head.
        head: columns of a head.
        rotary: see `ROTARY`; with none, keys and values are only stored.
        arch: real architecture.
        many: for `MANY_TOKENS` and more; results are the same.
        aligned: rows of q, k and v, tables and caches start at multiples of `vector` elements. False reads single ones.

    Exactness: bitwise the eager arithmetic in x's type, each product and the sum rounded; s8 as
    ``qcut.numerics.quantize_per_token_ref`` of a head.
    """

    x: DType
    cache: DType
    head: int
    rotary: Rotary
    arch: str
    many: bool = False
    aligned: bool = True

    def __post_init__(self) -> None:
        check(self.name, ROPE_CONSTRAINTS, self)

    @property
    def name(self) -> str:
        """``qcut_append_{arch}_{x}_{cache}_h{head}``, ``_rope`` or ``_rope_pairs``, ``_m``, ``_u``."""
        flags = {"half": "_rope", "interleaved": "_rope_pairs"}.get(self.rotary, "")
        flags += "_m" * self.many + "_u" * (not self.aligned)
        return f"qcut_append_{self.arch.replace('_', '')}_{self.x.value}_{self.cache.value}_h{self.head}{flags}"

    @property
    def block(self) -> int:
        """Threads of a CTA."""
        return 128

    @staticmethod
    def widest(head: int, element_size: int) -> int:
        """Elements that can be read at once: the power of two that divides half a head, 16 bytes at most."""
        return min((head & -head) // 2, 16 // element_size)

    @property
    def vector(self) -> int:
        """Elements that are read at once."""
        return self.widest(self.head, self.x.bits // 8) if self.aligned else 1

    @property
    def _heads(self) -> int:
        """Of a thread: as many as its registers hold with the tables' rows."""
        return max(1, 64 // self.x.bits // -(-self._shares // 32)) if self.many else 1

    @property
    def _tokens(self) -> int:
        """Of a CTA: with many each group of lanes has its own, so that what they store lies side by side."""
        return self._groups if self.many else 1

    @property
    def _groups(self) -> int:
        """Of a CTA, each with a head at a time: the lanes of one are a power of two."""
        return self.block // min(32, 1 << (self._shares - 1).bit_length())

    @property
    def _shares(self) -> int:
        """Of a head, each of two vectors."""
        return self.head // 2 // self.vector

    def grid(self, tokens: int, heads: int, kv_heads: int) -> tuple[int, int, int]:
        """CTAs of a launch. Without rotary positions queries have nothing to do: pass 0 heads, to the kernel too."""
        each = self._groups // self._tokens * self._heads
        return (-(-tokens // self._tokens), -(-(heads + 2 * kv_heads) // each), 1)

    def params(self) -> tuple[Param, ...]:
        """Arguments, in order.

        ``q, k, v``; ``cos, sin, positions`` (rotary alone); ``slots``; ``keys, values``; ``key_scales, value_scales``
        (s8 alone); ``q_stride, kv_stride, batch_stride`` in elements; ``heads, kv_heads, context, tokens``, ``length``,
        tokens of each sequence. Positions and slots are int32.
        """
        tables = ["cos", "sin", "positions"] * (self.rotary != "none")
        names = ["q", "k", "v", *tables, "slots", "keys", "values"]
        names += ["key_scales", "value_scales"] * (self.cache is DType.S8)
        return (
            *(Param(name, "ptr") for name in names),
            *(Param(name, "i64") for name in ("q_stride", "kv_stride", "batch_stride")),
            *(Param(name, "i32") for name in ("heads", "kv_heads", "context", "tokens", "length")),
        )


def emit_append(desc: RotateAndAppend) -> KernelSource:
    """Text of one kernel; arguments are ``desc.params()``. Everything is read after the previous kernel's end."""
    x, cache = desc.x.cpp, desc.cache.cpp
    types = dict.fromkeys(("k", "v", "cos", "sin"), f"const {x}*") | {"q": f"{x}*"}
    types |= dict.fromkeys(("keys", "values"), f"{cache}*")
    types |= dict.fromkeys(("key_scales", "value_scales"), "float*")
    types |= dict.fromkeys(("positions", "slots"), "const int*")
    types |= dict.fromkeys(("q_stride", "kv_stride", "batch_stride"), "long long")
    template = f"{x}, {cache}, {desc.head}, qcut::Pairs::{_PAIRS[desc.rotary]}, {desc.vector}, "
    template += f"{desc._tokens}, {desc._heads}, {desc.block}"
    order = ("q", "k", "v", "cos", "sin", "positions", "slots", "keys", "values", "key_scales", "value_scales")
    sizes = ("q_stride", "kv_stride", "batch_stride", "heads", "kv_heads", "context", "tokens", "length")
    return _source(desc, desc.params(), types, f"rotate_and_append<{template}>", (*order, *sizes), {}, "decoder/append")


ARGMAX_CONSTRAINTS = (Constraint("x", "is f16, bf16 or f32", lambda k: k.x in _FLOATS),)
"""What `ArgmaxRows` can be."""


@dataclass(frozen=True)
class ArgmaxRows:
    """The index of each row's largest element, as ``qcut.numerics.sampling.argmax`` chooses it.

    Attributes:
        x: element type of rows ``[m, columns]``, which may start anywhere.
        arch: real architecture.
        advances: each row's position and slot go on by one, up to ``context - 1`` and ``context``: a step's end.

    Exactness: bitwise.
    """

    x: DType
    arch: str
    advances: bool = False

    _unroll = 4

    def __post_init__(self) -> None:
        check(self.name, ARGMAX_CONSTRAINTS, self)

    @property
    def name(self) -> str:
        """``qcut_argmax_{arch}_{x}``, and ``_a`` where it advances."""
        return f"qcut_argmax_{self.arch.replace('_', '')}_{self.x.value}{'_a' * self.advances}"

    @property
    def block(self) -> int:
        """Threads of a CTA: one SM keeps a row's loads in flight."""
        return 1024

    def grid(self, m: int) -> tuple[int, int, int]:
        """CTAs for m rows."""
        return (m, 1, 1)

    def params(self) -> tuple[Param, ...]:
        """``x``; ``best``, int64 ``[m]``; ``stride`` of rows in elements; ``columns``.

        Where it advances, ``positions`` and ``slots``, int32 ``[m]``, before the stride, and ``context`` last.
        """
        state = (Param("positions", "ptr"), Param("slots", "ptr")) if self.advances else ()
        context = (Param("context", "i32"),) * self.advances
        return (
            Param("x", "ptr"),
            Param("best", "ptr"),
            *state,
            Param("stride", "i64"),
            Param("columns", "i32"),
            *context,
        )


def emit_argmax(desc: ArgmaxRows) -> KernelSource:
    """Text of one kernel; arguments are ``desc.params()``."""
    types = {"x": f"const {desc.x.cpp}*", "best": "long long*", "stride": "long long"}
    types |= dict.fromkeys(("positions", "slots"), "int*")
    template = f"{desc.x.cpp}, {str(desc.advances).lower()}, {desc.block}, {desc._unroll}"
    order = ("x", "best", "positions", "slots", "stride", "columns", "context")
    missing = {"positions": "nullptr", "slots": "nullptr", "context": "0"}
    return _source(desc, desc.params(), types, f"argmax_rows<{template}>", order, missing, "decoder/argmax")


ACTIVATIONS = ("silu_mul", "gelu_tanh")
"""Kinds of `ActivateRows`."""

ACTIVATION_CONSTRAINTS = (
    Constraint("kind", f"is {' or '.join(ACTIVATIONS)}", lambda k: k.kind in ACTIVATIONS),
    Constraint("x", "is f16, bf16 or f32", lambda k: k.x in _FLOATS),
)
"""What `ActivateRows` can be."""


@dataclass(frozen=True)
class ActivateRows:
    """What stands between an MLP's projections, of rows ``[m, columns]``; float32, rounded to x's type::

        silu_mul   y = rne(rne(x / (1 + exp(-x))) * up)
        gelu_tanh  y = rne(x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x**3))))

    Attributes:
        kind: see above.
        x: element type.
        arch: real architecture.
        aligned: rows start at multiples of 16 bytes, those of y too. False loads single elements.

    Exactness: before they are rounded, silu and GELU are within ``2**-21 |x|``.
    """

    kind: str
    x: DType
    arch: str
    aligned: bool = True

    def __post_init__(self) -> None:
        check(self.name, ACTIVATION_CONSTRAINTS, self)

    @property
    def name(self) -> str:
        """``qcut_{kind}_{arch}_{x}``, and ``_u`` where unaligned."""
        return f"qcut_{self.kind}_{self.arch.replace('_', '')}_{self.x.value}{'' if self.aligned else '_u'}"

    @property
    def block(self) -> int:
        """Threads of a CTA, each with 16 bytes."""
        return 128

    def grid(self, m: int, columns: int) -> tuple[int, int, int]:
        """CTAs for m rows."""
        return (m, -(-columns * self.x.bits // (128 * self.block)), 1)

    def params(self) -> tuple[Param, ...]:
        """``x``; ``up`` (silu_mul alone); ``y``; ``absmax``; ``x_stride``; ``up_stride`` (silu_mul alone); ``columns``.

        Absmax is null or float32 ``[m]``, which is raised to the largest magnitude of each row of y.
        """
        gated = self.kind == "silu_mul"
        names = ("x", *("up",) * gated, "y", "absmax")
        strides = ("x_stride", *("up_stride",) * gated)
        return (*(Param(n, "ptr") for n in names), *(Param(n, "i64") for n in strides), Param("columns", "i32"))


def emit_activation(desc: ActivateRows) -> KernelSource:
    """Text of one kernel; arguments are ``desc.params()``."""
    x = desc.x.cpp
    types = {"x": f"const {x}*", "up": f"const {x}*", "y": f"{x}*", "absmax": "float*"}
    types |= dict.fromkeys(("x_stride", "up_stride"), "long long")
    gated, aligned = (str(flag).lower() for flag in (desc.kind == "silu_mul", desc.aligned))
    template = f"{x}, {gated}, {desc.block}, {aligned}"
    order = ("x", "up", "y", "absmax", "x_stride", "up_stride", "columns")
    missing = {"up_stride": "0"}
    return _source(desc, desc.params(), types, f"activate_rows<{template}>", order, missing, "decoder/activate")


def _source(
    desc: NormRows | RotateAndAppend | ArgmaxRows | ActivateRows,
    params: tuple[Param, ...],
    types: dict[str, str],
    function: str,
    order: tuple[str, ...],
    missing: dict[str, str],
    header: str,
) -> KernelSource:
    """The text: ``function`` gets the arguments of ``order``, null pointers or ``missing`` for those there are not."""
    names = {p.name for p in params}
    signature = ", ".join(f"{types.get(p.name, 'int')} {p.name}" for p in params)
    arguments = ", ".join(name if name in names else missing.get(name, "nullptr") for name in order)
    text = (
        f"#include <qcut/{header}.cuh>\n\n"
        f'extern "C" __global__ void __launch_bounds__({desc.block})\n'
        f"{desc.name}({signature}) {{\n"
        f"  qcut::{function}({arguments});\n"
        "}\n"
    )
    return KernelSource(
        name=desc.name,
        text=text,
        entry=desc.name,
        params=params,
        arch=desc.arch,
        block=desc.block,
        includes=("qcut", "cuda"),
    )
