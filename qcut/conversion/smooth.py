"""Moves outliers from activations into weights, exactly.

Where linear layers alone read a norm's output, channel j of that output may be divided by ``s[j]`` (in the norm's
weight and bias) and column j of those layers' weights multiplied by it. With powers of two nothing is rounded on
either side: the float model computes the same bits as before, and the static ranges shrink.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from qcut.conversion.calibration.calibrate import Calibration
from qcut.errors import CalibrationError, ConfigError
from qcut.models.modules import weight_nk, weight_of
from qcut.models.selection import check_model
from qcut.models.tracing import NormPair
from qcut.numerics.plain_state import in_plain_state


@dataclass(frozen=True)
class Migration:
    """One norm, the layers it feeds, and what its channels are divided by.

    Attributes:
        norm: the norm's name.
        layers: all layers that read its output.
        scale: float32 ``[K]`` on the CPU, positive.
    """

    norm: str
    layers: tuple[str, ...]
    scale: Tensor

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
            lines.append(f"  {m.norm} -> {', '.join(m.layers)}: {m.moved} channels, scales {low:g} to {high:g}")
        lines += [f"  {norm}: left as it is: {reason}" for norm, reason in self.refused.items()]
        return "\n".join(lines)

    @property
    def scales(self) -> dict[str, Tensor]:
        """Per layer, what its input channels are divided by and its weight's columns multiplied by: float32 ``[K]``."""
        return {layer: m.scale for m in self.migrations for layer in m.layers}


def migrations_for(model: nn.Module, calibration: Calibration, alpha: float = 0.5, *, exact: bool = True) -> Smoothing:
    """Choose the scales of `smooth` without touching the model.

    Args and Raises: see `smooth`.
    """
    check_model(model)
    if not 0.0 <= alpha <= 1.0:
        raise ConfigError(f"smooth: found alpha = {alpha}; allowed is 0 <= alpha <= 1")
    modules = dict(model.named_modules())
    refused = dict(calibration.refused)
    migrations = []
    for pair in calibration.pairs:
        missing = [name for name in (pair.norm, *pair.layers) if getattr(modules.get(name), "weight", None) is None]
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
        absmax = calibration.absmax(known[0])
        for weight in weights:
            calibration.check(known[0], weight.shape[1])
        columns = torch.stack([w.float().abs().amax(0).cpu() for w in weights]).amax(0)
        scale = _scale(pair, absmax, columns, alpha, exact)
        if exact:
            vectors = [p.detach()[None] for p in norm._parameters.values() if p is not None]
            held = [_survives(w, scale) for w in weights] + [_survives(v, 1 / scale) for v in vectors]
            scale = torch.where(torch.stack(held).all(0), scale, 1.0)
        migrations.append(Migration(pair.norm, pair.layers, scale))
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
    weight = weight_of(module).detach()
    factor = scale.to(weight.device)
    factor = factor if isinstance(module, nn.Linear) else factor[:, None]
    return (weight.float() * factor).to(weight.dtype)


def norm_updates(model: nn.Module, migration: Migration) -> list[tuple[nn.Parameter, Tensor]]:
    """The norm's parameters with the values they get: ``dtype(f32(p[j]) / scale[j])``."""
    norm = model.get_submodule(migration.norm)
    return [
        (p, (p.detach().float() / migration.scale.to(p.device)).to(p.dtype))
        for p in norm._parameters.values()
        if p is not None
    ]


@in_plain_state
def smooth(model: nn.Module, calibration: Calibration, alpha: float = 0.5, *, exact: bool = True) -> Smoothing:
    """Move outlier channels from activations into weights, in place.

    For a norm and all the layers that read its output:
    ``s[j] = c · max|X[:, j]|^alpha / max|W[:, j]|^(1 - alpha)``, the second maximum over all those layers; 1 where
    either maximum is 0. The factor ``c``, which no scheme's error depends on, makes the median 1, so that most channels
    stay as they are. With ``exact``, ``s`` is rounded to the nearest power of two (in the logarithm), and is 1 for a
    channel where a weight or the norm's parameter would underflow or overflow. Then the norm's weight and bias are
    divided by ``s`` and the layers' columns multiplied by it.

    The model and the calibration change together: the calibration's channel minima and maxima and its sample are
    divided by ``s`` too, so that every range it gives, by any method, is that of the smoothed model. Nothing needs to
    be run again. Both are left untouched where this raises.

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
    done = migrations_for(model, calibration, alpha, exact=exact)
    modules = dict(model.named_modules())
    updates: list[tuple[nn.Parameter, Tensor]] = []
    for migration in done.migrations:
        updates += norm_updates(model, migration)
        for name in migration.layers:
            updates.append((weight_of(modules[name]), scaled_weight(modules[name], migration.scale)))
    for parameter, value in updates:
        parameter.data = value
    rescale(calibration, done)
    return done


def rescale(calibration: Calibration, smoothing: Smoothing) -> None:
    """Make a calibration, in place, that of the smoothed model."""
    for name, scale in smoothing.scales.items():
        if name in calibration.layers:
            calibration.divide_channels(name, scale)
