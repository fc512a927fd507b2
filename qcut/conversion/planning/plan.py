"""A plan as data: which scheme each layer gets, and the measurements behind it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qcut.common import schema
from qcut.common.files import write_json
from qcut.common.schema import read_json
from qcut.errors import ConfigError, PlanError
from qcut.schemes import StaticRange, parse_scheme

_FORMAT, _VERSION = "qcut-plan", 1
_NUMBER = schema.nothing_or(schema.number())
_BY_SCHEME = schema.table(_NUMBER)
_RANGE = schema.record({"lo": schema.number(most=0.0), "hi": schema.number(least=0.0)})
_LAYER = schema.record(
    {"scheme": schema.text(), "in_features": schema.integer(1), "out_features": schema.integer(1)},
    {
        "static_range": (schema.nothing_or(_RANGE), None),
        "static_ranges": (schema.items(_RANGE), []),
        "range_method": (schema.text(), ""),
        "sensitivity": (_BY_SCHEME, {}),
        "cost": (_BY_SCHEME, {}),
        "reason": (schema.text(most=1 << 16), ""),
    },
)
_POINT = schema.record({"scheme": schema.text(), "cost": schema.number(0.0), "loss": _NUMBER})
_SCHEMA = schema.record(
    {
        "format": schema.anything(),
        "version": schema.anything(),
        "layers": schema.table(_LAYER),
        "budget": _NUMBER,
        "metric": schema.text(),
        "objective": schema.text(),
        "predicted": _NUMBER,
        "measured": schema.number(),
        "start": _NUMBER,
    },
    {
        "tokens": (schema.integer(0, (1 << 62) - 1), 0),
        "limit": (_NUMBER, None),
        "gap": (_NUMBER, None),
        "curve": (schema.items(_POINT), []),
        "uniform": (schema.items(_POINT), []),
        "siblings": (schema.items(schema.items(schema.text())), []),
        "fitted": (schema.boolean(), False),
    },
)


@dataclass
class LayerPlan:
    """One layer of a plan, or one projection of all experts of a mixture (``mlp.experts.up``).

    Attributes:
        scheme: ``w8a8_static``, ``w8a8``, ``w8a8_rotated``, ``w8a16``, ``fp16`` or a codebook's name. Users may edit
            this field.
        in_features: K.
        out_features: N; of experts, that of all together.
        static_range: the range with which ``w8a8_static`` quantizes the input, for every layer that could use it.
        range_method: the method that derived ``static_range``.
        sensitivity: by scheme, the loss with only this layer quantized, in the unit of `Plan.metric`.
        cost: by scheme, the cost in the unit of `Plan.objective`: µs or bytes.
        reason: why the layer does not have the cheapest scheme; empty if it has.
        static_ranges: of experts, the range of each.
    """

    scheme: str
    in_features: int
    out_features: int
    static_range: StaticRange | None = None
    range_method: str = ""
    sensitivity: dict[str, float] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    static_ranges: list[StaticRange] = field(default_factory=list)


@dataclass(frozen=True)
class Point:
    """A cost and its loss.

    Attributes:
        scheme: that of all layers; empty if layers have their own.
        cost: in the unit of `Plan.objective`.
        loss: in the unit of `Plan.metric`.
    """

    scheme: str
    cost: float
    loss: float


@dataclass
class Plan:
    """Schemes for a model's layers, to read, edit, save and pass to `qcut.quantize`.

    Attributes:
        layers: `LayerPlan` by layer name. Layers without an entry stay as they are.
        budget: the loss that was allowed, in the unit of `metric`; None if the cost was limited.
        metric: the meaning of the loss; see `qcut.plan`.
        objective: the meaning of the costs: ``stored`` (bytes in a file), ``step`` (µs of a step of few tokens),
            ``time`` (µs), ``memory`` (bytes) or ``custom``; see `qcut.conversion.planning.costs`.
        predicted: what the layers' sensitivities add up to; None if they have another unit than the metric.
        measured: the loss of the whole plan, measured on the model.
        start: the measured loss with every layer on its cheapest scheme.
        tokens: number of tokens that the losses were measured on.
        limit: the cost that was allowed; None if the loss was limited.
        gap: no choice within the limit is predicted to lose less than ``predicted - gap``; None if the loss was
            limited.
        curve: `Point` by rising cost, the predictions of choices that are best for their cost; empty if
            sensitivities have another unit than the metric.
        uniform: `Point` of one scheme for all layers, measured.
        siblings: sets of layers that the engine computes by one product if they have one scheme, and by several if not.
        fitted: whether codebooks were fitted to second moments, as they should be then when the plan is carried out.
    """

    layers: dict[str, LayerPlan]
    budget: float | None
    metric: str
    objective: str
    predicted: float | None
    measured: float
    start: float
    tokens: int = 0
    limit: float | None = None
    gap: float | None = None
    curve: list[Point] = field(default_factory=list)
    uniform: list[Point] = field(default_factory=list)
    siblings: list[list[str]] = field(default_factory=list)
    fitted: bool = False

    @property
    def schemes(self) -> dict[str, str]:
        """Scheme by layer name."""
        return {name: layer.scheme for name, layer in self.layers.items()}

    @property
    def counts(self) -> dict[str, int]:
        """How many layers each scheme has."""
        return dict(Counter(layer.scheme for layer in self.layers.values()))

    @property
    def off_int8(self) -> list[str]:
        """Layers with activations in floating point: ``w8a16``, ``fp16``, and codebooks without ``int8``."""
        return [name for name, layer in self.layers.items() if not parse_scheme(layer.scheme).int8_products]

    @property
    def cost(self) -> float:
        """Sum of the layers' costs; 0 if costs are not known."""
        return sum(layer.cost.get(layer.scheme, 0.0) for layer in self.layers.values())

    @property
    def weights(self) -> int:
        """N times K of all layers together."""
        return sum(layer.out_features * layer.in_features for layer in self.layers.values())

    def bits_of(self, cost: float) -> float:
        """Bits a weight that a cost in bytes is: indices or integers, norms, and scales of rows, all counted."""
        return 8 * cost / max(1, self.weights)

    @property
    def parted(self) -> list[list[str]]:
        """The sets of `siblings` with layers of several schemes: the engine computes them by several products.

        Layers without an entry have no scheme.
        """
        schemes = self.schemes
        return [names for names in self.siblings if len({schemes.get(name) for name in names}) > 1]

    def _summary(self) -> list[str]:
        """The lines about the plan as a whole."""
        predicted = "" if self.predicted is None else f"predicted {self.predicted:.3%}, "
        budget = "" if self.budget is None else f"budget {self.budget:.3%}, "
        counts = ", ".join(f"{n} {scheme}" for scheme, n in sorted(self.counts.items()))
        lines = [
            f"Plan: {len(self.layers)} layers ({counts}), {len(self.off_int8)} off the int8 path",
            f"  loss ({self.metric}, {self.tokens} tokens): {budget}measured {self.measured:.3%}, "
            f"{predicted}all on the cheapest scheme {self.start:.3%}",
            f"  cost ({self.objective}): {self.cost_text(self.cost)}"
            + ("" if self.limit is None else f"; allowed: {self.cost_text(self.limit)}"),
        ]
        if self.gap is not None and self.predicted is not None:
            lines.append(f"  least predicted loss within this cost: {self.predicted - self.gap:.3%}")
        for point in self.uniform:
            lines.append(f"  all {point.scheme}: {self.cost_text(point.cost)}, measured {point.loss:.3%}")
        if self.objective == "stored":
            lines.append("  bits count indices or integers, norms, and scales of rows")
        if self.parted:
            lines.append(
                f"  {len(self.parted)} sets of layers have several schemes; the engine computes such a set by several "
                f"products in place of one: {', '.join(self.parted[0])}"
            )
        if self.fitted:
            lines.append("  made for fitted codebooks: quantize with second_moments=, or --fit")
        return lines

    def __str__(self) -> str:
        lines = self._summary()
        moved = {name: layer for name, layer in self.layers.items() if layer.reason}
        if moved:
            width = max(len(name) for name in moved)
            wide = max(11, *(len(layer.scheme) for layer in moved.values()))
            lines += [f"  {name:<{width}}  {layer.scheme:<{wide}}  {layer.reason}" for name, layer in moved.items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from qcut.common.html import html_table

        rows = (
            (
                name,
                layer.scheme,
                f"{layer.out_features} x {layer.in_features}",
                f"{layer.sensitivity[layer.scheme]:.3%}" if layer.scheme in layer.sensitivity else "",
                layer.reason,
            )
            for name, layer in self.layers.items()
        )
        return html_table("\n".join(self._summary()), ("layer", "scheme", "N x K", "sensitivity", "reason"), rows)

    def cost_text(self, cost: float) -> str:
        """A cost with its unit."""
        if self.objective == "stored":
            return f"{self.bits_of(cost):.3f} bits a weight"
        unit = {"time": "us", "step": "us a step (estimated)", "memory": "bytes"}.get(self.objective, "")
        return f"{cost:,.{1 if self.objective == 'step' else 0}f} {unit}".rstrip()

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` reads it back."""
        head = {"format": _FORMAT, "version": _VERSION}
        fields = {k: v for k, v in asdict(self).items() if k != "layers"}
        return head | fields | {"layers": {name: asdict(layer) for name, layer in self.layers.items()}}

    @classmethod
    def from_json(cls, data: dict[str, Any], source: str = "plan") -> Plan:
        """Read what `to_json` wrote, a user's edits included.

        Raises:
            PlanError: not a plan; a value of another type, or out of range; or a layer with a scheme that does not
                exist, or that needs a static range and has none.
        """
        if data.get("format") != _FORMAT or data.get("version") != _VERSION:
            raise PlanError(
                f"{source}: found format {data.get('format')!r} version {data.get('version')!r}; "
                f"{_FORMAT!r} version {_VERSION} is needed"
            )
        data = schema.conform(data, _SCHEMA, source, PlanError)
        rest = {key: value for key, value in data.items() if key not in ("format", "version", "layers")}
        if rest["budget"] is None and rest["limit"] is None:
            raise PlanError(f"{source}: 'budget' and 'limit' are both null; one of them has to be a number")
        rest["start"] = math.inf if rest["start"] is None else rest["start"]
        for key in ("curve", "uniform"):
            rest[key] = [Point(**{**p, "loss": math.inf if p["loss"] is None else p["loss"]}) for p in rest[key]]
        plan = cls(layers={name: _layer(layer) for name, layer in data["layers"].items()}, **rest)
        try:
            plan.check()
        except PlanError as exc:
            raise PlanError(f"{source}: {exc}") from exc
        return plan

    def check(self) -> None:
        """Raise `PlanError` naming the layer with a scheme that is unknown or lacks its range."""
        for name, layer in self.layers.items():
            try:
                scheme = parse_scheme(layer.scheme)
            except ConfigError as exc:
                raise PlanError(f"layer {name!r}: {exc}") from exc
            if scheme.needs_range and layer.static_range is None and not layer.static_ranges:
                raise PlanError(
                    f"layer {name!r}: scheme {scheme.name!r} needs a static_range, and the plan has none for it"
                )

    def save(self, path: str | Path) -> None:
        """Write one JSON file, under a temporary name first.

        Raises:
            PlanError: the file cannot be written.
        """
        try:
            write_json(Path(path), _finite(self.to_json()))
        except (OSError, ValueError, TypeError) as exc:
            raise PlanError(f"{path}: cannot be written: {exc}") from exc

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what `save` wrote, a user's edits included.

        Raises:
            PlanError: the file is missing, not a plan, or `check` fails.
        """
        return cls.from_json(read_json(Path(path), PlanError), str(path))


def _layer(data: dict[str, Any]) -> LayerPlan:
    given = data["static_range"]
    measured = {
        key: {scheme: math.inf if v is None else v for scheme, v in data[key].items()}
        for key in ("sensitivity", "cost")
    }
    ranges = {
        "static_range": None if given is None else StaticRange.from_json(given),
        "static_ranges": [StaticRange.from_json(one) for one in data["static_ranges"]],
    }
    return LayerPlan(**{**data, **ranges, **measured})


def _finite(data: Any) -> Any:
    """Replace infinities, which JSON lacks, by null: the sensitivity of a scheme that breaks the model."""
    if isinstance(data, dict):
        return {k: _finite(v) for k, v in data.items()}
    if isinstance(data, list):
        return [_finite(v) for v in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
