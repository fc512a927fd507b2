"""Compiles kernels of the portable path for a GPU that is not here: ``python -m tests.portable.compiled cuda 110 i8``.

It needs a process of its own: where Triton's interpreter runs kernels, none are compiled.
"""

from __future__ import annotations

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
    "SLOTS": 2,
}


def build(kernel: Any, tokens: str, target: GPUTarget, tile: codebook.Tile | int8.Tile, bits: int) -> int:
    """Bytes of a kernel's binary; raises where it does not compile."""
    signature = dict.fromkeys(NUMBERS, "i32") | POINTERS | {"x": f"*{tokens}", "book": ("i32",) * 8}
    signature["table"] = "*fp16" if tokens == "i8" else signature["x"]
    depth = {} if isinstance(tile, codebook.Tile) else {"BK": tile.depth}
    options = OPTIONS | {"BITS": bits, "BM": tile.rows, "BN": tile.columns, "TURNED": tile.turned, **depth}
    options |= {"PTX": target.backend == "cuda", "x_box": None, "w_box": None}
    names = kernel.arg_names
    types = {name: "constexpr" if name in options else signature[name] for name in names}
    constants = {(i,): options[name] for i, name in enumerate(names) if name in options}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if str(types[name]).startswith("*")}
    source = ASTSource(kernel, types, constexprs=constants, attrs=aligned)
    made = compile(source, target, {"num_warps": tile.warps, "num_stages": 2, "enable_fp_fusion": False})
    return len(made.asm["hsaco" if target.backend == "hip" else "cubin"])


def main(backend: str, arch: str, tokens: str) -> None:
    """Compile one kernel of each product."""
    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, 64 if arch.startswith("gfx9") else 32)
    print(build(int8_kernels.product, tokens, target, int8.Tile(16, 32, 128, True, 4, 2), 8))
    print(build(codebook_kernels.product, tokens, target, codebook.Tile(16, 64, True, 4, 2), 3))


if __name__ == "__main__":
    main(*sys.argv[1:])
