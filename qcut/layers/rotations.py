"""Rotations of tokens that layers share: q, k and v, or gate and up, rotate the same tensor in the same way."""

from __future__ import annotations

import weakref
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import qcut.ops.codebook  # noqa: F401  (registers its operators)
from qcut.common.locks import Lock
from qcut.numerics.codebook import tokens as rotated_tokens
from qcut.numerics.codebook.constants import outside_capture
from qcut.numerics.codebook.rotation import Kind
from qcut.ops import paths

_ROTATE = torch.ops.qcut.rotate_tokens.early_read
_QUANTIZE = torch.ops.qcut.quantize_rotated.early_read
_HALVES = (torch.float16, torch.bfloat16)


class RotationSpec(NamedTuple):
    """The parameters of a layer's rotation.

    Attributes:
        kind: hadamard, qr or none.
        group_size: columns of a group.
        k: columns of the input.
        seeds: one for each pass.
    """

    kind: Kind
    group_size: int
    k: int
    seeds: tuple[int, ...]


class Rotation:
    """A rotation and the tensors that its kernels read; `rotation_for` gives layers that rotate alike the same object.

    The tensors live as long as a layer that holds the rotation: a CUDA graph of that layer may read them.
    """

    def __init__(self, spec: RotationSpec) -> None:
        self.spec = spec
        self._operands: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def operands(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The tensors that the kernel reads besides tokens of a dtype; see `qcut.numerics.codebook.tokens.operands`."""
        # Matrices are of the tokens' type; signs are the same for all.
        matrices = dtype if self.spec.kind == "qr" and dtype in _HALVES else torch.float16
        made = self._operands.get((matrices, device))
        if made is None:
            # Threads that meet here get the same tensor: a graph of either may go on reading it.
            with outside_capture(device):
                own = rotated_tokens.operands(*self.spec, matrices, device)
            made = self._operands.setdefault((matrices, device), own)
        return made

    def operands_for(self, x: Tensor) -> Tensor:
        """`operands` for a tensor; a constant in compiled code."""
        if torch.compiler.is_compiling():
            return _constant_operands(self.spec, x.dtype, x.device)
        return self.operands(x.dtype, x.device)

    def __reduce__(self) -> tuple[Any, ...]:
        return rotation_for, (self.spec,)


_rotations: weakref.WeakValueDictionary[RotationSpec, Rotation] = weakref.WeakValueDictionary()
_rotations_lock = Lock()


def rotation_for(spec: RotationSpec) -> Rotation:
    """The rotation object that all layers with this specification share; each layer holds it."""
    with _rotations_lock:
        return _rotations.setdefault(spec, Rotation(spec))


class _Shared:
    """A rotated tensor, the layers that have used it, and what it holds for."""

    def __init__(self, x: weakref.ref[Tensor], key: tuple[Any, ...], result: tuple[Tensor, Tensor]) -> None:
        self.x, self.key, self.result = x, key, result
        self.users: list[weakref.ref[object]] = []

    def served(self, user: object) -> bool:
        for used in self.users:  # noqa: SIM110  (a generator takes longer, and every call of a layer comes here)
            if used() is user:
                return True
        return False


class SharedRotations:
    """Remembers the last tensor that was rotated, for the layers that read the same: q, k and v, or gate and up.

    A cached result is reused only if nothing can have changed: for the same tensor object at the same version, the same
    rotation and token type, on the same stream, inside the same graph capture or outside of any, and once to each
    layer. The memory holds the tensor and the layers weakly, and drops the result when the tensor dies. Tensors made
    in inference mode count no versions: each layer rotates them anew; so it does in compiled code, where the compiler
    sees common subexpressions itself. A write to a tensor without torch's knowledge between two layers that read it, by
    a graph's replay for example, goes unnoticed.
    """

    def __init__(self) -> None:
        self._last: _Shared | None = None

    def rotate(
        self, user: object, rotation: Rotation, x: Tensor, tokens: torch.dtype, *, in_rows: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Token blocks of x ``[..., K]``, and their scales; see ``torch.ops.qcut.rotate_tokens``.

        Args:
            user: the layer that asks.
            rotation: of the layer.
            x: the layer's input, the very object it was called with.
            tokens: dtype of the blocks.
            in_rows: return int8 rows in place of blocks; see ``torch.ops.qcut.quantize_rotated``.
        """
        constants = rotation.operands_for(x)
        unknown = torch.compiler.is_compiling() or x.is_inference() or not paths.is_usual()
        state = None if unknown else stream_state(x.device)
        if state is None:
            return _rotate(rotation.spec, x, tokens, constants, in_rows)
        key = (x._version, rotation.spec, tokens, in_rows, state)
        last = self._last
        if last is None or last.x() is not x or last.key != key or last.served(user):
            result = _rotate(rotation.spec, x, tokens, constants, in_rows)
            last = self._last = _Shared(weakref.ref(x, self._forget), key, result)
        last.users.append(weakref.ref(user))
        return last.result

    def _forget(self, dead: weakref.ref[Tensor]) -> None:
        last = self._last
        if last is not None and last.x is dead:
            self._last = None


def stream_state(device: torch.device) -> tuple[int, int] | None:
    """`qcut.backends.cuda.launch.streams.stream_state` of a CUDA device; None of another."""
    if device.type != "cuda":
        return None
    state: tuple[int, int] | None = _streams().stream_state(device)
    return state


@cache
def _streams() -> ModuleType:
    from qcut.backends.cuda.launch import (
        streams,  # at the first CUDA call: layers on the CPU import nothing of the kernel side
    )

    return streams


shared = SharedRotations()
"""The shared rotations of the process."""


def by_kernels(device: torch.device) -> bool:
    """Whether the operators of kernels compute a layer that rotates tokens on a device."""
    return paths.path.name == "triton" or (paths.path.name == "cuda" and has_kernels(device))


def has_kernels(device: torch.device) -> bool:
    """Whether kernels of CUDA run on a device."""
    return device.type == "cuda"


def _rotate(
    spec: RotationSpec, x: Tensor, tokens: torch.dtype, operands: Tensor, in_rows: bool
) -> tuple[Tensor, Tensor]:
    rows = x if x.dim() == 2 else x.reshape(-1, spec.k)  # even a view that changes nothing takes time
    result: tuple[Tensor, Tensor]
    if in_rows:
        result = _QUANTIZE(rows, operands, spec.group_size, *spec.seeds)
    else:
        result = _ROTATE(rows, operands, spec.kind, spec.group_size, spec.seeds, tokens)
    return result


def _constant_operands(spec: RotationSpec, dtype: torch.dtype, device: torch.device) -> Tensor:
    return rotation_for(spec).operands(dtype, device)


# What torch.compiler.assume_constant_result sets. That decorator imports the compiler.
_constant_operands._dynamo_marked_constant = True  # type: ignore[attr-defined]
