"""The arguments of ``qcut gemm``. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from qcut.cli.command import Answer, add_command
from qcut.cli.developer.gemm.report import Request
from qcut.emitters.families import SPELLINGS

USAGE = "qcut gemm M N K [transA transB transC] [use_tensor_cores] [options]"
_ROW_MAJOR, _COLUMN_MAJOR = ("T", "1"), ("N", "0")
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
    library to time beside the kernel (default: cublas)
"""
FIELDS = {
    "m, n, k": "sizes",
    "layouts": "memory orders of A, B, C: t row-major, n column-major",
    "tensor_cores": "whether tensor cores were asked for",
    "mode, scale, seed": "as given; scale is null with --mode wrap",
    "device": "the GPU's name, or cpu",
    "kernel, family, tile, reason": "the kernel and why it was chosen; null on the CPU but for the kernel",
    "checked": "whether the result was compared with the exact one",
    "wrong": "number of elements that differ; null where nothing was checked",
    "timing": "{median_us, p20_us, p80_us, samples, mode}, or null where nothing was timed",
    "tops, gb_s": "10^12 operations and 10^9 bytes a second, or null",
    "cublaslt": "{kernel, layouts, timing} of cuBLASLt, or null",
    "x_cublaslt": "the kernel's speed over cuBLASLt's, or null",
    "notes": "remarks, such as why nothing was timed",
}


class _Flags(argparse.Action):
    """Turns ``1 0 1 1`` or ``T N T 1`` into layouts, ``tnt``, and whether to use tensor cores."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        given = [str(value) for value in values or ()]
        if len(given) not in (0, 3, 4):
            raise argparse.ArgumentError(
                self,
                f"{len(given)} flags; allowed: none, or transA transB transC, each T or 1 (row-major) or N or 0 "
                "(column-major), and then use_tensor_cores, 1 or 0",
            )
        flags = given or ["1", "0", "1"]
        namespace.layouts = "".join(
            self._layout(name, flag) for name, flag in zip(("transA", "transB", "transC"), flags, strict=False)
        )
        tensor_cores = flags[3] if len(flags) == 4 else "1"
        if tensor_cores not in ("0", "1"):
            raise argparse.ArgumentError(self, f"use_tensor_cores is {tensor_cores!r}; allowed: 1 and 0 (dp4a)")
        namespace.tensor_cores = tensor_cores == "1"

    def _layout(self, name: str, flag: str) -> str:
        if flag.upper() in _ROW_MAJOR:
            return "t"
        if flag.upper() in _COLUMN_MAJOR:
            return "n"
        raise argparse.ArgumentError(self, f"{name} is {flag!r}; allowed: T or 1 (row-major) and N or 0 (column-major)")


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers of ``qcut``."""
    parser = add_command(
        commands,
        "gemm",
        _run,
        _ARGUMENTS,
        help="check and time one int8 product of any sizes and layouts",
        usage=USAGE,
        description=_DESCRIPTION,
        example="qcut gemm 1024 1024 1024 1 0 1 1\nqcut gemm 4096 4096 4096 N N T --kernel mma --json",
        fields=FIELDS,
    )
    parser.add_argument("flags", nargs="*", action=_Flags, metavar="flag", help="see above")


def _run(arguments: argparse.Namespace) -> Answer:
    refuse = arguments.parser.error
    if arguments.tile and arguments.kernel == "auto":
        refuse(f"--tile needs --kernel, one of {', '.join(SPELLINGS)}: families have tiles of their own")
    if not arguments.tensor_cores and arguments.kernel not in ("auto", "simt"):
        refuse(f"--kernel {arguments.kernel} runs on tensor cores, use_tensor_cores is 0; allowed: auto, simt")
    if arguments.mode == "wrap" and arguments.scale is not None:
        refuse("--scale is for --mode saturate: wrap takes the sum's bits as they are")
    from qcut.cli.developer.gemm import check

    report = check.run(
        Request(
            m=arguments.m,
            n=arguments.n,
            k=arguments.k,
            layouts=arguments.layouts,
            tensor_cores=arguments.tensor_cores,
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
