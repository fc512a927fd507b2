"""The CUDA kernels of layers that `qcut.quantize` is about to make, built before it begins."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qcut.codebooks.layout import UNIT_COLUMNS, Geometry
from qcut.config import Codebook
from qcut.conversion.tasks import Task
from qcut.errors import ConfigError
from qcut.models.modules import weight_nk
from qcut.ops.codebook import CodebookCall


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
    from qcut.cuda.linear import LinearLayer
    from qcut.cuda.plans import m_bucket
    from qcut.cuda.prebuild import prebuild

    calls: dict[int, set[LinearLayer]] = {}
    codebook_calls: dict[int, set[CodebookCall]] = {}
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
            wanted = _codebook_calls(scheme, weight.dtype, n, k, bias, task.activation, rows)
            codebook_calls.setdefault(index, set()).update(wanted)
            continue
        calls.setdefault(index, set()).update(
            LinearLayer(
                scheme=scheme.name,
                dtype=weight.dtype,
                rows=m_bucket(m),
                n=n,
                k=k,
                bias=bias,
                activation=task.activation,
                aligned=k * weight.element_size() % 16 == 0,
            )
            for m in rows
        )
    for index, needed in calls.items():
        prebuild(needed, index, progress)
    for index, codebooks in codebook_calls.items():
        from qcut.cuda import codebook as _codebook_cuda

        _codebook_cuda.prebuild(sorted(codebooks, key=str), index, progress)


def _codebook_calls(
    scheme: Codebook, dtype: torch.dtype, n: int, k: int, bias: bool, activation: str, rows: Sequence[int]
) -> list[CodebookCall]:
    """What a layer launches; of two widths nothing, whose kernels are built when they are met."""
    if len(set(scheme.widths)) > 1:
        return []
    size, passes = scheme.group_columns(k), len(scheme.widths)
    geometry = Geometry(k, size)
    return [
        CodebookCall(
            dtype,
            n,
            passes * geometry.units,
            m,
            scheme.bits,
            UNIT_COLUMNS // geometry.slot,
            bias,
            activation,
            scheme.activation == "int8",
            scheme.rotation,
            size,
            k,
            passes,
        )
        for m in rows
    ]
