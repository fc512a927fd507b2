"""A plan as data: which scheme each layer gets, and the measurements behind it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from qcut.config import StaticRange, parse_scheme
from qcut.errors import ConfigError, PlanError
from qcut.storage import schema
from qcut.storage.files import write_json
from qcut.storage.reading import read_json

_FORMAT, _VERSION = "qcut-plan", 1
_NUMBER = schema.nothing_or(schema.number())
_BY_SCHEME = schema.table(_NUMBER)
_RANGE = schema.record({"lo": schema.number(most=0.0), "hi": schema.number(least=0.0)})
_LAYER = schema.record(
    {"scheme": schema.text(), "in_features": schema.integer(1), "out_features": schema.integer(1)},
    {
        "static_range": (schema.nothing_or(_RANGE), None),
        "range_method": (schema.text(), ""),
        "sensitivity": (_BY_SCHEME, {}),
        "cost": (_BY_SCHEME, {}),
        "reason": (schema.text(most=1 << 16), ""),
    },
)
_SCHEMA = schema.record(
    {
        "format": schema.anything(),
        "version": schema.anything(),
        "layers": schema.table(_LAYER),
        "budget": schema.number(),
        "metric": schema.text(),
        "objective": schema.text(),
        "predicted": _NUMBER,
        "measured": schema.number(),
        "start": _NUMBER,
    },
    {"tokens": (schema.integer(0, (1 << 62) - 1), 0)},
)


@dataclass
class LayerPlan:
    """One layer of a plan.

    Attributes:
        scheme: ``w8a8_static``, ``w8a8``, ``w8a16``, ``fp16`` or a codebook's name. Users may edit this field.
        in_features: K.
        out_features: N.
        static_range: the range with which ``w8a8_static`` quantizes the input, for every layer that could use it.
        range_method: the method that derived ``static_range``.
        sensitivity: by scheme, the loss with only this layer quantized, in the unit of `Plan.metric`.
        cost: by scheme, the cost in the unit of `Plan.objective`: µs or bytes.
        reason: why the layer does not have the cheapest scheme; empty where it has.
    """

    scheme: str
    in_features: int
    out_features: int
    static_range: StaticRange | None = None
    range_method: str = ""
    sensitivity: dict[str, float] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    reason: str = ""


@dataclass
class Plan:
    """Schemes for a model's layers, to read, edit, save and pass to `qcut.quantize`.

    Attributes:
        layers: `LayerPlan` by layer name. Layers without an entry stay as they are.
        budget: the loss that was allowed, in the unit of `metric`.
        metric: the meaning of the loss; see `qcut.plan`.
        objective: the meaning of the costs: ``time``, ``memory`` or ``custom``.
        predicted: sum of the layers' sensitivities; None where sensitivities have another unit than the metric.
        measured: the loss of the whole plan, measured on the model.
        start: the measured loss with every layer on its cheapest scheme.
        tokens: number of tokens that the losses were measured on.
    """

    layers: dict[str, LayerPlan]
    budget: float
    metric: str
    objective: str
    predicted: float | None
    measured: float
    start: float
    tokens: int = 0

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
        """Layers whose activations stay in floating point: ``w8a16``, ``fp16``, and codebooks without ``int8``."""
        return [name for name, layer in self.layers.items() if not parse_scheme(layer.scheme).int8_products]

    @property
    def cost(self) -> float:
        """Sum of the layers' costs; 0 where costs are not known."""
        return sum(layer.cost.get(layer.scheme, 0.0) for layer in self.layers.values())

    def __str__(self) -> str:
        unit = {"time": "us", "memory": "bytes"}.get(self.objective, "")
        predicted = "" if self.predicted is None else f"predicted {self.predicted:.3%}, "
        counts = ", ".join(f"{n} {scheme}" for scheme, n in sorted(self.counts.items()))
        lines = [
            f"Plan: {len(self.layers)} layers ({counts}), {len(self.off_int8)} off the int8 path",
            f"  loss ({self.metric}, {self.tokens} tokens): budget {self.budget:.3%}, measured {self.measured:.3%}, "
            f"{predicted}all on the cheapest scheme {self.start:.3%}",
            f"  cost ({self.objective}): {self.cost:,.0f} {unit}".rstrip(),
        ]
        moved = {name: layer for name, layer in self.layers.items() if layer.reason}
        if moved:
            width = max(len(name) for name in moved)
            wide = max(11, *(len(layer.scheme) for layer in moved.values()))
            lines += [f"  {name:<{width}}  {layer.scheme:<{wide}}  {layer.reason}" for name, layer in moved.items()]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` reads it back."""
        head = {"format": _FORMAT, "version": _VERSION}
        fields = {k: v for k, v in asdict(self).items() if k != "layers"}
        return head | fields | {"layers": {name: asdict(layer) for name, layer in self.layers.items()}}

    @classmethod
    def from_json(cls, data: dict[str, Any], source: str = "plan") -> Plan:
        """Read what `to_json` wrote, a user's edits included.

        Raises:
            PlanError: not a plan; a value of another type, or out of range; or a layer whose scheme does not exist, or
                that needs a static range and has none.
        """
        if data.get("format") != _FORMAT or data.get("version") != _VERSION:
            raise PlanError(
                f"{source}: found format {data.get('format')!r} version {data.get('version')!r}; "
                f"{_FORMAT!r} version {_VERSION} is needed"
            )
        data = schema.conform(data, _SCHEMA, source, PlanError)
        rest = {key: value for key, value in data.items() if key not in ("format", "version", "layers")}
        rest["start"] = math.inf if rest["start"] is None else rest["start"]
        plan = cls(layers={name: _layer(layer) for name, layer in data["layers"].items()}, **rest)
        try:
            plan.check()
        except PlanError as exc:
            raise PlanError(f"{source}: {exc}") from exc
        return plan

    def check(self) -> None:
        """Raise `PlanError` naming the layer whose scheme is unknown or lacks its range."""
        for name, layer in self.layers.items():
            try:
                scheme = parse_scheme(layer.scheme)
            except ConfigError as exc:
                raise PlanError(f"layer {name!r}: {exc}") from exc
            if scheme.needs_range and layer.static_range is None:
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
    return LayerPlan(**{**data, "static_range": None if given is None else StaticRange.from_json(given), **measured})


def _finite(data: Any) -> Any:
    """Replace infinities, which JSON lacks, by null: the sensitivity of a scheme that breaks the model."""
    if isinstance(data, dict):
        return {k: _finite(v) for k, v in data.items()}
    return None if isinstance(data, float) and not math.isfinite(data) else data
