"""`qcut.explain`: which kernel would run a product, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qcut.errors import DeviceError

if TYPE_CHECKING:
    from qcut.dispatch.gemm import Explanation
    from qcut.dispatch.gpus import Target
    from qcut.emitters.core.epilogue import Epilogue


def explain(
    m: int,
    n: int,
    k: int,
    *,
    layouts: str = "tnt",
    out: str = "f16",
    epilogue: Epilogue | None = None,
    tensor_cores: bool = True,
    tokens: str = "s8",
    gpu: str | None = None,
) -> Explanation:
    """Say which kernel `qcut.gemm_s8` would run, or the product of a W8A16 layer, and why.

    The answer comes from tables and a cost model. Nothing is built or launched, and no GPU is needed if ``gpu`` names
    one.

    Args:
        m: rows of A and D.
        n: columns of B and D.
        k: summed over.
        layouts: memory orders of A ``[M, K]``, B ``[K, N]`` and D: ``t`` is row-major, ``n`` column-major.
        out: type of D: f16, bf16, f32, s8 or s32.
        epilogue: the fused epilogue; None takes the whole dequantization.
        tensor_cores: False asks for the dp4a kernels.
        tokens: type of A: s8, or f16 or bf16 for W8A16.
        gpu: a name such as ``NVIDIA H200``, or an architecture such as ``sm_80``; None takes the current device.

    Returns:
        The `qcut.dispatch.gemm.Explanation`; print it. It reports which tuned table was used, or which similar GPU's
        table served as a start, and what the model assumes of the GPU. CUTLASS counts as available if this machine can
        build its kernels.

    Raises:
        ConfigError: layouts, an output type, a type of tokens or a size that is not allowed.
        DeviceError: ``gpu`` is None, and there is no GPU.
        UnsupportedError: the GPU has no kernels, or is not known by that name.

    Example::

        >>> print(qcut.explain(16, 4096, 4096, gpu="NVIDIA H200"))  # doctest: +SKIP
    """
    from qcut import jit
    from qcut.dispatch import ahead_of_time
    from qcut.dispatch import gemm as dispatch

    problem = dispatch.problem_of(m, n, k, layouts=layouts, out=out, epilogue=epilogue, tokens=tokens)
    target = _target(gpu)
    cutlass = ahead_of_time.serves_cutlass(problem, target, lambda: jit.is_toolchain_available("nvcc"))
    return dispatch.explain(problem, m, n, k, target, cutlass=cutlass, tensor_cores=tensor_cores)


def _target(gpu: str | None) -> Target:
    import torch

    from qcut.backends.cuda.launch.plans import target
    from qcut.dispatch.gpus import target_named

    if torch.cuda.is_available():
        current = target(torch.cuda.current_device())
        if gpu is None or gpu.strip().lower() == current.name.lower():
            return current
    if gpu is None:
        raise DeviceError("explain: there is no CUDA device here; name one, as in gpu='NVIDIA H200' or gpu='sm_80'")
    return target_named(gpu)
