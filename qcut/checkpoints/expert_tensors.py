"""Tensors of quantized experts under the names of the hub: each expert's, with gate and up apart.

A `LinearStack` has one tensor for all experts, ``experts.up.qweight`` of ``[E, 2 I, K]``. Checkpoints of the hub, and
the programs that read them, have ``experts.3.gate_proj.…`` and ``experts.3.up_proj.…``: a piece of the stack's rows.
A tensor that is not of rows, such as a codebook, is in every piece.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from qcut.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from qcut.layers.experts.linear_stack import LinearStack
    from qcut.layers.linear import Linear
    from qcut.layers.quantized import StateEntry

_GATED: dict[str, list[str]] = {"up": ["gate_proj", "up_proj"], "down": ["down_proj"]}
_NAME = re.compile(r"[A-Za-z_]\w*$", re.ASCII)
_OF_EACH = re.compile(r"experts\\?\.\*\\?\.(\w+)\\?\.weight$")


def hub_names(model: Any, gated: bool) -> dict[str, list[str]]:
    """The names of an expert's layers in the checkpoints of a model's family, by projection.

    Args:
        model: of transformers, which may know that its checkpoints have a layer for each expert.
        gated: whether there is a gate next to ``up``.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    names = dict(_GATED) if gated else {"up": ["up_proj"], "down": ["down_proj"]}
    for conversion in get_model_conversion_mapping(model, add_legacy=False):
        found = [match[1] for source in conversion.source_patterns if (match := _OF_EACH.search(source))]
        target = conversion.target_patterns[0].rpartition(".")[2]
        projection = {"gate_up_proj": "up", "up_proj": "up", "down_proj": "down"}.get(target)
        if projection is not None and len(found) == len(conversion.source_patterns) == len(names[projection]):
            names[projection] = found
    return names


def pieces_of(experts: Mapping[str, Any], where: object) -> dict[str, list[str]]:
    """The names of the pieces of each stack that is stored so, by the stack's name.

    Args:
        experts: what is described of experts, by name.
        where: the file, for messages.

    Raises:
        CheckpointError: names that no piece has, or one twice.
    """
    found: dict[str, list[str]] = {}
    for name, spec in experts.items():
        for part, names in (spec.get("pieces") or {}).items():
            if not names or len(set(names)) < len(names) or not all(map(_NAME.match, names)):
                raise CheckpointError(f"{where}: experts {name!r}: found pieces {names}; one or two names are needed")
            found[f"{name}.{part}"] = names
    return found


def one_piece(stack: LinearStack, count: int) -> Linear:
    """A layer of the rows of one of so many pieces of an expert, on the meta device."""
    one = stack.expert(0)
    return type(one)(one.in_features, one.out_features // count, one.bias is not None, one.scheme, device="meta")


def piece_entries(stack: LinearStack, names: Sequence[str]) -> dict[str, dict[str, StateEntry]]:
    """What is stored of a stack: by expert and piece, as in ``3.gate_proj``, the entries of its tensors by key.

    Args:
        stack: its tensors may be on the meta device.
        names: of the pieces of an expert's rows, from the first rows on.

    Raises:
        CheckpointError: the rows of an expert cannot be cut so.
    """
    if stack.out_features % len(names):
        raise CheckpointError(f"{stack.name}: {stack.out_features} rows of an expert, for {', '.join(names)}")
    entries = one_piece(stack, len(names)).stored()
    return {f"{e}.{name}": entries for e in range(stack.experts) for name in names}


def stored_pieces(stack: LinearStack, names: Sequence[str]) -> Iterator[tuple[str, dict[str, StateEntry]]]:
    """The same entries with their values, which are made when they are read.

    Args:
        stack: with values.
        names: see `piece_entries`.
    """
    dtypes = {key: entry.dtype for key, entry in stack.stored().items()}
    for label, entries in piece_entries(stack, names).items():
        e, _, name = label.partition(".")
        read = partial(_read, stack, int(e), names.index(name))
        yield label, {k: replace(one, dtype=dtypes[k], read=partial(read, k, one.shape)) for k, one in entries.items()}


def _read(stack: LinearStack, e: int, i: int, key: str, shape: tuple[int, ...]) -> Tensor:
    return _piece(stack.expert(e).stored()[key].read().detach(), i, shape)


def _piece(whole: Tensor, i: int, shape: tuple[int, ...]) -> Tensor:
    """The piece i of so many rows, or all of what has no rows."""
    return whole if whole.shape == shape else whole[i * shape[0] : (i + 1) * shape[0]]


def split(stack: LinearStack, names: Sequence[str], keys: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a stack's pieces, copied, with names such as ``3.gate_proj.qweight``.

    Args:
        stack: with values.
        names: see `piece_entries`.
        keys: of the tensors.
    """
    entries = one_piece(stack, len(names)).stored()
    for e in range(stack.experts):
        stored = stack.expert(e).stored()
        for key in keys:
            whole = stored[key].read().detach()
            for i, name in enumerate(names):
                yield f"{e}.{name}.{key}", _piece(whole, i, entries[key].shape).clone()


def join(stack: LinearStack, names: Sequence[str], key: str, pieces: Mapping[str, Tensor], where: str) -> Tensor:
    """The tensor of a stack, joined from these pieces, bit by bit.

    Args:
        stack: on the meta device.
        names: see `piece_entries`.
        key: of the tensor.
        pieces: by expert and piece, of the shapes of `piece_entries`.
        where: the file and the experts, for messages.

    Raises:
        CheckpointError: pieces of an expert differ in what they share (named).
    """
    import torch  # reading headers needs none of it

    entry = stack.stored()[key]
    first = next(iter(pieces.values()))
    made = torch.empty(entry.shape, dtype=entry.dtype, device=first.device)
    rows = first.shape != entry.shape[1:]
    for e in range(stack.experts):
        parts = [pieces[f"{e}.{name}"] for name in names]
        if rows:
            torch.cat([part.to(entry.dtype) for part in parts], out=made[e])
            continue
        made[e] = parts[0]
        for name, part in zip(names[1:], parts[1:], strict=True):
            if not torch.equal(part, parts[0]):
                raise CheckpointError(
                    f"{where}.{e}.{name}.{key}': found other values than those of {names[0]}, with which it is one "
                    "layer; the same ones are needed"
                )
    return made
