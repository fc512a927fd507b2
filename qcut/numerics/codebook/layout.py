"""The memory layout of codebook weights and rotated tokens on GPUs: packing and unpacking in plain torch.

Columns. Every group is padded to whole *slots* of 16, 32, 64 or 128 columns (`Geometry.slot`), each with one norm, and
every row to whole *units* of 128 columns. A residual pass follows the first pass along K, as if K were longer.

Weights. A unit holds 16 rows x 128 columns as the tensor core's first operand needs them (PTX ISA, "Matrix Fragments
for mma.m16n8k16"): lane ``4g + t`` keeps eight 32-bit words of eight 4-bit indices; byte b of word i has columns
``16i + 8(b & 1) + 2t`` (low half) and the next one, of row ``g + 8(b >> 1)``. Words 0 to 3 of all lanes come first,
then words 4 to 7: a lane loads twice 16 bytes, a warp 512 contiguous bytes each time. With two bits, word j is
``w[2j] | w[2j + 1] << 2``, and a lane loads once. With three bits, the lower two bits are stored so, followed by two
words for each lane that hold the upper bits, ``sum (w[4q + j] >> 2) << j``.

Norms. Norms are float16, divided by a power of two for each row, so that 16-bit products keep their precision. That
power and ``1 / sqrt(group size)`` are multiplied into a float32 factor for each output channel.

Tokens. A block holds 8 tokens x 128 bytes, with 16-byte chunk c of token r at place ``c ^ (r % 8)``: the 128-byte
swizzle of shared memory, so that ``wgmma`` and ``ldmatrix`` read a plain bulk copy without bank conflicts. Columns of
int8 tokens are permuted within 16, so that one order of indices serves int8 and 16-bit products: place ``4t + e`` has
column ``8(e >> 1) + 2t + (e & 1)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qcut.errors import ConfigError, ShapeError
from qcut.numerics.codebook import pairs
from qcut.numerics.codebook.rotation import NO_ROTATION

UNIT_ROWS, UNIT_COLUMNS = 16, 128
ROW_ALIGNMENT = 64
"""Rows of weights are padded to a multiple of this many, the rows of one ``wgmma``."""
_BITS = (2, 3, 4)
_CHUNK_TILES = 256  # tiles of 16 rows that are packed into words at a time


@dataclass(frozen=True)
class Geometry:
    """Maps the columns of a weight, grouped, to their places in memory.

    Attributes:
        k: columns of the weight.
        group_size: columns of a group; the last group may have fewer.
        kind: of the rotation (`rotation.Kind`). Only groups that are not rotated have slots of 16 columns.
    """

    k: int
    group_size: int
    kind: str = "hadamard"

    def __post_init__(self) -> None:
        if self.k < 1 or self.group_size < 1:
            raise ConfigError(f"K is {self.k} and group_size {self.group_size}; allowed: 1 and more")

    @property
    def full(self) -> int:
        """Columns of a full group: the group size, or K where K is less."""
        return min(self.group_size, self.k)

    @property
    def slot(self) -> int:
        """Columns that share a stored norm: 16, 32, 64 or 128."""
        full = self.full
        if full <= 16 and self.kind == NO_ROTATION:
            return 16
        return 32 if full <= 32 else 64 if full <= 64 else 128

    @property
    def padded_group(self) -> int:
        """Columns that a full group takes in memory, padding included."""
        return -(-self.full // self.slot) * self.slot

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return -(-self.k // self.full)

    @property
    def k_padded(self) -> int:
        """Columns in memory, a multiple of 128."""
        full, slot = self.full, self.slot  # read once: every call of an operator asks for k_padded
        before = (self.k - 1) // full
        used = before * (-(-full // slot) * slot) + -(-(self.k - before * full) // slot) * slot
        return -(-used // UNIT_COLUMNS) * UNIT_COLUMNS

    @property
    def units(self) -> int:
        """Units along K."""
        return self.k_padded // UNIT_COLUMNS

    def columns(self, device: torch.device | str | None = None) -> Tensor:
        """int64 ``[K]``: the place in memory of each column."""
        column = torch.arange(self.k, device=device, dtype=torch.int64)
        return column // self.full * self.padded_group + column % self.full

    @property
    def in_order(self) -> bool:
        """Whether no padding lies between columns: column k is at place k."""
        return self.groups == 1 or self.padded_group == self.full

    def slot_groups(self, device: torch.device | str | None = None) -> Tensor:
        """int64 ``[k_padded / slot]``: the group of each slot; slots that are all padding belong to the last group."""
        slots = torch.arange(self.k_padded // self.slot, device=device, dtype=torch.int64)
        return (slots * self.slot // self.padded_group).clamp(max=self.groups - 1)


def row_tiles(n: int) -> int:
    """Number of 16-row tiles that n rows take, a multiple of 4."""
    return -(-n // ROW_ALIGNMENT) * (ROW_ALIGNMENT // UNIT_ROWS)


def unit_bytes(bits: int) -> int:
    """Bytes of a unit of 2-bit, 3-bit or 4-bit indices: 512, 768 or 1,024."""
    if bits not in _BITS:
        raise ConfigError(f"indices of {bits} bits; allowed: 2, 3, 4")
    return UNIT_ROWS * UNIT_COLUMNS * bits // 8


def pack_units(indices: Tensor, bits: int, geometry: Geometry) -> Tensor:
    """Pack indices in the order in which kernels read them.

    Args:
        indices: uint8 ``[N, K]``, each below ``2**bits``.
        bits: 2, 3 or 4.
        geometry: the weight's geometry.

    Returns:
        uint8 ``[row_tiles(N), units, unit_bytes(bits)]``; padding is 0.

    Raises:
        ShapeError: K differs from the geometry's.
        ConfigError: ``bits`` is not 2, 3 or 4.
    """
    n, k = indices.shape
    size = unit_bytes(bits)
    if k != geometry.k:
        raise ShapeError(f"indices have {k} columns; the geometry has {geometry.k}")
    out = torch.empty((row_tiles(n), geometry.units, size), dtype=torch.uint8, device=indices.device)
    places = geometry.columns(indices.device)
    for first in range(0, len(out), _CHUNK_TILES):
        piece = out[first : first + _CHUNK_TILES]
        rows = indices[first * UNIT_ROWS : (first + _CHUNK_TILES) * UNIT_ROWS]
        padded = indices.new_zeros((len(piece) * UNIT_ROWS, geometry.k_padded))
        padded[: len(rows), places] = rows
        piece.copy_(_pack_words(_to_nibbles(padded), bits))
    return out


def unpack_units(units: Tensor, bits: int, n: int, geometry: Geometry) -> Tensor:
    """uint8 ``[n, K]``: the indices that `pack_units` packed.

    Raises:
        ShapeError: the shape of ``units`` does not fit n rows, the bits and the geometry.
        ConfigError: ``bits`` is not 2, 3 or 4.
    """
    expected = (row_tiles(n), geometry.units, unit_bytes(bits))
    if units.shape != expected:
        raise ShapeError(f"units have shape {list(units.shape)}; allowed: {list(expected)}")
    out = torch.empty((n, geometry.k), dtype=torch.uint8, device=units.device)
    places = slice(geometry.k) if geometry.in_order else geometry.columns(units.device)
    for first in range(0, len(units), _CHUNK_TILES):
        rows = out[first * UNIT_ROWS : (first + _CHUNK_TILES) * UNIT_ROWS]
        rows.copy_(_all_rows(units[first : first + _CHUNK_TILES], bits)[: len(rows), places])
    return out


def unpack_rows(units: Tensor, bits: int, rows: Tensor) -> Tensor:
    """Unpack the indices of single rows of a packed weight.

    Args:
        units: uint8 ``[T, U, unit_bytes(bits)]``, contiguous.
        bits: 2, 3 or 4.
        rows: int64 ``[R]``, each at least 0 and below 16 T.

    Returns:
        uint8 ``[R, 128 U]``, columns in the order of memory; see `Geometry.columns`.
    """
    tile, r8, g = rows // UNIT_ROWS, rows % UNIT_ROWS // 8, rows % 8
    words = _words([part[tile, r8, g] for part in _bytes_by_row(units, bits)])
    return torch.stack((words & 15, words >> 4), -1).reshape(len(rows), units.shape[1] * UNIT_COLUMNS)


def _all_rows(units: Tensor, bits: int) -> Tensor:
    """uint8 ``[16 T, 128 U]``: the indices of every row, columns in the order of memory."""
    words = _words(_bytes_by_row(units, bits)).contiguous()  # each byte is read twice
    return torch.stack((words & 15, words >> 4), -1).reshape(len(units) * UNIT_ROWS, -1)


def _bytes_by_row(units: Tensor, bits: int) -> list[Tensor]:
    """Views of units, row by row: ``[T, 2 (r8), 8 (g), U, 2 (v), words, 2 (h), 4 (t)]``.

    Four words of 4 bits; or two pairs of words of the lower 2 bits, and with 3 bits one word that has the third bit of
    four.
    """
    t, u = units.shape[:2]
    if bits == 4:
        return [units.view(t, u, 2, 8, 4, 4, 2, 2).permute(0, 6, 3, 1, 2, 5, 7, 4)]
    parts = [units[..., :512].view(t, u, 8, 4, 2, 2, 2, 2)]
    if bits == 3:
        parts.append(units[..., 512:].view(t, u, 8, 4, 2, 1, 2, 2))
    return [part.permute(0, 6, 2, 1, 4, 5, 7, 3) for part in parts]


def _words(parts: list[Tensor]) -> Tensor:
    """``[..., 2 (v), 4 (word), 2 (h), 4 (t)]``: two 4-bit indices to a byte, of the parts of `_bytes_by_row`."""
    lower, *upper = parts
    if lower.shape[-3] == 4:
        return lower
    words = torch.stack((lower & 0x33, lower >> 2 & 0x33), -3).flatten(-4, -3)
    for third in upper:
        words |= torch.cat([third >> j & 0x11 for j in range(4)], -3) << 2
    return words


def _to_nibbles(padded: Tensor) -> Tensor:
    """``[16 T, Kp]`` → ``[T, U, 2 (v), 8 (g), 4 (t), 4 (word), 2 (r8), 2 (h), 2 (e)]``: a unit's order."""
    t, u = len(padded) // UNIT_ROWS, padded.shape[1] // UNIT_COLUMNS
    # rows: r8, g; columns: unit, v, word, h, t, e
    split = padded.view(t, 2, 8, u, 2, 4, 2, 4, 2)
    return split.permute(0, 3, 4, 2, 7, 5, 1, 6, 8)


