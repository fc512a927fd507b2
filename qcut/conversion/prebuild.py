"""The CUDA kernels of layers that `qcut.quantize` is about to make, built before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from qcut.config import Codebook
from qcut.conversion.tasks import Task
from qcut.errors import ConfigError
from qcut.models.modules import weight_nk

if TYPE_CHECKING:
    from qcut.cuda.codebook import CodebookLayer


def prebuild_layers(tasks: dict[str, Task], device: torch.device | None, rows: Sequence[int], progress: bool) -> None:
    """Build the kernels of the layers that will live on a CUDA device, each once.

    Args:
        tasks: what layers become, by name.
        device: where they will be; None takes where they are.
        rows: numbers of tokens to build for.
        progress: show a progress bar.

    Raises:
        ConfigError: float32 weights of a layer whose kernels take 16-bit tokens.
        BuildError: the first kernel that does not compile.
    """
    from qcut.cuda.plans import Kind, LinearCall, prebuild

    kinds: dict[str, Kind] = {"w8a8": "dynamic", "w8a8_static": "static", "w8a16": "weight_only"}
    calls: dict[int, set[LinearCall]] = {}
    codebook_layers: dict[int, set[CodebookLayer]] = {}
    for name, task in tasks.items():
        weight, scheme = weight_nk(task.module), task.scheme
        home = device or weight.device
        if home.type != "cuda":
            continue
        halves = scheme.name == "w8a16" or (isinstance(scheme, Codebook) and scheme.activation == "fp16")
        if halves and weight.dtype is torch.float32:
            raise ConfigError(
                f"layer {name!r}: {scheme.name} computes in float16 or bfloat16 on CUDA, and its weight is float32; "
                "convert the model first (model.half())"
            )
        n, k = weight.shape
        bias = task.module._parameters.get("bias") is not None
        index = home.index if home.index is not None else torch.cuda.current_device()
        if isinstance(scheme, Codebook):
            if len(set(scheme.widths)) > 1:
                continue  # kernels of two widths are built when they are met
            from qcut.cuda.codebook import CodebookLayer

            codebook_layers.setdefault(index, set()).update(
                CodebookLayer(
                    rows=m,
                    n=n,
                    k=k,
                    dtype=weight.dtype,
                    bits=scheme.bits,
                    passes=len(scheme.widths),
                    kind=scheme.rotation,
                    group_size=scheme.group_columns(k),
                    int8=scheme.activation == "int8",
                    bias=bias,
                    activation=task.activation,
                )
                for m in rows
            )
            continue
        calls.setdefault(index, set()).update(
            LinearCall(kinds[scheme.name], weight.dtype, m, n, k, bias, task.activation) for m in rows
        )
    for index, needed in calls.items():
        prebuild(needed, index, progress)
    for index, layers in codebook_layers.items():
        from qcut.cuda import codebook

        codebook.prebuild(sorted(layers, key=str), index, progress)
