"""Quantized layers of experts, with integers stored for each expert, or for its gate and its up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from qcut.checkpoints.formats.build import packed_layer
from qcut.checkpoints.formats.grid import Grid, Needs
from qcut.checkpoints.formats.parts import Format, Parts, Stored
from qcut.errors import UnsupportedError
from qcut.layers.linear import Linear


@runtime_checkable
class IntegerFormat(Format, Protocol):
    """A format of integers; rows can be joined before a layer is made of them."""

    def codes(self, parts: Parts) -> Tensor:
        """The integers of a layer with checked headers: uint8 ``[N, K]``, columns in the model's order."""

    def grid(self, parts: Parts) -> Grid:
        """What the integers stand for.

        Raises:
            CheckpointError: values that cannot be (named).
            UnsupportedError: the layer cannot be served exactly.
        """


@runtime_checkable
class StackedFormat(IntegerFormat, Protocol):
    """A format with all experts of a projection in one tensor, with rows as the product has them.

    Attributes:
        stacked: the ends of the names of these tensors, behind that of the model's parameter and ``_``.
    """

    stacked: tuple[str, ...]


def expert_layers(form: IntegerFormat, experts: Sequence[Sequence[Parts]]) -> Iterator[Linear]:
    """A layer for each expert, all of one scheme, on the CPU.

    Args:
        form: how the integers are stored.
        experts: of each expert, what is stored of its rows, from above: gate and up, or one for all. Headers were
            checked.

    Raises:
        CheckpointError: values that cannot be (named).
        UnsupportedError: rows that no layer holds together, or experts that are not of one form (named).

    Exactness: rows and values are those of a layer of only that part.
    """
    grids = [_joined([form.grid(one) for one in parts], parts) for parts in experts]
    needs = Needs()
    for grid, parts in zip(grids, experts, strict=True):
        _require_same(grids[0], experts[0][0], grid, parts[0])
        needs = needs.union(grid.needs())
    for grid, parts in zip(grids, experts, strict=True):
        q = torch.cat([form.codes(one) for one in parts])
        yield packed_layer(_whole(parts), q, grid, needs)


def _joined(grids: Sequence[Grid], parts: Sequence[Parts]) -> Grid:
    first = grids[0]
    for grid, one in zip(grids[1:], parts[1:], strict=True):
        _require_same(first, parts[0], grid, one)
        orders = [
            torch.arange(one.k, dtype=torch.int32, device="cpu") if g.order is None else g.order for g in (first, grid)
        ]
        if not torch.equal(*orders):
            raise UnsupportedError(
                f"{one.where}: layers {parts[0].name!r} and {one.name!r}: found columns sorted in two orders; one "
                "order for both is served, since one product computes both"
            )
    scales = torch.cat([grid.scales for grid in grids])
    factors = [grid.row_factor for grid in grids if grid.row_factor is not None]
    first = replace(first, row_factor=torch.cat(factors) if factors else None)
    plain = all(grid.zero_points is None for grid in grids)
    return replace(first, scales=scales, zero_points=None if plain else torch.cat([grid.zeros() for grid in grids]))


def _require_same(first: Grid, at: Parts, grid: Grid, one: Parts) -> None:
    """Refuse integers of another form than those of the first layer of a stack."""
    forms = [
        f"{g.bits} bits in groups of {g.group_size or one.k}, "
        + (f"of scheme {g.rows.name}" if g.levels is None else f"of the levels {g.levels.tolist()}")
        for g in (first, grid)
    ]
    if forms[0] != forms[1]:
        raise UnsupportedError(
            f"{one.where}: layer {one.name!r} has {forms[1]}, and {at.name!r} has {forms[0]}; one form for all experts "
            "of a projection is served"
        )


def _whole(parts: Sequence[Parts]) -> Parts:
    """Name, sizes and bias of the layer that holds all rows."""
    if len(parts) == 1:
        return parts[0]
    first, biased = parts[0], ["bias" in one.tensors for one in parts]
    if any(biased) and not all(biased):
        raise parts[biased.index(False)].error("bias", f"is missing; {parts[biased.index(True)].name!r} has one")
    rows = sum(one.n for one in parts)
    name = " + ".join(one.name for one in parts)

    def read() -> Tensor:
        return torch.cat([one.read_scales("bias").to(torch.float32) for one in parts])

    bias = {"bias": Stored("F32", (rows,), read)} if all(biased) else {}
    return Parts(name, first.where, rows, first.k, bias)
