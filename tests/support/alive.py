"""How many float weights are alive while a model is quantized."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor, nn

from qcut.layers.linear import Linear


@dataclass
class FloatWeights:
    """The memory of every weight that has reached `Linear.all_from_float`.

    Attributes:
        watched: each, in order.
        alive: how many of those before were alive when each came.
    """

    watched: list[weakref.ref[Any]] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)

    def now(self) -> int:
        """How many are alive."""
        gc.collect()
        return sum(one() is not None for one in self.watched)


def watch_float_weights(monkeypatch: pytest.MonkeyPatch) -> FloatWeights:
    """Watch the weights that reach `Linear.all_from_float` from now on."""
    found = FloatWeights()
    from_float = Linear.all_from_float.__func__  # type: ignore[attr-defined]

    def watching(cls: Any, modules: Sequence[nn.Module], *args: Any) -> Any:
        for module in modules:
            found.alive.append(found.now())
            weight = module.weight
            assert isinstance(weight, Tensor)
            assert not weight.is_meta
            found.watched.append(weakref.ref(weight.untyped_storage()))
        return from_float(cls, modules, *args)

    monkeypatch.setattr(Linear, "all_from_float", classmethod(watching))
    return found
