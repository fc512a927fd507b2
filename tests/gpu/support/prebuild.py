"""Builds every CUTLASS kernel that the GPU tests launch, in parallel, into the cache that their workers share."""

from __future__ import annotations

from itertools import product

import torch

from benchmarks.layers.device_kernels import prebuild
from qcut import jit
from qcut.backends.cuda.launch.plans import m_bucket
from qcut.backends.cuda.launch.prebuild import prebuild as prebuild_layers
from qcut.backends.cuda.linear import LinearLayer
from qcut.emitters.core.source import KernelSource
from tests.gpu.emitters.gemm.test_cutlass import cases
from tests.gpu.layers.test_linear import FLOAT8
from tests.gpu.layers.test_stacking import ROWS, K
from tests.gpu.support.launching import arch
from tests.gpu.support.problems import gpu_test_calls


def stacked_layers() -> list[LinearLayer]:
    """The int8 layers of `tests.gpu.layers.test_stacking`, single and stacked, at numbers of tokens for CUTLASS."""
    options = product((torch.float16, torch.float32), map(m_bucket, (9, 130)), (*ROWS, sum(ROWS)), (False, True))
    return [LinearLayer("w8a8", dtype, rows, n, K, bias, "none", True) for dtype, rows, n, bias in options]


def float8_layers() -> list[LinearLayer]:
    """The layers with e4m3 tokens of `tests.gpu.layers.test_linear`, at a number of tokens for CUTLASS."""
    options = product(FLOAT8, (torch.float16, torch.bfloat16), ((272, 336), (1280, 1280)))
    return [LinearLayer(scheme, dtype, m_bucket(129), n, k, True, "none", True) for scheme, dtype, (k, n) in options]


def mixed_products() -> list[KernelSource]:
    """Kernels of 16-bit and codebook weights that need nvcc."""
    if arch() != "sm_90a":
        return []
    from tests.gpu.emitters.codebook import test_cutlass as codebook
    from tests.gpu.emitters.gemm import test_fp8, test_w8a16_cutlass, test_w8a16_wgmma

    return [*test_w8a16_cutlass.cases(), *codebook.cases(), *test_w8a16_wgmma.cases(), *test_fp8.cases()]


if __name__ == "__main__":
    prebuild_layers(stacked_layers(), torch.cuda.current_device(), progress=False)  # the tests that run first
    prebuild(gpu_test_calls())
    prebuild_layers(float8_layers(), torch.cuda.current_device(), progress=False)
    jit.build_many([*cases(), *mixed_products()], progress=False)
