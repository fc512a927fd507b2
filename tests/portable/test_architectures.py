"""Kernels of the portable path compile for GPUs that are not here, those that qcut's own kernels refuse."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import ROOT


@pytest.mark.parametrize("target", ["cuda 110 i8", "cuda 80 bf16", "hip gfx942 fp16"])
def test_products_compile(target, tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.portable.compiled", *target.split()]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(int(size) > 1000 for size in done.stdout.split())
    assert len(done.stdout.split()) == 2
