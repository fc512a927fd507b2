"""Classes of experts of the installed transformers, found in its sources, each small and random."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

EXPERTS, HIDDEN, WIDTH = 4, 64, 32

_DECORATED = re.compile(r"^@use_experts_implementation.*\nclass (\w+)", re.M)
_CLASS = re.compile(r"^class (\w+)\(([\w.]+).*?\):\n((?:(?![^\s#]).*\n)*)", re.M)
_PARAMETER = re.compile(r"nn\.Parameter\(\s*torch\.\w+\(\(?((?:[^()]|\([^()]*\))*)\)")


@cache
def mixture_classes() -> tuple[str, ...]:
    """``folder.module:Class`` of every class that holds the matrices of several experts, or their modules.

    Those are the classes behind ``use_experts_implementation``, those with a parameter that is a matrix for each expert
    (or a matrix of all, one below the other), and containers that are called experts.
    """
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    found: list[str] = []
    for path in sorted((Path(spec.origin).parent / "models").glob("*/modeling_*.py")):
        text = path.read_text()
        if "xpert" not in text:
            continue
        names = _DECORATED.findall(text)
        for name, base, body in _CLASS.findall(text):
            container = "Experts" in name and base in ("nn.ModuleDict", "nn.ModuleList")
            if name not in names and (container or any(map(_of_experts, _PARAMETER.findall(body)))):
                names.append(name)
        # Experts with matrices in a part of theirs, which is not called by itself.
        inside = {inner: name for name, _, body in _CLASS.findall(text) for inner in names if f"= {inner}(" in body}
        found += [
            f"{path.parent.name}.{path.stem}:{inside[name] if 'Experts' in inside.get(name, '') else name}"
            for name in names
        ]
    return tuple(found)


def _of_experts(sizes: str) -> bool:
    plain = [size for size in sizes.split(",") if size.strip() and "=" not in size]
    return "expert" in plain[0] and (len(plain) == 3 or "*" in plain[0])


def class_of(name: str) -> Any:
    """A class of `mixture_classes`."""
    place, _, key = name.partition(":")
    return getattr(importlib.import_module(f"transformers.models.{place}"), key)


class SmallConfig:
    """A configuration as its class makes it, with the sizes of experts made small."""

    _experts_implementation = "eager"

    def __init__(self, config: Any) -> None:
        self.config = config

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__") or key == "config":
            raise AttributeError(key)
        value = getattr(self.config, key)
        sized = value is None or type(value) in (int, list)
        if sized and "expert" in key and re.search(r"(^|_)(num|n)_", key):
            return EXPERTS
        if sized and re.search(r"intermediate|ffn|d_ff", key):
            return WIDTH
        if sized and re.search(r"hidden_dim|hidden_size|d_model", key):
            return HIDDEN
        return value


def tiny_experts(name: str, seed: int = 0) -> Any:
    """Random experts of a class of `mixture_classes`, in evaluation mode; biases too."""
    cls = class_of(name)
    place = importlib.import_module(cls.__module__)
    made, errors = None, []
    torch.manual_seed(seed)
    for arguments in _arguments(cls, place):
        try:
            made = cls(*arguments)
            break
        except Exception as error:  # the configuration of another part of the model
            errors.append(f"{type(arguments[0]).__name__}: {error}")
    assert made is not None, f"{name}: {errors}"
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.2, generator=generator)
    return made.eval()


def _arguments(cls: Any, place: Any) -> Any:
    from transformers import PreTrainedConfig

    if "num_experts" in inspect.signature(cls.__init__).parameters:
        yield EXPERTS, HIDDEN, 2 * WIDTH
    own = [c for c in vars(place).values() if inspect.isclass(c) and issubclass(c, PreTrainedConfig)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for config in [c for c in own if c is not PreTrainedConfig]:
            default = config()
            more = (WIDTH,) if "ffn_dim" in inspect.signature(cls.__init__).parameters else ()
            for one in (default, getattr(default, "ffn_config", None)):
                if one is not None:
                    yield SmallConfig(one), *more


def routes(tokens: int, experts: int = EXPERTS, k: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Experts of each token, none twice, and weights: ``[T, k]`` int64 and float32."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k]
    return index, torch.rand(tokens, k, generator=generator) + 0.25


class Holder(nn.Module):
    """A model of nothing but experts, so that it can be quantized."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *arguments: Any) -> Any:
        return self.experts(*arguments)
