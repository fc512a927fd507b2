"""4-bit floats with e4m3 scales and a scale of the tensor: exact arithmetic, compressed-tensors' code, and layers."""

from __future__ import annotations

import warnings
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.errors import ConfigError, QuantizationError, QuantizationWarning, ShapeError
from qcut.layers.codebook import CodebookLinear
from qcut.numerics.codebook import float4, layout
from qcut.numerics.codebook.layout import Geometry
from qcut.numerics.codebook.quantizer import RotatedCodebook, dequantize, quantize_plain
from tests.numerics.codebook.test_float4 import MIDWAY, naive

E4M3 = torch.float8_e4m3fn


def made(weight: Tensor, **options: Any) -> RotatedCodebook:
    return quantize_plain(weight, 4, group_size=16, levels="e2m1", norm_dtype=E4M3, **options)


def weights(n: int = 24, k: int = 96) -> Tensor:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.05, 3, n)[:, None]
    weight[3, :16] = 0
    return weight


def layer_of(weight: Tensor, scheme: str = "nvfp4", bias: bool = False) -> CodebookLinear:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias)
    module.weight.data = weight
    layer = qcut.Linear.from_float(module, scheme, name="the.layer")
    assert isinstance(layer, CodebookLinear)
    return layer


def test_weights_are_the_nearest_by_exact_arithmetic() -> None:
    weight = weights()
    q = made(weight)
    got, whole = dequantize(q), torch.full((), 2688.0) / weight.abs().max()
    assert torch.equal(q.norm_scale, torch.full((24,), 1 / whole.item(), dtype=torch.float64))
    for n in range(24):
        for g in range(6):
            group = weight[n, 16 * g : 16 * g + 16]
            norm = (whole * (group.abs().max() / torch.full((), 6.0))).to(E4M3).float()
            assert q.norms[n, g].float() == norm
            scale = (norm / whole).item()
            # The quotient of two float32 is rounded before it is compared with midpoints.
            relative = [torch.tensor(w).div(scale).item() if scale else 0.0 for w in group.tolist()]
            want = [float(Fraction(naive(r, 1.0)) * Fraction(scale)) for r in relative]
            assert torch.equal(got[n, 16 * g : 16 * g + 16], torch.tensor(want, dtype=torch.float64).float())


def test_midpoints_go_to_even_codes() -> None:
    values = [*MIDWAY, *(-v for v in MIDWAY)]
    weight = torch.tensor([[*values, 6.0, -6.0], [*values, 448 * 6.0, 0.0]])
    # The second row's largest makes the global scale 1, and the first row's norm too.
    assert dequantize(made(weight))[0].tolist() == [*MIDWAY.values(), *(-v for v in MIDWAY.values()), 6.0, -6.0]


def test_weights_are_those_of_compressed_tensors() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4A16
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = NVFP4A16["weights"]
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    for exponent in range(-12, 12):
        weight = weights() * 1.7**exponent
        q = made(weight)
        whole = q.norm_scale[:1].reciprocal().float()
        theirs = generate_gparam(weight.amin(), weight.amax())  # multiplies by a rounded inverse
        assert abs(float(whole / theirs) - 1) <= 2.0**-23
        groups = weight.view(24, -1, 16)
        scale, _ = calculate_qparams(groups.amin(2), groups.amax(2), args, global_scale=whole)
        zero = q.norms.float() == 0  # for which the library has another number
        assert torch.equal(q.norms.float()[~zero], scale[~zero])
        state = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}
        packed = NVFP4PackedCompressor.compress(state, scheme)
        assert torch.equal(dequantize(q).bfloat16(), NVFP4PackedCompressor.decompress(packed, scheme)["weight"])


def test_sizes_of_a_tensor_leave_codes_alone() -> None:
    first, second = made(weights()), made(weights() * 2.0**-80)
    assert torch.equal(first.indices, second.indices)
    assert torch.equal(first.norms, second.norms)
    assert torch.equal(first.norm_scale * 2.0**-80, second.norm_scale)


def test_parts_of_rows_take_the_whole_rows_scale() -> None:
    weight = weights()
    whole, absmax = made(weight), weight.abs().amax(1)
    for half, groups in ((slice(0, 48), slice(0, 3)), (slice(48, 96), slice(3, 6))):
        part = made(weight[:, half], row_absmax=absmax)
        assert torch.equal(part.norms, whole.norms[:, groups])
        assert torch.equal(part.indices, whole.indices[:, half])
        assert torch.equal(part.norm_scale, whole.norm_scale)
    with pytest.raises(QuantizationError, match="row_absmax is not that of finite rows"):
        made(weight, row_absmax=absmax / 2)


def test_kernels_read_the_norms_exactly() -> None:
    layer = layer_of(weights(48, 144))
    assert layer.packed_norms.shape == (4, 2, 8, 8, 2)
    assert layer.geometry == Geometry(144, 16, "none")
    relative = layout.unpack_norms(layer.packed_norms)[:48, :9].double()
    power = layout.row_exponents(layer.norms.float()).double()
    assert torch.equal(relative * power[:, None], layer.norms.double())
    assert torch.equal(layer.col_scale, (power * layer.norm_scale).float())
    assert layer.norms.dtype is E4M3
    assert layer.norm_scale.dtype is torch.float64


