"""Quantizes the experts of a mixture while transformers loads them: a layer's, when all their tensors have arrived.

transformers joins the tensors of a layer's experts before anything sees them. The module of its own class holds them
until it is whole; then its experts are quantized as `qcut.quantize` does it, and their float weights are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import cast

import torch
from torch import Tensor, nn

from qcut.conversion.report import LayerReport, weight_error
from qcut.conversion.tasks import Task, quantized_together
from qcut.errors import CheckpointError
from qcut.layers.experts.experts import Experts, layer_of
from qcut.layers.experts.opening import Opened, stacked
from qcut.layers.experts.weights import open_experts
from qcut.layers.linear import Linear
from qcut.models.modules import replace_modules, weight_of
from qcut.numerics.checks import out_of_range

Hold = Callable[[str, nn.Module, Task, Linear, float], None]
"""Holds a quantized layer to its float one: name, float layer, task, quantized layer, error of its weight."""


@dataclass
class Mixture:
    """The experts of one layer of a model while it is loaded.

    Attributes:
        name: of the module.
        module: of transformers' class; its parameters are on the meta device before and after.
        tasks: of its experts' layers, by name.
        awaited: names of its parameters that have not arrived.
        meta: its parameters before they arrive, by name.
        open: its float experts as linear layers, without the weights that are quantized; None until it is whole.
        made: the quantized experts; None until it is whole, and if its experts stay in float.
        left: why its experts stay in float; empty if they do not.
        reports: of its experts' layers, by name, if they are needed.
    """

    name: str
    module: nn.Module
    tasks: dict[str, Task]
    awaited: set[str] = field(default_factory=set)
    meta: dict[str, nn.Parameter] = field(default_factory=dict)
    open: Experts | None = None
    made: Experts | None = None
    left: str = ""
    reports: dict[str, LayerReport] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.meta = {f"{self.name}.{key}": p for key, p in self.module.named_parameters()}
        self.awaited = set(self.meta)

    def take(self, name: str, tensor: Tensor, measured: bool, hold: Hold) -> None:
        """Keep a tensor that has arrived, and quantize the experts if it is the last one.

        Args:
            name: of the parameter.
            tensor: its value.
            measured: whether reports are needed.
            hold: see `Hold`.

        Raises:
            CheckpointError: it is of another size than the model's, or holds NaN or Inf.
            QcutError: see `qcut.Linear.from_float`.
        """
        wanted = self.meta[name]
        if tensor.shape != wanted.shape:
            raise CheckpointError(
                f"tensor {name!r}: found {list(tensor.shape)}, the configuration needs {list(wanted.shape)}"
            )
        if found := out_of_range(tensor):
            raise CheckpointError(f"tensor {name!r}: found {found}; finite values are needed")
        self._put(name, nn.Parameter(tensor.to(wanted.dtype), requires_grad=wanted.requires_grad))
        self.awaited.discard(name)
        if not self.awaited:
            self._quantize(measured, hold)

    def layers(self) -> dict[str, Linear]:
        """The quantized layers of its experts, by name, in the memory of the stacks."""
        made = self.made
        return {} if made is None else {name: cast(Linear, layer_of(*_place(made, name))) for name in self.tasks}

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        # Marked, or transformers would draw values for what it takes to be missing.
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        parent, _, key = name.removeprefix(f"{self.name}.").rpartition(".")
        self.module.get_submodule(parent)._parameters[key] = parameter

    def _quantize(self, measured: bool, hold: Hold) -> None:
        made = open_experts(self.module, self.name)
        if isinstance(made, str):
            self.left = made
            return
        layers: dict[str, Linear] = {}
        for _, names in groupby(self.tasks, lambda name: name.rpartition(".")[0]):  # a projection
            batch = {name: self.tasks[name] for name in names}
            sources = [cast(nn.Linear, layer_of(*_place(made, name))) for name in batch]
            for name, source, layer in zip(batch, sources, quantized_together(batch, sources), strict=True):
                task = self.tasks[name]
                weight = weight_of(source).detach().float()
                error = weight_error(weight, layer.dequantized_weight()) if measured else 0.0
                hold(name, source, task, layer, error)
                if measured:
                    nbytes = sum(parameter.nbytes for parameter in source.parameters())
                    self.reports[name] = LayerReport(
                        name,
                        task.scheme.name,
                        layer.in_features,
                        layer.out_features,
                        nbytes,
                        layer.weight_bytes,
                        error,
                        note=task.note,
                        weight_norm=weight.norm().item(),
                    )
                layers[name] = layer
        self.made = stacked(Opened({self.name: made}, {self.name: self.module}), layers)[self.name]
        for name, task in self.tasks.items():
            task.module = source = cast(nn.Linear, layer_of(*_place(made, name)))
            weight = weight_of(source)
            source.weight = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
        kept = () if made.post_expert_norm is None else {id(p) for p in made.post_expert_norm.parameters()}
        for name, parameter in self.meta.items():
            parent, _, key = name.removeprefix(f"{self.name}.").rpartition(".")
            if id(self.module.get_submodule(parent)._parameters[key]) not in kept:
                self._put(name, parameter)
        self.open = made


def _place(experts: Experts, name: str) -> tuple[nn.ModuleList, int]:
    _, projection, number = name.rsplit(".", 2)
    return getattr(experts, projection), int(number)


def mixtures_of(model: nn.Module, opened: Opened, tasks: Mapping[str, Task]) -> dict[str, Mixture]:
    """The experts of a model that have layers to quantize, by name.

    Args:
        model: on the meta device, its experts as they were before they were opened.
        opened: of the model.
        tasks: by the names of layers, experts' among them.
    """
    found: dict[str, Mixture] = {}
    for name, task in tasks.items():
        if (stack := opened.stack_of(name)) is not None:
            experts = stack.rpartition(".")[0]
            if experts not in found:
                found[experts] = Mixture(experts, model.get_submodule(experts), {})
            found[experts].tasks[name] = task
    return found


@contextmanager
def laid_open(model: nn.Module, mixtures: Iterable[Mixture]) -> Iterator[None]:
    """Let experts that have been quantized stand in the model as float linear layers without weights, for a while."""
    whole = [(mixture.module, mixture.open) for mixture in mixtures if mixture.open is not None]
    replace_modules(model, {id(module): experts for module, experts in whole})
    try:
        yield
    finally:
        replace_modules(model, {id(experts): module for module, experts in whole})


_OF_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(.+)$")


def check_experts(names: Iterable[str], mixtures: Mapping[str, Mixture], where: object) -> None:
    """Look whether a checkpoint that has each expert by itself has all of them.

    Args:
        names: of the stored tensors.
        mixtures: of the model that is to be loaded.
        where: the files, for messages.

    Raises:
        CheckpointError: a tensor of an expert is missing, or there are more experts than the model has (named).
    """
    counts = {1 + max(int(name.rpartition(".")[2]) for name in mixture.tasks) for mixture in mixtures.values()}
    if not counts:
        return
    # A family has rows for experts that are the identity, too.
    most = max(*counts, *(len(p) for mixture in mixtures.values() for p in mixture.meta.values() if p.ndim == 3), 1)
    found: dict[str, dict[str, set[int]]] = {}
    for name in names:
        if match := _OF_EXPERT.match(name):
            found.setdefault(match[1], {}).setdefault(match[3], set()).add(int(match[2]))
    for experts, tensors in found.items():
        for key, numbers in tensors.items():
            if max(numbers) >= most:
                raise CheckpointError(
                    f"{where}: tensor {f'{experts}.{max(numbers)}.{key}'!r} does not belong to the model, which has "
                    f"{most} experts"
                )
            if missing := set(range(min(counts))) - numbers:
                raise CheckpointError(f"{where}: tensor {f'{experts}.{min(missing)}.{key}'!r} is missing")
