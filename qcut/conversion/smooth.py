"""Moves outliers from activations into weights, exactly.

Where only linear layers read a norm's output, channel j of that output may be divided by ``s[j]`` (in the norm's
weight and bias) and column j of those layers' weights multiplied by it. With powers of two nothing is rounded on
either side: the float model computes the same bits as before, and the static ranges shrink.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from qcut.common.numbers import is_number
from qcut.conversion.calibration.calibrate import Calibration
from qcut.conversion.tasks import check_given
from qcut.errors import CalibrationError, ConfigError
from qcut.layers.experts.opening import Opened, opened
from qcut.models.modules import ExpertsModule, weight_nk, weight_of
from qcut.models.selection import check_model
from qcut.models.tracing import NormPair
from qcut.numerics.plain_state import in_plain_state

_NAMED = 8  # layers shown for a norm


@dataclass(frozen=True)
class Migration:
    """One norm, the layers it feeds, and what its channels are divided by.

    Attributes:
        norm: the norm's name.
        layers: all layers that read its output.
        routers: weights of routers that read it too.
        scale: float32 ``[K]`` on the CPU, positive.
    """

    norm: str
    layers: tuple[str, ...]
    scale: Tensor
    routers: tuple[str, ...] = ()

    @property
    def moved(self) -> int:
        """How many channels change."""
        return int((self.scale != 1).sum())


@dataclass(frozen=True)
class Smoothing:
    """The changes that `smooth` made.

    Attributes:
        migrations: the norms rescaled.
        refused: norms left as they were, with the reason.
        alpha: the migration strength.
        exact: whether every scale is a power of two.
    """

    migrations: list[Migration]
    refused: dict[str, str] = field(default_factory=dict)
    alpha: float = 0.5
    exact: bool = True

    def __str__(self) -> str:
        lines = [f"Smoothing: alpha {self.alpha}, {'powers of two' if self.exact else 'any scale (rounds)'}"]
        for m in self.migrations:
            low, high = m.scale.min().item(), m.scale.max().item()
            readers = ", ".join([*_shortly(m.layers), *m.routers])
            lines.append(f"  {m.norm} -> {readers}: {m.moved} channels, scales {low:g} to {high:g}")
        lines += [f"  {norm}: left as it is: {reason}" for norm, reason in self.refused.items()]
        return "\n".join(lines)

    @property
    def scales(self) -> dict[str, Tensor]:
        """Per layer, what its input channels are divided by and its weight's columns multiplied by: float32 ``[K]``."""
        return {layer: m.scale for m in self.migrations for layer in m.layers}


def _shortly(layers: Sequence[str]) -> list[str]:
    """Names of layers; of many, the first ones and the number of the others."""
    return list(layers) if len(layers) <= _NAMED else [*layers[:_NAMED], f"{len(layers) - _NAMED} others"]


def migrations_for(model: nn.Module, calibration: Calibration, alpha: float = 0.5, *, exact: bool = True) -> Smoothing:
    """Choose the scales of `smooth` without touching the model; its experts are open.

    Args and Raises: see `smooth`.
    """
    check_given(calibration)
    if not is_number(alpha) or not 0.0 <= alpha <= 1.0:
        raise ConfigError(f"smooth: found alpha = {alpha!r}; allowed is 0 <= alpha <= 1")
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    refused = dict(calibration.refused)
    migrations = []
    for pair in calibration.pairs:
        missing = [name for name in (pair.norm, *pair.layers) if getattr(modules.get(name), "weight", None) is None]
        missing += [name for name in pair.routers if name not in parameters]
        if missing:
            raise CalibrationError(
                f"{type(model).__name__} has no module {missing[0]!r}: the calibration is another model's"
            )
        known = [name for name in pair.layers if name in calibration.layers]
        if not known:
            refused[pair.norm] = f"none of its layers ({', '.join(pair.layers)}) was calibrated"
            continue
        norm, layers = modules[pair.norm], [modules[name] for name in pair.layers]
        weights = [weight_nk(layer) for layer in layers]
        # Experts see a part of the tokens each.
        absmax = torch.stack([calibration.absmax(name) for name in known]).amax(0)
        for weight in weights:
            calibration.check(known[0], weight.shape[1])
        columns = torch.stack([w.float().abs().amax(0).cpu() for w in weights]).amax(0)
        scale = _scale(pair, absmax, columns, alpha, exact)
        if exact:
            vectors = [p.detach()[None] for p in norm._parameters.values() if p is not None]
            held = [_survives(w, scale) for w in (*weights, *(parameters[name].detach() for name in pair.routers))]
            held += [_survives(v, 1 / scale) for v in vectors]
            scale = torch.where(torch.stack(held).all(0), scale, 1.0)
        migrations.append(Migration(pair.norm, pair.layers, scale, pair.routers))
    return Smoothing(migrations, refused, alpha, exact)


def _scale(pair: NormPair, absmax: Tensor, columns: Tensor, alpha: float, exact: bool) -> Tensor:
    if not columns.isfinite().all():
        raise CalibrationError(f"{', '.join(pair.layers)}: found NaN or Inf in a weight; weights must be finite")
    # A channel that is always zero, or that no weight reads, has nothing to move.
    live = (absmax > 0) & (columns > 0)
    if not live.any():
        return torch.ones_like(absmax)
    exponent = alpha * absmax.log2() - (1 - alpha) * columns.log2()
    exponent -= exponent[live].median()
    return torch.where(live, (exponent.round() if exact else exponent).exp2(), 1.0)


