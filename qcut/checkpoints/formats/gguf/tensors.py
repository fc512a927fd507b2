"""Tensors of GGUF files as those of transformers' models, and layers of the types that a scheme holds exactly.

Those are ``Q4_0``, ``Q5_0`` and ``Q8_0``, integers with a scale for each 32 columns, and ``MXFP4``. Values of other
quantized types are floats here, see `qcut.checkpoints.formats.gguf.blocks`.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qcut.checkpoints.formats.build import packed_layer
from qcut.checkpoints.formats.floats.e2m1 import Mxfp4Layout
from qcut.checkpoints.formats.gguf.architectures import Architecture, Change
from qcut.checkpoints.formats.gguf.blocks import FLOATS, codes_q5_0, dequantized, float16_at, nibbles, wrong_scale
from qcut.checkpoints.formats.gguf.container import GgufModel
from qcut.checkpoints.formats.gguf.metadata import FACTORS
from qcut.checkpoints.formats.grid import Grid
from qcut.checkpoints.formats.parts import Parts, Stored
from qcut.common.safetensors import torch_dtype
from qcut.errors import CheckpointError, QuantizationWarning
from qcut.layers.linear import Linear

_BLOCK, _MOST = 32, 1 << 18
EXACT = ("Q4_0", "Q5_0", "Q8_0", "MXFP4")
"""Types that a scheme holds exactly."""
_NAME = re.compile(r"(?:blk\.(0|[1-9]\d{0,4})\.)?(\w+)\.(weight|bias)")


class Gguf:
    """The blocks of GGUF files, see `qcut.checkpoints.formats.experts.layers.StackedFormat`."""

    stacked = ("weight",)

    def quantized(self, tensors: Mapping[str, Stored]) -> bool:
        """See `Format.quantized`."""
        return "weight" in tensors and tensors["weight"].code in EXACT

    def check(self, parts: Parts) -> None:
        """See `Format.check`."""
        parts.only(("weight", "bias"))
        parts.require("weight", EXACT, [parts.n, parts.k])
        parts.require_bias()

    def codes(self, parts: Parts) -> Tensor:
        """See `IntegerFormat.codes`."""
        return self._integers(parts, parts.read("weight"))[0]

    def grid(self, parts: Parts) -> Grid:
        """See `IntegerFormat.grid`."""
        return self._integers(parts, parts.read("weight"))[1]

    def layer(self, parts: Parts) -> Linear:
        """See `Format.layer`."""
        return packed_layer(parts, *self._integers(parts, parts.read("weight")))

    def _integers(self, parts: Parts, blocks: Tensor) -> tuple[Tensor, Grid]:
        n, k, kind = parts.n, parts.k, parts.tensors["weight"].code
        if kind == "MXFP4":
            return nibbles(blocks[..., 1:]).reshape(n, k), _Mxfp4().grid(_split(parts, blocks))
        scales = float16_at(blocks, 0).view(n, k // _BLOCK)
        if kind == "Q4_0":
            return nibbles(blocks[..., 2:]).view(n, k), Grid(4, scales, None, _BLOCK)
        if kind == "Q8_0":
            return blocks[..., 2:].reshape(n, k) ^ 0x80, Grid(8, scales, None, _BLOCK)
        q = codes_q5_0(blocks)  # scales have the sign of the largest value; backwards, 32 is one of 0 to 32
        q = torch.where((scales < 0)[..., None], 32 - q, q) + 112
        return q.view(n, k), Grid(8, scales.abs(), None, _BLOCK)


class _Mxfp4(Mxfp4Layout):
    packed, scales = "weight (codes)", "weight (scales)"


def _split(parts: Parts, blocks: Tensor) -> Parts:
    """The same layer with codes and scales as tensors of their own."""
    both = {_Mxfp4.packed: blocks[..., 1:].contiguous(), _Mxfp4.scales: blocks[..., 0].contiguous()}
    return replace(parts, tensors={key: Stored.of(tensor) for key, tensor in both.items()})


class _Source(NamedTuple):
    """A tensor in a file, or the part of it that is one expert's."""

    file: GgufModel
    name: str
    change: Change | None
    heads: int
    exact: bool
    part: int | None = None

    def stored(self) -> Stored:
        kind, shape, *_ = self.file.tensors[self.name]
        shape = shape if self.part is None else shape[1:]
        held = self.exact and kind in EXACT
        if self.change is not None and (self.change.linear or not held):
            shape = self.change.shape(shape)
        return Stored(kind if held or kind in FLOATS else "F32", shape, self.read)

    def read(self) -> Tensor:
        kind = self.file.tensors[self.name].kind
        tensor = self.file.read(self.name, self.part)
        held = self.exact and kind in EXACT
        if kind not in FLOATS:
            if (found := wrong_scale(kind, tensor)) is not None:
                raise CheckpointError(
                    f"{self.file.path}: tensor {self.name!r}: found the scale {found}; finite ones are needed"
                )
            tensor = tensor if held else dequantized(kind, tensor)
        if self.change is None or (held and not self.change.linear):
            return tensor
        return self.change.apply(tensor, self.heads).contiguous()


