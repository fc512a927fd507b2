"""Random rotations of groups of columns: they leave products alone and make weights look normally distributed.

Both are orthogonal and follow from a seed, the same on every device: they are drawn on the CPU. ``rotate`` applies
``x Pi^T`` to the last dimension, ``rotate_back`` the inverse.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from qcut.errors import ConfigError, layer_prefix

Kind = Literal["hadamard", "qr"]
KINDS = ("hadamard", "qr")

_HAAR_BYTES = 1 << 29  # a matrix of 8192 columns takes half of it, 128 columns of it 8192 times
_haar_cache: dict[tuple[int, int], Tensor] = {}


def groups(k: int, group_size: int) -> list[tuple[int, int]]:
    """(first column, columns) of each group of k columns; the last may be shorter.

    Raises:
        ConfigError: a group size below 1.
    """
    if group_size < 1:
        raise ConfigError(f"group_size is {group_size}; allowed: 1 and more")
    return [(first, min(group_size, k - first)) for first in range(0, k, group_size)]


def check_groups(k: int, group_size: int, kind: str, layer: str | None = None) -> list[tuple[int, int]]:
    """`groups`, after `check_group_size`."""
    check_group_size(k, group_size, kind, layer)
    return groups(k, group_size)


def check_group_size(k: int, group_size: int, kind: str, layer: str | None = None) -> None:
    """Check that a rotation takes k columns in such groups: a Hadamard group is a power of two, the last too.

    Args:
        k: columns.
        group_size: columns of a group; k or more takes whole rows.
        kind: see `rotate`.
        layer: name for error messages.

    Raises:
        ConfigError: a group that the rotation cannot take, another kind, or a group size below 1.
    """
    where = layer_prefix(layer)
    _check_kind(kind)
    if group_size < 1:
        raise ConfigError(f"group_size is {group_size}; allowed: 1 and more")
    if kind != "hadamard" or k < 1:
        return
    last = (k - 1) // group_size * group_size
    for first, d in ((0, min(group_size, k)), (last, k - last)):
        if d & (d - 1):
            raise ConfigError(
                f"{where}a Hadamard rotation of {d} columns (from column {first} of {k}, groups of {group_size}); "
                "allowed: powers of two, or rotation 'qr'"
            )


def haar(d: int, seed: int) -> Tensor:
    """float32 ``[d, d]``: a rotation of Haar measure, the Q of a Gaussian matrix with R's diagonal made positive.

    Not to be written to: calls share it, within half a gigabyte of them.

    Exactness: that of LAPACK's QR in float32; two builds of torch may differ in the last bits.

    Source: Mezzadri, "How to generate random matrices from the classical compact groups" (2007), section 5.
    """
    found = _haar_cache.pop((d, seed), None)
    if found is None:
        gaussian = torch.randn(d, d, generator=torch.Generator().manual_seed(seed))
        q, r = torch.linalg.qr(gaussian)
        found = q * torch.where(r.diagonal() < 0, -1.0, 1.0)
        held = sum(matrix.nbytes for matrix in _haar_cache.values())
        for key in list(_haar_cache):
            if held + found.nbytes <= _HAAR_BYTES:
                break
            held -= _haar_cache.pop(key).nbytes
    _haar_cache[d, seed] = found  # the last entry is the one used last
    return found


@lru_cache(maxsize=1024)
def signs(d: int, seed: int) -> Tensor:
    """float32 ``[d]`` of +1 and -1. Not to be written to: calls share it."""
    return torch.randint(0, 2, (d,), generator=torch.Generator().manual_seed(seed)).float() * 2 - 1


def walsh_hadamard(x: Tensor) -> Tensor:
    """``x H``, H the Walsh-Hadamard matrix of +1 and -1 in natural (Sylvester) order; in x's dtype.

    Args:
        x: floating point ``[..., d]``, d a power of two.

    Raises:
        ConfigError: d is no power of two.

    Exactness: additions in the order of the fast transform's butterflies, d log2 d of them.
    """
    d = x.shape[-1]
    if d < 1 or d & (d - 1):
        raise ConfigError(f"a Hadamard rotation of {d} columns; allowed: powers of two")
    half = 1
    while half < d:
        pairs = x.unflatten(-1, (-1, 2, half))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((low + high, low - high), -2).flatten(-3)
        half *= 2
    return x


def rotate(x: Tensor, kind: Kind, seed: int) -> Tensor:
    """``x Pi^T`` over the last dimension, in float32 or x's wider dtype.

    Args:
        x: ``[..., d]``, floating point.
        kind: ``hadamard``: ``Pi = H D / sqrt(d)``, D of `signs`, d a power of two; ``qr``: ``Pi`` is `haar`.
        seed: of this group: the layer's plus the group's first column.

    Raises:
        ConfigError: another kind, or a Hadamard group whose size is no power of two.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    d = x.shape[-1]
    _check_kind(kind)
    if kind == "qr":
        return x @ haar(d, seed).to(x).t()
    return walsh_hadamard(x * signs(d, seed).to(x)) * d**-0.5


