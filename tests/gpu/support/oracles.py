"""Operands, and what the operators must return for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.emitters.core.epilogue import Activation, Epilogue
from qcut.emitters.core.source import DType
from qcut.numerics import int8 as numerics

DEVICE = "cuda"

TORCH_DTYPE = {
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.F32: torch.float32,
    DType.S8: torch.int8,
    DType.S32: torch.int32,
}
MANTISSA_BITS = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23}
SMALLEST_SPACING = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133, torch.float32: 2.0**-149}


def full_range(*shape: int, seed: int = 0) -> Tensor:
    """Uniform int8 over all 256 values."""
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)


def pattern(name: str, m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """int8 operands [m, k] and [n, k] that go to extremes."""
    if name == "all_min":
        return torch.full((m, k), -128, dtype=torch.int8), torch.full((n, k), -128, dtype=torch.int8)
    if name == "checkerboard":
        board = torch.where((torch.arange(max(m, n))[:, None] + torch.arange(k)) % 2 == 0, 127, -127).to(torch.int8)
        return board[:m].clone(), board[:n].clone()
    if name == "identity":
        return full_range(m, k), torch.eye(n, k, dtype=torch.int8)
    if name == "zeros":
        return full_range(m, k), torch.zeros(n, k, dtype=torch.int8)
    if name == "min_times_max":
        return torch.full((m, k), -128, dtype=torch.int8), torch.full((n, k), 127, dtype=torch.int8)
    raise ValueError(name)


@dataclass
class Gemm:
    """One call of gemm_s8 on the CPU's side: operands, epilogue arguments, and the description they follow."""

    a: Tensor
    b: Tensor
    args: dict[str, Any]
    epilogue: Epilogue

    @classmethod
    def random(cls, epilogue: Epilogue, m: int, n: int, k: int, seed: int = 0) -> Gemm:
        """Full-range operands; scales that bring the sum to a few units, or to most of int8's range."""
        return cls.of(epilogue, full_range(m, k, seed=seed), full_range(n, k, seed=seed + 1), seed)

    @classmethod
    def of(cls, epilogue: Epilogue, a: Tensor, b: Tensor, seed: int = 0) -> Gemm:
        """Epilogue arguments for given operands."""
        (m, k), n = a.shape, b.shape[0]
        gen = torch.Generator().manual_seed(seed + 2)
        spread = 74.0**2 * k**0.5  # standard deviation of a sum of full-range products
        args: dict[str, Any] = {"out_dtype": TORCH_DTYPE[epilogue.out], "activation": epilogue.activation.value}
        unit = 1.0
        if epilogue.zero_point != "none":
            args["zero_point"] = torch.randint(-128, 128, (m,), generator=gen, dtype=torch.int32)
            args["colsum"] = b.sum(1, dtype=torch.int32)
        if epilogue.row_scale != "none":
            args["row_scale"] = (torch.rand(m, generator=gen) + 0.5) / 74.0
            unit *= 74.0
        if epilogue.col_scale != "none":
            args["col_scale"] = (torch.rand(n, generator=gen) + 0.5) * (2 * unit / spread)
        if epilogue.bias:
            args["bias"] = torch.randn(n, generator=gen)
        if epilogue.residual:
            args["residual"] = torch.randn(m, n, generator=gen).to(args["out_dtype"])
        if epilogue.wrap:
            args["wrap"] = True
        elif epilogue.out is DType.S8:
            args["out_inv_scale"] = 25.0 if epilogue.col_scale != "none" else 50.0 / spread
            args["out_zero_point"] = 3
        return cls(a, b, args, epilogue)

    def run(self, device: str = DEVICE) -> Tensor:
        """The operator's result on a device, brought back."""
        args = {key: v.to(device) if isinstance(v, Tensor) else v for key, v in self.args.items()}
        return torch.ops.qcut.gemm_s8(self.a.to(device), self.b.to(device), **args).cpu()

    def check(self, got: Tensor) -> None:
        """Hold a result to the oracle: bitwise, or by the bound `smooth_bound` derives."""
        m, n = self.a.shape[0], self.b.shape[0]
        assert got.dtype is self.args["out_dtype"]
        assert got.shape == (m, n)
        if self.epilogue.activation in (Activation.NONE, Activation.RELU):
            assert_same(got, numerics.gemm_s8_ref(self.a, self.b, **self.args))
            return
        exact, slack = self._smooth()
        if got.dtype is torch.int8:
            inv = torch.tensor(self.args["out_inv_scale"], dtype=torch.float32).item()
            exact = (exact * inv + self.args["out_zero_point"]).clamp(-128, 127)
            # requantize rounds once, to an integer; 2**-40 is for float64's own roundings of values below 2**8.
            bound = 0.5 + slack * inv + 2.0**-40
        else:
            bound = slack + half_ulp(exact, got.dtype)
        error = (got.double() - exact).abs()
        worst = (error - bound).argmax()
        assert bool((error <= bound).all()), f"error {error.flatten()[worst]} over bound {bound.flatten()[worst]}"

    def _smooth(self) -> tuple[Tensor, Tensor]:
        """The epilogue's float64 value from the float32 argument of the activation, and float32's slack.

        The argument v is bitwise defined, and each smooth activation is within 2**-21 |v| of the exact
        function (``qcut/core/activation.cuh`` says why). A residual adds one rounding of the sum.
        """
        keep = {key: v for key, v in self.args.items() if key not in ("activation", "residual", "out_inv_scale")}
        keep |= {"out_dtype": torch.float32, "out_zero_point": 0}
        v = numerics.gemm_s8_ref(self.a, self.b, **keep).double()
        exact, slack = smooth(v, self.epilogue.activation), v.abs() * 2.0**-21
        if "residual" in self.args:
            exact = exact + self.args["residual"].double()
            slack = slack + exact.abs() * 2.0**-23
        return exact, slack


