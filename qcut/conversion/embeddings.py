"""Tables of tokens and the classifiers tied to them, for `qcut.quantize`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from qcut.conversion.fitting import rotatable
from qcut.conversion.report import LayerReport
from qcut.conversion.tasks import Task
from qcut.errors import ConfigError, UnsupportedError
from qcut.layers.embedding import RESERVED, Embedding, check_table, is_table
from qcut.layers.linear import Linear
from qcut.models.modules import keep_hooks, kept_attributes, tensor_key, weight_nk, weight_of
from qcut.models.selection import DEFAULT_SKIP, held_elsewhere, linear_layers, matches
from qcut.models.weight_sharing.readers import class_checked, layers_read
from qcut.schemes import Scheme, parse_scheme


def computing_tables(tables: dict[str, nn.Embedding]) -> dict[str, str]:
    """Tables that stay in float, as their class computes more than rows, or one tied to them does; with the reason."""
    own: dict[Any, str] = {}
    for table in tables.values():
        if not is_table(table):
            cls = type(table)
            own[tensor_key(table.weight)] = (
                f"an embedding with its own forward (class {cls.__module__}.{cls.__qualname__})"
            )
    keys = {name: tensor_key(table.weight) for name, table in tables.items()}
    return {name: own[key] for name, key in keys.items() if key in own}


def classifier_tasks(
    model: nn.Module, tables: dict[str, nn.Embedding], embeddings: str | Scheme, left: Collection[nn.Embedding] = ()
) -> dict[str, Task]:
    """Tasks for the classifier and for all linear layers that are tied to a table of tokens.

    Args:
        model: see `qcut.quantize`.
        tables: to quantize.
        embeddings: see `qcut.quantize`.
        left: tables that stay in float, with all that is tied to them.

    Raises:
        ConfigError: an unknown scheme, or one that tables cannot have.
        UnsupportedError: a table that `qcut.Embedding` does not take, or that code does more with than call it (named).
    """
    scheme = parse_scheme(embeddings)
    if scheme.is_float or scheme.needs_range:
        raise ConfigError(f"embeddings: scheme {scheme.name!r} is not for tables; use w8a16, w8a8 or a codebook")
    for name, table in tables.items():
        check_table(table, name)
    _check_uses(model, tables)
    shared, kept = ({tensor_key(one.weight) for one in group} for group in (tables.values(), left))
    given: Any = getattr(model, "get_output_embeddings", None)
    head = given() if callable(given) else None
    tasks = {}
    for name, module in linear_layers(model)[0].items():
        if tensor_key(weight_of(module)) in kept:
            continue
        if module is head or tensor_key(weight_of(module)) in shared or matches(name, DEFAULT_SKIP):
            served, note = rotatable(scheme, weight_nk(module).shape[1])
            tasks[name] = Task(module, served, note=note)
    return tasks


def _check_uses(model: nn.Module, tables: dict[str, nn.Embedding]) -> None:
    """Check that the rest of the model only calls its tables, or asks for what quantized ones have too."""
    given = tables.values()
    read, checked, held = (
        layers_read(model, given),
        class_checked(model, given, Embedding),
        held_elsewhere(model, given),
    )
    for name, table in tables.items():
        reason = "" if id(table) not in read else f"{read[id(table)]} reads its weight itself, without calling it"
        if id(table) in checked:
            reason = f"{checked[id(table)]} checks its class, or uses what a quantized embedding has not"
        if id(table) in held:
            reason = f"it is also held outside of the model's modules ({held[id(table)]})"
        if taken := RESERVED & kept_attributes(table).keys():
            reason = (
                f"it has an attribute {min(taken)!r} of its own, which a quantized embedding has in another meaning"
            )
        if reason:
            raise UnsupportedError(
                f"embedding {name!r}: {reason}; allowed: one that is only called, or embeddings=None"
            )


def quantized_table(
    name: str,
    module: nn.Embedding,
    scheme: str | Scheme | None,
    owners: dict[tuple[Any, ...], Linear],
    device: torch.device | None,
) -> Embedding:
    """A quantized embedding, tied to the layer that has its weight, or to an earlier table."""
    owner = owners.get(tensor_key(module.weight))
    if owner is not None:
        made = Embedding.tied_to(owner, module.weight.dtype).train(module.training)
    else:
        served, _ = rotatable(parse_scheme(scheme or "w8a16"), module.weight.shape[1])
        made = Embedding.from_float(module, served, device=device, name=name)
        owners[tensor_key(module.weight)] = made.linear
    keep_hooks(module, made)
    return made


def table_report(name: str, made: Embedding, layers: dict[str, Linear], before: int, error: float) -> LayerReport:
    """The report on a quantized table.

    Args:
        name: of the table.
        made: the quantized table.
        layers: the quantized layers by name.
        before: bytes of the float table.
        error: see `weight_error`.
    """
    return LayerReport(
        name,
        made.scheme.name,
        made.embedding_dim,
        made.num_embeddings,
        before,
        made.linear.weight_bytes,
        error,
        None,
        next((other for other, layer in layers.items() if layer is made.linear), None),
    )
