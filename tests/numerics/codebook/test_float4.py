"""4-bit floats with powers of two: a naive search, OCP's example of rounding, and layers of them."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

import qcut
from qcut.errors import ConfigError
from qcut.numerics.codebook import float4
from qcut.numerics.codebook.quantizer import dequantize, quantize_plain
from qcut.schemes import Codebook

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIDWAY = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}


def naive(w: float, scale: float) -> float:
    """The nearest of 16 numbers by exact arithmetic; of two, the one with an even code."""
    if scale == 0:
        return 0.0
    sign = -1 if w < 0 else 1
    distance = [(abs(abs(Fraction(w)) / Fraction(scale) - Fraction(v)), code % 2) for code, v in enumerate(MAGNITUDES)]
    return sign * MAGNITUDES[distance.index(min(distance))] * scale


def test_weights_are_the_nearest_by_exact_arithmetic() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 96, generator=generator) * torch.logspace(-5, 3, 24, 10.0)[:, None]
    weight[3, :32] = 0
    weight[4, 32:64] = torch.tensor([*MIDWAY, *(-v for v in MIDWAY), 7.0, -7.9, *[0.0] * 16])
    q = quantize_plain(weight, 4, group_size=32, levels="e2m1", norm_dtype=torch.float32)
    got = dequantize(q)
    for n in range(24):
        for g in range(3):
            group = weight[n, 32 * g : 32 * g + 32].tolist()
            largest = max(map(abs, group))
            scale = 2.0 ** (math.floor(math.log2(largest)) - 2) if largest else 0.0
            assert q.norms[n, g] == scale
            assert got[n, 32 * g : 32 * g + 32].tolist() == [naive(w, scale) for w in group]
    assert got[4, 32:48].tolist() == [*MIDWAY.values(), *(-v for v in MIDWAY.values()), 6.0, -6.0]


@pytest.mark.parametrize("exponent", range(-124, 126, 17))
def test_scales_are_exact_powers(exponent: int) -> None:
    largest = torch.tensor([1.0, 1.5, 1.9999999, 2.0], dtype=torch.float32) * 2.0**exponent
    assert float4.scales(largest).tolist() == [2.0 ** (exponent - 2)] * 3 + [2.0 ** (exponent - 1)]
    assert float4.are_powers_of_two(float4.scales(largest))
    assert not float4.are_powers_of_two(float4.scales(largest) * 1.5)


def test_a_layer_computes_with_its_weights() -> None:
    torch.manual_seed(0)
    module = nn.Linear(160, 48)
    layer = qcut.Linear.from_float(module, "mxfp4")
    assert layer.scheme.name == "mxfp4"
    w = layer.dequantized_weight()
    assert torch.equal(
        qcut.Linear.from_float(nn.Linear(160, 48).requires_grad_(False), "mxfp4").codebook, layer.codebook
    )
    again = nn.Linear(160, 48)
    again.weight.data.copy_(w)
    assert torch.equal(qcut.Linear.from_float(again, "mxfp4").dequantized_weight(), w)  # what is on the grid stays
    x = torch.randn(7, 160).half()
    y, wanted = layer(x).float(), x.double() @ w.double().T + module.bias.detach().double()
    assert (y - wanted).abs().max() < 2e-3 * wanted.abs().max()
    assert (w - module.weight).norm() < 0.13 * module.weight.norm()


def test_states_of_others_are_refused() -> None:
    layer = qcut.Linear.from_float(nn.Linear(64, 16), "mxfp4")
    state = layer.state_dict()
    assert layer.state_problem(state) is None
    assert layer.state_problem({**state, "norms": state["norms"] * 1.5}) == (
        "norms",
        "found others than powers of two; mxfp4 has these and 0",
    )
    found = layer.state_problem({**state, "codebook": state["codebook"] * 2})
    assert "mxfp4 has [-6.0, -4.0" in str(found)


@pytest.mark.parametrize(
    "options", [{"group_size": 64}, {"bits": 3}, {"rotation": "hadamard"}, {"residual_bits": 4}, {"group_size": None}]
)
def test_other_formats_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="levels 'e2m1'"):
        Codebook(**{"group_size": 32, "rotation": "none", "levels": "e2m1", **options})  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        qcut.schemes.parse_scheme("mxfp4_g64")
