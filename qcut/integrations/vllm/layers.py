"""Which scheme each of vLLM's layers has: by one scheme or a plan, by qcut's checkpoint, or by another library's."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import nn
from vllm.config import get_current_vllm_config

from qcut.checkpoints.description import description_of
from qcut.checkpoints.formats.compressed_tensors.reader import CompressedTensors
from qcut.checkpoints.marks import stored_marks_pattern
from qcut.conversion.fitting import fitting_scheme
from qcut.conversion.planning.plan import LayerPlan, Plan
from qcut.errors import CheckpointError, PlanError, UnsupportedError
from qcut.integrations.transformers.config import QcutConfig
from qcut.integrations.vllm.experts import PROJECTIONS, OnlineExperts, QcutMoEMethod, StoredExperts, gating_of
from qcut.integrations.vllm.linear import OnlineMethod, QcutMethod, StoredMethod
from qcut.models.selection import DEFAULT_SKIP, matches
from qcut.numerics.gating import Gating
from qcut.schemes import Scheme, StaticRange, parse_scheme, scheme_from_json

WHERE = "quantization_config"
LOG = logging.getLogger("vllm.qcut")  # vLLM shows the messages of its own loggers


class Layers:
    """The layers of a configuration.

    Args:
        config: of compressed-tensors, or what a `QcutConfig` writes.

    Attributes:
        marks: a regular expression for tensors of a checkpoint that hold nothing, or None.

    Raises:
        CheckpointError, ConfigError, UnsupportedError: what cannot be read, or is not served (named).
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._foreign: CompressedTensors | None = None
        self._plan: dict[str, LayerPlan] = {}
        self._named: dict[str, Scheme] | None = None  # by layer, of a checkpoint or a plan
        self._mixtures: dict[str, Any] = {}  # what a checkpoint says of experts
        self.marks: str | None = None
        if config.get("quant_method") == "compressed-tensors":
            self._foreign = CompressedTensors(dict(config), WHERE)
            return
        self._asked = asked = QcutConfig.from_dict(config)
        own: dict[str, Any] = {"embeddings": asked.embeddings and asked.embeddings.name, "foreign": asked.foreign}
        if asked.stored is not None:
            saved = description_of(asked.stored, WHERE)
            own = {"embeddings": saved.embeddings, "tied": saved.tied}
            self._named = {name: scheme_from_json(spec["scheme"]) for name, spec in saved.layers.items()}
            self._mixtures = dict(saved.experts)
            self.marks = stored_marks_pattern(saved.experts) if saved.experts else None
        elif isinstance(asked.scheme, Plan):
            self._plan = dict(asked.scheme.layers)
            self._named = {name: parse_scheme(entry.scheme) for name, entry in self._plan.items()}
        if refused := next((f"{key} is {value}" for key, value in own.items() if value), None):
            raise UnsupportedError(f"{WHERE}: {refused}; allowed: none. vLLM has its own tables, and reads checkpoints")
        skip = asked.modules_to_not_convert
        self._skip = DEFAULT_SKIP if skip is None and self._named is None else tuple(skip or ())

    def method(self, layer: Any, name: str, parts: Sequence[str]) -> QcutMethod | None:
        """How one of vLLM's linear layers is quantized, or None if it stays in float.

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
        if self._asked.include is None and _is_router(layer, name):
            LOG.info("%s stays in float: a router, or one output", name)
            return None
        meta = nn.Linear(layer.input_size, layer.output_size, bias=False, device="meta", dtype=layer.params_dtype)
        fit = fitting_scheme(meta, scheme, self._asked.allow_growth)
        if fit.reason:
            LOG.info("%s: %s", name, fit.reason)
        return None if fit.scheme is None else OnlineMethod(fit.scheme, name)

    def experts(self, layer: Any, name: str) -> QcutMoEMethod | None:
        """How the experts of one of vLLM's mixtures are quantized, or None if they stay in float.

        Args:
            layer: with its configuration.
            name: vLLM's name of it.

        Raises:
            UnsupportedError: one projection is quantized, or experts have different schemes; or see `QcutMoEMethod`.
            CheckpointError: the checkpoint is of another mixture.
        """
        if self._foreign is not None:
            return self._foreign_experts(self._foreign, layer, name)
        place = self._place(name)
        schemes = {part: self._scheme(f"{place}.{part}", of_experts=True) for part in PROJECTIONS}
        if None in schemes.values():
            if quantized := [f"{name}.{part}" for part, scheme in schemes.items() if scheme is not None]:
                raise UnsupportedError(f"layer {quantized[0]!r} is quantized; allowed: up and down of experts, or none")
            return None
        chosen = cast("dict[str, Scheme]", schemes)
        if self._asked.stored is not None:
            self._check_mixture(layer, name, self._mixtures.get(place, {}))
            return StoredExperts(layer, name, chosen)
        if needing := [scheme.name for scheme in chosen.values() if scheme.needs_range]:
            raise UnsupportedError(
                f"layer {name!r}: {needing[0]} needs a range for each expert; allowed: a folder of save_pretrained"
            )
        if self._plan:
            return OnlineExperts(layer, name, chosen)
        moe, gated = layer.moe_config, gating_of(layer, name).gated
        sizes = {"up": (moe.hidden_dim, moe.intermediate_size * (1 + gated))}
        sizes["down"] = moe.intermediate_size, moe.hidden_dim
        for part, (k, n) in sizes.items():
            meta = nn.Linear(k, n, bias=False, device="meta", dtype=layer.params_dtype)
            fit = fitting_scheme(meta, chosen[part], self._asked.allow_growth)
            if fit.reason:
                LOG.info("%s.%s: %s", name, part, fit.reason)
            if fit.scheme is None:
                return None
            chosen[part] = fit.scheme
        return OnlineExperts(layer, name, chosen)

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
        self._mixtures = {new(name): spec for name, spec in self._mixtures.items()}

    def _scheme(self, name: str, of_experts: bool = False) -> Scheme | None:
        if self._foreign is not None:
            return self._foreign.row_scheme(name)
        include, one, stacks = self._asked.include, f"{name}.0" if of_experts else name, (name,) if of_experts else ()
        if matches(one, self._skip, stacks) or (include is not None and not matches(one, include, stacks)):
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

    def _place(self, name: str) -> str:
        """The checkpoint's name of a mixture: it may call the block around it otherwise than vLLM does (Mixtral)."""
        block, _, last = name.rpartition(".")
        alike = re.compile(rf"({re.escape(block.rpartition('.')[0])}\.[A-Za-z_]\w*\.{re.escape(last)})\.up")
        found = [match[1] for stack in self._named or () if (match := alike.fullmatch(stack))]
        return found[0] if found and name not in found else name

    def _check_mixture(self, layer: Any, name: str, stored: Mapping[str, Any]) -> None:
        if not stored.get("pieces"):
            raise UnsupportedError(f"layer {name!r}: experts stored in stacks; allowed: a folder of save_pretrained")
        expected = stored["count"], Gating.from_json(stored["gating"], f"{WHERE}: layer {name!r}")
        if expected != (found := (layer.moe_config.num_logical_experts, gating_of(layer, name))):
            raise CheckpointError(f"layer {name!r}: vLLM has {found[0]} experts with {found[1]}; stored: {expected}")

    def _foreign_experts(self, foreign: CompressedTensors, layer: Any, name: str) -> QcutMoEMethod | None:
        last = [layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name]
        names = [f"{name}.{e}.{key}" for e in range(layer.moe_config.num_logical_experts) for key in last if key]
        schemes = {one: foreign.row_scheme(one) for one in names}
        if len(set(schemes.values())) > 1:
            other = next(one for one in names if schemes[one] != schemes[names[0]])
            raise UnsupportedError(f"layer {name!r}: {names[0]} and {other} differ; allowed: one scheme for all")
        scheme = schemes[names[0]]
        return None if scheme is None else StoredExperts(layer, name, dict.fromkeys(PROJECTIONS, scheme), foreign)


def _is_router(layer: Any, name: str) -> bool:
    """Whether `qcut.quantize` leaves a linear layer in float by default; see `qcut.models.selection`."""
    model = get_current_vllm_config().model_config
    experts = 0 if model is None else model.get_num_experts()
    return layer.output_size == 1 or (layer.output_size == experts and not name.endswith("_proj"))
