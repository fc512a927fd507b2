"""`ShiftedCodebookLinear`: codebook weights with an offset for each norm, or with columns in an order of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from qcut.errors import ConfigError, layer_prefix
from qcut.layers.codebook import CodebookLinear
from qcut.layers.linear import Known
from qcut.layers.quantized import StateEntry
from qcut.layers.rotations import by_kernels
from qcut.numerics.checks import out_of_range
from qcut.numerics.codebook import layout as codebook_layout
from qcut.numerics.codebook import rotation
from qcut.numerics.codebook.quantizer import RotatedCodebook
from qcut.numerics.int8 import apply_activation
from qcut.schemes import Scheme, ShiftedCodebook

if TYPE_CHECKING:
    from typing_extensions import Self

    from qcut.backends.cuda.launch.prebuild import LayerCall


class ShiftedCodebookLinear(CodebookLinear, schemes=[ShiftedCodebook]):
    """``y = act(x[:, order] @ W.T + b)``, W the sum over passes of ``norm * (value + offset)``, without a rotation.

    A zero point z of a weight ``s * (q - z)`` is the offset ``8 - z`` of the codebook -8 … 7. Kernels read offsets
    together with the norms.

    Attributes:
        offsets: float16 ``[N, passes * G]``, or None.
        order: int32 ``[K]``: stored column j multiplies column ``order[j]`` of x; or None if the columns are in
            their places.

    The state dict has ``offsets`` and ``order`` besides the keys of `CodebookLinear`. Arguments are those of `Linear`.

    Exactness: that of `CodebookLinear`; kernels that round ``value * norm`` round ``offset * norm``, too. The reference
    path adds the product of each group's sum of x with ``norm * offset``, in float32.

    Source: docs/foreign-checkpoints.md.
    """

    scheme: ShiftedCodebook
    offsets: Tensor | None
    order: Tensor | None

    def _empty_buffers(self, device: torch.device | str | None) -> dict[str, Tensor | None]:
        k, scheme = self.in_features, self.scheme
        buffers = super()._empty_buffers(device)
        buffers["offsets"] = None
        if scheme.shifted:
            norms, packed = cast(Tensor, buffers["norms"]), cast(Tensor, buffers["packed_norms"])
            buffers["offsets"] = torch.empty(norms.shape, dtype=torch.float16, device=device)
            buffers["packed_norms"] = packed.new_empty((*packed.shape[:-1], 4))
        buffers["order"] = torch.empty(k, dtype=torch.int32, device=device) if scheme.ordered else None
        return buffers

    @classmethod
    def _quantize_all(cls, layers: Sequence[Self], weights: Sequence[Tensor], known: Sequence[Known]) -> None:
        raise ConfigError(
            f"{layer_prefix(layers[0].name)}scheme {layers[0].scheme.name} holds what other libraries quantized; int4 "
            "and codebook4 quantize weights"
        )

    @classmethod
    def from_parts(
        cls,
        passes: Sequence[RotatedCodebook],
        bias: Tensor | None,
        scheme: ShiftedCodebook,
        *,
        offsets: Tensor | None,
        order: Tensor | None,
        name: str | None = None,
    ) -> ShiftedCodebookLinear:
        """Builds a layer from weights that are quantized already.

        Args:
            passes: see `CodebookLinear.from_passes`; columns as stored.
            bias: ``[N]`` of any floating dtype, or None.
            scheme: says whether there are offsets and an order.
            offsets: float16 ``[N, passes * G]``, or None.
            order: int32 ``[K]``, a permutation, or None.
            name: name of the layer, for error messages.

        Raises:
            ConfigError: see `CodebookLinear.from_passes`; or offsets and order that the scheme does not name, or that
                cannot be.
        """
        layer = cast(ShiftedCodebookLinear, cls.from_passes(passes, bias, scheme, name=name))
        given = {"offsets": offsets, "order": order}
        for key, tensor in given.items():
            entry, wanted = layer._buffers[key], None
            if entry is not None:
                wanted = entry.dtype, entry.shape
            if (None if tensor is None else (tensor.dtype, tensor.shape)) != wanted:
                raise ConfigError(
                    f"{layer_prefix(name)}{key} do not go with the scheme {scheme.name}; needed: {wanted}"
                )
            layer._buffers[key] = tensor
        layer._pack_offsets()
        if problem := layer._own_problem({key: t for key, t in given.items() if t is not None}):
            raise ConfigError(f"{layer_prefix(name)}{problem[0]}: {problem[1]}")
        return layer

    @classmethod
    def cuda_calls(
        cls, scheme: Scheme, *, dtype: torch.dtype, rows: int, n: int, k: int, bias: bool, activation: str
    ) -> Sequence[LayerCall]:
        """See `Linear.cuda_calls`."""
        calls = super().cuda_calls(scheme, dtype=dtype, rows=rows, n=n, k=k, bias=bias, activation=activation)
        return [replace(call, offsets=cast(ShiftedCodebook, scheme).shifted) for call in cast(Any, calls)]

    def dequantized_weight(self) -> Tensor:
        """float32 ``[N, K]``: codebook value times norm, plus offset times norm, columns in the order of x.

        Exactness: exact for float16 norms, and values and offsets of whole or half steps.
        """
        return self._in_place(super().dequantized_weight(), self._shifts())

    def rows(self, ids: Tensor) -> Tensor:
        """See `Linear.rows`; bitwise the rows of `dequantized_weight`."""
        weight = super().rows(ids)
        return self._in_place(weight, self._shifts(ids))

    def _shifts(self, ids: Tensor | None = None) -> Tensor | None:
        """float32 ``[N, G]``: what is added to a group's codebook values; of all rows, or of some."""
        if self.offsets is None:
            return None
        norms, offsets = (t if ids is None else t.index_select(0, ids) for t in (self.norms, self.offsets))
        return (norms.float() * offsets.float()).unflatten(1, (-1, self.geometry.groups)).sum(1)

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
        """See `CodebookLinear.stored`; offsets and order last."""
        own = {key: self._buffers[key] for key in ("offsets", "order")}
        return super().stored() | {key: StateEntry.of(tensor) for key, tensor in own.items() if tensor is not None}

    def state_problem(self, state: Mapping[str, Tensor]) -> tuple[str, str] | None:
        """See `Linear.state_problem`: besides, finite offsets, and an order that is a permutation."""
        return self._own_problem(state) or super().state_problem(state)

    def _own_problem(self, state: Mapping[str, Tensor]) -> tuple[str, str] | None:
        if "offsets" in state and (found := out_of_range(state["offsets"])):
            return "offsets", f"found {found}; finite values are allowed"
        if "order" in state:
            order = state["order"]
            if not torch.equal(order.sort().values, torch.arange(len(order), dtype=order.dtype, device=order.device)):
                return "order", f"found no permutation; each of the columns 0 to {len(order) - 1} once is allowed"
        return None

    # ── products ─────────────────────────────────────────────────────────────────────────────────

    def _product(self, x: Tensor) -> Tensor:
        if (order := self._buffers["order"]) is not None:
            x = x.index_select(-1, order)
        if self._buffers["offsets"] is None or by_kernels(x.device):
            return super()._product(x)
        rows = x.reshape(-1, self.in_features)
        added = self._group_sums(rows) @ cast(Tensor, self._shifts()).t()
        y = self._by_reference(rows.float(), "none") + added
        return apply_activation(y, self.activation).to(x.dtype).view(*x.shape[:-1], self.out_features)

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
        given = {key: state_dict.get(prefix + key) for key in ("offsets", "order") if self._buffers[key] is not None}
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
        self._pack_offsets()

    def _pack_offsets(self) -> None:
        """Interleave the offsets with the norms, as kernels read them."""
        if (offsets := self.offsets) is not None:
            packed = self.packed_norms[..., :2]
            self.packed_norms = codebook_layout.pack_offsets(packed, offsets.to(packed.device), self.geometry)
