"""The report of `qcut.quantize`, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from qcut.conversion.inventory import ALREADY, FEW_TOKENS, QUANTIZED, Coverage

if TYPE_CHECKING:
    from qcut.conversion.smooth import Smoothing
    from qcut.layers.experts.experts import Experts
    from qcut.layers.experts.linear_stack import LinearStack
    from qcut.layers.experts.opening import Opened


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
        tied_to: the layer that shares its quantized weight with this one, or None.
        note: why its scheme is not the requested one; empty if it is.
        weight_norm: ``‖W‖``.
        experts: of a projection of experts, their number; N counts the rows of all. 0 for a layer by itself.
        few_tokens: of these experts, how many saw fewer tokens in calibration than `FEW_TOKENS`; 1 for a layer by
            itself that saw none, of an expert that is a module.
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
    note: str = ""
    weight_norm: float = 0.0
    experts: int = 0
    few_tokens: int = 0

    @property
    def bits_per_weight(self) -> float:
        """Bits of all that the layer keeps, over N times K."""
        return 8 * self.bytes_after / (self.out_features * self.in_features)


@dataclass(frozen=True)
class Report:
    """The changes that `qcut.quantize` made to a model.

    Attributes:
        layers: the quantized layers, in model order.
        skipped: linear layers left in floating point, in model order, and tables of ``embeddings``, with the reason.
        bytes_before: bytes of the float model's parameters and buffers, shared tensors once.
        bytes_after: bytes of the quantized model's parameters and buffers, shared tensors once.
        parameters: numbers of parameters of the float model by kind (`qcut.conversion.inventory.KINDS`): those that
            were quantized, those that had been before, and by what they are all that stay in floating point.
        already: layers that were quantized before.
        smoothing: the smoothing that was applied, or None.
        verified: calls of layers on which the model was compared with the float one; 0 without verification.
        held: layers that were compared with their float weights; see `qcut.conversion.verification`.
        unseen: why the whole model was not compared with the float one although requested; else empty.
        coverage: how much of what a user expects to be quantized is; None if that was not counted.
    """

    layers: tuple[LayerReport, ...]
    skipped: dict[str, str]
    bytes_before: int
    bytes_after: int
    parameters: dict[str, int] = field(default_factory=dict)
    already: tuple[str, ...] = ()
    smoothing: Smoothing | None = field(default=None, repr=False)
    verified: int = 0
    held: int = 0
    unseen: str = ""
    coverage: Coverage | None = None

    @property
    def schemes(self) -> dict[str, str]:
        """Scheme by layer name."""
        return {layer.name: layer.scheme for layer in self.layers}

    @property
    def percent(self) -> dict[str, float]:
        """Of all parameters, the per cent of each kind."""
        total = max(1, sum(self.parameters.values()))
        return {kind: 100 * count / total for kind, count in self.parameters.items()}

    @property
    def percent_experts(self) -> float:
        """Of all parameters, the per cent that are weights of experts and were quantized."""
        weights = sum(one.out_features * one.in_features for one in self.layers if one.experts)
        return 100 * weights / max(1, sum(self.parameters.values()))

    def to_json(self) -> dict[str, Any]:
        """Plain data, without the smoothing's vectors."""
        return {
            "layers": [asdict(layer) for layer in self.layers],
            "skipped": self.skipped,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "parameters": self.parameters,
            "already": list(self.already),
            "verified": self.verified,
            "held": self.held,
            "unseen": self.unseen,
            "coverage": None if self.coverage is None else self.coverage.share,
            "smoothed": [m.norm for m in self.smoothing.migrations] if self.smoothing else [],
        }

    def __str__(self) -> str:
        width = max(len(layer.name) for layer in self.layers)
        wide = max(11, *(len(layer.scheme) for layer in self.layers))
        lines = []
        for name, scheme, shape, size, bits, error, sqnr, note in (_HEAD, *map(_cells, self.layers)):
            first = f"{name:<{width}}  {scheme:<{wide}}  {shape:>13}  {size:>15}"
            lines.append(f"{first}  {bits:>11}  {error:>10}  {sqnr}  {note}".rstrip())
        return "\n".join([*lines, *self._summary()])

    def _repr_html_(self) -> str:
        from qcut.common.html import html_table

        return html_table("\n".join(self._summary()), _HEAD, map(_cells, self.layers))

    def _summary(self) -> list[str]:
        """The lines about the model as a whole."""
        lines = [f"left in float: {_some(names)}: {reason}" for reason, names in self._left().items()]
        if self.already:
            lines.append(f"quantized before, left as they are: {_some(self.already)}")
        ratio = self.bytes_before / max(1, self.bytes_after)
        lines.append(
            f"{len(self.layers)} layers quantized; model {self.bytes_before / 1e6:.2f} -> "
            f"{self.bytes_after / 1e6:.2f} MB ({ratio:.2f}x smaller)"
        )
        if self.verified:
            lines.append(f"verified: {self.verified} calls of layers on a batch, and the output, are the float model's")
        elif self.held:
            lines.append(
                f"verified: {self.held} layers against their float weights; the model as a whole was not: {self.unseen}"
            )
        if self.parameters:
            lines.append(self._shares())
        return lines

    def _left(self) -> dict[str, list[str]]:
        """Names of the layers that stay, by reason."""
        left: dict[str, list[str]] = {}
        for name, reason in self.skipped.items():
            left.setdefault(reason, []).append(name)
        return left

    def _shares(self) -> str:
        """What was quantized, and what stays in float, in per cent of the parameters."""
        percent = self.percent
        done = [f"{percent[kind]:.1f} % {kind}" for kind in (QUANTIZED, ALREADY) if kind in percent]
        if self.percent_experts:
            done[0] += f" (experts {self.percent_experts:.1f} %)"
        rest = sorted((share, kind) for kind, share in percent.items() if kind not in (QUANTIZED, ALREADY))
        stay = [f"{share:.1f} % {kind}" for share, kind in reversed(rest)]
        return f"parameters: {', '.join(done)}" + (f"; in float: {', '.join(stay)}" if stay else "")


