"""The cost of a layer under each scheme, which a plan minimizes. Measurements of your own can replace it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from qcut.layers.linear import Linear
from qcut.schemes import Codebook, Scheme, W8A8Rotated, parse_scheme


@dataclass(frozen=True)
class LayerSize:
    """The facts about a layer that a cost model may use.

    Attributes:
        name: the layer.
        out_features: N.
        in_features: K.
        bias: whether the layer has a bias.
        float_bytes: bytes of the layer's parameters as they are now.
        rows: N of the product that the engine computes the layer in: the sum of all N of fused projections of one
            scheme (`qcut.conversion.calibration.fused_projections`), or of all experts; 0 means ``out_features``.
        experts: of an expert's layer, how many experts there are; 0 of other layers.
        routes: of an expert's layer, how many experts a token goes to.
    """

    name: str
    out_features: int
    in_features: int
    bias: bool
    float_bytes: int
    rows: int = 0
    experts: int = 0
    routes: int = 1

    def tokens_of(self, tokens: int) -> float:
        """Of a call of so many tokens, those that the layer computes: an equal share of their routes."""
        return tokens * self.routes / self.experts if self.experts else tokens

    def share_read(self, tokens: int) -> float:
        """How likely a call of so many tokens reads the weight: 1 - (1 - k/E)^M, if all experts are chosen alike."""
        return 1.0 - (1.0 - self.routes / self.experts) ** tokens if self.experts else 1.0


CostModel = Callable[[LayerSize, str], float]
"""``cost(layer, scheme name) -> cost``, finite and not negative; any unit, the same for all layers."""


def memory_cost(layer: LayerSize, scheme: str) -> float:
    """Bytes the layer keeps: exact, padding and scales included; ``fp16`` is the layer as it is now."""
    parsed = parse_scheme(scheme)
    if parsed.is_float:
        return float(layer.float_bytes)
    sizes = layer.in_features, layer.out_features, layer.bias
    return float(Linear(*sizes, parsed, device="meta", name=layer.name).weight_bytes)


def stored_cost(layer: LayerSize, scheme: str) -> float:
    """Bytes that a file holds of the weight: indices or integers, norms, and scales of rows, all of them exact.

    Biases, and what all rows share (a codebook's values), are not counted. ``fp16`` is the weight as it is now. In the
    memory of a GPU a layer takes a little more (`memory_cost`): norms lie there twice, and rows are padded.
    """
    parsed, n, k = parse_scheme(scheme), layer.out_features, layer.in_features
    if parsed.is_float:
        weights = n * k + (n if layer.bias else 0)
        return layer.float_bytes / weights * n * k
    entries = Linear(k, n, False, parsed, device="meta", name=layer.name).stored()
    return float(sum(entry.nbytes for key, entry in entries.items() if not key.endswith("codebook")))


@dataclass(frozen=True)
class TimeCost:
    """Time of one call in µs: ``2 M N K / rate + bytes / bandwidth``.

    Bytes are those of the weight (int8, 2 a value, or a codebook's indices and norms), of the input (int8 products:
    one byte a value, and 8 a token for dynamic scales) and of the output (2 a value); a second pass of a codebook
    reads and multiplies the input again. Launches, and separate passes that quantize or rotate the
    input, are not counted, since fusion and CUDA graphs remove them; the float32 operations that rotate an input to
    int8 are (``log2(group) + 2`` a value, at a rate that is an estimate). The rate of products of e4m3 tokens was not
    measured: they count as those of 16-bit tokens. The defaults are rates that an H200 sustains; only the ratios
    between schemes matter to a plan. An expert computes its share of the tokens.

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
        m, n, k = layer.tokens_of(self.tokens), layer.out_features, layer.in_features
        parsed = parse_scheme(scheme)
        int8, passes = parsed.int8_products, parsed.passes
        rate = self.int8_tops if int8 else self.fp16_tflops
        moved = layer.share_read(self.tokens) * parsed.weight_bytes(n, k)
        moved += passes * m * k * (1 if int8 else 2) + 2 * m * n
        moved += 8 * m if int8 and not parsed.needs_range else 0
        rotation = 0.0
        if isinstance(parsed, W8A8Rotated):
            rotation = m * k * (math.log2(parsed.group_columns(k)) + 2) / _ROTATION_TFLOPS
        return (2 * passes * m * n * k / rate + rotation + moved / self.bandwidth) * 1e-6


_ROTATION_TFLOPS = 20.0
"""10¹² float32 operations a second of a rotation, which moves values between lanes; not measured."""


@dataclass(frozen=True)
class StepCost:
    """Time in µs of a layer in a step of few tokens: ``start + bytes / rate``, an estimate.

    A start is paid for each product: fused projections of one scheme share it. Start and rate are lines through times
    of whole layers, rotation included, measured on an H200 with one token (benchmarks/layers/schemes.py), which they
    meet within 15 %; on another GPU the rate goes with the memory's bandwidth, and the start to the clock. Of experts,
    a token reads k of E, and all of a projection are one product. Attention, norms and the classifier are not counted.

    Attributes:
        gpu: a GPU's name, or an architecture, as `qcut.dispatch.gpus.target_named` knows it.
    """

    gpu: str = "NVIDIA H200"

    def __call__(self, layer: LayerSize, scheme: str) -> float:
        """The time of the layer under the scheme: of fused projections and experts, the share of the layer's rows."""
        from qcut.dispatch.gpus import target_named

        parsed, n, k = parse_scheme(scheme), layer.out_features, layer.in_features
        start, rate = _step_line(parsed)
        machine = target_named(self.gpu).machine
        read = layer.share_read(1) * parsed.weight_bytes(n, k)
        return start / machine.clock * n / (layer.rows or n) + read / (rate * machine.gb_s / _H200_GB_S * 1e6)


def _step_line(scheme: Scheme) -> tuple[float, float]:
    """Start and rate of a scheme, or of the one measured that is nearest to it."""
    if isinstance(scheme, Codebook):
        start, rate = _CODEBOOK_LINES[scheme.bits if scheme.passes == 1 else 8]
        return start, rate * (_INT8_PRODUCTS if scheme.int8_products else 1.0)
    return _LINES["fp16" if scheme.is_float else "w8a8" if scheme.int8_products else "w8a16"]


_H200_GB_S = 4800.0
_LINES = {"fp16": (4.1, 4.35), "w8a16": (1.3, 4.3), "w8a8": (1.3, 4.0)}
"""Start in µs, and rate in 10¹² bytes a second, of one token on an H200."""
_CODEBOOK_LINES = {2: (2.15, 2.25), 3: (2.15, 2.92), 4: (2.0, 3.4), 8: (2.2, 3.57)}
"""The same by bits; 8 stands for two passes. Decoding takes its time for each weight, whatever the bits."""
_INT8_PRODUCTS = 0.8
"""What int8 products leave of the rate."""
