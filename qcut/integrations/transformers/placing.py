"""Changes to a model without memory that keep transformers from loading what qcut makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from qcut.layers.quantized import float_dtype


def tie_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Let tied names hold one parameter, which transformers does only when all has been loaded.

    Returns:
        By name, the parameters that others took the place of.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    before: dict[str, nn.Parameter] = {}
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        if target in parameters and source in parameters and parameters[target].shape == parameters[source].shape:
            parent, _, key = target.rpartition(".")
            model.get_submodule(parent)._parameters[key] = parameters[source]
            before[target] = parameters[target]
    return before


def keep_present_ties(model: Any) -> None:
    """Leave transformers to tie only what it still loads."""
    present = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    model.all_tied_weights_keys = {
        target: source
        for target, source in getattr(model, "all_tied_weights_keys", {}).items()
        if target in present and source in present
    }


def ignore_unexpected(model: Any, patterns: Sequence[str]) -> None:
    """Keep transformers from warning of tensors of these names, which it does not load."""
    ignored = model._keys_to_ignore_on_load_unexpected
    kind = set if isinstance(ignored, set) else list  # older versions of transformers add a list to it
    model._keys_to_ignore_on_load_unexpected = kind((*(ignored or ()), *patterns))


def names_here(model: Any, stored: Iterable[str]) -> dict[str, tuple[str, bool]]:
    """The names that a model has for stored tensors, and whether transformers joins or cuts them, as it loads them.

    Args:
        model: on the meta device, with all that it is to load.
        stored: names in the files.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    state = model.state_dict()
    found = {}
    for name in stored:
        new, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if pattern is not None and pattern.rstrip("$").endswith("weight") and not name.endswith("weight"):
            # Of the oldest versions, patterns find the beginning of ``weight_scale`` too.
            new, pattern = rename_source_key(name, renamings, [], model.base_model_prefix, state)
        if new not in state and name in state:
            new, pattern = rename_source_key(name, [], [], model.base_model_prefix, state)
        found[name] = new, pattern is not None
    return found


def loading_dtype(model: Any) -> torch.dtype:
    """The dtype that a model is loaded in. Its first parameter may be one that is kept in float32."""
    stated = getattr(model.config, "dtype", None)
    return stated if isinstance(stated, torch.dtype) else float_dtype(model)


def without_weight(module: nn.Module, key: str = "weight") -> None:
    """Take a weight out of what transformers loads, and leave what its initialization looks at."""
    weight: Any = module._parameters.pop(key)
    weight = weight.detach()
    weight._is_hf_initialized = True
    module.__dict__[key] = weight
