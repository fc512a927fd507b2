"""What limits a plan: the least cost within a loss, or the least loss within a cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from qcut.common.numbers import is_number
from qcut.conversion.planning.costs import CostModel, StepCost, TimeCost, memory_cost, stored_cost
from qcut.errors import ConfigError, PlanError
from qcut.schemes import Scheme, parse_scheme

WITHIN_LOSS = ("w8a8_static", "w8a8", "w8a8_rotated", "w8a16", "fp16")
"""Default candidates if the loss is limited."""
WITHIN_COST = ("codebook2", "codebook3", "codebook4", "codebook4+4", "w8a16")
"""Default candidates if the cost is limited."""

_LOSS = 0.003
_MOST_BITS = 1e6
"""More bits per weight limit nothing."""


@dataclass(frozen=True)
class Budget:
    """A limit, and the quantity to minimize within it.

    Attributes:
        objective: the meaning of costs; see `qcut.Plan`.
        cost: the cost of a layer under a scheme.
        loss: the loss allowed, or None.
        bits: the bits a weight allowed, or None.
        step_us: the microseconds of a step allowed, or None.
    """

    objective: str
    cost: CostModel
    loss: float | None = None
    bits: float | None = None
    step_us: float | None = None

    @classmethod
    def of(
        cls,
        budget: float | None,
        bits: float | None,
        step_us: float | None,
        objective: Literal["time", "memory"] | None,
        cost: CostModel | None,
    ) -> Budget:
        """The budget that arguments of `qcut.plan` state.

        Raises:
            ConfigError: two limits, a limit out of range, an unknown objective, or one with a limit of cost.
        """
        given = {"budget": budget, "bits": bits, "step_us": step_us}
        limits = {name: value for name, value in given.items() if value is not None}
        if len(limits) > 1:
            raise ConfigError(f"{' and '.join(limits)}: one of them is allowed; the others follow from the plan")
        for name, least, example in (
            ("budget", "0 and more", "0.003 for 0.3 %"),
            ("bits", "above 0", "3.5"),
            ("step_us", "above 0", "250"),
        ):
            value = limits.get(name)
            if value is None:
                continue
            finite = is_number(value) and math.isfinite(value)
            if not finite or value < 0 or (value == 0 and name != "budget"):
                raise ConfigError(f"{name}: found {value!r}; a finite number {least} is allowed, such as {example}")
        if cost is not None and not callable(cost):
            raise ConfigError(f"cost: found {cost!r}; allowed: a cost model (qcut.conversion.planning.costs)")
        if bits is None and step_us is None:
            if objective not in (None, "time", "memory"):
                raise ConfigError(f"objective: found {objective!r}; allowed are 'time' and 'memory', or pass cost=")
            what = objective or "time"
            model = cost or (TimeCost() if what == "time" else memory_cost)
            known = model is memory_cost or isinstance(model, TimeCost)
            return cls(what if known else "custom", model, loss=_LOSS if budget is None else budget)
        if objective is not None:
            raise ConfigError(f"objective: found {objective!r} with {', '.join(limits)}, which limits the cost itself")
        if bits is not None:
            if cost is not None:
                raise ConfigError("cost: found a cost model with bits, which are bits; limit step_us or budget")
            return cls("stored", stored_cost, bits=bits)
        return cls("step", cost or StepCost(), step_us=step_us)

    def schemes(self, candidates: Sequence[str | Scheme] | None) -> list[Scheme]:
        """The candidates, each once; if None, the usual ones of the budget.

        Raises:
            ConfigError: an unknown scheme, or an empty list.
        """
        usual = WITHIN_LOSS if self.loss is not None else WITHIN_COST
        if isinstance(candidates, str | Scheme) or not isinstance(candidates, Iterable | None):
            raise ConfigError(f"candidates: found {candidates!r}; allowed: a list of schemes, such as {list(usual)}")
        schemes = list(dict.fromkeys(map(parse_scheme, usual if candidates is None else candidates)))
        if not schemes:
            raise ConfigError(f"candidates: found none; choose among {', '.join(usual)}")
        return schemes

    def limit(self, weights: int) -> float | None:
        """The cost allowed, in the cost model's unit; None if the loss is limited."""
        if self.bits is not None:
            bits = min(self.bits, _MOST_BITS)
            return float(math.floor(bits * weights / 8 + 1e-6))  # whole bytes; bits are seldom a whole number
        return self.step_us

    def impossible(self, least: float, weights: int) -> PlanError:
        """The error if the least possible cost is above the limit."""
        if self.bits is not None:
            bits = math.ceil(8 * least / weights * 1e4) / 1e4
            return PlanError(
                f"bits={self.bits}: found {bits} bits a weight with every layer on its smallest candidate, norms and "
                f"scales counted; allow {bits} or more, or add candidates of fewer bits, such as codebook2"
            )
        us = math.ceil(least * 1e3) / 1e3
        return PlanError(
            f"step_us={self.step_us}: found an estimate of {us} us with every layer on its fastest candidate; allow "
            f"{us} or more, or add candidates that read fewer bytes, such as codebook2"
        )
