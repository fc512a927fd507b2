"""The CUDA kernels of layers that `qcut.quantize` is about to make, built before it begins."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qcut.config import Codebook
from qcut.conversion.tasks import Task
from qcut.errors import ConfigError
from qcut.models.modules import weight_nk


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
    from qcut.cuda.codebook import CodebookLayer
    from qcut.cuda.linear import LinearLayer
    from qcut.cuda.plans import m_bucket
    from qcut.cuda.prebuild import prebuild

    layers: dict[int, set[LinearLayer | CodebookLayer]] = {}
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
        of_device = layers.setdefault(index, set())
        if not isinstance(scheme, Codebook):
            of_device.update(
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
        elif len(set(scheme.widths)) == 1:  # kernels of two widths are built when they are met
            of_device.update(
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
    for index, wanted in layers.items():
        prebuild(sorted(wanted, key=str), index, progress)
