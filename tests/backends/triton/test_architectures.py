"""Kernels of the Triton back end compiled for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import pytest
from packaging.version import Version

from tests.backends.triton.compiled import early_steps, products_from_registers
from tests.support import ROOT

# The same GPU's name up to CUDA 12.9, which Triton 3.6 brings.
THOR = "101" if Version(version("triton")) < Version("3.7") else "110"
SIZES = tuple(f"sizes {target}" for target in (f"cuda {THOR} i8", "cuda 80 bf16", "hip gfx942 fp16"))
LOOPS = tuple(f"loops {product}" for product in ("codebook fp16 4096", "codebook i8 200", "int8 fp16 4096"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The lines that `tests.backends.triton.compiled` prints for each argument: one process compiles for all tests."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, "-m", "tests.backends.triton.compiled", *SIZES, *LOOPS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    blocks = done.stdout.split("\n\n")[:-1]
    return {argument: block.splitlines() for argument, block in zip((*SIZES, *LOOPS), blocks, strict=True)}


@pytest.mark.parametrize("target", SIZES)
def test_products_compile_for_gpus_without_cuda_kernels(target, compiled):
    assert len(compiled[target]) == 2
    assert all(int(size) > 1000 for size in compiled[target])


@pytest.mark.parametrize("product", LOOPS)
def test_loop_waits_for_product_that_reads_registers(product, compiled):
    """The next step decodes into the registers that a product of sm_90 reads while it runs."""
    tiles = [line.split(maxsplit=2) for line in compiled[product]]
    assert len(tiles) >= 3
    assert any(int(found) for found, _, _ in tiles)
    assert all(early == "0" for _, early, _ in tiles), tiles


def test_loops_that_do_not_wait_are_found():
    product = (
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, %rd1, %p1, 1, 1, 0;"
    )
    memory = product.replace("{%r1,%r2,%r3,%r4}", "%rd2")
    loop = "$L__BB0_2:\n{}\n\twgmma.wait_group.sync.aligned {};\n@%p2 bra \t$L__BB0_2;\n$L__BB0_3:\nbra.uni $L__BB0_4;"
    assert (products_from_registers(product), products_from_registers(memory)) == (1, 0)
    assert early_steps(loop.format(product, 0)) == 0
    assert early_steps(loop.format(product, 1)) == 1
    assert early_steps(loop.format(memory, 1)) == 0
    assert early_steps(loop.format(product, 7) + loop.format(memory, 0)) == 1