def test_int8_products_are_near_the_weights() -> None:
    layer, x = layer_of(weights(), "nvfp4_int8"), torch.randn(5, 96)
    want = x @ layer.dequantized_weight().T
    assert (layer(x) - want).norm() < 0.02 * want.norm()


def test_dtypes_and_moves_change_nothing() -> None:
    layer, x = layer_of(weights()), torch.randn(5, 96)
    want = layer(x)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        moved = layer.to(dtype)
        assert moved.norm_scale.dtype is torch.float64
        assert moved.norms.dtype is E4M3
        assert torch.equal(moved(x), want)


def test_zeros_and_rows_of_zeros() -> None:
    layer = layer_of(torch.zeros(8, 32))
    assert not layer.dequantized_weight().any()
    assert layer.norm_scale.tolist() == [1.0] * 8
    assert not layer(torch.randn(3, 32)).any()


def test_rows_that_lose_bits_are_told() -> None:
    weight = weights()
    weight[7] *= 1e-6
    with pytest.warns(QuantizationWarning, match=r"the\.layer.*1 of 24 rows, the first is row 7, .*float8_e4m3fn"):
        layer_of(weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer_of(weights())


@pytest.mark.parametrize("size", [1e-40, 1e-33, 1e38])
def test_sizes_beyond_the_scale_are_refused(size: float) -> None:
    weight = weights(8, 32)
    with pytest.raises(QuantizationError, match=r"the\.layer"):
        layer_of(weight * (size * 3 / weight.abs().max()))


def test_states_of_others_are_refused() -> None:
    layer = layer_of(weights())
    state = layer.state_dict()
    assert list(state) == ["indices", "norms", "codebook", "norm_scale"]
    assert layer.state_problem(state) is None
    for value, found in ((0.0, "0.0"), (-1.0, "-1.0"), (float("nan"), "nan"), (1e36, "1e+36")):
        changed = {**state, "norm_scale": state["norm_scale"].clone().index_fill_(0, torch.tensor([5]), value)}
        problem = layer.state_problem(changed)
        assert problem == ("norm_scale", f"found {found} at [5]; 1.2e-35 to 8.31e+34 are allowed")
        with pytest.raises(RuntimeError, match="norm_scale: found"):
            layer.load_state_dict(changed)
    with pytest.raises(RuntimeError, match=r'Missing key.*"norm_scale"'):
        layer.load_state_dict({key: tensor for key, tensor in state.items() if key != "norm_scale"})
    with pytest.raises(RuntimeError, match=r"norms: found torch.float16 .*; allowed: torch.float8_e4m3fn"):
        layer.load_state_dict({**state, "norms": state["norms"].half()})


def test_passes_that_do_not_go_together() -> None:
    q = made(weights())

    def changed(**fields: Any) -> list[RotatedCodebook]:
        return [RotatedCodebook(**{**vars(q), **fields})]

    layer = CodebookLinear.from_passes([q], None, "nvfp4")
    assert torch.equal(layer.passes[0].norms, q.norms)
    assert torch.equal(layer.passes[0].norm_scale, q.norm_scale)
    with pytest.raises(ConfigError, match=r"norm_scale goes with norms of torch\.float8_e4m3fn, and only"):
        CodebookLinear.from_passes(changed(norm_scale=None), None, "nvfp4")
    with pytest.raises(ConfigError, match="norm_scale goes with norms"):
        CodebookLinear.from_passes(changed(norms=q.norms.half()), None, "nvfp4")
    with pytest.raises(ConfigError, match="allowed: 4 and 32, or 4 and 16 with e4m3"):
        CodebookLinear.from_passes(changed(norms=q.norms.half(), norm_scale=None), None, "nvfp4")
    with pytest.raises(ShapeError, match=r"norm_scale has shape \[23\]; allowed: \[24\]"):
        CodebookLinear.from_passes(changed(norm_scale=q.norm_scale[1:]), None, "nvfp4")
    with pytest.raises(ShapeError, match=r"norm_scale has shape \[23\]; allowed: \[24\]"):
        dequantize(changed(norm_scale=q.norm_scale[1:]))


def test_scales_are_products_and_quotients_of_float32() -> None:
    """Also of a scale with an inverse that is not exact: two roundings, to float64 and to float32, are one."""
    norms = torch.arange(127, dtype=torch.uint8).view(E4M3).view(1, -1)
    whole = torch.rand(4096, generator=torch.Generator().manual_seed(1)).add_(1)
    whole *= torch.exp2(torch.arange(4096).remainder(200).sub(100).float())
    rows = norms.expand(4096, -1)
    product = float4.float_norms(rows, whole.double())
    assert torch.equal(product, rows.float() * whole[:, None])
    quotient = float4.float_norms(rows, whole.double().reciprocal())
    assert torch.equal(quotient, rows.float() / whole[:, None])
