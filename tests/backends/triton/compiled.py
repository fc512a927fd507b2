"""Compiles kernels of the Triton back end for a GPU that is not here.

``python -m tests.backends.triton.compiled "sizes cuda 110 i8"`` prints the sizes of binaries, one of each product.
``python -m tests.backends.triton.compiled "loops codebook fp16 4096"`` prints, for each tile of a list, how many
products read registers in a loop for sm_90, and how many loops begin their next step before such a product is done.
An empty line ends the output of each argument.

Compiling needs a process of its own: where Triton's interpreter runs kernels, none are compiled.
"""

from __future__ import annotations

import re
import sys
from typing import Any

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
MULTIPLES = ("N", "K", "stride_x", "stride_w")
"""Numbers that 16 divides, as Triton sees of most layers; loads are only then wide enough to run ahead of products."""
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
_FROM_REGISTERS = re.compile(r"wgmma\.mma_async\S+ \{[^}]*\}, *\{")


def build(kernel: Any, tokens: str, backend: str, arch: str, tile: Any, bits: int, **changed: Any) -> Any:
    """A kernel compiled for a tile; raises where it does not compile.

    Args:
        kernel: `product` of a module of kernels.
        tokens: their type in Triton's words.
        backend: ``cuda`` or ``hip``.
        arch: of the GPU.
        tile: of `qcut.backends.triton.codebook` or `qcut.backends.triton.int8`.
        bits: of a weight.
        **changed: options of the kernel other than `OPTIONS`.
    """
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, 64 if arch.startswith("gfx9") else 32)
    signature = dict.fromkeys(NUMBERS, "i32") | POINTERS | {"x": f"*{tokens}", "book": ("i32",) * 8}
    signature["table"] = "*fp16" if tokens == "i8" else signature["x"]
    options = OPTIONS | {"BITS": bits, "BM": tile.rows, "BN": tile.columns, "TRANSPOSED": tile.transposed}
    options |= {"PTX": backend == "cuda", **changed}
    if hasattr(tile, "depth"):
        options |= {"BK": tile.depth, "BOXES": tile.boxes}
    if options["BOXES"]:
        signature["x_box"] = f"tensordesc<{tokens}[{tile.rows},{tile.depth}]>"
        signature["w_box"] = f"tensordesc<i8[{tile.columns},{tile.depth}]>"
    else:
        options |= {"x_box": None, "w_box": None}
    names = kernel.arg_names
    types = {name: "constexpr" if name in options else signature[name] for name in names}
    constants = {(i,): options[name] for i, name in enumerate(names) if name in options}
    whole = [i for i, name in enumerate(names) if str(types[name]).startswith("*") or name in MULTIPLES]
    aligned = {(i,): [["tt.divisibility", 16]] for i in whole}
    source = ASTSource(kernel, types, constexprs=constants, attrs=aligned)
    made = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    return compile(source, target, made)


def products_from_registers(ptx: str) -> int:
    """The number of ``wgmma`` with their first operand in registers."""
    return len(_FROM_REGISTERS.findall(ptx))


def early_steps(ptx: str) -> int:
    """The number of branches back to a loop's start while such a product may still read its registers."""
    seen, reading, early = set(), False, 0
    for line in map(str.strip, ptx.splitlines()):
        if label := re.match(r"(\$\w+):", line):
            seen.add(label[1])
        elif _FROM_REGISTERS.match(line):
            reading = True
        elif re.match(r"wgmma\.wait_group\S* 0;", line):
            reading = False
        elif (branch := re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", line)) and branch[1] in seen:
            early += reading
    return early


def sizes(backend: str, arch: str, tokens: str) -> None:
    """Compile one kernel of each product."""
    from qcut.backends.triton import codebook, int8
    from qcut.backends.triton.kernels import codebook as codebook_kernels
    from qcut.backends.triton.kernels import int8 as int8_kernels

    binary = "hsaco" if backend == "hip" else "cubin"
    few = int8.Tile(16, 32, 128, True, 4, 2), codebook.Tile(16, 64, True, 4, 2)
    for kernel, tile, bits in zip((int8_kernels.product, codebook_kernels.product), few, (8, 3), strict=True):
        print(len(build(kernel, tokens, backend, arch, tile, bits).asm[binary]))


def loops(family: str, tokens: str, m: str) -> None:
    """Compile a product in every tile for m tokens."""
    from qcut.backends.triton import codebook, int8
    from qcut.backends.triton.kernels import codebook as codebook_kernels
    from qcut.backends.triton.kernels import int8 as int8_kernels

    if family == "codebook":
        kernel, tiles = codebook_kernels.product, codebook.tiles_of(int(m))
    else:
        kernel, tiles = int8_kernels.product, int8.tiles_of(int(m), tokens == "i8")
    # Parts of K change only what follows the loop.
    for tile in dict.fromkeys(tile._replace(parts=1) for tile in tiles):
        ptx = build(kernel, tokens, "cuda", "90", tile, 4, SPARSE=False).asm["ptx"]
        print(products_from_registers(ptx), early_steps(ptx), tile)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        name, *rest = argument.split()
        {"sizes": sizes, "loops": loops}[name](*rest)
        print()
