"""Statistics of the inputs of a model's linear layers over real batches.

`calibrate` runs the model and keeps, per layer, the exact minimum and maximum of every input channel and a bounded
uniform sample of tokens. From these come the static ranges (three methods), the per-channel magnitudes that smoothing
needs, and the layer errors that reports and plans print. All of it is rescaled exactly when channels are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from qcut.common import schema
from qcut.common.numbers import SEEDS, check_integer, is_number
from qcut.common.safetensors import read_index
from qcut.common.safetensors_writer import TensorFiles
from qcut.conversion.calibration.layer_stats import PARTS, LayerStats
from qcut.conversion.calibration.observers import LayerObserver, input_hooks, run_observed
from qcut.conversion.verification import excerpt
from qcut.errors import CalibrationError, ConfigError
from qcut.layers.experts.opening import Opened, opened
from qcut.layers.linear import Linear
from qcut.models.modules import forward, weight_nk
from qcut.models.selection import DEFAULT_SKIP, check_model, expert_modules, find_layers
from qcut.models.tracing import NormPair, NormTracer
from qcut.numerics.int8 import quantize_per_tensor_ref, static_qparams
from qcut.numerics.plain_state import in_plain_state
from qcut.schemes import StaticRange

Method = Literal["minmax", "quantile", "mse"]
METHODS: tuple[Method, ...] = get_args(Method)

SAMPLE_SIZE = 1 << 18
"""Values kept per layer by default: 1 MB in float32. All experts of a projection share as many."""
_EXPERT_ROWS = 8
"""Tokens kept per expert, at least."""
_MSE_VALUES = 1 << 14
_FORMAT, _VERSION = "qcut-calibration", 2
_FIRST_BATCH_ALONE = 1
"""The version with pairs from the first batch only: other batches may have had other readers."""
_INDEX = "calibration.json"
_SIZE = schema.integer(1)
_SCHEMA = schema.record(
    {
        "method": schema.text(choices=METHODS),
        "quantile": schema.number(0.5, 1.0),
        "file": schema.text(),
        "layers": schema.table(
            schema.record(
                {"tokens": schema.integer(0, (1 << 62) - 1), "sample": schema.items(_SIZE, 2)},
                {"borrowed": (schema.boolean(), False)},
            )
        ),
        "pairs": schema.items(
            schema.record(
                {"norm": schema.text(), "layers": schema.items(schema.text())},
                {"routers": (schema.items(schema.text()), [])},
            )
        ),
        "refused": schema.table(schema.text(most=1 << 16)),
    },
    more=True,
)


@dataclass
class Calibration:
    """Input statistics of a model's linear layers, and the norms with channels that may be rescaled.

    Attributes:
        layers: `LayerStats` by layer name.
        method: how `range` derives a range by default.
        quantile: the quantile of ``method="quantile"``, on both sides.
        pairs: norms with an output that only linear layers read; see `qcut.models.tracing`.
        refused: other norms, with the reason.
    """

    layers: dict[str, LayerStats]
    method: Method = "minmax"
    quantile: float = 0.9999
    pairs: list[NormPair] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    batch: Any = field(default=None, repr=False, compare=False)
    """A small batch of those that were seen, on which `qcut.quantize` holds the model to the float one; not saved."""

    def __post_init__(self) -> None:
        self._ranges: dict[tuple[str, str], StaticRange] = {}

    def __str__(self) -> str:
        tokens = max((s.tokens for s in self.layers.values()), default=0)
        return (
            f"Calibration: {len(self.layers)} layers, {tokens} tokens, method {self.method}; "
            f"norms that can be smoothed: {len(self.pairs)}, refused: {len(self.refused)}"
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from qcut.common.html import html_table

        rows = (
            (name, f"{stats.lo.numel()}", f"{stats.tokens:,}", f"[{stats.lo.min():.4g}, {stats.hi.max():.4g}]")
            for name, stats in self.layers.items()
        )
        return html_table(str(self), ("layer", "K", "tokens", "input"), rows)

    @property
    def tokens(self) -> dict[str, int]:
        """How many tokens each layer saw; 0 of an expert that no token came to."""
        return {name: stats.tokens for name, stats in self.layers.items()}

    def stats(self, name: str) -> LayerStats:
        """The statistics of a layer.

        Raises:
            CalibrationError: the layer was not calibrated.
        """
        if name not in self.layers:
            raise CalibrationError(
                f"layer {name!r} was not calibrated; the {len(self.layers)} calibrated layers begin with "
                f"{next(iter(self.layers), None)!r}. Name it in calibrate(..., layers=[...])"
            )
        return self.layers[name]

    def check(self, name: str, columns: int) -> None:
        """Raise `CalibrationError` where a layer of the model has another number of input channels than was seen."""
        seen = self.stats(name).lo.numel()
        if seen != columns:
            raise CalibrationError(f"layer {name!r}: calibrated with {seen} input channels, the model has {columns}")

    def absmax(self, name: str) -> Tensor:
        """``max |x[:, k]|`` over all calibration tokens: float32 ``[K]`` on the CPU.

        Raises:
            CalibrationError: the layer was not calibrated.
        """
        stats = self.stats(name)
        return torch.maximum(stats.lo.abs(), stats.hi.abs())

    def range(self, name: str, method: Method | None = None) -> StaticRange:
        """The static range of a layer's input, widened to hold 0.

        - ``minmax``: the least and greatest value over all tokens. Nothing seen in calibration saturates.
        - ``quantile``: the quantiles ``1 - p`` and ``p`` of the sample's values, exact, with linear interpolation
          between order statistics; p is `Calibration.quantile`.
        - ``mse``: the range ``[f · lo, g · hi]``, ``0 < f, g <= 1``, that minimizes
          ``sum (x - scale · (q(x) - zero_point))²`` over the sample (at most 16,384 evenly spaced order statistics
          of it). f = g is searched over 64 values, evenly spaced in the logarithm down to 1/64, then f and g in turn
          around the best.

        Exactness: the same statistics give the same range, bit by bit.

        Raises:
            CalibrationError: the layer was not calibrated.
            ConfigError: the method does not exist.
        """
        method = _check_method(self.method if method is None else method)
        stats = self.stats(name)
        if (name, method) not in self._ranges:
            low, high = min(0.0, stats.lo.min().item()), max(0.0, stats.hi.max().item())
            if method == "quantile":
                below, above = _quantile_range(stats.sample, self.quantile)
                low, high = min(0.0, max(low, below)), max(0.0, min(high, above))
            elif method == "mse":
                low, high = _mse_range(stats.sample, low, high)
            self._ranges[name, method] = StaticRange(low, high)
        return self._ranges[name, method]

    def divide_channels(self, name: str, scale: Tensor) -> None:
        """Make the statistics those of ``x / scale``; exact where every ``scale[k]`` is a power of two."""
        self.layers[name] = self.stats(name).divided(scale)
        self._ranges = {key: value for key, value in self._ranges.items() if key[0] != name}

    def copy(self) -> Calibration:
        """An independent copy."""
        return deepcopy(self)

    def save(self, directory: str | Path) -> None:
        """Write ``calibration.json`` and a safetensors file; the rename of the JSON commits both.

        One process saves at a time; see `qcut.common.safetensors_writer`.

        Raises:
            CalibrationError: the directory cannot be written, or another process does not end its save. What was there
                is then in force as before.
        """
        tensors = {f"{n}.{part}": getattr(s, part).contiguous() for n, s in self.layers.items() for part in PARTS}
        try:
            with TensorFiles(Path(directory), "calibration", _INDEX) as files:
                files.commit(
                    {
                        "format": _FORMAT,
                        "version": _VERSION,
                        "method": self.method,
                        "quantile": self.quantile,
                        "file": files.add(tensors),
                        "layers": {
                            n: {"tokens": s.tokens, "sample": list(s.sample.shape)}
                            | ({"borrowed": True} if s.borrowed else {})
                            for n, s in self.layers.items()
                        },
                        "pairs": [pair.to_json() for pair in self.pairs],
                        "refused": self.refused,
                    }
                )
        except (OSError, ValueError, TypeError) as exc:
            raise CalibrationError(f"{directory}: cannot be written: {exc}") from exc

    @classmethod
    def load(cls, directory: str | Path, *, verify: bool = True) -> Calibration:
        """Read what `save` wrote; every tensor's shape, dtype and values are checked.

        Args:
            directory: where the files are.
            verify: compare digests; False reads files that were changed by hand.

        Raises:
            CalibrationError: a file is missing, truncated, damaged or foreign; the two disagree; or statistics are
                NaN, Inf or contradict one another (file and tensor are named).
        """
        path = Path(directory) / _INDEX
        data, files = read_index(path, CalibrationError, lambda data: _checked(data, path), verify=verify)
        (file,) = files.values()
        layers = {}
        with file:
            if file.headers.keys() != {f"{name}.{part}" for name in data["layers"] for part in PARTS}:
                raise CalibrationError(f"{file.path}: its tensors are not those of the layers that {path.name} lists")
            for name, sizes in data["layers"].items():
                rows, columns = sizes["sample"]
                parts = {}
                for part, shape in zip(PARTS, ([columns], [columns], [rows, columns]), strict=True):
                    header = file.headers[f"{name}.{part}"]
                    if header.code != "F32" or header.shape != shape:
                        raise CalibrationError(
                            f"{file.path}: {name}.{part}: found {header.code} {header.shape}, F32 {shape} is needed"
                        )
                    parts[part] = file.read(f"{name}.{part}", verify=verify)
                stats = layers[name] = LayerStats(tokens=sizes["tokens"], borrowed=sizes["borrowed"], **parts)
                if problem := stats.problem():
                    raise CalibrationError(f"{file.path}: tensor '{name}.{problem[0]}': {problem[1]}")
        pairs = [NormPair(pair["norm"], tuple(pair["layers"]), tuple(pair["routers"])) for pair in data["pairs"]]
        refused = dict(data["refused"])
        if data["version"] == _FIRST_BATCH_ALONE:
            refused |= {pair.norm: "its readers were looked for in only one batch; calibrate anew" for pair in pairs}
            pairs = []
        return cls(layers, data["method"], data["quantile"], pairs, refused)


def _checked(data: dict[str, Any], path: Path) -> tuple[dict[str, Any], list[str]]:
    """The index's data, and the name of the data file."""
    if data.get("format") != _FORMAT or data.get("version") not in (_FIRST_BATCH_ALONE, _VERSION):
        raise CalibrationError(
            f"{path}: found format {data.get('format')!r} version {data.get('version')!r}; "
            f"{_FORMAT!r} version {_VERSION} is needed"
        )
    data = schema.conform(data, _SCHEMA, path, CalibrationError)
    try:
        _check_quantile(data["quantile"])
    except ConfigError as exc:
        raise CalibrationError(f"{path}: {exc}") from exc
    return data, [data["file"]]