def _pack_words(nibbles: Tensor, bits: int) -> Tensor:
    """``[T, U, v, g, t, word, r8, h, e]`` → uint8 ``[T, U, unit_bytes(bits)]``."""
    t, u = nibbles.shape[:2]
    # Bytes of 4-bit words: [T, U, v, lane, word, byte]; every shift below stays inside its nibble, so bytes will do.
    words = (nibbles[..., 0] | nibbles[..., 1] << 4).reshape(t, u, 2, 32, 4, 4)
    if bits == 4:
        return words.reshape(t, u, -1)
    by_lane = words.permute(0, 1, 3, 2, 4, 5).reshape(t, u, 32, 8, 4)  # word 0..7 of a lane
    lower = by_lane & 0x33
    packed = (lower[:, :, :, 0::2] | lower[:, :, :, 1::2] << 2).reshape(t, u, -1)
    if bits == 2:
        return packed
    upper = (by_lane >> 2 & 0x11).view(t, u, 32, 2, 4, 4)
    shifts = torch.arange(4, dtype=torch.uint8, device=nibbles.device)[:, None]
    planes = (upper << shifts).sum(4, dtype=torch.uint8).reshape(t, u, -1)
    return torch.cat((packed, planes), -1)


def row_exponents(norms: Tensor) -> Tensor:
    """float32 ``[N]``: for each row the least power of two that no norm exceeds; 1 for a row of zeros.

    Args:
        norms: ``[N, G]``, finite and at least 0.
    """
    largest = norms.float().amax(1)
    mantissa, exponent = torch.frexp(largest)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    power = torch.ldexp(torch.ones_like(largest), exponent.clamp(-126, 127))
    return torch.where(largest > 0, power, 1.0)


