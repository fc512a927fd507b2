"""Names of a mixture's tensors in files, where every expert has its own, as places in a model that stacks them.

The places are those of transformers' conversions: renamings, and merges of ``experts.*.gate_proj.weight`` and
``experts.*.up_proj.weight`` into ``experts.gate_up_proj``. A quantized layer has other tensors than ``weight`` under
the same names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn

from qcut.common.failures import failures_as
from qcut.errors import CheckpointError

_EXPERT = r"(0|[1-9][0-9]{0,8})\."
_MERGES = {1: [("MergeModulelist", 0)], 2: [("MergeModulelist", 0), ("Concatenate", 1)]}
"""By the number of names that are merged, the operations and their dimensions: experts in front, rows from above."""
_LONGEST = 1024
"""Characters of a name that is looked at: patterns may take long on longer ones."""


class Place(NamedTuple):
    """Where a tensor of one expert belongs.

    Attributes:
        parameter: the name of the model's stacked parameter, such as ``mlp.experts.gate_up_proj``.
        part: which of the layers that are joined to the parameter's rows, from above.
        parts: how many these are.
        expert: its number, which may be none of the model's.
        key: the end of the tensor's name, such as ``qweight``.
    """

    parameter: str
    part: int
    parts: int
    expert: int
    key: str


class ExpertNames:
    """What transformers does to the names of a model's tensors; nothing, for models of others.

    Args:
        model: its parameters may be without memory.
        where: the file or folder, for messages.

    Raises:
        CheckpointError: transformers fails on the model's configuration.
    """

    def __init__(self, model: nn.Module, where: str) -> None:
        transforms = _transforms(model, where)
        self._renamings = [one for one in transforms if not hasattr(one, "operations")]
        self._merges = [merge for one in transforms if hasattr(one, "operations") for merge in _merges_of(one)]

    @cached_property
    def _reversed(self) -> list[Any]:
        # Others than plain renamings change the prefix of what was read.
        plain = [one for one in self._renamings if type(one).__name__ == "WeightRenaming"]
        return [one.reverse_transform() for one in reversed(plain)]

    def renamed(self, name: str) -> str:
        """The name that transformers gives a tensor before any are merged."""
        if len(name) > _LONGEST:
            return name
        for one in self._renamings:
            name = one.rename_source_key(name)[0]
        return name

    def stored(self, name: str) -> str:
        """The name that checkpoints have for what `renamed` gives this name."""
        found = name
        for one in self._reversed:
            found = one.rename_source_key(found)[0]
        return found if self.renamed(found) == name else name

    def is_merged(self, parameter: str) -> bool:
        """Whether a parameter is made of tensors of many experts."""
        return any(parameter.endswith(target) for _, target, _, _ in self._merges)

    def place(self, name: str) -> Place | None:
        """Where a tensor belongs, by the name that `renamed` gives it; None if it is not of one expert."""
        if len(name) > _LONGEST:
            return None
        for pattern, target, part, parts in self._merges:
            if found := pattern.search(name):
                return Place(name[: found.start()] + target, part, parts, int(found[1]), found[2])
        return None


def full_name(name: str, known: Mapping[str, object], model: nn.Module) -> str | None:
    """A name in a model, with the prefix of its base if it is stored without; None if there is no such name."""
    base = getattr(model, "base_model_prefix", "")
    return next((one for one in (name, f"{base}.{name}") if one in known), None)


def _transforms(model: nn.Module, where: str) -> list[Any]:
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(model, modeling.PreTrainedModel):
        return []
    from transformers.conversion_mapping import get_model_conversion_mapping

    with failures_as(CheckpointError, f"{where}: transformers does not know the names of {type(model).__name__}"):
        return list(get_model_conversion_mapping(model, add_legacy=False))


def _merges_of(transform: Any) -> Iterator[tuple[re.Pattern[str], str, int, int]]:
    """Patterns of an expert's layers and their parameter, of a conversion that is such a merge; of others none."""
    sources, targets = transform.source_patterns, transform.target_patterns
    operations = [(type(one).__name__, getattr(one, "dim", None)) for one in transform.operations]
    if operations != _MERGES.get(len(sources)) or len(targets) != 1 or "\\1" in targets[0]:
        return
    for part, source in enumerate(sources):
        before, star, behind = source.removesuffix(".weight").partition("*.")
        if star and source.endswith(".weight") and "*." not in behind:
            pattern = re.compile(rf"{before}{_EXPERT}{behind}\.(.+)$", re.DOTALL)
            if pattern.groups == 2:
                yield pattern, targets[0].replace("\\.", "."), part, len(sources)
