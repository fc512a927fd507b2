"""Random rotations of groups of columns, which make weights look normally distributed.

Rotations are orthogonal, so rotating weights and tokens alike leaves their products unchanged. A rotation follows from
a seed and is drawn on the CPU, the same for every device. `rotate` applies
``x Pi^T`` to the last dimension, `rotate_back` the inverse; `rotate_groups` and `rotate_groups_back` do so group by
group. `back_operands` draws the inverse once, and `rotate_groups_back_by` applies it, for callers that rotate often.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final, Literal

import torch
from torch import Tensor

from qcut.common.locks import Lock
from qcut.errors import ConfigError, layer_prefix
from qcut.numerics.hadamard import walsh_hadamard as walsh_hadamard
from qcut.numerics.plain_state import in_plain_state

Kind = Literal["hadamard", "qr", "none"]
KINDS = ("hadamard", "qr")
"""The kinds that rotate."""
NO_ROTATION: Final = "none"
"""The kind of weights that are quantized as they are."""

_HAAR_BYTES = 1 << 29  # a matrix of 8192 columns takes half of the cache
_haar_cache: dict[tuple[int, int], Tensor] = {}
_haar_lock = Lock()


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
    """Check that a rotation takes k columns in groups: a Hadamard group, the last one too, is a power of two.

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


@in_plain_state
def haar(d: int, seed: int) -> Tensor:
    """A random rotation of Haar measure, float32 ``[d, d]``: Q of a Gaussian matrix's QR, with R's diagonal positive.

    Calls share the tensor, which must not be written to. A cache keeps the matrices used last, up to half a gigabyte.

    Exactness: that of LAPACK's QR in float32; two builds of torch may differ in the last bits.

    Source: Mezzadri, "How to generate random matrices from the classical compact groups" (2007), section 5.
    """
    with _haar_lock:
        rotation = _haar_cache.pop((d, seed), None)
        if rotation is not None:
            _haar_cache[d, seed] = rotation  # the dictionary's last entry is the matrix used last
            return rotation
    gaussian = torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")
    q, r = torch.linalg.qr(gaussian)
    rotation = q * torch.where(r.diagonal() < 0, -1.0, 1.0)
    with _haar_lock:
        held = sum(matrix.nbytes for matrix in _haar_cache.values())
        for key in list(_haar_cache):
            if held + rotation.nbytes <= _HAAR_BYTES:
                break
            held -= _haar_cache.pop(key).nbytes
        _haar_cache[d, seed] = rotation
    return rotation


@lru_cache(maxsize=1024)
@in_plain_state
def signs(d: int, seed: int) -> Tensor:
    """Random signs +1 and -1, float32 ``[d]``. Calls share the tensor, which must not be written to."""
    return (
        torch.randint(
            0, 2, (d,), generator=torch.Generator().manual_seed(seed), dtype=torch.int64, device="cpu"
        ).float()
        * 2
        - 1
    )


def rotate(x: Tensor, kind: Kind, seed: int) -> Tensor:
    """``x Pi^T`` over the last dimension, in float32 or x's wider dtype.

    Args:
        x: ``[..., d]``, floating point.
        kind: ``hadamard``: ``Pi = H D / sqrt(d)``, D of `signs`, d a power of two; ``qr``: ``Pi`` is `haar`.
        seed: seed of this group: the layer's seed plus the group's first column.

    Raises:
        ConfigError: another kind, or a Hadamard group with a size that is not a power of two.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    d = x.shape[-1]
    _check_kind(kind)
    if kind == "qr":
        return _product(x, haar(d, seed).to(x).t())
    return walsh_hadamard(x * signs(d, seed).to(x)) * d**-0.5


def rotate_back(x: Tensor, kind: Kind, seed: int) -> Tensor:
    """``x Pi``: the inverse of `rotate`, with its arguments and errors."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    d = x.shape[-1]
    _check_kind(kind)
    if kind == "qr":
        return _product(x, haar(d, seed).to(x))
    return walsh_hadamard(x) * signs(d, seed).to(x) * d**-0.5


