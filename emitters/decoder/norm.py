"""RMSNorm and LayerNorm of a decoder's rows, after a residual is added, and with their quantization or rotation.

Device code: ``include/qcut/decoder/norm.cuh``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qcut.emitters.codebook.rotate_rows import ROTATION, RowsRotation
from qcut.emitters.core.constraints import FLOAT_X, Constraint
from qcut.emitters.core.family import Kernel
from qcut.emitters.core.source import DType, KernelSource, Param
from qcut.emitters.core.text import call_arguments, flag, include

_MAX_VECTORS = 4

_MANY_VECTORS = 5
_WIDE = 768
"""Most threads of a CTA that have more than 72 registers each."""
MANY_ROWS = 1024
"""Number of rows from which an SM has several at once."""
CONSTRAINTS = (
    FLOAT_X,
    Constraint("threads", "are 32 to 1024, a multiple of 32", lambda k: k.threads in range(32, 1025, 32)),
    Constraint(
        "vectors",
        f"of a thread are 1 to {_MAX_VECTORS}, or {_MANY_VECTORS} where a CTA has 512 threads at most",
        lambda k: 1 <= k.vectors <= (_MANY_VECTORS if k.threads <= 512 else _MAX_VECTORS),
    ),
    ROTATION,
    Constraint("quantized", "is False with a rotation", lambda k: k.rotation is None or not k.quantized),
    Constraint("routes", "are of a residual", lambda k: k.residual or not k.routes),
    Constraint(
        "plain", "goes with quantized or a rotation", lambda k: not k.plain or k.quantized or k.rotation is not None
    ),
)
"""Constraints of `NormRows`."""


@dataclass(frozen=True)
class NormRows(Kernel):
    """RMSNorm or LayerNorm of rows ``[m, k]`` that a CTA's threads hold.

    ``s = x``, or ``rne(x + residual)``, which the kernel also writes. The kernel computes in float32 and rounds to x's
    type where eager models do. With ``routes`` the residual is the weighted sum of a row's routes, as
    `qcut.emitters.routing.sum_routes.SumRoutes` adds them::

        rms    y = rne(rne(s * rsqrt(mean(s**2) + eps)) * weight)
        layer  y = rne((s - mean(s)) * rsqrt(mean((s - mean(s))**2) + eps) * weight + bias)

    With ``quantized``, y becomes int8 with a scale for each row, bitwise as
    `qcut.emitters.decoder.quantize.QuantizePerToken` quantizes y. With a rotation, y becomes blocks of tokens or
    int8 rows, bitwise as `qcut.emitters.codebook.rotate.RotateTokens` makes them. With ``plain``, the kernel writes y
    of x's type too.

    Attributes:
        x: element type.
        layer: LayerNorm instead of RMSNorm; its bias may be a null pointer.
        arch: real architecture.
        residual: add a residual first.
        quantized: write int8 and scales.
        threads: threads of a row.
        vectors: vectors of 16 bytes of a thread.
        aligned: rows, weight and bias start at multiples of 16 bytes. False loads single elements.
        rotation: of y, or None.
        plain: write y as it is before its quantization or rotation, too.
        routes: the residual has several rows for each, weighted.

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
    rotation: RowsRotation | None = None
    plain: bool = False
    routes: bool = False

    constraints = CONSTRAINTS

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
        rotation: RowsRotation | None = None,
        plain: bool = False,
        routes: bool = False,
    ) -> NormRows:
        """The kernel for rows of k columns.

        A thread has one vector, for the shortest time of a row; with ``many`` rows a thread has up to five vectors, so
        that an SM has several rows in flight. Results are the same.

        Raises:
            EmitError: rows longer than 1024 threads hold; see `CONSTRAINTS`.
        """
        vectors = -(-k * x.bits // 128)
        each = -(-vectors // 1024)
        if many:
            most = _MANY_VECTORS if vectors <= 512 * _MANY_VECTORS else _MAX_VECTORS
            each = max(each, min(most, -(-vectors // 32)))
        threads = min(1024, math.ceil(vectors / each / 32) * 32)
        each = -(-vectors // threads)
        return cls(x, layer, arch, residual, quantized, threads, each, aligned, rotation, plain, routes)

    @property
    def name(self) -> str:
        """``qcut_norm_{arch}_{x}_{kind}``, ``_r`` or ``_rs``, ``_q`` or the rotation's name, ``_t{threads}v{vectors}``.

        ``_rs`` of several routes; ``_p`` before ``_t`` where plain, ``_u`` last where unaligned.
        """
        kind = "layer" if self.layer else "rms"
        flags = "_r" * self.residual + "s" * self.routes + "_q" * self.quantized
        flags += (self.rotation.name if self.rotation else "") + "_p" * self.plain
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

        ``x``; ``residual, sum`` (with one); ``weight``; ``bias`` (layer only); ``y``; ``scale`` (of int8 only);
        ``x_stride`` in elements, ``k``, ``k_padded``, a multiple of 16 (quantized only), ``eps``; then the rotation's;
        ``plain`` (with it only), rows of k elements; ``route_weights`` ``[m, top_k]`` and ``top_k`` (of routes only).
        """
        x = self.x.cpp
        names = ["x", *["residual", "sum"] * self.residual, "weight", *["bias"] * self.layer, "y"]
        names += ["scale"] * (self.quantized or (self.rotation is not None and self.rotation.quantized))
        types = {"sum": f"{x}*", "y": "void*", "scale": "float*"}
        padded = (Param("k_padded", "i32"),) * self.quantized
        return (
            *(Param(name, "ptr", types.get(name, f"const {x}*")) for name in names),
            Param("x_stride", "i64"),
            Param("k", "i32"),
            *padded,
            Param("eps", "f32"),
            *(self.rotation.params() if self.rotation else ()),
            *(Param("plain", "ptr", f"{x}*"),) * self.plain,
            *(Param("route_weights", "ptr", "const float*"), Param("top_k", "i32")) * self.routes,
        )

    def emit(self) -> KernelSource:
        """Text of the kernel.

        Weight, bias and a rotation's signs may be read before the previous kernel ends.
        """
        params, rotation = self.params(), self.rotation
        flags = ", ".join(map(flag, (self.layer, self.residual, self.quantized)))
        options = ", ".join(map(flag, (self.aligned, *(True,) * self.plain)))
        pointers = call_arguments(("x", "residual", "sum", "weight", "bias", "y", "scale"), params)
        k_padded = "k_padded" if self.quantized else "0"
        more = self.plain or self.routes
        last = [rotation.argument(self.x, self.vectors, self.threads)] if rotation else ["{}"] * more
        last += ["plain" if self.plain else "nullptr"] * more
        wide = self.threads > _WIDE
        unroll = 2 if self.vectors > 2 or (wide and self.vectors > 1) else 4 if wide or self.vectors > 1 else 8
        last += [f"qcut::RoutedResidual<{unroll}>{{route_weights, top_k}}"] * self.routes
        return self._source(
            f"qcut::norm_rows<{self.x.cpp}, {flags}, {self.vectors}, {self.threads}, {options}>"
            f"({', '.join((pointers, 'x_stride', 'k', k_padded, 'eps', *last))});",
            device_code=(rotation.device_code if rotation else "") + include("decoder/norm.cuh"),
        )