def smooth(v: Tensor, activation: Activation) -> Tensor:
    """The smooth activations in v's own precision, written out."""
    if activation is Activation.GELU_ERF:
        return v * 0.5 * (1 + torch.erf(v * 0.5**0.5))
    if activation is Activation.GELU_TANH:
        return v * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (v + 0.044715 * v**3)))
    if activation is Activation.SILU:
        return v * torch.sigmoid(v)
    raise ValueError(activation)


def half_ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Largest error of rounding float64 values to ``dtype`` once."""
    exponent = torch.frexp(value).exponent - 1
    spacing = torch.ldexp(torch.ones_like(value), exponent - MANTISSA_BITS[dtype])
    return spacing.clamp(min=SMALLEST_SPACING[dtype]) / 2


def assert_same(got: Tensor, expected: Tensor) -> None:
    """Equal in dtype, shape and every bit; NaN equals NaN."""
    if got.dtype == expected.dtype == torch.float8_e4m3fn:
        got, expected = got.view(torch.uint8), expected.view(torch.uint8)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    if got.is_floating_point():
        zeros = (got == 0) & (expected == 0)
        assert torch.equal(got[zeros].signbit(), expected[zeros].signbit()), "zeros differ in sign"


def activations(m: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Tokens of very different size: ordinary ones, zeros, one outlier, the dtype's extremes."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed))
    x[0] *= 1000
    if m > 4:
        x[1] = 0
        x[2, k // 2] = 6e4
        x[3] = torch.finfo(dtype).max * torch.sign(x[3])
        x[4] *= torch.finfo(dtype).smallest_normal
    return x.to(dtype)


def relayout(x: Tensor, layout: str, filler: float) -> Tensor:
    """The same matrix behind other strides or another offset, its surroundings full of ``filler``."""
    rows, columns = x.shape
    if layout == "row_stride":
        out = x.new_full((rows + 2, columns + 7), filler)[1 : rows + 1, 3 : columns + 3]
    elif layout == "column_stride":
        out = x.new_full((rows, 2 * columns), filler)[:, ::2]
    elif layout == "transposed":
        out = x.new_full((columns, rows), filler).t()
    else:
        offset = int(layout.removeprefix("offset_"))
        out = x.new_full((offset + rows * columns + 64,), filler)[offset : offset + rows * columns].view(rows, columns)
    return out.copy_(x)


def name(value: object) -> str:
    """Test id of a parameter."""
    if isinstance(value, Epilogue):
        return value.name
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value).removeprefix("torch.")


def assert_w8a16_near(got: Tensor, x: Tensor, gemm: Gemm) -> None:
    """A product of 16-bit tokens with int8 weights, a scale per channel and a bias, against float64.

    The tensor core rounds or truncates each addition to 24 bits: ``K * 2**-23 * sum |x q|`` bounds the sum's error.
    Scale and bias round once each, to within ``2**-24`` of their result, and the result once to its own type.
    """
    scale, bias = gemm.args["col_scale"].double(), gemm.args["bias"].double()
    product = x.double() @ gemm.b.double().t() * scale
    exact = product + bias
    slack = x.shape[1] * 2.0**-23 * (x.double().abs() @ gemm.b.double().abs().t()) * scale
    slack += 2.0**-23 * (product.abs() + exact.abs())
    assert bool(((got.double() - exact).abs() <= slack + half_ulp(exact, got.dtype)).all())