def _check_method(method: str) -> Method:
    if method not in METHODS:
        raise ConfigError(f"method: found {method!r}; allowed are {', '.join(METHODS)}")
    return method  # type: ignore[return-value]


def _check_quantile(quantile: float) -> float:
    if not is_number(quantile) or not 0.5 < quantile <= 1.0:
        raise ConfigError(f"quantile: found {quantile!r}; allowed is 0.5 < quantile <= 1")
    return quantile


def _quantile_range(sample: Tensor, p: float) -> list[float]:
    """The quantiles ``1 - p`` and ``p``, linear between order statistics (torch.quantile stops at 2**24 values)."""
    ordered = sample.flatten().double().sort().values
    at = torch.tensor([1 - p, p], dtype=torch.float64, device="cpu") * (ordered.numel() - 1)
    return torch.lerp(ordered[at.floor().long()], ordered[at.ceil().long()], at.frac()).tolist()


def _mse_range(sample: Tensor, low: float, high: float) -> tuple[float, float]:
    """See `Calibration.range`. The first candidate is the range itself; only a strict improvement replaces it."""
    values = sample.flatten().sort().values
    if values.numel() > _MSE_VALUES:
        values = values[
            torch.linspace(0, values.numel() - 1, _MSE_VALUES, dtype=torch.float64, device="cpu").round().long()
        ]
    row = values[None]

    def error(f: float, g: float) -> float:
        scale, zero_point = static_qparams(low * f, high * g)
        q = quantize_per_tensor_ref(row, scale, zero_point, row.shape[1])
        return ((q.float() - zero_point) * scale - row).double().square().sum().item()

    best = (error(1.0, 1.0), 1.0, 1.0)
    steps = [2.0 ** (-6 * i / 63) for i in range(64)]
    for f in steps[1:]:
        best = min(best, (error(f, f), f, f), key=lambda c: c[0])
    ratio = steps[1]
    around = [ratio**i for i in range(-6, 7)]
    for _ in range(2):
        _, f, g = best
        for x in (min(1.0, f * step) for step in around):
            best = min(best, (error(x, g), x, g), key=lambda c: c[0])
        _, f, g = best
        for x in (min(1.0, g * step) for step in around):
            best = min(best, (error(f, x), f, x), key=lambda c: c[0])
    return low * best[1], high * best[2]


