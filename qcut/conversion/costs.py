"""What a layer costs under each scheme: the numbers a plan minimizes. Replace them by your own measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qcut.codebooks.layout import UNIT_COLUMNS, UNIT_ROWS, Geometry, row_tiles, unit_bytes
from qcut.config import Codebook, padded_k, parse_scheme


@dataclass(frozen=True)
class LayerSize:
    """What a cost model may know about a layer.

    Attributes:
        name: the layer.
        out_features: N.
        in_features: K.
        bias: whether it has one.
        float_bytes: of its parameters as they are now.
    """

    name: str
    out_features: int
    in_features: int
    bias: bool
    float_bytes: int


CostModel = Callable[[LayerSize, str], float]
"""``cost(layer, scheme name) -> cost``, finite and not negative; any unit, the same for all layers."""


def memory_cost(layer: LayerSize, scheme: str) -> float:
    """Bytes the layer keeps: exact, padding and scales included; ``fp16`` is the layer as it is now."""
    if scheme == "fp16":
        return float(layer.float_bytes)
    n = layer.out_features
    codebook = parse_scheme(scheme)
    if isinstance(codebook, Codebook):
        return float(_codebook_bytes(layer, codebook))
    scales = 4 * n * (1 + layer.bias) + (8 * n + 8 if scheme == "w8a8_static" else 0)
    return float(n * padded_k(layer.in_features) + scales)


def _codebook_bytes(layer: LayerSize, scheme: Codebook) -> int:
    """Bytes of the buffers of a `qcut.layers.codebook.CodebookLinear`."""
    geometry = Geometry(layer.in_features, scheme.group_columns(layer.in_features))
    n, tiles, widths = layer.out_features, row_tiles(layer.out_features), scheme.widths
    packed_norms = 2 * UNIT_ROWS * (UNIT_COLUMNS // geometry.slot)
    units = sum(tiles * geometry.units * (unit_bytes(bits) + packed_norms) for bits in widths)
    norms = len(widths) * n * geometry.groups * (2 if scheme.norm_dtype == "fp16" else 4)
    sets = widths if len(set(widths)) > 1 else widths[:1]
    per_set = 4 * n + (4 * UNIT_ROWS * tiles if scheme.int8_products else 0)
    return units + norms + sum(4 << bits for bits in sets) + len(sets) * per_set + 4 * n * layer.bias


@dataclass(frozen=True)
class TimeCost:
    """Time of one call in µs: ``2 M N K / rate + bytes / bandwidth``.

    Bytes are those of the weight (int8, 2 a value, or a codebook's indices and norms), of the input (int8 products:
    one byte a value, and 8 a token for dynamic scales) and of the output (2 a value); a second pass of a codebook
    reads and multiplies the input again. Not counted is what fusion and CUDA graphs take away: launches, and a
    separate pass that quantizes or rotates the input. The defaults are what an H200 sustains; only the ratios between
    schemes matter to a plan.

    Attributes:
        tokens: M, the tokens of a call: prompts by default. With few tokens the bytes decide, and so will the plan.
        int8_tops: 10¹² int8 operations a second.
        fp16_tflops: 10¹² float16 operations a second.
        bandwidth: 10¹² bytes a second.
    """

    tokens: int = 2048
    int8_tops: float = 1450.0
    fp16_tflops: float = 700.0
    bandwidth: float = 4.4

    def __call__(self, layer: LayerSize, scheme: str) -> float:
        """The time of one call of the layer under the scheme."""
        m, n, k = self.tokens, layer.out_features, layer.in_features
        parsed = parse_scheme(scheme)
        int8, passes, weight_bytes = parsed.int8_products, 1, n * k * (2.0 if scheme == "fp16" else 1.0)
        if isinstance(parsed, Codebook):
            groups = -(-k // parsed.group_columns(k))
            passes = len(parsed.widths)
            weight_bytes = n * (k * sum(parsed.widths) / 8 + 2 * groups * passes)
        rate = self.int8_tops if int8 else self.fp16_tflops
        moved = weight_bytes + passes * m * k * (1 if int8 else 2) + 2 * m * n
        moved += 8 * m if int8 and scheme != "w8a8_static" else 0
        return (2 * passes * m * n * k / rate + moved / self.bandwidth) * 1e-6
