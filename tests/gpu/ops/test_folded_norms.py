"""Products that take part in a norm, on the GPU: against float64, and bitwise the CPU where sums are integers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.cuda import folded_norms as cuda
from qcut.numerics import int8 as numerics
from tests.gpu.support.oracles import DEVICE
from tests.support.folded import Operands, check, operands
from tests.support.oracles import FLOATS

OPS = torch.ops.qcut
SHAPES = [(1, 3840, 1280), (1, 6144, 4096), (3, 5120, 1280), (8, 300, 288), (5, 33, 77), (2, 17, 1), (1, 4096, 14336)]


def on(of: Operands, device: str = DEVICE) -> Operands:
    return Operands(*(None if t is None else t.to(device) for t in vars(of).values()))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layer", [True, False])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_a_norm_and_a_product(m: int, n: int, k: int, layer: bool, dtype: torch.dtype) -> None:
    of = on(operands(m, n, k, layer=layer, dtype=dtype))
    y = OPS.normed_linear(*of.given())
    check(y, of)
    assert torch.equal(y, OPS.normed_linear(*of.given(), constants=True))


@pytest.mark.parametrize(("m", "k"), [(1, 1280), (3, 288), (8, 520), (2, 4096)])
def test_rows_whose_root_is_one_are_bitwise_the_cpus(m: int, k: int) -> None:
    """Of rows of ±1 all sums are exact, and so is the root, but for eps, which is 0 here."""
    of = operands(m, 65, k, layer=False, dtype=torch.float32)
    of.x = torch.where(of.x > 0.5, 1.0, -1.0)
    given = list(of.given())
    given[4] = 0.0
    want = OPS.normed_linear(*given)
    got = OPS.normed_linear(*(t.to(DEVICE) if isinstance(t, Tensor) else t for t in given))
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_a_product_onto_a_residual_is_bitwise_the_cpus(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    of = operands(m, n, k, layer=False, dtype=dtype)
    residual, gain = torch.randn(m, n).to(dtype), torch.randn(n).to(dtype)
    largest, weight = of.x.float().abs().amax(1), (of.qweight, of.weight_scale, of.bias)
    given = (of.x, largest, *weight, residual)
    want, noted = OPS.residual_linear(*given), torch.zeros(m)
    OPS.residual_linear(*given, gain, noted)
    absmax = torch.zeros(m, device=DEVICE)
    moved = tuple(t.to(DEVICE) for t in given)
    for constants in (False, True):
        assert torch.equal(OPS.residual_linear(*moved, gain.to(DEVICE), absmax, constants=constants).cpu(), want)
        assert torch.equal(OPS.residual_linear(*moved, constants=constants).cpu(), want)
    assert torch.equal(absmax.cpu(), noted)


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "gelu_erf", "silu"])
@pytest.mark.parametrize("layer", [True, False])
def test_activations_and_magnitudes(activation: str, layer: bool) -> None:
    of = operands(3, 300, 288, layer=layer)
    absmax = torch.tensor([0.0, 2.0**99, 0.0], device=DEVICE)
    y = OPS.normed_linear(*on(of).given(activation), absmax)
    want = OPS.normed_linear(*of.given(activation))
    torch.testing.assert_close(y.cpu(), want, rtol=2e-3, atol=2e-3)
    assert absmax.tolist() == [y[0].abs().max(), 2.0**99, y[2].abs().max()]


@pytest.mark.parametrize("layer", [True, False])
def test_unaligned_and_strided_rows(layer: bool) -> None:
    of = on(operands(4, 48, 160, layer=layer))
    want = OPS.normed_linear(*of.given())
    shifted = torch.empty(4 * 161 + 1, dtype=of.x.dtype, device=DEVICE)[1:].view(4, 161)[:, :160]
    shifted.copy_(of.x)
    of.x = shifted
    assert torch.equal(OPS.normed_linear(*of.given()), want)
    gain = torch.empty(161, dtype=of.x.dtype, device=DEVICE)[1:]
    gain.copy_(of.gain)
    of.gain = gain
    assert torch.equal(OPS.normed_linear(*of.given()), want)


@pytest.mark.parametrize("layer", [True, False])
def test_a_row_of_nan_is_nan_and_no_other(layer: bool) -> None:
    of = on(operands(3, 100, 288, layer=layer))
    of.x[1, 4] = float("nan")
    y = OPS.normed_linear(*of.given())
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("layer", [True, False])
def test_more_rows_than_the_kernels_take(layer: bool) -> None:
    """What no kernel serves is computed by others: the same definition."""
    of = on(operands(20, 48, 160, layer=layer))
    absmax = torch.zeros(20, device=DEVICE)
    check(OPS.normed_linear(*of.given(), absmax), of)
    residual, gain = torch.randn(20, 48, device=DEVICE).half(), torch.randn(48, device=DEVICE).half()
    largest, noted = of.x.float().abs().amax(1), torch.zeros(20, device=DEVICE)
    y = OPS.residual_linear(of.x, largest, of.qweight, of.weight_scale, of.bias, residual, gain, noted)
    q, scale = OPS.quantize_per_token(of.x, 160)
    options = {"row_scale": scale, "col_scale": of.weight_scale, "bias": of.bias, "residual": residual}
    assert torch.equal(y.cpu(), numerics.gemm_s8_ref(q.cpu(), of.qweight.cpu(), **_on_cpu(options)))
    assert torch.equal(noted, (y.float() * gain.float()).abs().amax(1))


def _on_cpu(options: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if t is None else t.cpu() for name, t in options.items()}


def test_kernels_serve_few_rows() -> None:
    for norm, options in (("layer", (True, "none", False, False)), ("next", (True, "none", True, True))):
        layer = cuda.FoldedLayer(norm, torch.float16, 1, 1280, 1280, *options, True)  # type: ignore[arg-type]
        spec = layer.spec(0)
        assert spec is not None
        assert f"_{norm}_" in spec.source.name


def test_no_rows() -> None:
    of = on(operands(1, 19, 70, layer=True))
    of.x = of.x[:0]
    given = list(of.given())
    given[1] = torch.zeros(0, device=DEVICE)
    assert OPS.normed_linear(*given).shape == (0, 19)
