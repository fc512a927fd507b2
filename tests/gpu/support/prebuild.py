"""Builds every CUTLASS kernel that the GPU tests launch, in parallel, into the cache that their workers share."""

from __future__ import annotations

from benchmarks.device_kernels import prebuild
from qcut import jit
from tests.gpu.emitters.test_cutlass import cases
from tests.gpu.support.problems import gpu_test_calls

if __name__ == "__main__":
    prebuild(gpu_test_calls())
    jit.build_many(cases(), progress=False)
