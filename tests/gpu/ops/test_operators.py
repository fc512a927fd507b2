"""torch.ops.qcut on CUDA, held to the CPU reference and to float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType
from qcut.errors import ConfigError, DeviceError, DtypeError, QcutError, QuantizationError, ShapeError
from qcut.schemes import K_MAX
from tests.gpu.support.oracles import (
    DEVICE,
    TORCH_DTYPE,
    Gemm,
    activations,
    assert_same,
    full_range,
    name,
    pattern,
    relayout,
)
from tests.gpu.support.pools import guard_pool
from tests.gpu.support.problems import ALIGNED_SHAPES, DYNAMIC, EPILOGUE_SHAPE, GEMM_EPILOGUES, GUARD_SHAPE, ODD_SHAPES

pytestmark = pytest.mark.usefixtures("prebuilt")
OPS = torch.ops.qcut
RAW_F32 = Epilogue(DType.F32)


# ── gemm_s8 ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("epilogue", GEMM_EPILOGUES, ids=name)
def test_epilogue(epilogue: Epilogue) -> None:
    gemm = Gemm.random(epilogue, *EPILOGUE_SHAPE)
    first = gemm.run()
    gemm.check(first)
    assert_same(gemm.run(), first)


@pytest.mark.parametrize("shape", ALIGNED_SHAPES + ODD_SHAPES, ids=name)
def test_shape(shape: tuple[int, int, int]) -> None:
    gemm = Gemm.random(DYNAMIC, *shape, seed=sum(shape))
    first = gemm.run()
    gemm.check(first)
    assert_same(gemm.run(), first)


@pytest.mark.parametrize("epilogue", [e for e in GEMM_EPILOGUES if e.residual or e.out is DType.S8], ids=name)
def test_odd_shape_with_wide_epilogue(epilogue: Epilogue) -> None:
    gemm = Gemm.random(epilogue, 33, 127, 129)
    gemm.check(gemm.run())


@pytest.mark.parametrize("seed", range(8))
def test_random_shape(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    m, n, k = (int(torch.randint(1, top, (), generator=generator)) for top in (200, 600, 700))
    gemm = Gemm.random(DYNAMIC, m, n, k, seed)
    gemm.check(gemm.run())


@pytest.mark.parametrize("kind", ["all_min", "checkerboard", "identity", "zeros", "min_times_max"])
def test_sums_of_extremes_are_exact(kind: str) -> None:
    a, b = pattern(kind, *EPILOGUE_SHAPE)
    got = Gemm.of(RAW_F32, a, b).run()
    assert torch.equal(got.double(), a.double() @ b.double().t())


def test_largest_k_does_not_overflow() -> None:
    k = K_MAX // 16 * 16
    a, b = pattern("all_min", 17, 48, k)
    assert torch.equal(Gemm.of(RAW_F32, a, b).run().double(), torch.full((17, 48), 2.0**14 * k, dtype=torch.double))


def test_results_beyond_float16_are_infinite() -> None:
    gemm = Gemm.random(DYNAMIC, *EPILOGUE_SHAPE)
    gemm.args["row_scale"] *= 1e5
    got = gemm.run()
    assert got.isinf().any()
    gemm.check(got)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_row_scale_stays_in_its_row(value: float) -> None:
    gemm = Gemm.random(DYNAMIC, *EPILOGUE_SHAPE)
    gemm.args["row_scale"][5] = value
    got = gemm.run()
    assert not got[5].isfinite().any()
    assert got[[i for i in range(len(got)) if i != 5]].isfinite().all()
    gemm.check(got)


@pytest.mark.parametrize("epilogue", [DYNAMIC, Epilogue(DType.S8)], ids=name)
def test_no_tokens(epilogue: Epilogue) -> None:
    got = Gemm.random(epilogue, 0, 336, 272).run()
    assert got.shape == (0, 336)
    assert got.dtype is TORCH_DTYPE[epilogue.out]


@pytest.mark.parametrize("epilogue", GEMM_EPILOGUES, ids=name)
def test_writes_every_element_and_no_other(epilogue: Epilogue) -> None:
    gemm = Gemm.random(epilogue, *GUARD_SHAPE)
    m, n, _ = GUARD_SHAPE
    gemm.run()  # builds the kernel and allocates its workspace elsewhere
    args = {key: v.to(DEVICE) if isinstance(v, Tensor) else v for key, v in gemm.args.items()}
    a, b = gemm.a.to(DEVICE), gemm.b.to(DEVICE)
    size = m * n * epilogue.out.bits // 8
    assert size % 512 == 0
    with torch.cuda.use_mem_pool(guard_pool()):
        before, slot, after = (torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE) for _ in range(3))
        place = slot.data_ptr()
        del slot
        out = OPS.gemm_s8(a, b, **args)
        assert out.data_ptr() == place, "the allocator put the result elsewhere: this test proves nothing"
        assert before.data_ptr() + size == place == after.data_ptr() - size
        gemm.check(out.cpu())
        assert (before == 0xFF).all()
        assert (after == 0xFF).all()


@pytest.mark.parametrize("layout", ["row_stride", "column_stride", "transposed", "offset_1", "offset_16"])
@pytest.mark.parametrize("operand", ["a", "b"])
def test_gemm_reads_any_layout(operand: str, layout: str) -> None:
    gemm = Gemm.random(DYNAMIC, *EPILOGUE_SHAPE)
    operands = {"a": gemm.a.to(DEVICE), "b": gemm.b.to(DEVICE)}
    operands[operand] = relayout(operands[operand], layout, filler=127)
    args = {key: v.to(DEVICE) if isinstance(v, Tensor) else v for key, v in gemm.args.items()}
    gemm.check(OPS.gemm_s8(operands["a"], operands["b"], **args).cpu())


def test_gemm_reads_vectors_and_residual_of_any_layout() -> None:
    epilogue = GEMM_EPILOGUES[-1]
    gemm = Gemm.random(epilogue, *EPILOGUE_SHAPE)
    args = dict(gemm.args)
    for key, value in gemm.args.items():
        if isinstance(value, Tensor):
            moved = value.to(DEVICE)
            args[key] = relayout(moved, "row_stride", 99) if value.dim() == 2 else torch.stack([moved, moved], 1)[:, 1]
    gemm.check(OPS.gemm_s8(gemm.a.to(DEVICE), gemm.b.to(DEVICE), **args).cpu())


@pytest.mark.parametrize("m", [5, 200])
def test_rows_beside_zero_points_out_of_range_are_right(m: int) -> None:
    a, b = full_range(m, 64), full_range(32, 64)
    points = torch.arange(m, dtype=torch.int32) % 256 - 128
    options = {"colsum": b.sum(1, dtype=torch.int32), "out_dtype": torch.float32}
    want = OPS.gemm_s8(a, b, zero_point=points, **options)
    wild = points.clone()
    wild[:4] = torch.tensor([-(2**31), -129, 128, 2**31 - 1])
    moved = {"colsum": options["colsum"].to(DEVICE), "out_dtype": torch.float32}
    got = OPS.gemm_s8(a.to(DEVICE), b.to(DEVICE), zero_point=wild.to(DEVICE), **moved)
    assert_same(got.cpu()[4:], want[4:])


# ── streams, devices, graphs, tracing ────────────────────────────────────────────────────────────


def linear_args(m: int = 129, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor, Tensor, str]:
    _, n, k = EPILOGUE_SHAPE
    weight = full_range(n, k).clamp(min=-127)
    return activations(m, k, dtype), weight, torch.rand(n) / 100, torch.randn(n), "none"


def on(device: str | torch.device, args: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(a.to(device) if isinstance(a, Tensor) else a for a in args)


def test_runs_on_the_current_stream() -> None:
    args = linear_args()
    expected = OPS.w8a8_linear(*args)
    x, *rest = on(DEVICE, args)
    stale, fresh = torch.zeros_like(x), x
    OPS.w8a8_linear(stale, *rest)  # builds, so that nothing below waits for a compiler
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # about 50 ms: work on any other stream would read the zeros
        stale.copy_(fresh)
        got = OPS.w8a8_linear(stale, *rest)
        stale.zero_()
    side.synchronize()
    assert_same(got.cpu(), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_runs_on_the_tensors_device() -> None:
    args = linear_args()
    second = torch.device("cuda", 1)
    got = OPS.w8a8_linear(*on(second, args))  # while cuda:0 is the current device
    assert got.device == second
    assert torch.cuda.current_device() == 0
    assert_same(got.cpu(), OPS.w8a8_linear(*args))


@pytest.mark.parametrize("op", ["w8a8_linear", "w8a16_linear", "gemm_s8"])
def test_cuda_graph_replays_on_new_data(op: str) -> None:
    if op == "gemm_s8":
        gemms = [Gemm.random(DYNAMIC, *EPILOGUE_SHAPE, seed=s) for s in (0, 10)]
        inputs = [g.a.to(DEVICE) for g in gemms]
        args = {key: v.to(DEVICE) if isinstance(v, Tensor) else v for key, v in gemms[0].args.items()}
        b = gemms[0].b.to(DEVICE)

        def call(x: Tensor) -> Tensor:
            return OPS.gemm_s8(x, b, **args)
    else:
        first, *rest = on(DEVICE, linear_args())
        inputs = [first, first.flip(0).contiguous()]

        def call(x: Tensor) -> Tensor:
            return getattr(OPS, op)(x, *rest)

    eager = [call(x) for x in inputs]
    static = inputs[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(static)
    for x, expected in zip(reversed(inputs), reversed(eager), strict=True):
        static.copy_(x)
        out.zero_()
        graph.replay()
        assert_same(out, expected)


@pytest.mark.parametrize("op", ["w8a8_linear", "w8a16_linear"])
def test_compiles_without_graph_breaks(op: str) -> None:
    x, *rest = on(DEVICE, linear_args())

    def call(x: Tensor) -> Tensor:
        return torch.relu(getattr(OPS, op)(x, *rest))

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for tokens in (129, 33):
        assert_same(compiled(x[:tokens]), call(x[:tokens]))


def opcheck_cases() -> dict[str, tuple[tuple[object, ...], dict[str, object]]]:
    x, weight, scale, bias, activation = linear_args(5)
    gemm = Gemm.random(GEMM_EPILOGUES[-1], *EPILOGUE_SHAPE)
    colsum = weight.sum(1, dtype=torch.int32)
    return {
        "quantize_per_token": ((x, 272), {}),
        "quantize_per_tensor": ((x, 0.1, 3, 288), {}),
        "dequantize": ((weight, scale, torch.float16), {}),
        "colsum": ((weight,), {}),
        "gemm_s8": ((gemm.a, gemm.b), gemm.args),
        "w8a8_linear": ((x, weight, scale, bias, activation), {}),
        "w8a8_static_linear": ((x, weight, scale, colsum, bias, 0.05, -7, activation), {}),
        "w8a16_linear": ((x, weight, scale, bias, activation), {}),
    }


@pytest.mark.parametrize("op", list(opcheck_cases()))
def test_opcheck(op: str) -> None:
    args, kwargs = opcheck_cases()[op]
    keywords = {key: v.to(DEVICE) if isinstance(v, Tensor) else v for key, v in kwargs.items()}
    torch.library.opcheck(getattr(OPS, op).default, on(DEVICE, args), keywords)


# ── bad input: last, because a kernel that ran on it would take the CUDA context with it ──────────


def bad_gemms() -> list[tuple[str, type[QcutError]]]:
    return [
        ("b_on_cpu", DeviceError),
        ("bias_on_cpu", DeviceError),
        ("k_differs", ShapeError),
        ("short_row_scale", ShapeError),
        ("float_a", DtypeError),
        ("double_bias", DtypeError),
        ("zero_point_without_colsum", ConfigError),
        ("residual_with_s8", ConfigError),
        ("unknown_activation", ConfigError),
        ("k_too_large", QuantizationError),
    ]


@pytest.mark.parametrize(("fault", "error"), bad_gemms())
def test_gemm_refuses(fault: str, error: type[QcutError]) -> None:
    gemm = Gemm.random(DYNAMIC, 17, 48, 32)
    a, b = gemm.a.to(DEVICE), gemm.b.to(DEVICE)
    args = {key: v.to(DEVICE) if isinstance(v, Tensor) else v for key, v in gemm.args.items()}
    if fault == "b_on_cpu":
        b = b.cpu()
    elif fault == "bias_on_cpu":
        args["bias"] = args["bias"].cpu()
    elif fault == "k_differs":
        b = b[:, :16]
    elif fault == "short_row_scale":
        args["row_scale"] = args["row_scale"][:16]
    elif fault == "float_a":
        a = a.float()
    elif fault == "double_bias":
        args["bias"] = args["bias"].double()
    elif fault == "zero_point_without_colsum":
        args["zero_point"] = torch.zeros(17, dtype=torch.int32, device=DEVICE)
    elif fault == "residual_with_s8":
        args |= {"out_dtype": torch.int8, "residual": torch.zeros(17, 48, dtype=torch.int8, device=DEVICE)}
    elif fault == "unknown_activation":
        args["activation"] = "swish"
    elif fault == "k_too_large":
        a, b = (torch.zeros(t.shape[0], K_MAX + 1, dtype=torch.int8, device=DEVICE) for t in (a, b))
    with pytest.raises(error):
        OPS.gemm_s8(a, b, **args)
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("weight_on_cpu", DeviceError),
        ("scale_on_cpu", DeviceError),
        ("wrong_k", ShapeError),
        ("short_bias", ShapeError),
        ("integer_x", DtypeError),
        ("unknown_activation", ConfigError),
    ],
)
@pytest.mark.parametrize("op", ["w8a8_linear", "w8a16_linear"])
def test_linear_refuses(op: str, fault: str, error: type[QcutError]) -> None:
    x, weight, scale, bias, activation = on(DEVICE, linear_args(5))
    if fault == "weight_on_cpu":
        weight = weight.cpu()
    elif fault == "scale_on_cpu":
        scale = scale.cpu()
    elif fault == "wrong_k":
        x = x[:, :100]
    elif fault == "short_bias":
        bias = bias[:-1]
    elif fault == "integer_x":
        x = x.int()
    else:
        activation = "swish"
    with pytest.raises(error):
        getattr(OPS, op)(x, weight, scale, bias, activation)
    torch.cuda.synchronize()