def rotate_groups(x: Tensor, kind: Kind, group_size: int, seed: int, *, as_full: bool = False) -> Tensor:
    """Apply `rotate` to every group of the last dimension; a group's seed is ``seed`` plus its first column.

    Args:
        x: ``[..., K]``, floating point.
        kind: see `rotate`.
        group_size: columns of a group; the last may have fewer.
        seed: of the group at column 0.
        as_full: multiply a last group of d columns by ``sqrt(columns of a full group / d)``, so that products of all
            groups can be divided by the root of a full group's columns.

    Returns:
        ``[..., K]`` in float32 or x's wider dtype.

    Raises:
        ConfigError: see `check_groups`.

    Exactness: bitwise `rotate` of each group. With ``as_full``, the factor of a Hadamard group is rounded once; ``qr``
    multiplies by the factor in a second product.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    k = x.shape[-1]
    parts = check_groups(k, group_size, kind)
    full = parts[0][1]
    if kind == "qr":
        out = torch.empty_like(x)
        for first, d in parts:
            rotated = rotate(x[..., first : first + d], kind, seed + first)
            out[..., first : first + d] = rotated * math.sqrt(full / d) if as_full and d < full else rotated
        return out
    factors = [math.sqrt(full) / d if as_full else d**-0.5 for _, d in parts]
    x = _walsh_hadamard_groups(x * group_signs(k, group_size, seed).to(x), full)
    return x * per_column(torch.tensor(factors, dtype=x.dtype, device=x.device), parts)


def rotate_groups_back(x: Tensor, kind: Kind, group_size: int, seed: int) -> Tensor:
    """The inverse of `rotate_groups` without ``as_full``, with its arguments and errors."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    k = x.shape[-1]
    parts = check_groups(k, group_size, kind)
    if kind == "qr":
        out = torch.empty_like(x)
        for first, d in parts:
            out[..., first : first + d] = rotate_back(x[..., first : first + d], kind, seed + first)
        return out
    return rotate_groups_back_by(x, kind, group_size, back_operands(k, kind, group_size, seed, x.device, x.dtype))


def back_operands(
    k: int,
    kind: Kind,
    group_size: int,
    seed: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    """The tensors that `rotate_groups_back_by` multiplies by. They are constant; the caller keeps them.

    Args:
        k: columns.
        kind: of the rotation.
        group_size: columns of a group.
        seed: of the group at column 0.
        device: device of the result. A CUDA graph can be captured once the tensors exist.
        dtype: dtype of the result and of the columns: float32 or float64.

    Returns:
        - hadamard: ``[K]``, each column's sign times ``1 / sqrt(columns of its group)``.
        - qr: the matrices of full groups ``[groups, d, d]``, and the matrix of a shorter last group.
        - none: no tensor.
    """
    parts = groups(k, group_size)
    if kind == "hadamard":
        factors = torch.tensor([d**-0.5 for _, d in parts], dtype=dtype, device="cpu")
        return ((group_signs(k, group_size, seed) * per_column(factors, parts)).to(device),)
    if kind == "qr":
        matrices = [haar(d, seed + first).to(dtype) for first, d in parts]
        full = sum(d == parts[0][1] for _, d in parts)
        return torch.stack(matrices[:full]).to(device), matrices[-1].to(device)
    return ()


def rotate_groups_back_by(x: Tensor, kind: Kind, group_size: int, operands: tuple[Tensor, ...]) -> Tensor:
    """`rotate_groups_back` with given operands and without checks.

    Args:
        x: ``[R, K]`` of the operands' dtype, on their device.
        kind: of the rotation; ``none`` returns x.
        group_size: columns of a group.
        operands: `back_operands` of K columns in such groups.

    Returns:
        ``[R, K]``.

    Exactness: ``hadamard`` is bitwise `rotate_groups_back`; ``qr`` sums in the order of the device's batched product.
    """
    if kind == "hadamard":
        return _walsh_hadamard_groups(x, group_size) * operands[0]
    if kind == "qr":
        matrices, last_matrix = operands
        d = matrices.shape[1]
        whole = x.shape[1] // d * d
        out = _product(x[:, :whole].unflatten(1, (-1, d)).transpose(0, 1), matrices).transpose(0, 1).flatten(1)
        return out if whole == x.shape[1] else torch.cat((out, _product(x[:, whole:], last_matrix)), 1)
    return x


@in_plain_state
def _product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def group_signs(k: int, group_size: int, seed: int) -> Tensor:
    """float32 ``[K]`` of +1 and -1: the `signs` of all groups, side by side."""
    return torch.cat([signs(d, seed + first) for first, d in groups(k, group_size)])


def per_column(per_group: Tensor, parts: list[tuple[int, int]]) -> Tensor:
    """Repeat a value per group ``[..., G]`` at each column of the group: ``[..., K]``. ``parts`` are the `groups`."""
    sizes = torch.tensor([d for _, d in parts], device=per_group.device, dtype=torch.int64)
    return per_group.repeat_interleave(sizes, -1, output_size=parts[-1][0] + parts[-1][1])


def _walsh_hadamard_groups(x: Tensor, group_size: int) -> Tensor:
    """`walsh_hadamard` of each group: all full groups at once, then a shorter last group."""
    d = min(group_size, x.shape[-1])
    whole = x.shape[-1] // d * d
    out = walsh_hadamard(x[..., :whole].unflatten(-1, (-1, d))).flatten(-2)
    return out if whole == x.shape[-1] else torch.cat((out, walsh_hadamard(x[..., whole:])), -1)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ConfigError(f"rotation {kind!r}; allowed: {', '.join(KINDS)}")