@in_plain_state
def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    layers: Sequence[str] | None = None,
    skip: Sequence[str] = DEFAULT_SKIP,
    method: Method = "minmax",
    quantile: float = 0.9999,
    sample_size: int = SAMPLE_SIZE,
    seed: int = 0,
    progress: bool = True,
) -> Calibration:
    """Observe the inputs of a model's linear layers over real batches.

    Statistics live on the CPU: ``sample_size + 2 K`` float32 values per layer, whatever the number of batches. The
    batches are also traced to find the norms that smoothing can rescale. Every row of a layer's input counts,
    padding included: pass unpadded text.

    Experts of a mixture are layers like others, ``mlp.experts.up.17`` and ``mlp.experts.down.17``; those of one
    projection share ``sample_size``, with eight tokens each at least. An expert that saw few tokens, or none, gets
    statistics with tokens of the others (`qcut.conversion.calibration.few_tokens`); so does one that is a module in a
    container of experts, which is called on these tokens.

    Args:
        model: run in evaluation mode without gradients; modes, buffers and attributes are restored after each batch.
        batches: what the model is called on: tensors (first argument), tuples (arguments) or dicts (keywords), of any
            rank; moved to the model's device; read once.
        layers: globs of layer names (``h.*.mlp.c_fc``, ``*.mlp.experts``); None takes every ``nn.Linear`` and
            ``Conv1D``, and experts.
        skip: globs of layers to leave out.
        method: what `Calibration.range` returns by default: ``minmax``, ``quantile`` or ``mse``.
        quantile: for ``method="quantile"``, on both sides.
        sample_size: values of each layer's input to keep, as whole tokens (at least one).
        seed: of the sample. Layers that see the same tokens keep the same ones.
        progress: show a progress bar.

    Returns:
        The `Calibration`.

    Raises:
        CalibrationError: no batch, a layer that never ran (of experts, all of a projection), or NaN or Inf in a layer's
            input (layer and batch named).
        QuantizationError: no layer matches.
        ConfigError: an unknown method, or a quantile or sample size out of range.

    Exactness: deterministic: same model, batches and seed, same statistics.
    """
    _check_method(method)
    _check_quantile(quantile)
    check_integer(sample_size, "sample_size")
    check_integer(seed, "seed", SEEDS)
    check_model(model)
    with opened(model) as mixtures:
        chosen = find_layers(model, layers, skip)
        stats, tracer, batch = _observed(model, batches, chosen, mixtures, sample_size, seed, progress)
        pairs, refused = tracer.verdict()
    return Calibration(stats, method, quantile, pairs, refused, batch)


