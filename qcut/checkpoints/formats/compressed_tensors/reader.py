"""The compressed-tensors format: which layers a configuration quantizes, and the layout of each group of them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from qcut.checkpoints.detect import imported
from qcut.checkpoints.formats.grid import Grid
from qcut.checkpoints.formats.parts import Parts, Stored, refuse_others
from qcut.common import schema
from qcut.errors import CheckpointError, UnsupportedError
from qcut.layers.linear import Linear
from qcut.schemes import W8A8, W8A16

LAYOUTS = {
    "int-quantized": "qcut.checkpoints.formats.compressed_tensors.integers.IntQuantized",
    "pack-quantized": "qcut.checkpoints.formats.compressed_tensors.integers.PackQuantized",
    "float-quantized": "qcut.checkpoints.formats.compressed_tensors.floats.FloatQuantized",
    "mxfp4-pack-quantized": "qcut.checkpoints.formats.compressed_tensors.floats.Mxfp4Packed",
    "nvfp4-pack-quantized": "qcut.checkpoints.formats.compressed_tensors.floats.Nvfp4Packed",
}
"""By ``format``, the `Layout` that reads it."""
_MOST_REPEATS, _MOST_PATTERNS, _MOST_GROUPS = 5, 1024, 1024
_REPEAT, _REPEATED_GROUP = re.compile(r"[*+{]"), re.compile(r"\)[*+{]")
_MOST_WAYS, _WAYS_OF_REPEAT = 1 << 19, 8.0
_PLAIN, _OPTIONAL = re.compile(r"\\.|\[\^?\]?[^\]]*\]", re.DOTALL), re.compile(r"(?<![(*+?}])\?")
_ARGS = schema.record(
    {"num_bits": schema.integer(1, 64)},
    {
        "type": (schema.text(), "int"),
        "symmetric": (schema.boolean(), True),
        "strategy": (schema.nothing_or(schema.text()), None),
        "group_size": (schema.nothing_or(schema.integer(-1)), None),
        "dynamic": (schema.anything(), False),
        "actorder": (schema.anything(), None),
        "block_structure": (schema.nothing_or(schema.items(schema.integer(1))), None),
    },
    more=True,
)
_GROUP = schema.record(
    {"targets": schema.items(schema.text()), "weights": schema.nothing_or(_ARGS)},
    {
        "input_activations": (schema.nothing_or(_ARGS), None),
        "output_activations": (schema.nothing_or(_ARGS), None),
        "format": (schema.nothing_or(schema.text()), None),
    },
    more=True,
)
_CONFIG = schema.record(
    {"config_groups": schema.table(_GROUP)},
    {
        "format": (schema.nothing_or(schema.text()), None),
        "quantization_status": (schema.nothing_or(schema.text()), "compressed"),
        "kv_cache_scheme": (schema.anything(), None),
        "sparsity_config": (schema.anything(), None),
        "transform_config": (schema.anything(), None),
        "ignore": (schema.nothing_or(schema.items(schema.text())), None),
    },
    more=True,
)


class _Targets:
    """Names of layers, patterns behind ``re:``, and classes of modules.

    Raises:
        UnsupportedError: more patterns than are read, or one that may take long.
        CheckpointError: no pattern.
    """

    def __init__(self, targets: Collection[str], where: str) -> None:
        patterns = [target for target in targets if target.startswith("re:")]
        if len(patterns) > _MOST_PATTERNS:
            raise UnsupportedError(f"{where}: found {len(patterns)} patterns; at most {_MOST_PATTERNS} are read")
        self._names = frozenset(targets)
        self._patterns = [_pattern(target, where) for target in patterns]

    def by_name(self, name: str) -> bool:
        """Whether a layer is named."""
        return name in self._names

    def by_pattern(self, name: str) -> bool:
        """Whether a pattern fits a layer."""
        return any(pattern.match(name) for pattern in self._patterns)

    def by_class(self, name: str) -> bool:
        """Whether linear layers are named, by their class."""
        return "Linear" in self._names


_STATUSES = ("compressed", "frozen")
"""Both hold the same tensors: writers of 2024 wrote frozen. Dtypes of the tensors are checked."""
_FIELDS = (
    "config_groups",
    "format",
    "global_compression_ratio",
    "ignore",
    "kv_cache_scheme",
    "quant_method",
    "quantization_status",
    "run_compressed",
    "sparsity_config",
    "transform_config",
    "version",
)
_GROUP_FIELDS = ("format", "input_activations", "output_activations", "targets", "weights")
_ARGS_FIELDS = (
    "actorder",
    "block_structure",
    "dynamic",
    "group_size",
    "num_bits",
    "observer",
    "observer_kwargs",
    "scale_dtype",
    "strategy",
    "symmetric",
    "type",
    "zp_dtype",
)


class Layout(Protocol):
    """How the tensors of a layer lie: one class for each ``format``, in `LAYOUTS`.

    A layout is made of the arguments of a group's weights and of its input activations, or None, as JSON holds them,
    and of the place of the group, for messages. Layouts raise the errors of `Format`.
    """

    def __init__(self, weights: dict[str, Any], tokens: dict[str, Any] | None, where: str) -> None: ...

    def check(self, parts: Parts) -> None:
        """See `Format.check`."""

    def layer(self, parts: Parts) -> Linear:
        """See `Format.layer`."""

    def codes(self, parts: Parts) -> Tensor:
        """See `IntegerFormat.codes`."""

    def grid(self, parts: Parts) -> Grid:
        """See `IntegerFormat.grid`."""

    def row_scheme(self, where: str) -> W8A8 | W8A16:
        """The scheme of int8 weights with a scale for each row, known before there are tensors.

        Raises:
            UnsupportedError: the layer is stored in another way; ``where`` names it.
        """


class _Group(NamedTuple):
    """The layers that one group of the configuration has as targets, and how they are stored."""

    targets: _Targets
    layout: Layout


class CompressedTensors:
    """Reads compressed-tensors layers; see `Format`."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        where = f"{where}: quantization_config"
        data = schema.conform(config, _CONFIG, where, CheckpointError)
        status = data["quantization_status"]
        refuse_others(config, _FIELDS, where)
        if status not in (None, *_STATUSES):
            raise UnsupportedError(f"{where}: quantization_status is {status!r}; {', '.join(_STATUSES)} are read")
        for key in ("kv_cache_scheme", "transform_config"):
            if data[key]:
                raise UnsupportedError(f"{where}: {key} is {str(data[key])[:80]}; none is served")
        sparsity = data["sparsity_config"] or {}
        if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
            raise UnsupportedError(f"{where}: sparsity_config is {str(sparsity)[:80]}; dense weights are read")
        self._where = where
        self._ignored = _Targets(data["ignore"] or (), f"{where}: ignore")
        self._groups = [
            _group(group, data["format"], f"{where}: config_groups.{label}")
            for label, group in data["config_groups"].items()
            if group["weights"] is not None
        ]
        if not self._groups:
            raise CheckpointError(f"{where}: no group has quantized weights")
        if len(self._groups) > _MOST_GROUPS:
            raise UnsupportedError(f"{where}: found {len(self._groups)} groups; at most {_MOST_GROUPS} are read")

    def quantized(self, tensors: Mapping[str, Stored]) -> bool:
        """See `Format.quantized`."""
        return "weight_packed" in tensors or "weight_scale" in tensors

    def check(self, parts: Parts) -> None:
        """See `Format.check`."""
        parts.require_bias()
        self._layout_of(parts).check(parts)

    def layer(self, parts: Parts) -> Linear:
        """See `Format.layer`."""
        return self._layout_of(parts).layer(parts)

    def codes(self, parts: Parts) -> Tensor:
        """See `IntegerFormat.codes`."""
        return self._layout_of(parts).codes(parts)

    def grid(self, parts: Parts) -> Grid:
        """See `IntegerFormat.grid`."""
        return self._layout_of(parts).grid(parts)

    def row_scheme(self, name: str) -> W8A8 | W8A16 | None:
        """The scheme of a linear layer's int8 weight with a scale for each row, known before there are tensors.

        Args:
            name: of the layer.

        Returns:
            None if the configuration leaves the layer in float.

        Raises:
            UnsupportedError: the layer is stored in another way.
        """
        if self._ignored.by_name(name) or self._ignored.by_pattern(name):
            return None
        layout = self._target(name)
        return None if layout is None else layout.row_scheme(f"{self._where}: layer {name!r}")

    def _target(self, *names: str) -> Layout | None:
        """The layout of a layer: targets that name it come before patterns, and patterns before its class.

        Args:
            names: in the model and in the files. Writers state those of their own model, which may be either.
        """
        for fits in (_Targets.by_name, _Targets.by_pattern, _Targets.by_class):
            for group in self._groups:
                if any(fits(group.targets, name) for name in names):
                    return group.layout
        return None

    def _layout_of(self, parts: Parts) -> Layout:
        layout = self._target(parts.name, *parts.other_names)
        if layout is None:
            raise CheckpointError(
                f"{self._where}: layer {parts.name!r} has quantized tensors, and no group has it as target"
            )
        return layout


