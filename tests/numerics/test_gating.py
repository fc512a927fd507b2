"""What experts compute between their products: against float64, found by calling, distinguished from what is nearly the
same."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qcut.errors import ConfigError
from qcut.numerics.gating import KINDS, Gating, gating_of
from tests.support.oracles import FLOATS

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda v: F.relu(v).square(),
    "none": lambda v: v,
}
FORMS = (
    *(Gating(kind, gated) for kind in KINDS for gated in (True, False)),
    *(Gating(kind, limit=3.5, plus_one=plus_one) for kind in KINDS for plus_one in (False, True)),
    *(Gating(kind, limit=2.25, limit_after=True) for kind in ("silu", "gelu_tanh")),
    Gating("silu", alpha=1.702, limit=7.0, plus_one=True),
    Gating("silu", False, alpha=1.702),
    Gating("silu", alpha=0.5),
    Gating("silu", gate_cap=4.0, up_cap=25.0),
    Gating("silu", gate_cap=6.0),
    Gating("silu", up_cap=11.0),
)


def written(g: Gating, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The function as a model would write it, in the rows' dtype: the result, g, its activation and u."""
    if not g.gated:
        v = rows
        act = v * torch.sigmoid(g.alpha * v) if g.kind == "silu" else EXACT[g.kind](v)
        return act, v, act, torch.ones_like(v)
    v, u = rows.chunk(2, -1)
    if g.limit is not None:
        u = u.clamp(-g.limit, g.limit)
        v = v if g.limit_after else v.clamp(max=g.limit)
    if g.up_cap is not None:
        u = g.up_cap * torch.tanh(u / g.up_cap)
    if g.kind == "silu":
        factor = v if g.gate_cap is None else g.gate_cap * torch.tanh(v / g.gate_cap)
        act = factor * torch.sigmoid(g.alpha * v)
    else:
        act = EXACT[g.kind](v)
    if g.limit_after:
        act = act.clamp(max=g.limit)
    u = u + 1 if g.plus_one else u
    return act * u, v, act, u


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("gating", FORMS, ids=str)
def test_result_is_within_the_bound_of_float64(gating: Gating, dtype: torch.dtype) -> None:
    """Activations err by a few ulp of their argument, the rest by a few of the result, and it is rounded once."""
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(-3, 0.9, 40)[:, None]
    rows = (torch.randn(40, 64, generator=generator) * size).to(dtype)
    got = gating(rows)
    want, g, act, u = written(gating, rows.double())
    error = (got.double() - want).abs()
    few = 8 * UNIT[torch.float32]
    allowed = few * (torch.maximum(g.abs(), act.abs()) * u.abs() + act.abs() * torch.maximum(u.abs(), (u - 1).abs()))
    allowed += UNIT[dtype] * (want.abs() + torch.finfo(dtype).smallest_normal)
    assert got.dtype is dtype
    assert (error <= allowed).all()


@pytest.mark.parametrize("gating", FORMS, ids=str)
def test_edges_of_the_number_range(gating: Gating) -> None:
    values = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 3e4, -3e4, math.inf, -math.inf, math.nan])
    rows = torch.cartesian_prod(values, torch.tensor([0.0, 1.0, -2.0])) if gating.gated else values[:, None]
    got, want = gating(rows), written(gating, rows.double())[0].float()
    nan = rows.isnan().any(1, keepdim=True)
    assert got[nan].isnan().all()
    finite = rows.isfinite().all(1, keepdim=True)
    torch.testing.assert_close(got[finite], want[finite], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gating", FORMS, ids=str)
def test_form_is_found_by_calling(gating: Gating) -> None:
    numbers = [4.0, 3.5, 7.0, 1e-5, 1.702, 25.0, 6.0, 2.25, 0.5, 11.0][:: -1 if gating.limit_after else 1]
    own = [v for v in (gating.alpha, gating.limit, gating.gate_cap, gating.up_cap) if v not in (None, 1.0)]
    given = [*own, *(v for v in numbers if v not in own)]
    for width in (1, 24, 40000):
        assert gating_of(lambda rows: written(gating, rows)[0], width, gating.gated, map(float, given)) == gating


def test_forms_of_random_numbers_are_found() -> None:
    draw = random.Random(0)
    for _ in range(40):
        gating = Gating(
            "silu",
            alpha=draw.choice([1.0, 1.702, draw.uniform(0.3, 3)]),
            limit=draw.choice([None, draw.uniform(0.5, 60)]),
            plus_one=draw.random() < 0.5,
        )
        numbers = [v for v in (gating.limit, gating.alpha, 1e-6, 12.0) if v is not None]
        assert gating_of(lambda rows: written(gating, rows)[0], 16, True, numbers) == gating  # noqa: B023


OSS = Gating("silu", alpha=1.702, limit=7.0, plus_one=True)


def one_sided(rows: Tensor) -> Tensor:
    g, u = rows.chunk(2, -1)
    return F.silu(g.clamp(max=7.0)) * u.clamp(max=7.0)


def gate_from_below_too(rows: Tensor) -> Tensor:
    g, u = rows.chunk(2, -1)
    return F.silu(g.clamp(-7.0, 7.0)) * u.clamp(-7.0, 7.0)


NEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "limit of up on one side": one_sided,
    "limit of the gate on both sides": gate_from_below_too,
    "limit of the gate alone": lambda r: F.silu(r.chunk(2, -1)[0].clamp(max=7.0)) * r.chunk(2, -1)[1],
    "limit of up alone": lambda r: F.silu(r.chunk(2, -1)[0]) * r.chunk(2, -1)[1].clamp(-7.0, 7.0),
    "another alpha": lambda r: written(replace(OSS, alpha=1.7021), r)[0],
    "another limit": lambda r: written(replace(OSS, limit=7.01), r)[0],
    "a limit that nobody holds": lambda r: written(replace(OSS, limit=55.0), r)[0],
    "up - 1": lambda r: F.silu(r.chunk(2, -1)[0]) * (r.chunk(2, -1)[1] - 1),
    "swapped halves": lambda r: F.silu(r.chunk(2, -1)[1]) * r.chunk(2, -1)[0],
    "interleaved": lambda r: F.silu(r[..., 0::2]) * r[..., 1::2],
    "sum of halves": lambda r: F.silu(r.chunk(2, -1)[0]) + r.chunk(2, -1)[1],
    "hard activation": lambda r: F.hardswish(r.chunk(2, -1)[0]) * r.chunk(2, -1)[1],
    "leaky": lambda r: F.leaky_relu(r.chunk(2, -1)[0], 1e-3) * r.chunk(2, -1)[1],
    "mish": lambda r: F.mish(r.chunk(2, -1)[0]) * r.chunk(2, -1)[1],
    "a bend far out": lambda r: F.silu(r.chunk(2, -1)[0].clamp(max=500.0)) * r.chunk(2, -1)[1],
    "a constant more": lambda r: F.silu(r.chunk(2, -1)[0]) * r.chunk(2, -1)[1] + 1e-3,
    "another shape": lambda r: r,
    "NaN": lambda r: r.chunk(2, -1)[0] * math.nan,
}


