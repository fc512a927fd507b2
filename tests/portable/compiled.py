"""Compiles kernels of the portable path for a GPU that is not here: ``python -m tests.portable.compiled cuda 110 i8``.

``python -m tests.portable.compiled waits fp16`` prints what Hopper's kernels for many tokens wait for. It needs
a process of its own: where Triton's interpreter runs kernels, none are compiled.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qcut.portable import codebook, int8
from qcut.portable.kernels import codebook as codebook_kernels
from qcut.portable.kernels import int8 as int8_kernels

POINTERS = {
    "row_scale": "*fp32",
    "col_scale": "*fp32",
    "colsum": "*i32",
    "bias": "*fp32",
    "residual": "*fp16",
    "y": "*fp16",
    "units": "*i32",
    "norms": "*i32",
    "fold": "*fp32",
    "w": "*i8",
}
NUMBERS = ("M", "N", "K", "U", "blocks", "stride_x", "stride_w", "zero_point")
OPTIONS: dict[str, Any] = {
    "ACTIVATION": "gelu_tanh",
    "HAS_ROW_SCALE": True,
    "HAS_COLSUM": True,
    "HAS_BIAS": True,
    "HAS_RESIDUAL": True,
    "WHOLE_K": True,
    "BOXES": False,
    "OFFSETS": False,
    "ONE_TABLE": False,
    "EXACT": False,
    "GROUP": 8,
    "SPARSE": True,
    "PARTS": 1,
    "HALVES": False,
    "PAIRS": False,
    "SLOTS": 2,
}


def build(kernel: Any, tokens: str, target: GPUTarget, tile: codebook.Tile | int8.Tile, bits: int) -> Any:
    """A compiled kernel; raises where it does not compile."""
    signature = dict.fromkeys(NUMBERS, "i32") | POINTERS | {"x": f"*{tokens}", "book": ("i32",) * 8}
    signature["table"] = "*fp16" if tokens == "i8" else signature["x"]
    depth = {} if isinstance(tile, codebook.Tile) else {"BK": tile.depth}
    options = OPTIONS | {"BITS": bits, "BM": tile.rows, "BN": tile.columns, "TURNED": tile.turned, **depth}
    options |= {"SPARSE": tile.rows <= 16}
    options |= {"PTX": target.backend == "cuda", "x_box": None, "w_box": None}
    names = kernel.arg_names
    types = {name: "constexpr" if name in options else signature[name] for name in names}
    constants = {(i,): options[name] for i, name in enumerate(names) if name in options}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if str(types[name]).startswith("*")}
    source = ASTSource(kernel, types, constexprs=constants, attrs=aligned)
    return compile(source, target, {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False})


def main(backend: str, arch: str, tokens: str) -> None:
    """Compile one kernel of each product, and print the bytes of the binaries."""
    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, 64 if arch.startswith("gfx9") else 32)
    for kernel, tile, bits in (
        (int8_kernels.product, int8.Tile(16, 32, 128, True, 4, 2), 8),
        (codebook_kernels.product, codebook.Tile(16, 64, True, 4, 2), 3),
    ):
        print(len(build(kernel, tokens, target, tile, bits).asm["hsaco" if backend == "hip" else "cubin"]))


def waits(tokens: str) -> None:
    """Print, for a kernel of each product, the products that Hopper takes from registers, and how many may be left."""
    target = GPUTarget("cuda", 90, 32)
    for kernel, tile, bits in (
        (int8_kernels.product, int8.Tile(256, 128, 64, True, 8, 3), 8),
        (codebook_kernels.product, codebook.Tile(256, 128, True, 8, 3), 4),
    ):
        text = build(kernel, tokens, target, tile, bits).asm["ptx"]
        from_registers = re.findall(r"wgmma[.]mma_async\S* \{[^}]*\}, *\{", text)
        left = re.findall(r"wgmma[.]wait_group\S* (\d+)", text)
        print(len(from_registers), *left)


if __name__ == "__main__":
    waits(*sys.argv[2:]) if sys.argv[1] == "waits" else main(*sys.argv[1:])
