"""The report of `qcut.quantize`, layer by layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from qcut.conversion.smoothing import Smoothing


@dataclass(frozen=True)
class LayerReport:
    """One quantized layer.

    Attributes:
        name: the layer.
        scheme: its scheme.
        in_features: K.
        out_features: N.
        bytes_before: bytes of the layer's parameters.
        bytes_after: bytes of the quantized layer's buffers; shared buffers count in every layer that holds them.
        weight_error: ``‖W − Ŵ‖ / ‖W‖`` (Frobenius).
        output_sqnr_db: signal over quantization noise of its output on calibration tokens, or None without calibration.
        tied_to: the layer whose quantized weight it shares, or None.
    """

    name: str
    scheme: str
    in_features: int
    out_features: int
    bytes_before: int
    bytes_after: int
    weight_error: float
    output_sqnr_db: float | None = None
    tied_to: str | None = None

    @property
    def bits_per_weight(self) -> float:
        """Bits of all that the layer keeps, over N times K."""
        return 8 * self.bytes_after / (self.out_features * self.in_features)


@dataclass(frozen=True)
class Report:
    """The changes that `qcut.quantize` made to a model.

    Attributes:
        layers: the quantized layers, in model order.
        skipped: linear layers left in floating point, with the reason.
        bytes_before: bytes of the float model's parameters and buffers, shared tensors once.
        bytes_after: bytes of the quantized model's parameters and buffers, shared tensors once.
        smoothing: the smoothing that was applied, or None.
    """

    layers: tuple[LayerReport, ...]
    skipped: dict[str, str]
    bytes_before: int
    bytes_after: int
    smoothing: Smoothing | None = field(default=None, repr=False)

    @property
    def schemes(self) -> dict[str, str]:
        """Scheme by layer name."""
        return {layer.name: layer.scheme for layer in self.layers}

    def to_json(self) -> dict[str, Any]:
        """Plain data, without the smoothing's vectors."""
        return {
            "layers": [asdict(layer) for layer in self.layers],
            "skipped": self.skipped,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "smoothed": [m.norm for m in self.smoothing.migrations] if self.smoothing else [],
        }

    def __str__(self) -> str:
        width = max(len(layer.name) for layer in self.layers)
        wide = max(11, *(len(layer.scheme) for layer in self.layers))
        head = f"{'layer':<{width}}  {'scheme':<{wide}}  {'N x K':>13}  {'KB':>15}"
        lines = [f"{head}  {'bits/weight':>11}  {'weight err':>10}  output SQNR"]
        for r in self.layers:
            size = f"{r.bytes_before / 1e3:,.0f} -> {r.bytes_after / 1e3:,.0f}"
            sqnr = "" if r.output_sqnr_db is None else f"{r.output_sqnr_db:.1f} dB"
            tied = f"  tied to {r.tied_to}" if r.tied_to else ""
            shape = f"{r.out_features} x {r.in_features}"
            lines.append(
                f"{r.name:<{width}}  {r.scheme:<{wide}}  {shape:>13}  {size:>15}  {r.bits_per_weight:>11.2f}  "
                f"{r.weight_error:>10.3%}  {sqnr}{tied}"
            )
        lines += [f"{name:<{width}}  left as it is: {reason}" for name, reason in self.skipped.items()]
        ratio = self.bytes_before / max(1, self.bytes_after)
        lines.append(
            f"{len(self.layers)} layers quantized; model {self.bytes_before / 1e6:.2f} -> "
            f"{self.bytes_after / 1e6:.2f} MB ({ratio:.2f}x smaller)"
        )
        return "\n".join(lines)