def rotate_back(x: Tensor, kind: Kind, seed: int) -> Tensor:
    """``x Pi``: the inverse of `rotate`, with its arguments and errors."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    d = x.shape[-1]
    _check_kind(kind)
    if kind == "qr":
        return x @ haar(d, seed).to(x)
    return walsh_hadamard(x) * signs(d, seed).to(x) * d**-0.5


def rotate_groups(x: Tensor, kind: Kind, group_size: int, seed: int) -> Tensor:
    """`rotate` on every group of the last dimension, a group's seed being ``seed`` plus its first column.

    Args:
        x: ``[..., K]``, floating point.
        kind: see `rotate`.
        group_size: columns of a group; the last may have fewer.
        seed: of the group at column 0.

    Returns:
        ``[..., K]`` in float32 or x's wider dtype.

    Raises:
        ConfigError: see `check_groups`.

    Exactness: bitwise that of `rotate` per group.
    """
    return _each_group(x, kind, group_size, seed, back=False)


def rotate_groups_back(x: Tensor, kind: Kind, group_size: int, seed: int) -> Tensor:
    """The inverse of `rotate_groups`, with its arguments and errors."""
    return _each_group(x, kind, group_size, seed, back=True)


def _each_group(x: Tensor, kind: Kind, group_size: int, seed: int, back: bool) -> Tensor:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    parts = check_groups(x.shape[-1], group_size, kind)
    if kind == "qr":
        out = torch.empty_like(x)
        for first, d in parts:
            one = rotate_back if back else rotate
            out[..., first : first + d] = one(x[..., first : first + d], kind, seed + first)
        return out
    flips = torch.cat([signs(d, seed + first) for first, d in parts]).to(x)
    pieces = []
    # Groups of one size are transformed together: all but a shorter last one.
    full = sum(d == parts[0][1] for _, d in parts)
    for first, d, count in ((0, parts[0][1], full), (*parts[-1], len(parts) - full)):
        if count:
            columns = slice(first, first + d * count)
            piece = x[..., columns] if back else x[..., columns] * flips[columns]
            piece = walsh_hadamard(piece.unflatten(-1, (count, d))).flatten(-2)
            pieces.append((piece * flips[columns] if back else piece) * d**-0.5)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)


def turns(kind: str, group_size: int, k: int, seed: int) -> tuple[Tensor, ...]:
    """Operands of `turn_back`, in float32 on the CPU.

    Args:
        kind: ``hadamard``, ``qr`` or ``none``.
        group_size: columns of a full group, at most k.
        k: columns.
        seed: of the group at column 0.

    Returns:
        - hadamard: ``[K]``, sign times ``1 / sqrt(columns)``.
        - qr: the matrices ``[full groups, d, d]`` and the last group's.
        - none: nothing.
    """
    parts = groups(k, group_size)
    if kind == "hadamard":
        return (torch.cat([signs(d, seed + first) * torch.tensor(d**-0.5) for first, d in parts]),)
    if kind == "qr":
        matrices = [haar(d, seed + first) for first, d in parts]
        return torch.stack(matrices[: k // group_size]), matrices[-1]
    return ()


def turn_back(x: Tensor, kind: str, group_size: int, operands: tuple[Tensor, ...]) -> Tensor:
    """`rotate_groups_back` with operands that are on x's device already, so that a CUDA graph can hold the call.

    Args:
        x: float32 ``[R, K]``.
        kind: see `turns`.
        group_size: columns of a full group, at most K.
        operands: `turns`.

    Exactness: bitwise that of `rotate_groups_back` for hadamard; products with matrices are those of all full groups
    at once.
    """
    if kind == "none":
        return x
    edge = x.shape[1] // group_size * group_size
    grouped, last = x[:, :edge].unflatten(1, (-1, group_size)), x[:, edge:]
    if kind == "qr":
        matrices, last_matrix = operands
        out = (grouped.transpose(0, 1) @ matrices).transpose(0, 1).flatten(1)
        return torch.cat((out, last @ last_matrix), 1) if last.shape[1] else out
    out = walsh_hadamard(grouped).flatten(1)
    if last.shape[1]:
        out = torch.cat((out, walsh_hadamard(last)), 1)
    return out * operands[0]


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ConfigError(f"rotation {kind!r}; allowed: {', '.join(KINDS)}")