def _observed(
    model: nn.Module,
    batches: Iterable[Any],
    chosen: Mapping[str, nn.Module],
    mixtures: Opened,
    sample_size: int,
    seed: int,
    progress: bool,
) -> tuple[dict[str, LayerStats], NormTracer, Any]:
    """Statistics of chosen layers, the tracer that has seen all batches, and a small part of the first of them."""
    layers = dict(chosen)
    observers = {}
    experts_of = dict.fromkeys(chosen, 1)
    for experts, names in mixtures.members(chosen).items():
        layers |= {name: model.get_submodule(name) for name in names}
        experts_of |= dict.fromkeys(names, mixtures.experts[experts].num_experts)
    for name, module in layers.items():
        k = module.in_features if isinstance(module, nn.Linear | Linear) else weight_nk(module).shape[1]
        rows = max(sample_size // (k * experts_of[name]), 1 if experts_of[name] == 1 else _EXPERT_ROWS)
        observers[name] = LayerObserver(name, rows, k, seed)
    excerpts: list[Any] = []
    done = 0
    tracer = NormTracer(model)

    def observe(name: str, x: Tensor) -> None:
        with torch._C.DisableTorchFunction():  # statistics are none of the reads that are traced
            observers[name](x, done)

    places, inputs = input_hooks(layers, observe), None
    if modules := expert_modules(model):
        from qcut.conversion.calibration.few_tokens import ExpertInputs  # most models have no experts

        inputs = ExpertInputs(model, modules, sample_size, seed)
        places = chain(places, inputs.hooks())

    def run(batch: Any) -> None:
        nonlocal done
        if not done:
            excerpts.append(excerpt(batch))
        tracer.run(partial(forward, model, batch))
        done += 1

    try:
        with torch.no_grad():
            run_observed(model, batches, places, run, "calibrate", progress)
    finally:
        tracer.remove()
    stats = {name: observer.stats() for name, observer in observers.items() if observer.tokens}
    if mixtures.experts:
        from qcut.conversion.calibration.few_tokens import lend  # most models have no experts

        stats = lend(stats, mixtures)
    if inputs is not None:
        stats = inputs.lend(stats, chosen)
    idle = [name for name in chosen if name not in stats]
    if idle:
        raise CalibrationError(
            f"layer {idle[0]!r} saw no token in {done} batches (nor did {len(idle) - 1} others); "
            "pass data that reaches it, or leave it out with skip=[...]"
        )
    return {name: stats[name] for name in chosen}, tracer, excerpts[0]