_HEAD = ("layer", "scheme", "N x K", "KB", "bits/weight", "weight err", "output SQNR", "")


def _cells(layer: LayerReport) -> tuple[str, ...]:
    """A row of the report's table, under `_HEAD`."""
    notes = [f"tied to {layer.tied_to}"] if layer.tied_to else []
    if layer.note:
        notes.append(layer.note)
    if layer.few_tokens and not layer.experts:
        notes.append("saw no token in calibration")
    elif layer.few_tokens:
        notes.append(f"{layer.few_tokens} of {layer.experts} experts saw fewer than {FEW_TOKENS} tokens")
    return (
        layer.name,
        layer.scheme,
        f"{layer.out_features} x {layer.in_features}",
        f"{layer.bytes_before / 1e3:,.0f} -> {layer.bytes_after / 1e3:,.0f}",
        f"{layer.bits_per_weight:.2f}",
        f"{layer.weight_error:.3%}",
        "" if layer.output_sqnr_db is None else f"{layer.output_sqnr_db:.1f} dB",
        "  ".join(notes),
    )


def stack_reports(
    reports: Iterable[LayerReport], mixtures: Opened, experts: Mapping[str, Experts], *seen: Any
) -> list[LayerReport]:
    """Reports of layers, with one for all experts of a projection, in the order of the first ones.

    Errors are those of the whole projection; the signal over noise is that of the expert with the least.

    Args:
        reports: of layers, experts' among them.
        mixtures: the model's experts as they were open.
        experts: the quantized ones.
        *seen: the calibration and the second moments, with ``tokens`` by layer; or None.
    """
    tokens: dict[str, int] = {}
    for one in seen:
        tokens |= getattr(one, "tokens", None) or {}
    found: list[LayerReport] = []
    of_stack: dict[str, list[LayerReport]] = {}
    for one in reports:
        stack = mixtures.stack_of(one.name)
        if stack is None:
            found.append(replace(one, few_tokens=int(tokens.get(one.name) == 0)))
        elif stack in of_stack:
            of_stack[stack].append(one)
        else:
            of_stack[stack] = [one]
            found.append(one)
    return [_whole(of_stack, mixtures.stack_of(one.name), experts, tokens) or one for one in found]


def _whole(
    of_stack: Mapping[str, list[LayerReport]],
    stack: str | None,
    experts: Mapping[str, Experts],
    tokens: Mapping[str, int],
) -> LayerReport | None:
    if stack is None:
        return None
    members = of_stack[stack]
    name, _, projection = stack.rpartition(".")
    made: LinearStack = getattr(experts[name], projection)
    sqnr = [one.output_sqnr_db for one in members if one.output_sqnr_db is not None]
    squares = sum(one.weight_norm**2 for one in members)
    error = math.sqrt(sum((one.weight_error * one.weight_norm) ** 2 for one in members) / squares) if squares else 0.0
    return replace(
        members[0],
        name=stack,
        out_features=made.experts * made.out_features,
        bytes_before=sum(one.bytes_before for one in members),
        bytes_after=made.weight_bytes,
        weight_error=error,
        weight_norm=math.sqrt(squares),
        output_sqnr_db=min(sqnr, default=None),
        experts=made.experts,
        few_tokens=sum(tokens.get(one.name, FEW_TOKENS) < FEW_TOKENS for one in members),
        note=next((one.note for one in members if one.note), ""),
    )


def weight_error(weight: Tensor, dequantized: Tensor) -> float:
    """``‖W − Ŵ‖ / ‖W‖`` (Frobenius) of two matrices of one shape, on the device of ``dequantized``; 0 for zeros."""
    plain = weight.detach().to(dequantized.device, dtype=dequantized.dtype)
    norm = plain.double().norm().item()
    return (dequantized - plain).double().norm().item() / norm if norm else 0.0


def _some(names: Sequence[str]) -> str:
    """Up to four names, and the number of the others."""
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} others"
