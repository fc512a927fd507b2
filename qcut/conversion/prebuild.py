"""The CUDA kernels of layers that `qcut.quantize` is about to make, built before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from qcut.conversion.tasks import Task
from qcut.errors import ConfigError
from qcut.layers.linear import Linear
from qcut.models.modules import weight_nk
from qcut.ops import paths

if TYPE_CHECKING:
    from qcut.backends.cuda.launch.prebuild import LayerCall


def prebuild_layers(tasks: dict[str, Task], device: torch.device | None, rows: Sequence[int], progress: bool) -> None:
    """Build the kernels of layers that will live on CUDA devices, each once.

    Args:
        tasks: what layers become, by name.
        device: where they will be; None takes where they are.
        rows: numbers of tokens to build for.
        progress: show a progress bar.

    Raises:
        ConfigError: float32 weights of a layer with kernels that take 16-bit tokens.
        BuildError: the first kernel that does not compile.
    """
    calls: dict[int, set[LayerCall]] = {}
    for name, task in tasks.items():
        weight, scheme = weight_nk(task.module), task.scheme
        home = device or weight.device
        if not scheme.int8_products and weight.dtype is torch.float32:
            raise ConfigError(
                f"layer {name!r}: {scheme.name} computes in float16 or bfloat16 on CUDA, and its weight is float32; "
                "convert the model first (model.half())"
            )
        n, k = weight.shape
        bias = task.module._parameters.get("bias") is not None
        index = home.index if home.index is not None else torch.cuda.current_device()
        if index in paths.refusals():
            continue  # the Triton kernels are built by the first call
        describe, of_device = Linear.subclass_for(scheme).cuda_calls, calls.setdefault(index, set())
        for m in rows:
            of_device.update(
                describe(scheme, dtype=weight.dtype, rows=m, n=n, k=k, bias=bias, activation=task.activation)
            )
    for index, required in calls.items():
        from qcut.backends.cuda.launch.prebuild import prebuild

        prebuild(sorted(required, key=str), index, progress)


def prebuild_layer(layer: Linear, dtype: torch.dtype, rows: Sequence[int]) -> None:
    """Build the best kernels of a layer on a CUDA device and wait for them, also where callers do not wait otherwise.

    A CUDA graph goes on with the kernels that it was captured with; a server captures once.

    Args:
        layer: on the device. Nothing is built for one on the CPU.
        dtype: of tokens.
        rows: numbers of tokens.

    Raises:
        BuildError: the first kernel that does not compile.
    """
    device = next(layer.buffers()).device
    if device.type != "cuda" or device.index in paths.refusals():
        return
    from qcut.backends.cuda.launch.prebuild import prebuild
    from qcut.jit.waiting import no_fallbacks

    n, k, bias = layer.out_features, layer.in_features, layer.bias is not None
    required: set[LayerCall] = set()
    for m in rows:
        required.update(
            layer.cuda_calls(layer.scheme, dtype=dtype, rows=m, n=n, k=k, bias=bias, activation=layer.activation)
        )
    with no_fallbacks():
        prebuild(sorted(required, key=str), device.index)
