"""The types of GGUF tensors: the bytes of each type's blocks, and the float32 values that they stand for.

A block has a float16 scale d for 32 values, or for 256 (a super block, the types ``…_K`` and ``IQ4_XS``) next to
integers that scale its groups of 16 or 32 values. Some have a second float16 for what is added or subtracted: m, or
dmin. Integers q are split into nibbles and upper bits. Values are, in the words of the functions below:

- ``Q4_0``, ``Q5_0``, ``Q8_0``: ``d * (q - 8)``, ``d * (q - 16)``, ``d * q``
- ``Q4_1``, ``Q5_1``: ``d * q + m``
- ``IQ4_NL``: ``d * level[q]``
- ``Q2_K``, ``Q4_K``, ``Q5_K``: ``(d * scale) * q - dmin * minimum``
- ``Q3_K``, ``Q6_K``: ``(d * scale) * q``; ``IQ4_XS``: ``(d * scale) * level[q]``
- ``MXFP4``: e2m1 times a power of two, a byte in place of d

**Exactness**: every product has at most 24 significant bits, so float32 holds it, and a sum is rounded once: the values
are those of llama.cpp's ``dequantize_row_…`` bit for bit, whether or not a compiler has fused its products and sums.

Source: llama.cpp, ``ggml/src/ggml-common.h`` (layouts) and ``ggml/src/ggml-quants.c`` (values).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qcut.checkpoints.formats.floats.e2m1 import BIAS, LEVELS
from qcut.numerics.checks import out_of_range

_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of ``IQ4_NL`` and ``IQ4_XS`` stand for, times their scale."""
_MOST_VALUES = 1 << 19
"""Values that are made at once, so that intermediate tensors are small and lie in a cache."""


class BlockType(NamedTuple):
    """A type of tensors.

    Attributes:
        number: by which files name the type.
        size: values of a block.
        nbytes: bytes of a block.
        values: makes float32 ``[..., size]`` of blocks uint8 ``[..., nbytes]``; None of types of floats.
        scales: where a block's float16 scales begin; none of ``MXFP4``, which begins with an exponent.
    """

    number: int
    size: int
    nbytes: int
    values: Callable[[Tensor], Tensor] | None = None
    scales: tuple[int, ...] = ()


def dequantized(kind: str, blocks: Tensor) -> Tensor:
    """The values of quantized rows.

    Args:
        kind: a key of `TYPES` with ``values``.
        blocks: uint8 ``[..., K / size, nbytes]``, contiguous, on the CPU.

    Returns:
        float32 ``[..., K]``.

    Exactness: see the module.
    """
    form = TYPES[kind]
    assert form.values is not None
    flat = blocks.reshape(-1, form.nbytes)
    made = torch.empty((len(flat), form.size), dtype=torch.float32, device="cpu")
    for part, out in zip(flat.split(_MOST_VALUES // form.size), made.split(_MOST_VALUES // form.size), strict=True):
        out.copy_(form.values(part))
    return made.view(*blocks.shape[:-2], blocks.shape[-2] * form.size)


def wrong_scale(kind: str, blocks: Tensor) -> str | None:
    """A scale of quantized rows that is NaN or Inf; None if all are finite. For arguments see `dequantized`."""
    if kind == "MXFP4":
        nan = (blocks[..., 0] == 255).nonzero()
        return f"255, which is NaN, at {nan[0].tolist()}" if len(nan) else None
    for at in TYPES[kind].scales:
        if found := out_of_range(float16_at(blocks, at)):
            return found
    return None


def float16_at(blocks: Tensor, at: int) -> Tensor:
    """A float16 of each block, float16 ``[..., 1]``."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def nibbles(packed: Tensor) -> Tensor:
    """Integers 0 to 15 of bytes: the lower halves of all, then the upper halves."""
    return torch.cat((packed & 15, packed >> 4), -1)


def codes_q5_0(blocks: Tensor) -> Tensor:
    """uint8 ``[..., 32]`` of 0 to 31 of the blocks of ``Q5_0``: d, a bit for each value, 16 bytes of nibbles."""
    return _fifth_bits(blocks[..., 6:], blocks[..., 2:6])


def _fifth_bits(packed: Tensor, upper: Tensor) -> Tensor:
    bits = upper[..., None] >> torch.arange(8, dtype=torch.uint8, device="cpu") & 1
    return nibbles(packed) | bits.flatten(-2) << 4


def _float(blocks: Tensor, at: int) -> Tensor:
    return float16_at(blocks, at).float()


def _q4_0(blocks: Tensor) -> Tensor:
    return _float(blocks, 0) * (nibbles(blocks[..., 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _float(blocks, 0) * nibbles(blocks[..., 4:]).float() + _float(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return _float(blocks, 0) * (codes_q5_0(blocks).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    return _float(blocks, 0) * _fifth_bits(blocks[..., 8:], blocks[..., 4:8]).float() + _float(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _float(blocks, 0) * blocks[..., 2:].view(torch.int8).float()


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _float(blocks, 0) * _levels(nibbles(blocks[..., 2:]))


def _levels(codes: Tensor) -> Tensor:
    return torch.tensor(_LEVELS, dtype=torch.float32, device="cpu")[codes.int()]


def _pairs_of_bits(packed: Tensor, chunk: int) -> Tensor:
    """Integers 0 to 3: of each chunk of bytes the lowest two bits of all, then the next two, and so on."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device="cpu")[:, None]
    return (packed.unflatten(-1, (-1, 1, chunk)) >> shifts & 3).flatten(-3)


def _super_block(scales: Tensor, q: Tensor, minimums: Tensor | None = None) -> Tensor:
    """Values of integers ``[B, 256]``, with a scale and what is subtracted for each group ``[B, G]``, all float32."""
    groups = q.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]
    return (groups if minimums is None else groups - minimums[..., None]).flatten(-2)


def _q2_k(blocks: Tensor) -> Tensor:
    # 16 bytes of a scale and a minimum each, 64 bytes of two bits a value, d, dmin
    packed = blocks[..., :16]
    scales, minimums = _float(blocks, 80) * (packed & 15).float(), _float(blocks, 82) * (packed >> 4).float()
    return _super_block(scales, _pairs_of_bits(blocks[..., 16:80], 32).float(), minimums)


def _q3_k(blocks: Tensor) -> Tensor:
    # 32 bytes of upper bits, bit i of byte j of value 32 i + j; 64 bytes of two bits a value; 12 of scales; d
    shifts = torch.arange(8, dtype=torch.uint8, device="cpu")[:, None]
    upper = (blocks[..., None, :32] >> shifts & 1).flatten(-2)
    q = _pairs_of_bits(blocks[..., 32:96], 32).float() + 4 * upper.float() - 4
    packed = blocks[..., 96:108]
    # The lower four bits of 16 scales, then their upper two: those of scales 0, 4, 8 and 12 share a byte.
    scales = nibbles(packed[..., :8]) | _pairs_of_bits(packed[..., 8:], 4) << 4
    return _super_block(_float(blocks, 108) * (scales.float() - 32), q)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """8 scales and 8 minimums of six bits, float32, of 12 bytes.

    The first four scales and the first four minimums have a byte each. Its upper two bits belong to one of the last
    four, which have the lower (scales) and the upper half (minimums) of the last four bytes.
    """
    first, second, rest = packed.split(4, -1)
    scales = torch.cat((first & 63, rest & 15 | first >> 6 << 4), -1)
    minimums = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), -1)
    return scales.float(), minimums.float()


