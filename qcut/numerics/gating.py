"""What experts compute between their two products: an activation, times a second half if there is one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from qcut.common import schema
from qcut.errors import ConfigError
from qcut.numerics.int8 import apply_activation
from qcut.numerics.plain_state import outside_modes

KINDS = ("silu", "gelu_erf", "gelu_tanh", "relu", "relu2", "none")
"""Activations of experts; ``relu2`` is ``max(v, 0)**2``, ``none`` is v."""
_FAR = (30.0, 100.0, 1000.0)
"""Magnitudes of gates and ups that a function is called with, besides those up to 12."""
_MOST_NUMBERS = 8
_LARGEST = 1e6
"""Of limits, caps and alphas: their products with float32 values of a model are finite."""
_STRIDE = 101
"""Of the pairs that a candidate is held to at first."""

GATING = schema.record(
    {"kind": schema.text(choices=KINDS)},
    {
        "gated": (schema.boolean(), True),
        "alpha": (schema.number(), 1.0),
        "limit": (schema.nothing_or(schema.number(0.0)), None),
        "limit_after": (schema.boolean(), False),
        "plus_one": (schema.boolean(), False),
        "gate_cap": (schema.nothing_or(schema.number(0.0)), None),
        "up_cap": (schema.nothing_or(schema.number(0.0)), None),
    },
)


class GatedSilu(NamedTuple):
    """Options of `torch.ops.qcut.silu_mul`; see there."""

    alpha: float = 1.0
    limit: float = 0.0
    plus_one: bool = False


@dataclass(frozen=True)
class Gating:
    """The function of one expert between its products, as data.

    With rows ``[..., 2 I]``, the gate g in the first half and u in the second: g is at most ``limit``, u within
    ``±limit``, and the result is ``act(g) * (u + 1 if plus_one else u)``. Without a gate, it is ``act`` of all columns.

    Attributes:
        kind: the activation, one of `KINDS`.
        gated: whether there are two halves.
        alpha: of ``silu``: ``g * sigmoid(alpha * g)``; 1.702 is GPT-OSS's and also ``quick_gelu``.
        limit: see above; None for none.
        limit_after: whether ``act(g)`` is at most ``limit``, in place of g.
        plus_one: see above.
        gate_cap: of ``silu``: the factor g before the sigmoid becomes ``cap * tanh(g / cap)``; None for g itself.
        up_cap: u becomes ``cap * tanh(u / cap)``; None for u itself.

    Raises:
        ConfigError: a kind that does not exist, or an option that the kind has not.
    """

    kind: str
    gated: bool = True
    alpha: float = 1.0
    limit: float | None = None
    limit_after: bool = False
    plus_one: bool = False
    gate_cap: float | None = None
    up_cap: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"gating: kind {self.kind!r} does not exist; allowed: {', '.join(KINDS)}")
        if self.kind != "silu" and (self.alpha != 1.0 or self.gate_cap is not None):
            raise ConfigError(f"gating: alpha and gate_cap are options of silu; found them with {self.kind!r}")
        if not self.gated and (self.limit, self.up_cap, self.plus_one) != (None, None, False):
            raise ConfigError("gating: limit, up_cap and plus_one need a gate; found them with gated=False")
        if self.limit_after and self.limit is None:
            raise ConfigError("gating: limit_after needs a limit; found None")
        for key in ("alpha", "limit", "gate_cap", "up_cap"):
            value = getattr(self, key)
            if value is not None and not 0 < value <= _LARGEST:
                raise ConfigError(f"gating: {key} is {value}; allowed: positive, and at most {_LARGEST:g}")

    def __call__(self, y: Tensor) -> Tensor:
        """The result of rows ``[..., 2 I]``, or ``[..., I]`` without a gate: ``[..., I]`` of their dtype.

        Exactness: computed in float32 and rounded once; the activation as `qcut.numerics.int8.apply_activation`.
        """
        v = y.float()
        if not self.gated:
            return self._apply(v).to(y.dtype)
        g, u = v.chunk(2, -1)
        if self.limit is not None:
            g, u = g if self.limit_after else g.clamp(max=self.limit), u.clamp(-self.limit, self.limit)
        if self.up_cap is not None:
            u = torch.tanh(u / self.up_cap) * self.up_cap
        g = self._apply(g)
        if self.limit_after:
            g = g.clamp(max=self.limit)
        return (g * (u + 1 if self.plus_one else u)).to(y.dtype)

    @property
    def gated_silu(self) -> GatedSilu | None:
        """Options with which `torch.ops.qcut.silu_mul` computes this function, rounded twice; None: none do."""
        others = self.limit_after, self.gate_cap, self.up_cap
        if self.kind != "silu" or not self.gated or others != (False, None, None):
            return None
        return GatedSilu(self.alpha, self.limit or 0.0, self.plus_one)

    def _apply(self, g: Tensor) -> Tensor:
        wants_gradient = self.kind != "none" and torch.is_grad_enabled() and g.requires_grad
        return cast(Tensor, _Activation.apply(g, self)) if wants_gradient else self._activated(g)

    def _activated(self, g: Tensor) -> Tensor:
        if self.kind == "relu2":
            return torch.relu(g).square()
        if self.kind != "silu" or (self.alpha == 1.0 and self.gate_cap is None):
            return apply_activation(g, self.kind)
        factor = g if self.gate_cap is None else torch.tanh(g / self.gate_cap) * self.gate_cap
        return factor / (torch.exp(g * -self.alpha) + 1.0)

    def to_json(self) -> dict[str, Any]:
        """Plain data: the fields that are not their defaults, and the kind."""
        default = Gating(self.kind)
        return {k: v for k, v in asdict(self).items() if k == "kind" or v != getattr(default, k)}

    @classmethod
    def from_json(cls, data: Any, where: str) -> Gating:
        """What `to_json` wrote.

        Raises:
            ConfigError: something else (named).
        """
        return cls(**schema.conform(data, GATING, where, ConfigError))


def clamped_silu_mul(
    gate: Tensor, up: Tensor, alpha: float = 1.0, limit: float = 0.0, plus_one: bool = False
) -> Tensor:
    """``y = rne(rne(g * sigmoid(alpha * g)) * w)``, the gate of a decoder's MLP, rounded as the module is.

    With a limit, rounded to the tensors' type, ``g = min(gate, limit)`` and ``u = clamp(up, -limit, limit)``; otherwise
    g is gate and u is up. w is ``rne(u + 1)`` with ``plus_one``, and u otherwise; rne rounds to the nearest value of
    the type. `Gating` of the same numbers computes in float32, and rounds once.

    Args:
        gate: floating ``[M, N]``.
        up: as ``gate``.
        alpha: positive.
        limit: positive; 0 for none.
        plus_one: see above.

    Returns:
        y ``[M, N]`` of gate's type.

    Exactness: with alpha 1, bitwise ``F.silu(g) * w``; otherwise ``g / (1 + exp(-alpha * g))`` in float32.
    """
    if limit:
        most = gate.new_tensor(limit)  # infinite if it is beyond the type
        gate, up = torch.minimum(gate, most), up.clamp(-most, most)
    if alpha == 1.0:
        silu = F.silu(gate)
    else:
        g = gate.float()
        silu = (g / (torch.exp(g * -alpha) + 1.0)).to(gate.dtype)
    return silu * (up + 1 if plus_one else up)


def check_clamped_silu(where: str, alpha: float, limit: float) -> None:
    """Check the numbers of `clamped_silu_mul`.

    Raises:
        ConfigError: alpha or limit is out of range.
    """
    if not 0 < alpha <= _LARGEST:
        raise ConfigError(f"{where}: alpha is {alpha}; allowed: positive, and at most {_LARGEST:g}")
    if not 0 <= limit <= _LARGEST:
        raise ConfigError(f"{where}: limit is {limit}; allowed: positive, and at most {_LARGEST:g}, or 0 for none")


class _Activation(torch.autograd.Function):
    """The activation of a `Gating`, bit by bit, with a backward pass: torch has none for its operations in place."""

    @staticmethod
    def forward(g: Tensor, gating: Gating) -> Tensor:
        return gating._activated(g)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Gating], output: Tensor) -> None:
        ctx.gating = inputs[1]
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        gating: Gating = ctx.gating
        (g,) = ctx.saved_tensors
        match gating.kind:
            case "relu":
                return torch.where(g > 0, dy, 0.0), None
            case "relu2":
                return dy * 2 * torch.relu(g), None
            case "gelu_erf" | "gelu_tanh":
                approximate = "tanh" if gating.kind == "gelu_tanh" else "none"
                return torch.ops.aten.gelu_backward(dy, g, approximate=approximate), None
        share = torch.sigmoid(gating.alpha * g)
        factor, slope = g, torch.ones_like(g)
        if gating.gate_cap is not None:
            bent = torch.tanh(g / gating.gate_cap)
            factor, slope = bent * gating.gate_cap, 1 - bent.square()
        return dy * (slope * share + factor * gating.alpha * share * (1 - share)), None


@outside_modes()
def gating_of(function: Callable[[Tensor], Tensor], width: int, gated: bool, values: Iterable[float]) -> Gating | None:
    """The `Gating` that computes what a function does, found by calling it; None if none does.

    Args:
        function: of float32 rows ``[R, 2 * width]``, or ``[R, width]`` without a gate.
        width: columns of its result.
        gated: whether the rows have two halves.
        values: numbers that may be its limit, its alpha and its caps, the likely ones first; a few are tried.

    Exactness: gates and ups from -12 to 12 in steps of a half, around the numbers, and far out to 1000, in all
    combinations, to 1e-5 of the largest of 1, up and the result. A limit beyond 1000, or a difference between the
    steps, is not seen.
    """
    numbers = [v for v in dict.fromkeys(values) if 0 < v <= _LARGEST][:_MOST_NUMBERS]
    edges = [v * near for v in numbers for near in (0.97, 1.03) if v < _FAR[-1]]
    positive = [*(i / 2 for i in range(1, 25)), *edges, *_FAR]
    points = torch.tensor([0.0, *positive, *(-v for v in positive)], dtype=torch.float32, device="cpu")
    pairs = torch.cartesian_prod(points, points) if gated else points[:, None]
    count = -(-len(pairs) // width) * width
    halves = [torch.nn.functional.pad(half, (0, count - len(half))).view(-1, width) for half in pairs.t()]
    result = function(torch.cat(halves, 1))
    if result.shape != halves[0].shape:
        return None
    found = result.flatten()[: len(pairs), None]
    # Activations round to the last bit of their argument, and up multiplies that.
    allowed = 1e-5 * pairs[:, -1:].abs() if gated else torch.zeros_like(found)
    some = slice(None, None, _STRIDE)
    for candidate in _candidates(gated, numbers):
        if all(_near(found[at], candidate(pairs[at]), allowed[at]) for at in (some, slice(None))):
            return candidate
    return None


def _near(found: Tensor, expected: Tensor, allowed: Tensor) -> bool:
    return bool(((found - expected).abs() <= allowed.maximum(1e-5 * expected.abs().clamp(min=1.0))).all())


def _candidates(gated: bool, numbers: list[float]) -> Iterable[Gating]:
    """Every gating of these numbers, the plain ones first."""
    yield from (Gating(kind, gated) for kind in KINDS)
    alphas = (1.0, 1.702, *numbers)
    if not gated:
        yield from (Gating("silu", False, alpha) for alpha in alphas)
        return
    optional = (None, *numbers)
    for limit, plus_one in itertools.product(optional, (False, True)):
        for after in (False, True) if limit is not None else (False,):
            yield from (Gating(kind, True, 1.0, limit, after, plus_one) for kind in KINDS)
            yield from (Gating("silu", True, alpha, limit, after, plus_one) for alpha in alphas)
    yield from (Gating("silu", gate_cap=one, up_cap=two) for one, two in itertools.product(optional, optional))
