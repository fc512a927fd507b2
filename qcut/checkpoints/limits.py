"""Bounds that keep a small file from asking for a large model: counts in configurations, sizes of layers, modules."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from qcut.errors import CheckpointError

LEAST_PARTS = 1024
"""Layers, experts and the like that any configuration may state."""
COUNT = 1 << 20
"""Other numbers of things that a configuration may state: heads, labels, groups."""
MODULES_PER_TENSOR = 16
_PARTS = re.compile(r"layer|block|depth|expert|stage")
_COUNTS = re.compile(r"^n_|num_|heads?|labels?|groups?|_count")
_NO_COUNT = re.compile(r"position|ctx|vocab|inner|embd|size|token|_id")


def check_counts(config: Any, tensors: int, path: Path) -> None:
    """Hold the numbers of parts that a configuration states to the number of tensors that are stored.

    Raises:
        CheckpointError: a number of layers, blocks, experts or stages beyond both `LEAST_PARTS` and ``tensors``, or a
            number of other things beyond `COUNT` (named).
    """
    pending: list[tuple[str, Any]] = [("", config)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, Mapping):
            pending += [(str(key), one) for key, one in value.items()]
        elif isinstance(value, (list, tuple)):
            pending += [(name, one) for one in value]
        elif type(value) is int:
            most = None
            if _PARTS.search(name.lower()) and "size" not in name:
                most = max(LEAST_PARTS, tensors)
            elif _COUNTS.search(name.lower()) and not _NO_COUNT.search(name.lower()):
                most = COUNT
            if most is not None and value > most:
                raise CheckpointError(f"{path}: {name} is {value} in the configuration; at most {most} are read here")


def check_layer_sizes(layers: Mapping[str, Mapping[str, Any]], stored_bytes: int, path: Path) -> None:
    """Hold the sizes of quantized layers to what is stored: two bits a weight at least.

    Raises:
        CheckpointError: a layer has more weights than the files can hold.
    """
    for name, spec in layers.items():
        n, k = spec["out_features"], spec["in_features"]
        if n * k > 4 * stored_bytes:
            raise CheckpointError(
                f"{path}: layer {name!r}: saved with (K, N) = {k, n}; the data files have {stored_bytes} bytes"
            )


@contextmanager
def limited_modules(tensors: int, path: Path) -> Iterator[None]:
    """Stop a model that is being built in this thread at many more modules than there are stored tensors.

    Raises:
        CheckpointError: there are more than `LEAST_PARTS` and `MODULES_PER_TENSOR` for each tensor.
    """
    most, thread = LEAST_PARTS + MODULES_PER_TENSOR * tensors, threading.get_ident()
    count = 0

    def counted(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        nonlocal count
        if threading.get_ident() == thread:
            count += 1
            if count > most:
                raise CheckpointError(f"{path}: the model has more than {most} modules, for {tensors} stored tensors")

    handle = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()
