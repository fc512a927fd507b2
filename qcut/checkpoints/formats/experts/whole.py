"""Stacks with all experts of a projection in one tensor: the share of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor, nn

from qcut.checkpoints.formats.experts.layers import StackedFormat
from qcut.checkpoints.formats.experts.names import full_name
from qcut.checkpoints.formats.parts import Format, Parts, Stored
from qcut.errors import CheckpointError, UnsupportedError
from qcut.layers.experts.families import uses_interface


class WholeStack(NamedTuple):
    """One projection of a mixture's experts.

    Attributes:
        parameter: of the model.
        layers: what is stored of each expert, from above: its gate and its up, if their rows alternate, else one.
        tensors: their names.
    """

    parameter: str
    layers: list[list[Parts]]
    tensors: list[str]


def turned(module: Any) -> bool:
    """Whether a model's experts do not have gate above up in their rows."""
    return bool(module.is_transposed or not getattr(module, "is_concatenated", True))


def whole_stacks(model: nn.Module, form: Format, tensors: Mapping[str, Stored], where: str) -> list[WholeStack]:
    """Find the tensors that have all experts of a projection, if the format has such.

    Args:
        model: its parameters may be without memory.
        form: how quantized layers are stored.
        tensors: by the names that `ExpertNames.renamed` gives them.
        where: the file or folder, for messages.

    Raises:
        CheckpointError: tensors of other numbers of experts or rows than the model's.
        UnsupportedError: a class of experts that does not say how its rows lie.
    """
    if not isinstance(form, StackedFormat):
        return []
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, dict[str, str]] = {}
    for key in (*form.stacked, "bias"):
        for name in tensors:
            stem = name.removesuffix(f"_{key}")
            parameter = full_name(stem, parameters, model) if stem != name else None
            if parameter is not None and parameters[parameter].ndim == 3 and (key != "bias" or parameter in found):
                found.setdefault(parameter, {})[key] = name

    @lru_cache(maxsize=len(form.stacked) + 1)  # experts take their shares of one stack's tensors in turn
    def read(name: str) -> Tensor:
        return tensors[name].read()

    return [
        WholeStack(parameter, _experts_of(parameter, model, own, tensors, read, where), list(own.values()))
        for parameter, own in found.items()
    ]


def _experts_of(
    parameter: str,
    model: nn.Module,
    own: Mapping[str, str],
    tensors: Mapping[str, Stored],
    read: Callable[[str], Tensor],
    where: str,
) -> list[list[Parts]]:
    path, _, projection = parameter.rpartition(".")
    module: Any = model.get_submodule(path)
    if not uses_interface(type(module)):
        raise UnsupportedError(
            f"{where}: experts {path!r} have quantized tensors, and {type(module).__name__} does not say how the rows "
            "of its weights lie; allowed: classes that transformers' interface for experts computes"
        )
    experts, n, k = model.get_parameter(parameter).shape
    if module.is_transposed:
        n, k = k, n
    turns = 2 if projection == "gate_up_proj" and not getattr(module, "is_concatenated", True) else 1
    for name in own.values():
        if list(tensors[name].shape[:2]) != [experts, n]:
            raise CheckpointError(
                f"{where}: tensor {name!r}: found {tensors[name].code} {list(tensors[name].shape)}; needed: "
                f"[{experts}, {n}, ...], experts and rows of the model"
            )

    def share(name: str, expert: int, turn: int) -> Stored:
        shape = (n // turns, *tensors[name].shape[2:])
        return Stored(tensors[name].code, shape, lambda: read(name)[expert, turn::turns].contiguous())

    def parts(expert: int, turn: int) -> Parts:
        mine = {key: share(name, expert, turn) for key, name in own.items()}
        return Parts(stem, f"{where}: expert {expert}", n // turns, k, mine, "_")

    key, name = next(iter(own.items()))
    stem = name.removesuffix(f"_{key}")
    return [[parts(expert, turn) for turn in range(turns)] for expert in range(experts)]
