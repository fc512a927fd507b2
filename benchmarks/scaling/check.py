"""Predictions of `benchmarks.scaling.model` against measured times, and the three constants taken from these.

The column ``gpus`` of a row of `engine/steps.py` is the tensor-parallel size within one host; without the
column, or without a value, one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from benchmarks.engine import caches, steps
from benchmarks.engine.steps import CASES
from benchmarks.publish.rows import Row, Rows
from benchmarks.scaling.laws import FLOAT, GPU, Primitives
from benchmarks.scaling.model import Layout, Shape, predicted, prompt, step
from qcut.errors import ConfigError

LIMIT = 0.10
"""Predictions are to be this near."""
Key = tuple[str, str, int, int]
"""Case, what, sequences and GPUs."""
STEP_ROW: Key = ("llama-3-8b-codebook4", "decode", 1, 1)
PROMPT_ROWS: tuple[Key, Key] = (
    ("llama-3-8b-codebook4", "first token after 256", 1, 1),
    ("llama2c-288", "prefill of 256", 1, 1),
)
TAKEN = (STEP_ROW, *PROMPT_ROWS)
"""Rows from which constants of `Primitives` are taken. No other row of whole models affects a prediction."""


@dataclass(frozen=True)
class Check:
    """One measured time and its prediction.

    Attributes:
        case: of `bench_engine.CASES`.
        what: was timed: ``decode``, ``prefill of N``, ``first token after N``, or ``decode, <cache>, context N``.
        batch: sequences.
        gpus: that share each layer.
        measured_us, predicted_us: microseconds.
        taken: whether a figure of the model was taken from this row, or from one of the same work, so that the row
            says nothing of the model.
    """

    case: str
    what: str
    batch: int
    gpus: int
    measured_us: float
    predicted_us: float
    taken: bool = False

    @property
    def off(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_us / self.measured_us - 1

    @property
    def near(self) -> bool:
        """Whether the prediction is within `LIMIT`."""
        return abs(self.off) <= LIMIT


def key_of(row: Row) -> Key:
    """The key of a row of `engine/steps.py`."""
    return row["case"], row["what"], int(row["batch"]), int(row.get("gpus") or 1)


def is_taken(key: Key) -> bool:
    """Whether a row is one of `TAKEN`, or another measurement of the same work."""
    return any((key[0], key[1].split()[-1], *key[2:]) == (own[0], own[1].split()[-1], *own[2:]) for own in TAKEN)


def _scheme(case: str) -> str:
    return CASES[case].scheme or FLOAT


def _predicted_us(primitives: Primitives, key: Key) -> float:
    case, what, batch, gpus = key
    shape, layout = Shape.of(case, CASES[case]), Layout(tp=gpus)
    if what == "decode":
        context = steps.PROMPT + steps.NEW // 2
        return step(primitives, shape, _scheme(case), batch, context, layout).us
    return prompt(primitives, shape, _scheme(case), batch, int(what.split()[-1]), layout).us


def _engine_rows(rows: Rows) -> Iterable[tuple[Key, float]]:
    for row in rows.of("bench_engine", gpu=GPU):
        if row["what"] != "kernel" and not row["what"].startswith(steps.IN_CONTEXT):
            yield key_of(row), float(row["median_us"])


def calibrated(primitives: Primitives, rows: Rows) -> Primitives:
    """Take from the rows of `TAKEN` what steps and prompts take besides the terms that primitives explain.

    A layer of a step: what is left of `STEP_ROW`, over the layers; below 0 where kernels overlap by more than norms and
    activation take. A layer of a prompt, and a prompt: what is left of both `PROMPT_ROWS`, of models with unlike
    numbers of layers.

    Raises:
        ConfigError: a row is missing.
    """
    measured = dict(_engine_rows(rows))
    if missing := [key for key in TAKEN if key not in measured]:
        raise ConfigError(f"bench_engine.csv has no row {missing[0]} on an {GPU}, which the model of scale is built on")
    bare = replace(primitives, layer_us=0.0, first_us=0.0, prompt_us=0.0)
    step_left, many, few = (measured[key] - _predicted_us(bare, key) for key in TAKEN)
    layers, few_layers = (CASES[key[0]].layers for key in PROMPT_ROWS)
    first_us = max(0.0, (many - few) / (layers - few_layers))
    return replace(
        primitives,
        layer_us=step_left / CASES[STEP_ROW[0]].layers,
        first_us=first_us,
        prompt_us=max(0.0, many - layers * first_us),
    )


def checks(primitives: Primitives, rows: Rows) -> list[Check]:
    """Predict every step and prompt of `engine/steps.py` and every step of `engine/caches.py` that was measured.

    Mixtures are left out if there are no rows of their experts.

    Args:
        primitives: calibrated.
        rows: of ``benchmarks/results``.
    """

    def known(case: str) -> bool:
        return predicted(primitives, Shape.of(case, CASES[case]), _scheme(case))

    found = [
        Check(*key, us, _predicted_us(primitives, key), is_taken(key))
        for key, us in _engine_rows(rows)
        if known(key[0])
    ]
    for row in rows.of("bench_cache", gpu=GPU):
        if row["cache"] not in ("auto", "int8") or not known(row["case"]):
            continue
        case, batch, context = row["case"], int(row["batch"]), int(row["context"])
        cache = "float" if row["cache"] == "auto" else row["cache"]
        at = context - caches.NEW // 2
        us = step(primitives, Shape.of(case, CASES[case]), _scheme(case), batch, at, cache=cache).us
        what = f"decode, {'float16' if cache == 'float' else cache} cache, context {context:,}"
        found.append(Check(case, what, batch, 1, float(row["median_us"]), us))
    return found


def worst(found: Iterable[Check]) -> Check | None:
    """The check that is furthest off, of rows that nothing was taken from; None of none."""
    return max((one for one in found if not one.taken), key=lambda one: abs(math.log1p(one.off)), default=None)