def _survives(w: Tensor, scale: Tensor) -> Tensor:
    """Per column, on the CPU: whether multiplying by a power of two loses no bit (to underflow or overflow)."""
    factor = scale.to(w.device)
    scaled = (w.float() * factor).to(w.dtype)
    return ((scaled.float() / factor).to(w.dtype) == w).all(0).cpu() & scaled.isfinite().all(0).cpu()


def scaled_weight(module: nn.Module, scale: Tensor) -> Tensor:
    """A linear layer's weight with column j times ``scale[j]``, in its own layout, dtype and device.

    ``w'[n, j] = dtype(f32(w[n, j]) · scale[j])``.
    """
    return _scaled(weight_of(module), scale if isinstance(module, nn.Linear) else scale[:, None])


def float_updates(
    model: nn.Module, migration: Migration, quantized: Container[str], mixtures: Opened
) -> list[tuple[nn.Parameter, Tensor]]:
    """The parameters that stay in float, with the values they get.

    A norm's: ``dtype(f32(p[j]) / scale[j])``; for layers and routers see `scaled_weight`.

    Args:
        model: its experts are open.
        migration: of one norm.
        quantized: layers that are quantized; their weights stay as they are.
        mixtures: the experts; weights are written where the model keeps them.
    """
    norm, scale = model.get_submodule(migration.norm), migration.scale
    updates = [
        (p, (p.detach().float() / scale.to(p.device)).to(p.dtype)) for p in norm._parameters.values() if p is not None
    ]
    for name in migration.layers:
        stack = mixtures.stack_of(name)
        experts = "" if stack is None else stack.rpartition(".")[0]
        original = mixtures.original.get(experts)
        if name in quantized:
            continue
        if original is None or isinstance(original, ExpertsModule) or f"{experts}.down.0" in quantized:
            module = model.get_submodule(name)  # which is, or will be, in the model
            updates.append((weight_of(module), scaled_weight(module, scale)))
        elif name.endswith(".0"):
            from qcut.layers.experts.families import up_parameters  # most models have no experts

            for parameter, axis in up_parameters(original):
                shape = [-1 if i == axis else 1 for i in range(parameter.dim())]
                updates.append((parameter, _scaled(parameter, scale.view(shape))))
    return updates + [(p, _scaled(p, scale)) for p in map(model.get_parameter, migration.routers)]


def _scaled(parameter: Tensor, factor: Tensor) -> Tensor:
    return (parameter.detach().float() * factor.to(parameter.device)).to(parameter.dtype)


@in_plain_state
def smooth(model: nn.Module, calibration: Calibration, alpha: float = 0.5, *, exact: bool = True) -> Smoothing:
    """Move outlier channels from activations into weights, in place.

    For a norm and all the layers that read its output:
    ``s[j] = c · max|X[:, j]|^alpha / max|W[:, j]|^(1 - alpha)``, the second maximum over all those layers; 1 where
    either maximum is 0. The factor ``c``, which no scheme's error depends on, makes the median 1, so that most channels
    stay as they are. With ``exact``, ``s`` is rounded to the nearest power of two (in the logarithm), and is 1 for a
    channel where a weight or the norm's parameter would underflow or overflow. Then the norm's weight and bias are
    divided by ``s`` and the layers' columns multiplied by it. The first products of experts are such layers; where a
    norm is before experts, the columns of the router's weight are multiplied too, and routes stay as they are.

    The model and the calibration change together: the calibration's channel minima and maxima and its sample are
    divided by ``s`` too, so that every range it gives, by any method, is that of the smoothed model. Nothing needs to
    be run again. Both are left untouched if this raises.

    Args:
        model: the model that was calibrated.
        calibration: of that model; updated in place. It knows the norms (`qcut.models.tracing`).
        alpha: 0 moves all difficulty to the activations, 1 all of it to the weights; 0.5 shares it.
        exact: round the scales to powers of two.

    Returns:
        What was done, and which norms were refused and why: a residual reads the norm's output, the norm multiplies
        by ``1 + weight``, a weight is tied to another module's.

    Raises:
        ConfigError: alpha outside [0, 1].
        CalibrationError: the calibration is another model's, or a weight is not finite.

    Exactness: with ``exact`` the float model's outputs are the same bits as before, unless an activation or a product
    underflows or overflows (float16 activations under 6e-5 lose bits); without, weights and norms round once each.
    Source: Xiao et al., SmoothQuant (2023), section 4, equation 4; the powers of two are ours.
    """
    check_model(model)
    with opened(model) as mixtures:
        done = migrations_for(model, calibration, alpha, exact=exact)
        updates = [update for migration in done.migrations for update in float_updates(model, migration, (), mixtures)]
    for parameter, value in updates:
        parameter.data = value
    rescale(calibration, done)
    return done


def rescale(calibration: Calibration, smoothing: Smoothing) -> None:
    """Make a calibration, in place, that of the smoothed model."""
    for name, scale in smoothing.scales.items():
        if name in calibration.layers:
            calibration.divide_channels(name, scale)
