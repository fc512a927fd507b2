"""Tensors by which transformers refuses a quantized model's folder where qcut was not imported.

transformers skips quantization methods that it does not know, with a warning: it would draw all quantized weights at
random. Each quantized layer has two marks in the files. One has the name of the float weight and a shape that the float
layer refuses, so that ``from_pretrained`` raises. The other has a name that says what to do, which the report above
that error shows.

With ``ignore_mismatched_sizes=True`` such shapes are no error. The ``config.json`` of `qcut.save` therefore names, as
the file of the weights, what to do: transformers refuses it with that sentence, and qcut's quantizer takes it away
before files are looked for. ``save_pretrained`` leaves no way to write such a name: transformers deletes it, and
writes the file after the quantizer's last word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from qcut.common.safetensors import TensorHeader

if TYPE_CHECKING:
    from torch import Tensor

ADVICE = "import qcut before from_pretrained"
"""The name of the second mark."""
NO_FILE = "transformers_weights"
"""The field of ``config.json`` that names the file of the weights."""
KEYS = ("weight", ADVICE)
_OF_EXPERTS = {"gate_up_proj": (1, 2, 1), "up_proj": (1, 1, 1), "down_proj": (1, 1, 1)}
"""Shapes of the marks of experts, which transformers may cut up by expert, as it does float weights, and join again."""


def mark(
    layers: Iterable[str], embeddings: Mapping[str, Any], experts: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """The marks of a model, by name; one or two bytes each.

    Args:
        layers: names of the quantized layers, tables of embeddings and stacks of experts among them.
        embeddings: names of the quantized embeddings; float models have their tables in these places.
        experts: by name, the description of quantized experts; float models have parameters of three dimensions in
            these places.
    """
    import torch

    layers, experts = set(layers), experts or {}
    stacks = {f"{name}.{part}" for name in experts for part in ("up", "down")} & layers
    names = sorted({*layers, *embeddings} - {f"{name}.table" for name in embeddings} - stacks)
    shapes: dict[str, tuple[int, ...]] = {f"{name}.{key}": (1,) for name in names for key in KEYS}
    for name, spec in experts.items():
        up = "gate_up_proj" if spec["gating"].get("gated", True) else "up_proj"
        keys = [key for part, key in (("up", up), ("down", "down_proj")) if f"{name}.{part}" in stacks]
        shapes |= {f"{name}.{key}": _OF_EXPERTS[key] for key in keys} | {f"{name}.{ADVICE}": (1,)}
    return {name: torch.zeros(shape, dtype=torch.uint8, device="cpu") for name, shape in shapes.items()}


def marks_among(names: Iterable[str]) -> set[str]:
    """The marks among the names of stored tensors, which transformers may have changed."""
    modules = {name.removesuffix(ADVICE) for name in names if name.endswith(f".{ADVICE}")}
    return {module + key for module in modules for key in KEYS}


def is_mark(header: TensorHeader | None) -> bool:
    """Whether a stored tensor is of the size of a mark, or of a piece of one."""
    return header is not None and header.code == "U8" and header.nbytes <= 2


def expert_marks_among(headers: Mapping[str, TensorHeader]) -> set[str]:
    """The marks of experts among stored tensors, by names that transformers may have changed or cut up."""
    keys = ("weight", *_OF_EXPERTS)
    return {name for name, header in headers.items() if is_mark(header) and name.rpartition(".")[2] in keys}


def marks_pattern(layers: Iterable[str], embeddings: Mapping[str, Any]) -> str:
    """A regular expression for the names of `mark` as the model has them, with any prefix."""
    names = "|".join(map(re.escape, sorted({*layers, *embeddings})))
    return rf"(^|\.)({names})\.({'|'.join(map(re.escape, KEYS))})$"


def expert_marks_pattern(experts: Iterable[str]) -> str:
    """A regular expression for the names of `mark_experts` as the model has them, with any prefix."""
    names = "|".join(map(re.escape, sorted(experts)))
    return rf"(^|\.)({names})\.({'|'.join(map(re.escape, (*_OF_EXPERTS, ADVICE)))})$"


def stored_marks_pattern(experts: Iterable[str]) -> str:
    """A regular expression for the marks of experts as files have them, where blocks may have other names.

    Args:
        experts: names in the model, such as ``model.layers.0.mlp.experts``.
    """
    names = set()
    for name in experts:
        *outer, last = map(re.escape, name.split("."))
        if outer and not outer[-1].isdigit():
            outer[-1] = r"\w+"
        names.add(r"\.".join([*outer, last]))
    keys = rf"\d+\.\w+\.weight|{'|'.join(map(re.escape, (*_OF_EXPERTS, ADVICE)))}"
    return rf"(^|\.)({'|'.join(sorted(names))})\.({keys})$"
