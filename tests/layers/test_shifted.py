"""`qcut.Linear` with an offset for each norm, or columns in an order of their own: the CPU's path, the kernels'."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import qcut
from qcut import errors
from qcut.layers import rotations
from qcut.layers.shifted import ShiftedCodebookLinear
from qcut.layers.stacking import Stacker
from qcut.numerics.codebook import layout, products
from qcut.numerics.codebook.quantizer import RotatedCodebook
from qcut.schemes import Codebook, ShiftedCodebook, parse_scheme, scheme_from_json

N, K = 72, 100


def made(
    size: int | None = 32, *, shifted: bool = True, ordered: bool = True, n: int = N, passes: int = 1, seed: int = 0
) -> tuple[ShiftedCodebookLinear, Tensor]:
    """A layer, and its weight in float64; the last group is shorter."""
    draws = torch.Generator().manual_seed(seed)
    groups = -(-K // (size or K))
    scheme = ShiftedCodebook(
        group_size=size,
        residual_bits=4 if passes == 2 else None,
        levels="steps" if passes == 1 else "normal",
        shifted=shifted,
        ordered=ordered,
    )
    norms = (torch.rand(n, groups, generator=draws) + 0.1).half()
    indices = [torch.randint(0, 16, (n, K), dtype=torch.uint8, generator=draws) for _ in range(passes)]
    offsets = torch.randint(-15, 16, (n, passes * groups), generator=draws).half() / 2 if shifted else None
    order = torch.randperm(K, generator=torch.Generator().manual_seed(7)).int() if ordered else None
    parts = [RotatedCodebook(i, norms, torch.arange(-8.0, 8.0), size or K, "none", 0) for i in indices]
    bias = torch.randn(n, generator=draws)
    layer = ShiftedCodebookLinear.from_parts(parts, bias, scheme, offsets=offsets, order=order, name="l")

    def wide(t: Tensor) -> Tensor:
        return t.double().repeat_interleave(size or K, 1)[:, :K]

    stored = sum(wide(norms) * (i.double() - 8) for i in indices)
    for part in () if offsets is None else offsets.split(groups, 1):
        stored = stored + wide(norms) * wide(part)
    weight = torch.empty(n, K, dtype=torch.float64)
    weight[:, torch.arange(K) if order is None else order.long()] = stored
    return layer, weight


CASES = [
    {"size": 32},
    {"size": 64, "ordered": False},
    {"size": None, "ordered": False},
    {"size": 128, "shifted": False},
    {"size": 32, "passes": 2},
]


@pytest.mark.parametrize("case", CASES)
def test_the_weight_and_its_rows(case):
    layer, weight = made(**case)
    torch.testing.assert_close(layer.dequantized_weight().double(), weight, rtol=2e-7, atol=1e-6)
    ids = torch.tensor([5, 0, N - 1])
    assert torch.equal(layer.rows(ids), layer.dequantized_weight()[ids])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_both_paths_compute_the_product(case, dtype, kernels):
    layer, weight = made(**case)
    x = torch.randn(2, 3, K, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = x.double() @ weight.T + layer.bias.double()
    fused = layer(x)
    with qcut.execution_path("reference"):
        explicit = layer(x)
    assert fused.dtype == explicit.dtype == dtype
    largest = float(exact.abs().max())
    step = torch.finfo(dtype).eps
    # The reference rounds the result; kernels round each weight to 16 bits, too.
    assert float((explicit.double() - exact).abs().max()) <= step * largest
    assert float((fused.double() - exact).abs().max()) <= 4 * step * largest
    for m in (0, 1):
        assert layer(x[:1, :m]).shape == (1, m, N)


def test_float32_computes_on_the_cpu_alone(monkeypatch):
    layer, weight = made()
    x = torch.randn(4, K)
    torch.testing.assert_close(layer(x).double(), x.double() @ weight.T + layer.bias.double(), rtol=1e-5, atol=1e-4)
    monkeypatch.setattr(rotations, "has_kernels", lambda device: True)
    with pytest.raises(
        errors.DtypeError, match="layer 'l': x is float32; int4_g32_shifted_ordered computes in float16"
    ):
        layer(x)


@pytest.mark.parametrize("case", CASES)
def test_states_need_offsets_and_orders(case):
    layer, _ = made(**case)
    state = layer.state_dict()
    assert ("offsets" in state, "order" in state) == (layer.scheme.shifted, layer.scheme.ordered)
    assert layer.state_problem(state) is None
    for key in {"offsets", "order"} & state.keys():
        with pytest.raises(RuntimeError, match=key):
            layer.load_state_dict({name: t for name, t in state.items() if name != key})


def test_values_that_cannot_be():
    layer, _ = made()
    state = dict(layer.state_dict())
    twice = state["order"].clone()
    twice[0] = twice[1]
    assert layer.state_problem({**state, "order": twice}) == (
        "order",
        "found no permutation; each of the columns 0 to 99 once is allowed",
    )
    assert "found nan" in layer.state_problem({**state, "offsets": state["offsets"] * float("nan")})[1]
    with pytest.raises(RuntimeError, match="order: found no permutation"):
        layer.load_state_dict({**state, "order": twice})


def test_stacks_where_orders_are_one():
    first, second = made(n=64, seed=1)[0], made(n=64, seed=2)[0]
    x = torch.randn(3, K)
    apart = torch.cat((first(x), second(x)), 1)
    model = torch.nn.ModuleList([first, second])
    stack = Stacker(model).stack((first, second))
    assert stack is not None
    torch.testing.assert_close(stack(x), apart, rtol=1e-6, atol=1e-5)
    third = made(n=64, seed=3)[0]
    third.order = third.order.flip(0)
    assert Stacker(torch.nn.ModuleList([second, third])).stack((second, third)) is None


def test_schemes():
    scheme = ShiftedCodebook(group_size=64, levels="steps", shifted=True)
    assert scheme.name == "int4_g64_shifted"
    assert parse_scheme(scheme.name) == scheme_from_json(scheme.to_json()) == scheme
    assert ShiftedCodebook(residual_bits=4, ordered=True).name == "codebook4+4_none_ordered"
    assert parse_scheme("int4_g64") == Codebook(group_size=64, rotation="none", levels="steps")
    with pytest.raises(errors.ConfigError, match=r"\(False, False\); allowed"):
        ShiftedCodebook()
    for fields in ({"rotation": "hadamard"}, {"activation": "int8"}, {"residual_bits": 3}):
        with pytest.raises(errors.ConfigError, match="allowed: the rotation 'none'"):
            ShiftedCodebook(shifted=True, **fields)
    with pytest.raises(errors.ConfigError, match="holds what other libraries quantized"):
        qcut.Linear.from_float(torch.nn.Linear(64, 64), "int4_shifted")


def test_the_operator_refuses_offsets_of_int8():
    layer = made(None, n=64, ordered=False)[0]
    x = torch.zeros(1, 1, 8, 128, dtype=torch.int8)
    book = list(products.pack_book(layer.codebook, torch.float16))
    rows = layout.row_tiles(64) * layout.UNIT_ROWS
    with pytest.raises(errors.ShapeError, match="norms"):
        torch.ops.qcut.codebook_gemm(
            *(x, torch.ones(1), 1, layer.units, layer.packed_norms, torch.ones(rows), layer.col_scale, book),
            *(None, 4, "none", None, torch.float16),
        )
