"""`ShiftedCodebookLinear`: codebook weights with a shift for each group, or with columns in an order of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from qcut.codebooks import rotation
from qcut.codebooks.quantizer import RotatedCodebook
from qcut.config import Scheme, ShiftedCodebook, StaticRange
from qcut.errors import ConfigError, DtypeError, layer_prefix
from qcut.layers.codebook import CodebookLinear, _has_kernels, _path
from qcut.layers.rotations import shared
from qcut.layers.stored import StateEntry
from qcut.models.modules import dtype_name
from qcut.numerics.checks import out_of_range
from qcut.numerics.int8 import apply_activation

if TYPE_CHECKING:
    from qcut.cuda.prebuild import LayerCall

_GEMM = torch.ops.qcut.codebook_gemm.default
_HALVES = (torch.float16, torch.bfloat16)


class ShiftedCodebookLinear(CodebookLinear, schemes=[ShiftedCodebook]):
    """``y = act(x[:, order] @ (C + shifts).T + b)``, C the codebook weight, without a rotation.

    The codebook's kernels compute ``x @ C.T``; a small float32 product of each group's sum of x, ``[M, G]``, with the
    shifts, ``[N, G]``, is added before bias and activation. A zero point z of a weight ``s * (q - z)`` is the shift
    ``s * (8 - z)`` of the codebook -8 … 7.

    Attributes:
        shifts: float32 ``[N, G]``, or None.
        order: int32 ``[K]``: stored column j multiplies column ``order[j]`` of x; or None where the columns are in
            their places.

    The state dict has ``shifts`` and ``order`` beside the keys of `CodebookLinear`. Arguments are those of `Linear`.

    Exactness: that of `CodebookLinear`, and a float32 product of the sums with the shifts (TF32 on CUDA where torch is
    told to take it).

    Source: docs/foreign-checkpoints.md.
    """

    scheme: ShiftedCodebook
    shifts: Tensor | None
    order: Tensor | None

    def _empty_buffers(self, device: torch.device | str | None) -> dict[str, Tensor | None]:
        n, k, scheme = self.out_features, self.in_features, self.scheme
        buffers = super()._empty_buffers(device)
        shape = n, self.geometry.groups
        buffers["shifts"] = torch.empty(shape, dtype=torch.float32, device=device) if scheme.shifted else None
        buffers["order"] = torch.empty(k, dtype=torch.int32, device=device) if scheme.ordered else None
        return buffers

    def _quantize(self, weight: Tensor, static_range: StaticRange | None, second_moment: Tensor | None) -> None:
        raise ConfigError(
            f"{layer_prefix(self.name)}scheme {self.scheme.name} holds what other libraries quantized; int4 and "
            "codebook4 quantize weights"
        )

    @classmethod
    def from_parts(
        cls,
        passes: Sequence[RotatedCodebook],
        bias: Tensor | None,
        scheme: ShiftedCodebook,
        *,
        shifts: Tensor | None,
        order: Tensor | None,
        name: str | None = None,
    ) -> ShiftedCodebookLinear:
        """Builds a layer from weights that are quantized already.

        Args:
            passes: see `CodebookLinear.from_passes`; columns as stored.
            bias: ``[N]`` of any floating dtype, or None.
            scheme: says whether there are shifts and an order.
            shifts: float32 ``[N, G]``, or None.
            order: int32 ``[K]``, a permutation, or None.
            name: name of the layer, for error messages.

        Raises:
            ConfigError: see `CodebookLinear.from_passes`; or shifts and order that the scheme does not name, or that
                cannot be.
        """
        layer = cast(ShiftedCodebookLinear, cls.from_passes(passes, bias, scheme, name=name))
        given = {"shifts": shifts, "order": order}
        for key, tensor in given.items():
            entry, wanted = layer._buffers[key], None
            if entry is not None:
                wanted = entry.dtype, entry.shape
            if (None if tensor is None else (tensor.dtype, tensor.shape)) != wanted:
                raise ConfigError(
                    f"{layer_prefix(name)}{key} do not go with the scheme {scheme.name}; needed: {wanted}"
                )
            layer._buffers[key] = tensor
        if problem := layer._own_problem({key: t for key, t in given.items() if t is not None}):
            raise ConfigError(f"{layer_prefix(name)}{problem[0]}: {problem[1]}")
        return layer

    @classmethod
    def cuda_calls(
        cls, scheme: Scheme, *, dtype: torch.dtype, rows: int, n: int, k: int, bias: bool, activation: str
    ) -> Sequence[LayerCall]:
        """See `Linear.cuda_calls`: kernels are built when the layer is called first."""
        return ()

    def dequantized_weight(self) -> Tensor:
        """float32 ``[N, K]``: codebook value times norm, plus shift, columns in the order of x.

        Exactness: exact for float16 norms and shifts of whole steps.
        """
        return self._in_place(super().dequantized_weight(), self.shifts)

    def rows(self, ids: Tensor) -> Tensor:
        """See `Linear.rows`; bitwise the rows of `dequantized_weight`."""
        weight = super().rows(ids)
        return self._in_place(weight, None if self.shifts is None else self.shifts.index_select(0, ids))

    def _in_place(self, weight: Tensor, shifts: Tensor | None) -> Tensor:
        if shifts is not None:
            weight = weight + rotation.per_column(shifts, rotation.groups(self.in_features, self.group_size))
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order.long(), weight)

    def row_buffers(self) -> dict[str, Tensor]:
        """All but the codebooks and the order."""
        return {key: buffer for key, buffer in super().row_buffers().items() if key != "order"}

    def stored(self) -> dict[str, StateEntry]:
        """See `CodebookLinear.stored`; shifts and order last."""
        own = {key: self._buffers[key] for key in ("shifts", "order")}
        return super().stored() | {key: StateEntry.of(tensor) for key, tensor in own.items() if tensor is not None}

    def state_problem(self, state: Mapping[str, Tensor]) -> tuple[str, str] | None:
        """See `Linear.state_problem`: besides, finite shifts, and an order that is a permutation."""
        return self._own_problem(state) or super().state_problem(state)

    def _own_problem(self, state: Mapping[str, Tensor]) -> tuple[str, str] | None:
        if "shifts" in state and (found := out_of_range(state["shifts"])):
            return "shifts", f"found {found}; finite values are allowed"
        if "order" in state:
            order = state["order"]
            if not torch.equal(order.sort().values, torch.arange(len(order), dtype=order.dtype, device=order.device)):
                return "order", f"found no permutation; each of the columns 0 to {len(order) - 1} once is allowed"
        return None

    # ── products ─────────────────────────────────────────────────────────────────────────────────

    def _product(self, x: Tensor) -> Tensor:
        b = self._buffers
        order, shifts = b["order"], b["shifts"]
        if order is not None:
            x = x.index_select(-1, order)
        if shifts is None:
            return super()._product(x)
        rest, n = x.shape[:-1], self.out_features
        m = math.prod(rest)
        added = self._group_sums(x.reshape(m, self.in_features)) @ shifts.t()
        if _path.name == "fused" and _has_kernels(x.device):
            if x.dtype not in _HALVES:
                raise DtypeError(
                    f"{layer_prefix(self.name)}x is {dtype_name(x.dtype)}; {self.scheme.name} computes in float16, "
                    "bfloat16 on CUDA"
                )
            blocks, _ = shared.rotate(self, self._rotation, x, x.dtype)
            weight = b["units"], b["packed_norms"], b["fold"], b["col_scale"], self._books()[0][x.dtype]
            # The residual of a product is added last, the bias here before it: the sum is one in float32.
            y = _GEMM(blocks, None, m, *weight, b["bias"], self.set_bits[0], "none", added, torch.float32, True)
        else:
            y = self._explicit(x.reshape(m, self.in_features).float(), "none") + added
        return apply_activation(y, self.activation).to(x.dtype).view(*rest, n)

    def _group_sums(self, x: Tensor) -> Tensor:
        """float32 ``[M, G]``: the sum of x over the columns of each group."""
        full, groups = self.geometry.full, self.geometry.groups
        padded = torch.nn.functional.pad(x, (0, groups * full - self.in_features))
        return padded.view(len(x), groups, full).sum(-1, dtype=torch.float32)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        problems = len(missing_keys), len(error_msgs)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        given = {key: state_dict.get(prefix + key) for key in ("shifts", "order") if self._buffers[key] is not None}
        if problems != (len(missing_keys), len(error_msgs)) or any(t is None or t.is_meta for t in given.values()):
            return
        assign = local_metadata.get("assign_to_params_buffers", False)
        if self.norms.is_meta:
            return  # as torch does: a copy into a tensor without memory
        for key, tensor in given.items():
            if problem := self._own_problem({key: cast(Tensor, tensor)}):
                error_msgs.append(f"{prefix}{key}: {problem[1]}")
                continue
            held = cast(Tensor, tensor).detach()
            self._buffers[key] = held.to(self.norms.device) if assign else held.to(self.norms.device, copy=True)
