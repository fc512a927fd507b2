"""Statistics of the inputs of a model's linear layers over real batches.

`calibrate` runs the model and keeps, per layer, the exact minimum and maximum of every input channel and a bounded
uniform sample of tokens. From these come the static ranges (three methods), the per-channel magnitudes that smoothing
needs, and the layer errors that reports and plans print. All of it is rescaled exactly when channels are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from qcut.config import StaticRange
from qcut.errors import CalibrationError, ConfigError
from qcut.models.modules import evaluating, forward, model_device, to_device, weight_nk
from qcut.models.selection import DEFAULT_SKIP, find_layers
from qcut.models.tracing import NormPair, trace_norms
from qcut.numerics.int8 import quantize_per_tensor_ref, static_qparams
from qcut.progress import with_progress
from qcut.storage.files import read_json
from qcut.storage.tensors import TensorFiles, open_tensors, plain_name

Method = Literal["minmax", "quantile", "mse"]
METHODS: tuple[Method, ...] = get_args(Method)

SAMPLE_SIZE = 1 << 18
"""Values kept per layer by default: 1 MB in float32."""
_MSE_VALUES = 1 << 14
_FORMAT, _VERSION = "qcut-calibration", 1
_INDEX = "calibration.json"


@dataclass
class LayerStats:
    """Statistics of one layer's input ``[..., K]``, on the CPU in float32.

    Attributes:
        lo: ``[K]`` least value of every channel over all tokens.
        hi: ``[K]`` greatest value.
        sample: ``[R, K]`` tokens drawn uniformly without replacement; R is bounded.
        tokens: how many tokens were seen.
    """

    lo: Tensor
    hi: Tensor
    sample: Tensor
    tokens: int


@dataclass
class Calibration:
    """Input statistics of a model's linear layers, and the norms whose channels may be rescaled.

    Attributes:
        layers: `LayerStats` by layer name.
        method: how `range` derives a range unless told otherwise.
        quantile: the quantile of ``method="quantile"``, on both sides.
        pairs: norms whose output only linear layers read; see `qcut.models.tracing`.
        refused: other norms, with the reason.
    """

    layers: dict[str, LayerStats]
    method: Method = "minmax"
    quantile: float = 0.9999
    pairs: list[NormPair] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ranges: dict[tuple[str, str], StaticRange] = {}

    def __str__(self) -> str:
        tokens = max((s.tokens for s in self.layers.values()), default=0)
        return (
            f"Calibration: {len(self.layers)} layers, {tokens} tokens, method {self.method}; "
            f"norms that can be smoothed: {len(self.pairs)}, refused: {len(self.refused)}"
        )

    __repr__ = __str__

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
        stats = self.stats(name)
        scale = scale.to("cpu", torch.float32)
        self.layers[name] = LayerStats(stats.lo / scale, stats.hi / scale, stats.sample / scale, stats.tokens)
        self._ranges = {key: value for key, value in self._ranges.items() if key[0] != name}

    def copy(self) -> Calibration:
        """An independent copy."""
        return deepcopy(self)

    def save(self, directory: str | Path) -> None:
        """Write ``calibration.json`` and a safetensors file; the rename of the JSON commits both.

        Raises:
            CalibrationError: the directory cannot be written.
        """
        tensors = {f"{n}.{part}": getattr(s, part).contiguous() for n, s in self.layers.items() for part in _PARTS}
        try:
            files = TensorFiles(Path(directory), "calibration", _INDEX)
            try:
                files.commit(
                    {
                        "format": _FORMAT,
                        "version": _VERSION,
                        "method": self.method,
                        "quantile": self.quantile,
                        "file": files.add(tensors),
                        "layers": {
                            n: {"tokens": s.tokens, "sample": list(s.sample.shape)} for n, s in self.layers.items()
                        },
                        "pairs": [pair.to_json() for pair in self.pairs],
                        "refused": self.refused,
                    }
                )
            except BaseException:
                files.abandon()
                raise
        except OSError as exc:
            raise CalibrationError(f"{directory}: cannot be written: {exc}") from exc

    @classmethod
    def load(cls, directory: str | Path) -> Calibration:
        """Read what `save` wrote; every tensor's shape and dtype is checked.

        Raises:
            CalibrationError: a file is missing, truncated, foreign, or the two disagree.
        """
        path = Path(directory) / _INDEX
        data = read_json(path, CalibrationError)
        if data.get("format") != _FORMAT or data.get("version") != _VERSION:
            raise CalibrationError(
                f"{path}: found format {data.get('format')!r} version {data.get('version')!r}; "
                f"{_FORMAT!r} version {_VERSION} is needed"
            )
        try:
            sizes = {
                name: (int(d["tokens"]), (int(d["sample"][0]), int(d["sample"][1])))
                for name, d in data["layers"].items()
            }
            pairs = [NormPair.from_json(pair) for pair in data["pairs"]]
            refused = {str(k): str(v) for k, v in data["refused"].items()}
            method, quantile = _check_method(data["method"]), _check_quantile(float(data["quantile"]))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as exc:
            raise CalibrationError(f"{path}: a field is missing or malformed: {exc!r}") from exc
        file = path.parent / plain_name(data.get("file"), path, CalibrationError)
        layers = {}
        with open_tensors(file, CalibrationError) as tensors:
            if set(tensors.keys()) != {f"{name}.{part}" for name in sizes for part in _PARTS}:
                raise CalibrationError(f"{file}: its tensors are not those of the layers that {path.name} lists")
            for name, (tokens, shape) in sizes.items():
                parts = {part: tensors.get_tensor(f"{name}.{part}").clone() for part in _PARTS}
                expected = {"lo": shape[1:], "hi": shape[1:], "sample": shape}
                for part, tensor in parts.items():
                    if tensor.dtype is not torch.float32 or tuple(tensor.shape) != expected[part]:
                        raise CalibrationError(
                            f"{file}: {name}.{part}: found {tensor.dtype} {tuple(tensor.shape)}, "
                            f"torch.float32 {expected[part]} is needed"
                        )
                layers[name] = LayerStats(tokens=tokens, **parts)
        return cls(layers, method, quantile, pairs, refused)


_PARTS = ("lo", "hi", "sample")


def _check_method(method: str) -> Method:
    if method not in METHODS:
        raise ConfigError(f"method: found {method!r}; allowed are {', '.join(METHODS)}")
    return method  # type: ignore[return-value]


def _check_quantile(quantile: float) -> float:
    if not 0.5 < quantile <= 1.0:
        raise ConfigError(f"quantile: found {quantile}; allowed is 0.5 < quantile <= 1")
    return quantile


def _quantile_range(sample: Tensor, p: float) -> list[float]:
    """The quantiles ``1 - p`` and ``p``, linear between order statistics (torch.quantile stops at 2**24 values)."""
    ordered = sample.flatten().double().sort().values
    at = torch.tensor([1 - p, p], dtype=torch.float64) * (ordered.numel() - 1)
    return torch.lerp(ordered[at.floor().long()], ordered[at.ceil().long()], at.frac()).tolist()


def _mse_range(sample: Tensor, low: float, high: float) -> tuple[float, float]:
    """See `Calibration.range`. The first candidate is the range itself; only a strict improvement replaces it."""
    values = sample.flatten().sort().values
    if values.numel() > _MSE_VALUES:
        values = values[torch.linspace(0, values.numel() - 1, _MSE_VALUES, dtype=torch.float64).round().long()]
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


class _Observer:
    """Running statistics of one layer.

    The sample is exact: every token gets a random key, and the rows with the least keys are kept. Which tokens those
    are depends on the seed and the number of tokens alone.
    """

    def __init__(self, name: str, rows: int, columns: int, seed: int) -> None:
        self.name, self.tokens = name, 0
        self.generator = torch.Generator().manual_seed(seed)
        self.keys = torch.full((rows,), torch.inf, dtype=torch.float64)
        self.sample = torch.empty(rows, columns)
        self.lo, self.hi = torch.full((columns,), torch.inf), torch.full((columns,), -torch.inf)

    def __call__(self, x: Tensor, batch: int) -> None:
        x = x.detach().reshape(-1, x.shape[-1])
        if x.shape[0] == 0:
            return
        lo, hi = (t.float().cpu() for t in x.aminmax(dim=0))
        bad = ~(lo.isfinite() & hi.isfinite())
        if bad.any():
            raise CalibrationError(
                f"layer {self.name!r}: batch {batch}: found NaN or Inf in {int(bad.sum())} of {bad.numel()} input "
                f"channels, first in channel {int(bad.nonzero()[0])}; calibration data must be finite"
            )
        self.lo, self.hi = torch.minimum(self.lo, lo), torch.maximum(self.hi, hi)
        self.tokens += x.shape[0]
        rows = len(self.keys)
        keys = torch.rand(x.shape[0], generator=self.generator, dtype=torch.float64)
        least = torch.cat([self.keys, keys]).argsort()[:rows]
        fresh = least[least >= rows] - rows
        free = torch.ones(rows, dtype=torch.bool)
        free[least[least < rows]] = False
        self.keys[free] = keys[fresh]
        self.sample[free] = x[fresh.to(x.device)].float().cpu()

    def stats(self) -> LayerStats:
        return LayerStats(self.lo, self.hi, self.sample[self.keys.isfinite()], self.tokens)


def _observe(observer: _Observer, counter: list[int]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        observer(args[0] if args else next(iter(kwargs.values())), counter[0])

    return hook


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
    first batch is also traced to find the norms that smoothing can rescale. Every row of a layer's input counts,
    padding included: pass unpadded text.

    Args:
        model: run in evaluation mode without gradients; modes are restored.
        batches: what the model is called on: tensors (first argument), tuples (arguments) or dicts (keywords), of any
            rank; moved to the model's device; read once.
        layers: globs of layer names (``h.*.mlp.c_fc``); None takes every ``nn.Linear`` and ``Conv1D``.
        skip: globs of layers to leave out.
        method: what `Calibration.range` returns by default: ``minmax``, ``quantile`` or ``mse``.
        quantile: for ``method="quantile"``, on both sides.
        sample_size: values of each layer's input to keep, as whole tokens (at least one).
        seed: of the sample. Layers that see the same tokens keep the same ones.
        progress: show a progress bar.

    Returns:
        The `Calibration`.

    Raises:
        CalibrationError: no batch, a layer that never ran, or NaN or Inf in a layer's input (layer and batch named).
        QuantizationError: no layer matches.
        ConfigError: an unknown method, or a quantile or sample size out of range.

    Exactness: deterministic: same model, batches and seed, same statistics.
    """
    _check_method(method)
    _check_quantile(quantile)
    if sample_size < 1:
        raise ConfigError(f"sample_size: found {sample_size}; at least 1 is allowed")
    chosen = find_layers(model, layers, skip)
    device, counter = model_device(model), [0]
    observers: dict[str, _Observer] = {}
    handles = []
    pairs: list[NormPair] = []
    refused: dict[str, str] = {}
    try:
        for name, module in chosen.items():
            columns = weight_nk(module).shape[1]
            observers[name] = _Observer(name, max(1, sample_size // columns), columns, seed)
            handles.append(module.register_forward_pre_hook(_observe(observers[name], counter), with_kwargs=True))
        with evaluating(model), torch.no_grad():
            for batch in with_progress(batches, "calibrate", "batch", shown=progress):
                batch = to_device(batch, device)
                if counter[0] == 0:
                    pairs, refused = trace_norms(model, partial(forward, model, batch))
                else:
                    forward(model, batch)
                counter[0] += 1
    finally:
        for handle in handles:
            handle.remove()
    if counter[0] == 0:
        raise CalibrationError("batches: found none; calibration needs at least one batch")
    idle = [name for name, observer in observers.items() if observer.tokens == 0]
    if idle:
        raise CalibrationError(
            f"layer {idle[0]!r} saw no token in {counter[0]} batches (nor did {len(idle) - 1} others); "
            "pass data that reaches it, or leave it out with skip=[...]"
        )
    return Calibration({name: o.stats() for name, o in observers.items()}, method, quantile, pairs, refused)
