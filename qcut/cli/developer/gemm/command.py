"""The arguments of ``qcut gemm``. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from qcut.cli.command import Answer, Command
from qcut.cli.developer.gemm.report import Request
from qcut.emitters.families import SPELLINGS

USAGE = "qcut gemm M N K [transA transB transC] [use_tensor_cores] [options]"
_ORDERS = {"T": "t", "1": "t", "N": "n", "0": "n"}
_DESCRIPTION = """\
Computes C = requantize(A B), A [M, K], B [K, N], C [M, N], all int8, on full-range random data. The result is
compared with an exact reference, element by element; then the kernel's name, its median time, TOPS, GB/s and the
ratio to cuBLASLt in the same run are printed. B rotates over copies that together exceed the L2. Without a GPU the
CPU's reference runs, and nothing is timed.

transA, transB, transC: T or 1 for a row-major matrix, N or 0 for a column-major one (cuBLAS's flags).
use_tensor_cores: 1, or 0 for the dp4a kernels. Default: 1 0 1 1, that is A row-major, B stored [N, K], C row-major.

The exit status is 1 if the result is wrong or the kernel cannot be built.
"""
_ARGUMENTS = f"""\
M: positive
    rows of A and C
N: positive
    columns of B and C
K: positive
    columns of A, rows of B
flag *
    see above
--kernel {"|".join(("auto", *SPELLINGS))} = auto
    kernel family (default: dispatch chooses)
--tile NAME
    tile of the --kernel family, spelled as in kernel names
--[no-]check = True
    compare with the exact reference
--mode saturate|wrap = saturate
    C is clamp(rne(scale * sum), -128, 127), or the low eight bits of the sum (default: saturate)
--scale SCALE: positive_float
    factor of the sums with --mode saturate (default: gives C a standard deviation of 40)
--seed SEED: natural = 0
    seed of the random data (default: 0)
--compare cublas|none = cublas
    library to compare the kernel with (default: cublas)
"""
FIELDS = {
    "m, n, k": "sizes",
    "layouts": "memory orders of A, B, C: t row-major, n column-major",
    "tensor_cores": "whether tensor cores were asked for",
    "mode, scale, seed": "as given; scale is null with --mode wrap",
    "device": "the GPU's name, or cpu",
    "kernel, family, tile, reason": "the kernel and the reason of its choice; null on the CPU except kernel",
    "checked": "whether the result was compared with the exact one",
    "wrong": "number of elements that differ; null if nothing was checked",
    "timing": "{median_us, p20_us, p80_us, samples, mode}, or null if nothing was timed",
    "tops, gb_s": "10^12 operations and 10^9 bytes a second, or null",
    "cublaslt": "{kernel, layouts, timing} of cuBLASLt, or null",
    "x_cublaslt": "the kernel's speed over cuBLASLt's, or null",
    "notes": "remarks, such as why nothing was timed",
}


def _orders(given: list[str], refuse: Callable[[str], NoReturn]) -> tuple[str, bool]:
    """Layouts, such as ``tnt``, and whether to use tensor cores, of ``1 0 1 1`` or ``T N T 1``."""
    if len(given) not in (0, 3, 4):
        refuse(
            f"argument flag: {len(given)} flags; allowed: none, or transA transB transC, each T or 1 (row-major) or N "
            "or 0 (column-major), and then use_tensor_cores, 1 or 0"
        )
    *flags, tensor_cores = given if len(given) == 4 else [*(given or ["1", "0", "1"]), "1"]
    for name, flag in zip(("transA", "transB", "transC"), flags, strict=True):
        if flag.upper() not in _ORDERS:
            refuse(f"argument flag: {name} is {flag!r}; allowed: T or 1 (row-major) and N or 0 (column-major)")
    if tensor_cores not in ("0", "1"):
        refuse(f"argument flag: use_tensor_cores is {tensor_cores!r}; allowed: 1 and 0 (dp4a)")
    return "".join(_ORDERS[flag.upper()] for flag in flags), tensor_cores == "1"


COMMAND = Command(
    "gemm",
    _ARGUMENTS,
    help="check and time one int8 product of any sizes and layouts",
    usage=USAGE,
    description=_DESCRIPTION,
    example="qcut gemm 1024 1024 1024 1 0 1 1\nqcut gemm 4096 4096 4096 N N T --kernel mma --json",
    fields=FIELDS,
)


def run(arguments: argparse.Namespace) -> Answer:
    """Run the command."""
    refuse = arguments.parser.error
    layouts, tensor_cores = _orders(arguments.flag, refuse)
    if arguments.tile and arguments.kernel == "auto":
        refuse(f"--tile needs --kernel, one of {', '.join(SPELLINGS)}: families have tiles of their own")
    if not tensor_cores and arguments.kernel not in ("auto", "simt"):
        refuse(f"--kernel {arguments.kernel} runs on tensor cores, use_tensor_cores is 0; allowed: auto, simt")
    if arguments.mode == "wrap" and arguments.scale is not None:
        refuse("--scale is for --mode saturate: wrap takes the sum's bits as they are")
    from qcut.cli.developer.gemm import check

    report = check.run(
        Request(
            m=arguments.m,
            n=arguments.n,
            k=arguments.k,
            layouts=layouts,
            tensor_cores=tensor_cores,
            family=SPELLINGS.get(arguments.kernel),
            tile=arguments.tile,
            wrap=arguments.mode == "wrap",
            scale=arguments.scale,
            seed=arguments.seed,
            check=arguments.check,
            compare=arguments.compare == "cublas",
        )
    )
    return Answer(report.to_json(), str(report), 1 if report.wrong else 0)
