"""Loads a model that another library quantized: transformers reads what is float, qcut the layers, one at a time."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qcut.checkpoints.builder import check_no_meta
from qcut.checkpoints.formats.name_mapping import match
from qcut.checkpoints.formats.parts import Stored
from qcut.checkpoints.formats.reader import format_of, stored_in
from qcut.errors import CheckpointError
from qcut.integrations.transformers.placing import ignore_unexpected, keep_present_ties, tie_parameters, without_weight
from qcut.layers.linear import state_dtype
from qcut.models.modules import replace_modules
from qcut.numerics.checks import out_of_range
from qcut.numerics.plain_state import in_plain_state


class ForeignLoading:
    """The state of one ``from_pretrained`` of a model that another library quantized.

    The tensors of quantized layers stay in the files until all others have arrived.

    Args:
        model: on the meta device.
        config: the ``quantization_config`` of the checkpoint, as JSON holds it.
        files: that transformers is about to read.

    Raises:
        CheckpointError, UnsupportedError: see `qcut.checkpoints.formats.name_mapping.match`; a file that is no
            safetensors file.
    """

    report = None

    def __init__(self, model: Any, config: Mapping[str, Any], files: list[Path]) -> None:
        where = str(files[0].parent) if files else "from_pretrained"
        if not files or any(path.suffix != ".safetensors" for path in files):
            raise CheckpointError(f"{where}: there are no safetensors files; pickles are not read")
        self._open = ExitStack()
        weakref.finalize(self, self._open.close)
        tie_parameters(model)
        tensors = _inside(model, stored_in(files, self._open))
        self._matched = match(model, format_of(dict(config), where), tensors, where)
        for name in (*self._matched.layers, *self._matched.tied):
            module = model.get_submodule(name)
            if "weight" in module._parameters:
                without_weight(module)
            if "bias" in module._parameters:
                del module._parameters["bias"]
                module.__dict__["bias"] = None
        keep_present_ties(model)
        self._ignored = model._keys_to_ignore_on_load_unexpected
        ignore_unexpected(model, [rf"(^|\.){re.escape(name)}\." for name in self._matched.layers])

    @in_plain_state
    def finish(self, model: Any) -> None:
        """Read the quantized layers, one after another, and put them in place.

        Raises:
            CheckpointError: a tensor cannot be read, or holds what it cannot (named).
            UnsupportedError: a layer cannot be served exactly.
        """
        from transformers.utils.logging import is_progress_bar_enabled

        model._keys_to_ignore_on_load_unexpected = self._ignored
        where = self._matched.where
        tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        for names in self._matched.holders:
            tensor = tensors.get(names[0])
            if tensor is None:
                continue  # a buffer that the model's class computes
            if tensor.is_floating_point() and (found := out_of_range(tensor.detach())):
                raise CheckpointError(f"{where}: tensor {names[0]!r}: found {found}; finite values are needed")
        floats = next(
            (p for p in model.parameters() if p.is_floating_point()), torch.empty(0, dtype=torch.float32, device="cpu")
        )
        with self._open:
            new = self._matched.make(floats.device, floats.dtype, is_progress_bar_enabled())
        replace_modules(model, new)
        state_dtype(model, floats.dtype)
        check_no_meta(dict(model.named_modules()), Path(where))
        model.eval()


def _inside(model: nn.Module, tensors: dict[str, Stored]) -> dict[str, Stored]:
    """The tensors that are this model's: all, or those of its base where it is the base of what was saved."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    if prefix == "." or hasattr(model, prefix[:-1]) or not any(name.startswith(prefix) for name in tensors):
        return tensors
    return {name.removeprefix(prefix): stored for name, stored in tensors.items() if name.startswith(prefix)}