@pytest.mark.parametrize("name", NEAR)
def test_what_is_nearly_a_form_is_none(name: str) -> None:
    width = 25 if name == "interleaved" else 24
    assert gating_of(NEAR[name], width, True, [7.0, 1.702]) is None


def test_a_function_may_change_what_it_gets() -> None:
    def in_place(rows: Tensor) -> Tensor:
        g, u = rows.chunk(2, -1)
        return F.silu(g, inplace=True).mul_(u)

    assert gating_of(in_place, 8, True, []) == Gating("silu")


def test_search_is_in_full_precision_under_any_mode() -> None:
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert gating_of(lambda rows: written(OSS, rows)[0], 8, True, [7.0]) == OSS


def test_two_numbers_are_kept_apart() -> None:
    """A cap as large as the limit, and limits beyond what the search calls with."""
    for gating in (Gating("silu", limit=200.0), Gating("silu", gate_cap=4.0, up_cap=4.0), Gating("relu", limit=999.0)):
        assert gating_of(lambda rows: written(gating, rows)[0], 8, True, [4.0, 200.0, 999.0]) == gating  # noqa: B023


@pytest.mark.parametrize("gating", FORMS, ids=str)
def test_gradient_is_that_of_the_function(gating: Gating) -> None:
    rows = torch.linspace(-4, 4, 2 * 24).view(2, 24).requires_grad_()
    gating(rows).sum().backward()
    other = rows.detach().double().requires_grad_()
    written(gating, other)[0].sum().backward()
    assert rows.grad is not None
    assert other.grad is not None
    torch.testing.assert_close(rows.grad.double(), other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gating", FORMS, ids=str)
def test_json_round_trip(gating: Gating) -> None:
    data = gating.to_json()
    assert Gating.from_json(data, "x") == gating
    assert all(data[key] == value for key, value in asdict(gating).items() if key in data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "kind"),
        ([], "found"),
        ({"kind": "swish"}, "swish"),
        ({"kind": "silu", "more": 1}, "more"),
        ({"kind": "silu", "gated": 1}, "gated"),
        ({"kind": "silu", "alpha": "1"}, "alpha"),
        ({"kind": "silu", "limit": -1.0}, "limit"),
        ({"kind": "silu", "limit": 0.0}, "limit is 0"),
        ({"kind": "silu", "limit": math.nan}, "limit"),
        ({"kind": "silu", "limit": math.inf}, "limit"),
        ({"kind": "silu", "alpha": math.nan}, "alpha"),
        ({"kind": "silu", "alpha": 0.0}, "alpha"),
        ({"kind": "silu", "alpha": -1.0}, "alpha"),
        ({"kind": "silu", "alpha": 1e300}, "alpha"),
        ({"kind": "silu", "gate_cap": 0}, "gate_cap"),
        ({"kind": "silu", "limit_after": True}, "limit_after needs a limit"),
        ({"kind": "relu", "alpha": 1.702}, "options of silu"),
        ({"kind": "gelu_erf", "gate_cap": 4.0}, "options of silu"),
        ({"kind": "silu", "gated": False, "limit": 7.0}, "need a gate"),
        ({"kind": "silu", "gated": False, "plus_one": True}, "need a gate"),
        ({"kind": "silu", "gated": False, "up_cap": 2.0}, "need a gate"),
    ],
)
def test_bad_json_is_refused(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Gating.from_json(data, "config.json: experts 'mlp.experts'")