def _halves_of_chunks(packed: Tensor, chunk: int) -> Tensor:
    return nibbles(packed.unflatten(-1, (-1, chunk))).flatten(-2)


def _q4_k(blocks: Tensor) -> Tensor:
    # d, dmin, 12 bytes of scales, 128 bytes of nibbles
    scales, minimums = _six_bits(blocks[..., 4:16])
    q = _halves_of_chunks(blocks[..., 16:], 32).float()
    return _super_block(_float(blocks, 0) * scales, q, _float(blocks, 2) * minimums)


def _q5_k(blocks: Tensor) -> Tensor:
    # as Q4_K, with 32 bytes of upper bits in front of the nibbles: bit i of byte j of value 32 i + j
    scales, minimums = _six_bits(blocks[..., 4:16])
    shifts = torch.arange(8, dtype=torch.uint8, device="cpu")[:, None]
    upper = (blocks[..., None, 16:48] >> shifts & 1).flatten(-2)
    q = _halves_of_chunks(blocks[..., 48:], 32) | upper << 4
    return _super_block(_float(blocks, 0) * scales, q.float(), _float(blocks, 2) * minimums)


def _q6_k(blocks: Tensor) -> Tensor:
    # 128 bytes of nibbles, 64 bytes of upper two bits, 16 scales of a signed byte, d
    q = _halves_of_chunks(blocks[..., :128], 64) | _pairs_of_bits(blocks[..., 128:192], 32) << 4
    scales = blocks[..., 192:208].view(torch.int8).float()
    return _super_block(_float(blocks, 208) * scales, q.float() - 32)


def _iq4_xs(blocks: Tensor) -> Tensor:
    # d, 2 bytes of the upper two bits of 8 scales, 4 bytes of their nibbles, 128 bytes of nibbles
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device="cpu")
    upper = (blocks[..., 2:4, None] >> shifts & 3).flatten(-2)
    lower = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(-2)
    scales = (lower | upper << 4).float() - 32
    return _super_block(_float(blocks, 0) * scales, _levels(_halves_of_chunks(blocks[..., 8:], 16)))


def _mxfp4(blocks: Tensor) -> Tensor:
    exponents = blocks[..., :1].to(torch.int32) - BIAS
    return torch.ldexp((LEVELS + 0.0)[nibbles(blocks[..., 1:]).int()], exponents)  # code 8 is 0, not -0


TYPES = {
    "F32": BlockType(0, 1, 4),
    "F16": BlockType(1, 1, 2),
    "BF16": BlockType(30, 1, 2),
    "Q4_0": BlockType(2, 32, 18, _q4_0, (0,)),
    "Q4_1": BlockType(3, 32, 20, _q4_1, (0, 2)),
    "Q5_0": BlockType(6, 32, 22, _q5_0, (0,)),
    "Q5_1": BlockType(7, 32, 24, _q5_1, (0, 2)),
    "Q8_0": BlockType(8, 32, 34, _q8_0, (0,)),
    "Q2_K": BlockType(10, 256, 84, _q2_k, (80, 82)),
    "Q3_K": BlockType(11, 256, 110, _q3_k, (108,)),
    "Q4_K": BlockType(12, 256, 144, _q4_k, (0, 2)),
    "Q5_K": BlockType(13, 256, 176, _q5_k, (0, 2)),
    "Q6_K": BlockType(14, 256, 210, _q6_k, (208,)),
    "IQ4_NL": BlockType(20, 32, 18, _iq4_nl, (0,)),
    "IQ4_XS": BlockType(23, 256, 136, _iq4_xs, (0,)),
    "MXFP4": BlockType(39, 32, 17, _mxfp4),
}
"""The types that are read."""
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Those of them that are floats."""
