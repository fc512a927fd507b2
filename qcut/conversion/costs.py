"""The cost of a layer under each scheme, which a plan minimizes. Measurements of your own can replace it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qcut.config import parse_scheme
from qcut.layers.base import Linear


@dataclass(frozen=True)
class LayerSize:
    """The facts about a layer that a cost model may use.

    Attributes:
        name: the layer.
        out_features: N.
        in_features: K.
        bias: whether the layer has a bias.
        float_bytes: bytes of the layer's parameters as they are now.
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
    parsed = parse_scheme(scheme)
    if parsed.is_float:
        return float(layer.float_bytes)
    sizes = layer.in_features, layer.out_features, layer.bias
    return float(Linear(*sizes, parsed, device="meta", name=layer.name).weight_bytes)


@dataclass(frozen=True)
class TimeCost:
    """Time of one call in µs: ``2 M N K / rate + bytes / bandwidth``.

    Bytes are those of the weight (int8, 2 a value, or a codebook's indices and norms), of the input (int8 products:
    one byte a value, and 8 a token for dynamic scales) and of the output (2 a value); a second pass of a codebook
    reads and multiplies the input again. Launches, and separate passes that quantize or rotate the
    input, are not counted, since fusion and CUDA graphs remove them. The defaults are rates that an H200 sustains;
    only the ratios between schemes matter to a plan.

    Attributes:
        tokens: M, the tokens of a call; the default is a prompt's. With few tokens, bytes decide the time and the plan.
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
        int8, passes = parsed.int8_products, parsed.passes
        rate = self.int8_tops if int8 else self.fp16_tflops
        moved = parsed.weight_bytes(n, k) + passes * m * k * (1 if int8 else 2) + 2 * m * n
        moved += 8 * m if int8 and not parsed.needs_range else 0
        return (2 * passes * m * n * k / rate + moved / self.bandwidth) * 1e-6
