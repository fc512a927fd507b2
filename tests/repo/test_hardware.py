"""The table of schemes by hardware in docs/gpus.md says what dispatch and the back ends do."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from qcut.backends.cuda.linear import FLOAT_TOKENS, FP8_TOKENS, linear_problem
from qcut.dispatch import codebook, gemm
from qcut.dispatch.gpus import Target, target_for
from qcut.emitters.core.arch import ARCHITECTURES, architecture
from qcut.emitters.core.source import DType
from qcut.schemes import Codebook, parse_scheme
from tests.support import ROOT

SIZE = 4096
"""Output channels and columns of the layer that the table is about."""


def table() -> tuple[list[str], dict[str, list[str]]]:
    """The head of the table, and its cells by scheme."""
    page = (ROOT / "docs" / "gpus.md").read_text()
    (found,) = re.findall(r"^(\| scheme .*?)\n\n", page, re.MULTILINE | re.DOTALL)
    head, _, *rows = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in found.splitlines())
    return head, {name: cells for names, *cells in rows for name in re.findall(r"`([\w+]+)`", names)}


def family(name: str, tokens: int, gpu: Target) -> str:
    """The family of the kernel that multiplies float16 tokens, with a compiler at hand."""
    scheme, nvcc = parse_scheme(name), architecture(gpu.arch).wgmma
    if isinstance(scheme, Codebook):
        x = DType.S8 if scheme.int8_products else DType.F16
        slots = 8 if scheme.group_size == 16 else 1
        product = codebook.problem_of(x, scheme.bits, slots, DType.F16, True, "none", False, 16, pairs=scheme.pairs)
        return codebook.select(product, tokens, SIZE, SIZE // 128, gpu).family
    sizes = (tokens, SIZE, SIZE, gpu)
    problem = linear_problem(DType.F16, SIZE, SIZE, True, "none", name.replace("w8a8_rotated", "w8a8"))
    if name in FLOAT_TOKENS:
        return gemm.select_w8a16(problem, *sizes, nvcc=nvcc).family
    if name in FP8_TOKENS:
        return gemm.select_fp8(problem, *sizes, nvcc=nvcc)[1].family
    few = gemm.few_tokens(problem, *sizes)
    return gemm.select_gemm(problem, *sizes).family if few is None else few[1].family


def test_families_are_those_that_dispatch_chooses() -> None:
    head, rows = table()
    columns = {column: re.findall(r"\d+\.\d", name) for column, name in enumerate(head[1:]) if name[0].isdigit()}
    capabilities = [tuple(map(int, one.split("."))) for ones in columns.values() for one in ones]
    gpus = {f"{major}.{minor}": target_for((major, minor), 100) for major, minor in capabilities}
    assert {gpu.arch for gpu in gpus.values()} == set(ARCHITECTURES)
    assert len(rows) >= 19
    for name, cells in rows.items():
        for column, ones in columns.items():
            for gpu in (gpus[one] for one in ones):
                chosen = [family(name, tokens, gpu) for tokens in (1, SIZE)]
                assert re.findall(r"`(\w+)`", cells[column]) == chosen, (name, gpu.arch)


PROGRAM = """
import sys
import torch
import qcut
for name in sys.argv[1:]:
    ranges = {"static_range": qcut.StaticRange(-4.0, 4.0)} if name.endswith("_static") else {}
    layer = qcut.Linear.from_float(torch.nn.Linear(128, 16).half(), name, **ranges)
    try:
        with torch.no_grad(), qcut.execution_path("triton"):
            layer(torch.ones(2, 128).half())
        print(name, "yes")
    except (qcut.errors.DtypeError, qcut.errors.UnsupportedError):
        print(name, "no")
"""


def test_triton_back_end_has_the_schemes_named() -> None:
    pytest.importorskip("triton")
    head, rows = table()
    column = next(column for column, name in enumerate(head[1:]) if "Triton" in name)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-c", PROGRAM, *rows]
    found = subprocess.run(program, env=environment, capture_output=True, text=True, check=True).stdout
    assert dict(line.split() for line in found.splitlines()) == {name: cells[column] for name, cells in rows.items()}
