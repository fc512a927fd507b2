"""Proves that the forward of a subclass of ``nn.Linear`` is ``x @ W.T + b``."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

_INPUT, _WEIGHT, _TRANSPOSED, _BIAS, _PRODUCT, _RESULT = "x", "W", "W.T", "b", "x @ W.T", "x @ W.T + b"

_LINEAR = (F.linear,)
_MATMUL = (operator.matmul, torch.matmul, "matmul")
_ADD = (operator.add, operator.iadd, torch.add, "add", "add_")
_TRANSPOSE = (torch.t, torch.transpose, torch.swapaxes, torch.adjoint, "t", "transpose", "swapaxes", "permute")
_DIMENSIONS = ((), (0, 1), (1, 0), (-1, -2), (-2, -1))


def is_affine(module: nn.Linear) -> bool:
    """Whether a module's forward computes what ``nn.Linear`` computes with the same weight and bias.

    The forward of the class is traced symbolically, and every node of the graph must be one of the few that the formula
    needs. Whatever cannot be traced, takes a second argument or does anything else is not affine.

    Args:
        module: a subclass of ``nn.Linear``, on any device; it is not run. What its forward makes of ``self.training``
            holds for the module's present mode.
    """
    try:
        graph = fx.Tracer().trace(module)
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        if len(inputs) != 1:
            return False
        meaning: dict[fx.Node, str] = {}
        for node in graph.nodes:
            if node.op == "output":
                expected = _PRODUCT if module._parameters.get("bias") is None else _RESULT
                return meaning.get(node.args[0]) == expected
            found = _meaning(node, meaning)
            if found is None:
                return False
            meaning[node] = found
    except Exception:  # a foreign forward may raise anything while it is traced
        return False
    return False


def _meaning(node: fx.Node, known: dict[fx.Node, str]) -> str | None:
    """The part of the formula that a node computes, or None."""
    if node.op == "placeholder":
        return _INPUT
    if node.op == "get_attr":
        return {"weight": _WEIGHT, "bias": _BIAS}.get(str(node.target))
    if node.op not in ("call_function", "call_method"):
        return None
    values: list[Any] = [known.get(a) if isinstance(a, fx.Node) else a for a in node.args]
    if node.target is getattr:
        return _TRANSPOSED if values in ([_WEIGHT, "T"], [_WEIGHT, "mT"]) else None
    if node.target in _LINEAR:
        named = {key: known.get(a) if isinstance(a, fx.Node) else a for key, a in node.kwargs.items()}
        given = dict(zip(("input", "weight", "bias"), values, strict=False)) | named
        operands = [given.get(key) for key in ("input", "weight", "bias")]
        if operands[:2] != [_INPUT, _WEIGHT] or operands[2] not in (None, _BIAS):
            return None
        return _PRODUCT if operands[2] is None else _RESULT
    if node.kwargs:
        return None
    if node.target in _TRANSPOSE and values[:1] == [_WEIGHT] and tuple(values[1:]) in _DIMENSIONS:
        identity = node.target == "permute" and tuple(values[1:]) not in ((1, 0), (-1, -2))
        return None if identity else _TRANSPOSED
    if node.target in _MATMUL and values == [_INPUT, _TRANSPOSED]:
        return _PRODUCT
    if node.target in _ADD and sorted(map(str, values)) == sorted((_PRODUCT, _BIAS)):
        return _RESULT
    return None