def _pattern(target: str, where: str) -> re.Pattern[str]:
    """A pattern; one that may take for ever on a name is refused: a checkpoint is not trusted."""
    repeats = len(_REPEAT.findall(target))
    if repeats > _MOST_REPEATS or _REPEATED_GROUP.search(target):
        raise UnsupportedError(
            f"{where}: target {target[:80]!r} has {repeats} repetitions; {_MOST_REPEATS} are read, none of a group"
        )
    if (ways := _ways(target[3:])) > _MOST_WAYS:
        raise UnsupportedError(
            f"{where}: target {target[:80]!r} can be tried in {ways:.2g} ways, the product of its alternatives, 2 for "
            f"each '?' and {_WAYS_OF_REPEAT:g} for each repetition; {_MOST_WAYS} are read"
        )
    try:
        return re.compile(target[3:])
    except (re.error, RecursionError, OverflowError) as exc:
        raise CheckpointError(f"{where}: target {target[:80]!r} is no pattern: {exc}") from None


def _ways(pattern: str) -> float:
    """A bound of the ways in which a pattern without repeated groups is tried on a name."""
    plain, factors, alternatives = _PLAIN.sub("x", pattern), list[float](), [1.0]
    for mark in plain:
        if mark == "|":
            alternatives[-1] += 1
        elif mark == "(":
            alternatives.append(1.0)
        elif mark == ")" and len(alternatives) > 1:
            factors.append(alternatives.pop())
    factors += [2.0] * len(_OPTIONAL.findall(plain)) + [_WAYS_OF_REPEAT] * len(_REPEAT.findall(plain))
    return math.prod(factors + alternatives)


def _group(data: dict[str, Any], common: str | None, where: str) -> _Group:
    form = data["format"] or common
    refuse_others(data, _GROUP_FIELDS, where)
    for key in ("weights", "input_activations"):
        refuse_others(data[key] or {}, _ARGS_FIELDS, f"{where}.{key}")
    if form not in LAYOUTS:
        raise UnsupportedError(f"{where}: format is {form!r}; {', '.join(LAYOUTS)} are served")
    weights = data["weights"]
    if weights["dynamic"]:
        raise UnsupportedError(f"{where}: weights are dynamic; static ones are served")
    if data["output_activations"]:
        raise UnsupportedError(f"{where}: output_activations are quantized; those of inputs are served")
    layout: type[Layout] = imported(LAYOUTS[form])
    return _Group(_Targets(data["targets"], where), layout(weights, data["input_activations"], where))