def pack_norms(norms: Tensor, exponents: Tensor, geometry: Geometry) -> Tensor:
    """Pack norms in the order in which kernels read them, divided by their row's power of two.

    Args:
        norms: float16 or float32 ``[N, G]``.
        exponents: float32 ``[N]``, `row_exponents` of these norms or, for a residual pass, of the first pass.
        geometry: the weight's geometry.

    Returns:
        float16 ``[row_tiles(N), units, slots per unit, 8, 2]``: for each slot, rows g and g + 8 side by side; padding
        is 0.

    Exactness: float16 norms are exact, except norms below ``2**-14`` of the row's power, which lose bits as
    subnormals; float32 norms are rounded once.
    """
    n = len(norms)
    relative = (norms.float() / exponents[:, None]).half()
    padded = relative.new_zeros((row_tiles(n) * UNIT_ROWS, geometry.k_padded // geometry.slot))
    padded[:n] = relative[:, geometry.slot_groups(norms.device)]
    split = padded.view(row_tiles(n), 2, 8, geometry.units, UNIT_COLUMNS // geometry.slot)
    return split.permute(0, 3, 4, 2, 1).contiguous()


def pack_offsets(packed_norms: Tensor, offsets: Tensor, geometry: Geometry) -> Tensor:
    """Interleave offsets with the norms that multiply them: ``weight = norm * (value + offset)``.

    Args:
        packed_norms: result of `pack_norms` for all passes.
        offsets: float16 ``[N, passes * G]``.
        geometry: the geometry of one pass.

    Returns:
        float16 ``[row_tiles(N), units, slots per unit, 8, 4]``: the norms of rows g and g + 8, and their offsets;
        padding is 0.
    """
    ones = torch.ones(len(offsets), device=offsets.device, dtype=torch.float32)
    packed = [pack_norms(part, ones, geometry) for part in offsets.split(geometry.groups, 1)]
    return torch.cat((packed_norms, torch.cat(packed, 1)), -1)


def unpack_norms(packed: Tensor) -> Tensor:
    """float16 ``[16 row tiles, slots]``: the norm of each row and slot, relative to the row's power of two."""
    t, u, s = packed.shape[:3]
    return packed[..., :2].permute(0, 4, 3, 1, 2).reshape(t * UNIT_ROWS, u * s)


def unpack_offsets(packed: Tensor) -> Tensor:
    """float16 ``[16 row tiles, slots]``: the offset of each row and slot; 0 without offsets."""
    if packed.shape[4] == 2:
        return torch.zeros_like(unpack_norms(packed))
    return unpack_norms(packed[..., 2:])


def fold_scales(packed_norms: Tensor, values: Tensor) -> Tensor:
    """The scale from a row's weights to int8: ``127 / (max |value| * the row's largest relative norm)``.

    Args:
        packed_norms: result of `pack_norms` for all passes.
        values: float16, the codebook: ``[16]``, or pairs, ``[256, 2]``.

    Returns:
        float32 ``[16 row tiles]``; 0 for rows with norms of 0.

    Exactness: two float32 operations, an exact product and a division rounded once.
    """
    largest = unpack_norms(packed_norms).float().amax(1) * values.float().abs().max()
    scale = torch.full((), 127.0, device=largest.device, dtype=torch.float32) / largest
    return torch.where(largest > 0, scale, 0.0)


def int8_weight(units: Tensor, bits: int, packed_norms: Tensor, values: Tensor, fold: Tensor) -> Tensor:
    """The int8 weights of int8 products: ``q = rne(value * f32(norm * fold))``, of pairs ``f16(f32(norm * fold))``.

    Args:
        units: result of `pack_units`.
        bits: bits of an index.
        packed_norms: result of `pack_norms`.
        values: float16, the codebook: ``[2**bits]`` or longer, or pairs, ``[256, 2]``.
        fold: result of `fold_scales`.

    Returns:
        int8 ``[16 row tiles, 128 units]`` in [-127, 127], columns in the order of `Geometry.columns`.

    Exactness: bitwise; the product is exact in float64 and rounded once, to an integer.
    """
    indices = _all_rows(units, bits)
    norms = unpack_norms(packed_norms).float()
    factor = norms * fold[:, None]
    if pairs.are_pairs(values):
        factor = factor.half()
    factor = factor.double().repeat_interleave(indices.shape[1] // norms.shape[1], 1)
    return (pairs.look_up(values.double(), indices) * factor).round().clamp(-127, 127).to(torch.int8)


def rotated_weight(units: Tensor, bits: int, packed_norms: Tensor, values: Tensor) -> Tensor:
    """float64 ``[16 row tiles, 128 units]``: ``norm * (value + offset)``, the weights before the channel's factor."""
    indices = _all_rows(units, bits)
    norms, offsets = (part(packed_norms).double() for part in (unpack_norms, unpack_offsets))
    columns = indices.shape[1] // norms.shape[1]
    return (pairs.look_up(values.double(), indices) + offsets.repeat_interleave(columns, 1)) * norms.repeat_interleave(
        columns, 1
    )


def token_order(columns: int, dtype: torch.dtype) -> Tensor:
    """int64 ``[columns]``: the column at each place in a row of tokens, before the swizzle."""
    place = torch.arange(columns, dtype=torch.int64, device="cpu")
    if dtype is not torch.int8:
        return place
    inside = place % 16
    t, e = inside // 4, inside % 4
    return place - inside + 8 * (e // 2) + 2 * t + e % 2


def to_blocks(x: Tensor, natural: bool = False) -> Tensor:
    """Arrange rotated, padded tokens in the blocks that kernels read.

    Args:
        x: float16, bfloat16 or int8 ``[M, Kp]``, Kp a multiple of 128.
        natural: whether int8 columns stay in natural order, for int8 weights; else they have `token_order`.

    Returns:
        ``[Kp / B, ceil(M / 8), 8, B]`` of x's dtype, B = 128 bytes; rows past M are 0.
    """
    m, k = x.shape
    per_block = 128 // x.element_size()
    rows = x.new_zeros((-(-m // 8) * 8, k))
    rows[:m] = x if natural else x[:, token_order(k, x.dtype).to(x.device)]
    chunks = rows.view(-1, 8, k // per_block, 8, per_block // 8)
    swizzled = torch.empty_like(chunks)
    place = torch.arange(8, dtype=torch.int64, device="cpu")
    for r in range(8):
        swizzled[:, r, :, place ^ r] = chunks[:, r]
    return swizzled.permute(2, 0, 1, 3, 4).flatten(3).contiguous()


def from_blocks(blocks: Tensor, m: int, natural: bool = False) -> Tensor:
    """``[m, Kp]``: the inverse of `to_blocks`."""
    kb, m8, _, per_block = blocks.shape
    swizzled = blocks.view(kb, m8, 8, 8, per_block // 8).permute(1, 2, 0, 3, 4)
    chunks = torch.empty_like(swizzled)
    place = torch.arange(8, dtype=torch.int64, device="cpu")
    for r in range(8):
        chunks[:, r] = swizzled[:, r][:, :, place ^ r]
    rows = chunks.reshape(m8 * 8, kb * per_block)[:m]
    if natural:
        return rows
    out = torch.empty_like(rows)
    out[:, token_order(kb * per_block, blocks.dtype).to(blocks.device)] = rows
    return out
