"""Kernels of the Triton back end compiled for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from packaging.version import Version

from tests.backends.triton.compiled import early_steps, products_from_registers
from tests.support import ROOT


def compiled(folder: Path, *arguments: str) -> list[list[str]]:
    """The lines that `tests.backends.triton.compiled` prints for each argument."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-m", "tests.backends.triton.compiled", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [block.splitlines() for block in done.stdout.split("\n\n")[:-1]]
    assert len(found) == len(arguments)
    return found


def test_products_compile_for_gpus_without_cuda_kernels(tmp_path):
    # The same GPU's name up to CUDA 12.9, which Triton 3.6 brings.
    thor = "101" if Version(version("triton")) < Version("3.7") else "110"
    targets = (f"cuda {thor} i8", "cuda 80 bf16", "hip gfx942 fp16")
    for target, lines in zip(targets, compiled(tmp_path, *(f"sizes {target}" for target in targets)), strict=True):
        assert len(lines) == 2, target
        assert all(int(size) > 1000 for size in lines), target


def test_loop_waits_for_product_that_reads_registers(tmp_path):
    """The next step decodes into the registers that a product of sm_90 reads while it runs."""
    products = ("codebook fp16 4096", "codebook i8 200", "int8 fp16 4096")
    for product, lines in zip(products, compiled(tmp_path, *(f"loops {product}" for product in products)), strict=True):
        tiles = [line.split(maxsplit=2) for line in lines]
        assert len(tiles) >= 3, product
        assert any(int(found) for found, _, _ in tiles), product
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
