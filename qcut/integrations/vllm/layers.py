"""Which scheme each of vLLM's layers has: by one scheme or a plan, by qcut's checkpoint, or by another library's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from qcut.checkpoints.description import description_of
from qcut.checkpoints.formats.compressed_tensors.reader import CompressedTensors
from qcut.conversion.fitting import fitting_scheme
from qcut.conversion.planning.plan import LayerPlan, Plan
from qcut.errors import PlanError, UnsupportedError
from qcut.integrations.transformers.config import QcutConfig
from qcut.integrations.vllm.linear import OnlineMethod, QcutMethod, StoredMethod
from qcut.models.selection import DEFAULT_SKIP, matches
from qcut.schemes import Scheme, StaticRange, parse_scheme, scheme_from_json

WHERE = "quantization_config"
LOG = logging.getLogger("vllm.qcut")  # vLLM shows the messages of its own loggers


class Layers:
    """The layers of a configuration.

    Args:
        config: of compressed-tensors, or what a `QcutConfig` writes.

    Raises:
        CheckpointError, ConfigError, UnsupportedError: what cannot be read, or is not served (named).
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._foreign: CompressedTensors | None = None
        self._plan: dict[str, LayerPlan] = {}
        self._named: dict[str, Scheme] | None = None  # by layer, of a checkpoint or a plan
        if config.get("quant_method") == "compressed-tensors":
            self._foreign = CompressedTensors(dict(config), WHERE)
            return
        self._asked = asked = QcutConfig.from_dict(config)
        own: dict[str, Any] = {"embeddings": asked.embeddings and asked.embeddings.name, "foreign": asked.foreign}
        if asked.stored is not None:
            saved = description_of(asked.stored, WHERE)
            own = {"embeddings": saved.embeddings, "tied": saved.tied}
            self._named = {name: scheme_from_json(spec["scheme"]) for name, spec in saved.layers.items()}
        elif isinstance(asked.scheme, Plan):
            self._plan = dict(asked.scheme.layers)
            self._named = {name: parse_scheme(entry.scheme) for name, entry in self._plan.items()}
        if refused := next((f"{key} is {value}" for key, value in own.items() if value), None):
            raise UnsupportedError(f"{WHERE}: {refused}; allowed: none. vLLM has its own tables, and reads checkpoints")
        skip = asked.modules_to_not_convert
        self._skip = DEFAULT_SKIP if skip is None and self._named is None else tuple(skip or ())

    def method(self, layer: Any, name: str, parts: Sequence[str]) -> QcutMethod | None:
        """How one of vLLM's linear layers is quantized, or None where it stays in float.

        Args:
            layer: with its sizes.
            name: vLLM's name of it.
            parts: the checkpoint's names of the layers that it holds.

        Raises:
            UnsupportedError: the parts have different schemes or static ranges.
            PlanError: the plan is of another model.
        """
        schemes = [self._scheme(part) for part in parts]
        scheme = schemes[0]
        if any(other != scheme for other in schemes):
            listed = ", ".join(f"{p} {'float' if s is None else s.name}" for p, s in zip(parts, schemes, strict=True))
            raise UnsupportedError(f"layer {name!r}: vLLM computes {listed} as one; allowed: one scheme for all")
        if scheme is None:
            return None
        if self._foreign is not None:
            return StoredMethod(scheme, name, self._foreign, parts[0])
        if self._asked.stored is not None:
            return StoredMethod(scheme, name)
        if self._plan:
            return OnlineMethod(scheme, name, self._static_range(layer, name, parts) if scheme.needs_range else None)
        meta = nn.Linear(layer.input_size, layer.output_size, bias=False, device="meta", dtype=layer.params_dtype)
        fit = fitting_scheme(meta, scheme, self._asked.allow_growth)
        if fit.reason:
            LOG.info("%s: %s", name, fit.reason)
        return None if fit.scheme is None else OnlineMethod(fit.scheme, name)

    def check_float(self, name: str) -> None:
        """Raise `UnsupportedError` where a module that vLLM computes itself is quantized, or a part of it."""
        for quantized in self._named or ():
            if quantized == name or quantized.startswith(f"{name}."):
                raise UnsupportedError(f"layer {quantized!r} is quantized; vLLM computes {name!r} itself, in float")

    def rename(self, new: Callable[[str], str]) -> None:
        """Take vLLM's names in place of the checkpoint's; patterns stay."""
        self._plan = {new(name): entry for name, entry in self._plan.items()}
        if self._named is not None:
            self._named = {new(name): scheme for name, scheme in self._named.items()}

    def _scheme(self, name: str) -> Scheme | None:
        if self._foreign is not None:
            return self._foreign.row_scheme(name)
        include = self._asked.include
        if matches(name, self._skip) or (include is not None and not matches(name, include)):
            return None
        scheme: Scheme | None = self._asked.scheme if self._named is None else self._named.get(name)
        return None if scheme is None or scheme.is_float else scheme

    def _static_range(self, layer: Any, name: str, parts: Sequence[str]) -> StaticRange | None:
        entries = [self._plan[part] for part in parts]
        if wrong := [entry.in_features for entry in entries if entry.in_features != layer.input_size]:
            raise PlanError(f"layer {name!r}: the plan has {wrong[0]} input channels, the model {layer.input_size}")
        ranges = {entry.static_range for entry in entries}
        if len(ranges) > 1:
            raise UnsupportedError(f"layer {name!r}: {', '.join(parts)} have different static ranges, and one input")
        return ranges.pop()
