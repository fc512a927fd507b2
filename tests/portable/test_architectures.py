"""Kernels of the portable path compile for GPUs that are not here, and wait for products where they must."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import ROOT


def compiled(arguments, cache):
    """Lines of ``python -m tests.portable.compiled``, as numbers: one for each product."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "tests.portable.compiled", *arguments.split()]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [[int(number) for number in line.split()] for line in done.stdout.splitlines()]
    assert len(lines) == 2
    return lines


@pytest.mark.parametrize("target", ["cuda 110 i8", "cuda 80 bf16", "hip gfx942 fp16"])
def test_products_compile(target, tmp_path):
    assert all(size > 1000 for (size,) in compiled(target, tmp_path))


@pytest.mark.parametrize("tokens", ["fp16", "i8"])
def test_products_from_registers_are_finished_before_the_registers_are_written(tokens, tmp_path):
    """A step decodes into the registers that the products of the step before read."""
    for i, (from_registers, *left) in enumerate(compiled(f"waits {tokens}", tmp_path)):
        assert bool(from_registers) == (tokens == "fp16" or i == 1)
        assert left
        assert set(left) <= {0} if from_registers else True