def tensors_of(
    file: GgufModel, architecture: Architecture, config: Mapping[str, Any], exact: bool = True
) -> dict[str, Stored]:
    """The tensors of a model, by their names in transformers.

    Args:
        file: the file.
        architecture: its own.
        config: of the metadata; its numbers of heads decide which rows belong together.
        exact: whether tensors of `EXACT` are read as they are; otherwise they are dequantized like the others.

    Raises:
        CheckpointError: a tensor of a name that the architecture does not have, rows that are no whole heads, or other
            experts than the metadata counts.
    """
    stored: dict[str, Stored] = {}
    joined: dict[str, dict[int, _Source]] = {}
    for name, place in file.tensors.items():
        if name in FACTORS:  # the configuration states what these come of
            continue
        match = _NAME.fullmatch(name)
        block, stem, key = match.groups() if match else (None, "", "")
        inner = (architecture.outside if block is None else architecture.layer).get(stem)
        if inner is None:
            raise CheckpointError(
                f"{file.path}: tensor {name!r} is none of the architecture {file.metadata['general.architecture']!r}"
            )
        change, heads = architecture.changes.get(stem), 0
        if change is not None and change.heads:
            heads, pieces = config[change.heads], change.pieces
            if place.shape[0] % (pieces * heads):
                raise CheckpointError(
                    f"{file.path}: tensor {name!r}: {place.shape[0]} rows for {heads} heads; multiples of "
                    f"{pieces * heads} are needed"
                )
        outer = inner if block is None else f"{architecture.prefix}{block}.{inner}"
        source = _Source(file, name, change, heads, exact and stem not in architecture.floats)
        if stem not in architecture.experts:
            stored[outer if stem in architecture.bare else f"{outer}.{key}"] = source.stored()
            continue
        experts, sizes = config[architecture.count], len(place.shape)
        if place.shape[0] != experts or sizes != (3 if key == "weight" else 2):
            raise CheckpointError(
                f"{file.path}: tensor {name!r}: found {place.kind} {list(place.shape)}; needed: "
                f"[{experts}, {'N, K' if key == 'weight' else 'N'}], by the number of experts in the metadata"
            )
        if "{}" not in outer:
            turn = architecture.experts.index(stem)
            joined.setdefault(outer if key == "weight" else f"{outer}_bias", {})[turn] = source
            continue
        if len(stored) + experts > _MOST:
            raise CheckpointError(
                f"{file.path}: tensor {name!r}: found {experts} experts next to {len(stored)} tensors; at most {_MOST} "
                "tensors are read, those of each expert counted"
            )
        stored |= {f"{outer.format(i)}.{key}": source._replace(part=i).stored() for i in range(experts)}
    for name, sources in joined.items():
        new, one = _joined(name, [sources[turn] for turn in sorted(sources)], architecture.in_turn)
        stored[new] = one
    return stored


def _joined(name: str, sources: Sequence[_Source], in_turn: bool) -> tuple[str, Stored]:
    """One parameter of all experts: of gates and ups, or of downs.

    Args:
        name: of the parameter.
        sources: of its parts.
        in_turn: see `Architecture`.

    Returns:
        Its name, and the tensor: quantized rows as `StackedFormat` has them; floats as the parameter is.

    Raises:
        CheckpointError: gates and ups of different types or sizes.
    """
    file, first = sources[0].file, sources[0].stored()
    for source, one in ((source, source.stored()) for source in sources[1:]):
        if (one.code, one.shape) != (first.code, first.shape):
            raise CheckpointError(
                f"{file.path}: tensor {source.name!r}: found {one.code} {list(one.shape)}; {sources[0].name!r} has "
                f"{first.code} {list(first.shape)}, and one form is needed"
            )
    experts, rows, *columns = first.shape
    turns, held = len(sources), first.code in EXACT
    if held or not columns:
        shape, dim = (experts, turns * rows, *columns), 2 if in_turn else 1
        return f"{name}_weight" if held else name, Stored(
            first.code, shape, lambda: torch.stack([one.read() for one in sources], dim).flatten(1, 2)
        )
    shape = (experts, *columns, turns * rows) if in_turn else (experts, turns * rows, *columns)

    def read() -> Tensor:
        made = torch.empty(shape, dtype=torch_dtype(first.code), device="cpu")
        for expert in range(experts):
            parts = [one._replace(part=expert).read() for one in sources]
            made[expert] = torch.stack(parts, 1).flatten(0, 1).t() if in_turn else torch.cat(parts)
        return made

    return name, Stored(first.code, shape, read)


def warn_of_floats(file: GgufModel, dtype: torch.dtype, stacklevel: int) -> None:
    """Warn of quantized tensors that become floats, since no scheme holds their types exactly.

    Args:
        file: the file.
        dtype: of the floats.
        stacklevel: of the warning.
    """
    found = [place for place in file.tensors.values() if place.kind not in (*FLOATS, *EXACT)]
    if found:
        kinds, values = sorted({place.kind for place in found}), sum(math.prod(place.shape) for place in found)
        warnings.warn(
            f"{file.path}: {len(found)} tensors of the types {', '.join(kinds)}, which no scheme of qcut holds "
            f"exactly, become {dtype}: {values * dtype.itemsize / 1e9:.3g} GB in place of "
            f"{sum(place.nbytes for place in found) / 1e9:.3g}; allowed: "
            "qcut.load(…, quantization_config=qcut.QcutConfig(scheme)), which quantizes them while they are read",
            QuantizationWarning,
            stacklevel=stacklevel,
        )
