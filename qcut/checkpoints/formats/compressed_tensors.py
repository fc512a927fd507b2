"""The compressed-tensors format: integers of ``int-quantized`` and ``pack-quantized`` layers.

- ``int-quantized``: ``weight`` int8 ``[N, K]``, ``weight_scale`` ``[N, 1]``, or ``[1]`` for one scale of a layer.
- ``pack-quantized``: ``weight_packed`` int32 ``[N, K / 8]`` of 4 bits (``[N, K / 4]`` of 8), along K, low bits first,
  q + 8; ``weight_scale`` ``[N, G]``; ``weight_shape`` int64 ``[2]``; without symmetry ``weight_zero_point`` int32
  ``[ceil(N / 8), G]``, packed along N in the same way; of columns sorted by activation ``weight_g_idx`` int32 ``[K]``,
  the group of each column.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qcut.checkpoints.formats.build import column_order, int8_layer, packed_layer
from qcut.checkpoints.formats.fields import refuse_others
from qcut.checkpoints.formats.packing import centred, unpack_words
from qcut.checkpoints.formats.parts import FLOATS, Parts, Stored
from qcut.common import schema
from qcut.errors import CheckpointError, UnsupportedError
from qcut.layers.linear import Linear
from qcut.schemes import W8A8, W8A16

_FORMATS = ("int-quantized", "pack-quantized")
_MOST_REPEATS, _MOST_PATTERNS, _MOST_GROUPS = 5, 1024, 1024
_REPEAT, _REPEATED_GROUP = re.compile(r"[*+{]"), re.compile(r"\)[*+{]")
_ARGS = schema.record(
    {"num_bits": schema.integer(1, 64)},
    {
        "type": (schema.text(), "int"),
        "symmetric": (schema.boolean(), True),
        "strategy": (schema.nothing_or(schema.text()), None),
        "group_size": (schema.nothing_or(schema.integer(-1)), None),
        "dynamic": (schema.anything(), False),
        "actorder": (schema.anything(), None),
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


_ORDERS = {"none": "none", "false": "none", "weight": "weight", "static": "weight"} | dict.fromkeys(
    ("group", "dynamic", "true"), "group"
)
"""By ``actorder``, whether groups are of columns that are sorted, or only weights were found in another order."""
_STATUSES = ("compressed", "frozen")
"""Of the same tensors: writers of 2024 said frozen of integers. The dtypes of the tensors are checked."""
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


@dataclass(frozen=True)
class _Group:
    """How the layers of one group are stored.

    Attributes:
        label: of the group, for messages.
        targets: the layers of the group.
        packed: whether integers are packed to words.
        bits: of an integer.
        symmetric: whether there are no zero points.
        group_size: columns of a group; None: whole rows.
        one_scale: one scale for the layer.
        int8_tokens: activations are int8, a scale for each token.
        ordered: columns are sorted by activation, and a tensor has the group of each.
    """

    label: str
    targets: _Targets
    packed: bool
    bits: int
    symmetric: bool
    group_size: int | None
    one_scale: bool
    int8_tokens: bool
    ordered: bool


class CompressedTensors:
    """compressed-tensors's, as `Format` says."""

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
            _group(label, group, data["format"], f"{where}: config_groups.{label}")
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
        group, n, k = self._group_of(parts), parts.n, parts.k
        parts.require_bias()
        if not group.packed:
            parts.only(("weight", "weight_scale", "weight_zero_point", "bias"))
            parts.require("weight", ("I8",), [n, k])
            parts.require("weight_scale", FLOATS, *([[1], []] if group.one_scale else [[n, 1], [n]]))
            return
        own = ("weight_packed", "weight_scale", "weight_shape", "weight_g_idx", "bias")
        parts.only(own if group.symmetric else (*own, "weight_zero_point"))
        if group.ordered or "weight_g_idx" in parts.tensors:
            parts.require("weight_g_idx", ("I32", "I64"), [k])
        groups = -(-k // (group.group_size or k))
        per_word = 32 // group.bits
        parts.require("weight_packed", ("I32",), [n, -(-k // per_word)])
        parts.require("weight_scale", FLOATS, [n, groups])
        parts.require("weight_shape", ("I64", "I32"), [2])
        if not group.symmetric:
            parts.require("weight_zero_point", ("I32",), [-(-n // per_word), groups])

    def layer(self, parts: Parts) -> Linear:
        """See `Format.layer`."""
        group, n, k = self._group_of(parts), parts.n, parts.k
        scales = parts.read_scales("weight_scale")
        if not group.packed:
            if "weight_zero_point" in parts.tensors and bool(parts.read("weight_zero_point").any()):
                raise parts.error("weight_zero_point", "found values that are not 0; symmetric weights have none")
            scheme = W8A8() if group.int8_tokens else W8A16()
            return int8_layer(parts, parts.read("weight"), scales.reshape(-1).expand(n), scheme)
        if (shape := parts.read("weight_shape").tolist()) != [n, k]:
            raise parts.error("weight_shape", f"found {shape}; the model asks for {[n, k]}")
        q = unpack_words(parts.read("weight_packed"), group.bits, 1)[:, :k]
        zero_points: Tensor | None = None
        if not group.symmetric:
            zero_points = unpack_words(parts.read("weight_zero_point"), group.bits, 0)[:n]
        g_idx = "weight_g_idx"
        unset = g_idx in parts.tensors and bool((parts.read(g_idx) == -1).all())
        if unset and group.ordered:
            raise parts.error(g_idx, "found -1 of all columns; needed: their groups, since actorder is 'group'")
        order = None if unset else column_order(parts, g_idx, group.group_size)
        if group.int8_tokens:
            return int8_layer(parts, centred(q), scales[:, 0], W8A8())
        return packed_layer(parts, group.bits, q, scales, zero_points, group.group_size, order)

    def row_scheme(self, name: str) -> W8A8 | W8A16 | None:
        """The scheme of a linear layer's int8 weight with a scale for each row, known before there are tensors.

        Args:
            name: of the layer.

        Returns:
            None where the configuration leaves the layer in float.

        Raises:
            UnsupportedError: the layer is stored in another way.
        """
        if self._ignored.by_name(name) or self._ignored.by_pattern(name):
            return None
        group = self._target(name)
        if group is not None and (group.packed or group.one_scale):
            found = f"packed integers of {group.bits} bits" if group.packed else "one scale for the whole layer"
            raise UnsupportedError(
                f"{self._where}: layer {name!r} has {found}; allowed: int-quantized, with a scale for each row"
            )
        return None if group is None else W8A8() if group.int8_tokens else W8A16()

    def _target(self, name: str) -> _Group | None:
        """The group whose targets name the layer, by itself before a pattern, and by a pattern before its class."""
        for fits in (_Targets.by_name, _Targets.by_pattern, _Targets.by_class):
            for group in self._groups:
                if fits(group.targets, name):
                    return group
        return None

    def _group_of(self, parts: Parts) -> _Group:
        group = self._target(parts.name)
        if group is None:
            raise CheckpointError(
                f"{self._where}: layer {parts.name!r} has quantized tensors, and no group has it as target"
            )
        return group


def _pattern(target: str, where: str) -> re.Pattern[str]:
    """A pattern; one that may take for ever on a name is refused: a checkpoint is not trusted."""
    repeats = len(_REPEAT.findall(target))
    if repeats > _MOST_REPEATS or _REPEATED_GROUP.search(target):
        raise UnsupportedError(
            f"{where}: target {target[:80]!r} has {repeats} repetitions; {_MOST_REPEATS} are read, none of a group"
        )
    try:
        return re.compile(target[3:])
    except (re.error, RecursionError, OverflowError) as exc:
        raise CheckpointError(f"{where}: target {target[:80]!r} is no pattern: {exc}") from None


def _group(label: str, data: dict[str, Any], common: str | None, where: str) -> _Group:
    form = data["format"] or common
    refuse_others(data, _GROUP_FIELDS, where)
    for key in ("weights", "input_activations"):
        refuse_others(data[key] or {}, _ARGS_FIELDS, f"{where}.{key}")
    if form not in _FORMATS:
        raise UnsupportedError(f"{where}: format is {form!r}; {', '.join(_FORMATS)} are served")
    weights, tokens = data["weights"], data["input_activations"]
    packed = form == "pack-quantized"
    bits, kind, strategy = weights["num_bits"], weights["type"], weights["strategy"]
    size = weights["group_size"]
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if kind != "int" or bits not in ((4, 8) if packed else (8,)):
        raise UnsupportedError(
            f"{where}: weights are {kind} of {bits} bits; {form} is served of int with {'4 or 8' if packed else 8} bits"
        )
    order = _ORDERS.get(str(weights["actorder"]).lower())
    if order is None:
        raise UnsupportedError(f"{where}: actorder is {str(weights['actorder'])[:80]!r}; group and weight are read")
    if weights["dynamic"]:
        raise UnsupportedError(f"{where}: weights are dynamic; static ones are served")
    strategies = {"int-quantized": ("channel", "tensor"), "pack-quantized": ("group", "channel")}[form]
    if strategy not in strategies:
        raise UnsupportedError(f"{where}: weights have the strategy {strategy!r}; {', '.join(strategies)} are served")
    if strategy == "group" and (size is None or size < 1):
        raise CheckpointError(f"{where}: weights have groups of {size}; allowed: 1 and more")
    if not packed and not weights["symmetric"]:
        raise UnsupportedError(f"{where}: weights are not symmetric; symmetric ones are served of {form}")
    if data["output_activations"]:
        raise UnsupportedError(f"{where}: output_activations are quantized; those of inputs are served")
    if tokens is not None:
        found = {key: tokens[key] for key in ("num_bits", "type", "symmetric", "strategy", "dynamic")}
        wanted = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        if found != wanted or bits != 8 or strategy == "group" or not weights["symmetric"]:
            raise UnsupportedError(
                f"{where}: input_activations are {found} with weights of {bits} bits; {wanted} with symmetric "
                "weights of 8 bits and a scale for each row are served"
            )
    return _Group(
        label,
        _Targets(data["targets"], where),
        packed,
        bits,
        weights["symmetric"],
        size if strategy == "group" else None,
        strategy == "tensor",
        tokens is not None,
        order == "group" and strategy == "group",
    )
