"""The C++ operators against Python's, on CPU tensors: callbacks stand in for the driver and for host launchers.

Both must pass the same bytes to the same kernels. Addresses of the buffers a call allocates differ from call to
call; they are compared by what they point to.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from qcut.backends.cuda import linear as linear_cuda
from qcut.backends.cuda.launch import native as _native
from qcut.backends.cuda.launch import plans
from qcut.backends.cuda.launch.plans import LaunchPlan, PlanCache, m_bucket
from qcut.backends.cuda.linear import LinearLayer, LinearPlan
from qcut.emitters.core.family import Grid
from qcut.emitters.decoder.quantize import QuantizePerTensor, QuantizePerToken
from qcut.emitters.gemm.cutlass.text import LAUNCH_PARAMS
from qcut.emitters.stream.w8a8 import W8A8Problem
from qcut.errors import QcutError
from qcut.numerics.int16 import rows_of_blocks
from qcut.schemes import padded_k
from tests.support.fakes.native import (
    STREAM,
    Driver,
    Kernel,
    Record,
    Setting,
    decoded,
    defined,
    launch_plan,
    registered,
)

NAMESPACE = "qcut_native_test"
SM_COUNT, SWIZZLE, RASTER, SPLITS = 132, 4, 2, 3
LIMIT = 100
"""Layers that the plan cache holds."""
BY_TOKEN = ("w8a8", "int16x8")
"""Schemes with a scale for each token."""
QUANTIZE, GEMM = 0x7F00_0000_0010, 0x7F00_0000_0020
"""Function handles of W8A8 layers; see `handle`."""


def handle(function: int, scheme: str) -> int:
    return function + 0x100 * _native.LINEAR_OPS.index(f"{scheme}_linear")


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver()


@pytest.fixture(scope="module")
def library(driver: Driver) -> Iterator[_native.Library]:
    with registered(NAMESPACE, driver) as loaded:
        yield loaded


@pytest.fixture(params=[True, False], ids=["cutlass", "raw"])
def setting(
    request: pytest.FixtureRequest,
    driver: Driver,
    library: _native.Library,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Setting]:
    hosted = request.param
    driver.reset()

    def plan_for(layer: LinearLayer, device: int) -> LinearPlan:
        n, k_padded, problem = layer.n, padded_k(layer.k), layer.problem()
        scheme, dtype = layer.scheme, plans.DTYPES[layer.dtype]
        if scheme == "w8a16":
            kernel = Kernel(driver, handle(GEMM, scheme), problem.params(), host=False)
            return LinearPlan(None, launch_plan(kernel, Grid(16, (3, 1, 1)), pdl=True), n, k_padded)
        if scheme in BY_TOKEN and layer.rows == 1:  # its product quantizes
            params = W8A8Problem("floats", dtype, problem.epilogue).params()
            kernel = Kernel(driver, handle(GEMM, scheme), params, host=False)
            return LinearPlan(None, launch_plan(kernel, Grid(1, (3, 1, 1)), pdl=True), n, k_padded)
        desc: Any
        if scheme in BY_TOKEN:
            desc = QuantizePerToken(dtype, "sm_90a", threads=32, halves=problem.epilogue.halves)
            source = desc.emit()
        else:
            desc = QuantizePerTensor(dtype, "sm_90a", threads=32, vectors=1)
            source = desc.emit()
        grid = Grid(desc.rows, desc.grid(1, k_padded))
        quantize = launch_plan(Kernel(driver, handle(QUANTIZE, scheme), source.params, host=False), grid)
        if hosted:
            kernel = Kernel(driver, handle(GEMM, scheme), (*problem.params(), *LAUNCH_PARAMS), host=True)
            tail = (SM_COUNT, SWIZZLE, RASTER, SPLITS)
            gemm = launch_plan(kernel, Grid(1, (1, 1, 1)), tail=tail, pdl=True, row_multiple=64)
        else:
            kernel = Kernel(driver, handle(GEMM, scheme), problem.params(), host=False)
            gemm = launch_plan(kernel, Grid(32, (-(-n // 64), 1, 1)), pdl=True)
        return LinearPlan(quantize, gemm, n, k_padded)

    monkeypatch.setattr(linear_cuda, "plan_for", plan_for)
    monkeypatch.setattr(
        linear_cuda, "_called", PlanCache(limit=LIMIT, on_clear=partial(library.clear, *_native.LINEAR_OPS))
    )
    monkeypatch.setattr(plans, "current_stream", lambda device: STREAM)
    monkeypatch.setattr(_native, "library", lambda **_: library)
    library.clear(*_native.OPS)
    yield Setting(driver, library)
    library.clear(*_native.OPS)


def arguments(
    op: str,
    shape: tuple[int, ...],
    n: int,
    *,
    bias: bool = True,
    dtype: torch.dtype = torch.float16,
    activation: str = "none",
) -> list[Any]:
    k = shape[-1]
    qweight = torch.zeros(n, padded_k(k), dtype=torch.int8)
    vector = torch.ones(n) if bias else None
    if op == "w8a8_static_linear":
        sums = torch.zeros(n, dtype=torch.int32)
        return [torch.randn(shape).to(dtype), qweight, torch.ones(n), sums, vector, 0.1, -7, activation]
    return [torch.randn(shape).to(dtype), qweight, torch.ones(n), vector, activation]


def operator(op: str, overload: str = "default") -> Any:
    return getattr(getattr(getattr(torch.ops, NAMESPACE), op), overload)


def compare(python: list[Record], native: list[Record], driver: Driver, out: tuple[Tensor, Tensor]) -> None:
    """The same launches, except the addresses of scratch memory and result; those in the same relation."""
    assert len(python) == len(native)
    bases = []
    for records in (python, native):
        base, facts = {}, []
        for record in records:
            args = decoded(record, driver.params[record.function])
            if record.function & 0xFF == QUANTIZE & 0xFF:
                base = {"q": args["q"], "scale": args.get("scale")}
                own = ("q", "scale") if isinstance(args.get("scale"), int) else ("q",)
            else:
                own = ("a", "row_scale", "d") if base else ("d",)
                assert not base or args["a"] == base["q"]
                assert "row_scale" not in args or args["row_scale"] == base["scale"]
                if "row_scale" in args:
                    of_int16 = record.function & 0xFF00 == handle(0, "int16x8")
                    assert args["m"] == (rows_of_blocks(args["tokens"]) if of_int16 else args["m"])
                    assert args["row_scale"] - args["a"] == args["m"] * args["lda"]
                base["d"] = args["d"]
            facts.append((record._replace(block=b""), {name: v for name, v in args.items() if name not in own}))
        bases.append((base, facts))
    assert bases[0][1] == bases[1][1]
    for (base, _), result in zip(bases, out, strict=True):
        assert base["d"] == result.data_ptr()


ROWS = (1, 2, 16, 17, 63, 64, 65, 129, 1000)


@pytest.mark.parametrize("op", _native.LINEAR_OPS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_launches_are_pythons(setting: Setting, op: str, bias: bool) -> None:
    for m, (n, k) in itertools.product(ROWS, ((128, 64), (33, 37))):
        args = arguments(op, (m, k), n, bias=bias)
        setting.library.clear(*_native.OPS)
        linear_cuda._called.clear()
        expected, python, by_native = setting.served(lambda a=args: operator(op)(*a))
        assert not by_native
        one = op == "w8a16_linear" or (op in ("w8a8_linear", "int16x8_linear") and m == 1)
        assert len(python) == (1 if one else 2)
        got, native, by_native = setting.served(lambda a=args: operator(op)(*a))
        assert by_native
        compare(python, native, setting.driver, (expected, got))
        assert {record.stream for record in native} == {STREAM}
        assert (got.shape, got.stride(), got.dtype) == (expected.shape, expected.stride(), expected.dtype)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (op, d)
        for op in _native.LINEAR_OPS
        for d in (torch.float16, torch.bfloat16, torch.float32)
        if op != "w8a16_linear" or d is not torch.float32
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(37,), (1, 37), (3, 37), (2, 5, 37), (2, 1, 3, 70)], ids=str)
def test_results_have_pythons_shape(setting: Setting, op: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    args = arguments(op, shape, 50, dtype=dtype, activation="gelu_tanh")
    expected = operator(op)(*args)
    got, _, by_native = setting.served(lambda: operator(op)(*args))
    assert by_native
    assert (got.shape, got.stride(), got.dtype, got.device) == (
        (*shape[:-1], 50),
        expected.stride(),
        dtype,
        args[0].device,
    )
    assert not got.requires_grad


def test_rows_with_a_stride_and_copies(setting: Setting) -> None:
    _, qweight, scale, bias, activation = arguments("w8a8_linear", (24, 64), 128)
    op = operator("w8a8_linear")
    wide = torch.randn(24, 96).half()
    for x, by_native in ((wide[:, :64], True), (wide[::2, :64], True), (torch.randn(64, 24).half().t(), False)):
        args = (x, qweight, scale, bias, activation)
        expected, python, _ = setting.served(lambda a=args: op(*a))
        got, native, served = setting.served(lambda a=args: op(*a))
        assert served is by_native
        assert got.shape == expected.shape == (len(x), 128)
        if by_native:
            compare(python, native, setting.driver, (expected, got))
            assert decoded(native[0], setting.driver.params[QUANTIZE])["x_stride"] == x.stride(0)


def test_another_call_is_another_plan(setting: Setting) -> None:
    op = operator("w8a8_linear")
    args = arguments("w8a8_linear", (40, 64), 128)
    for changed in (
        {},
        {0: torch.randn(65, 64).half()},  # another bucket of rows
        {0: torch.randn(40, 64).bfloat16()},
        {0: torch.randn(40 * 64 + 1).half()[1:].view(40, 64)},  # unaligned
        {1: torch.zeros(64, 64, dtype=torch.int8), 2: torch.ones(64), 3: torch.ones(64)},
        {3: None},
        {4: "relu"},
    ):
        call = [changed.get(i, value) for i, value in enumerate(args)]
        for overload in (op, operator("w8a8_linear", "early_read")):
            assert not setting.served(lambda c=call, o=overload: o(*c))[2]
            assert setting.served(lambda c=call, o=overload: o(*c))[2]
    fewer_rows = [torch.randn(33, 64).half(), *args[1:]]
    assert setting.served(lambda: op(*fewer_rows))[2], "one plan serves a whole bucket"


@pytest.mark.parametrize("op", _native.LINEAR_OPS)
def test_a_plan_knows_no_address(setting: Setting, op: str) -> None:
    first = arguments(op, (5, 64), 128)
    operator(op)(*first)
    for _ in range(3):  # other tensors of the same layout, as another layer has them
        args = arguments(op, (5, 64), 128)
        _, records, by_native = setting.served(lambda a=args: operator(op)(*a))
        assert by_native
        product = decoded(records[-1], setting.driver.params[records[-1].function])
        names = ("b", "col_scale", "colsum", "bias") if op == "w8a8_static_linear" else ("b", "col_scale", "bias")
        assert [product[name] for name in names] == [t.data_ptr() for t in args[1 : 1 + len(names)]]


def test_unaligned_parameters_at_a_reused_address_are_copied(setting: Setting) -> None:
    op = operator("w8a8_linear")
    x, qweight, scale, bias, activation = arguments("w8a8_linear", (5, 64), 128)
    op(x, qweight, scale, bias, activation)
    memory = torch.zeros(128 * 64 + 16, dtype=torch.int8)
    unaligned = memory[4 : 4 + 128 * 64].view(128, 64)
    shifted = torch.ones(132)[1:129]
    for call, name in (((x, unaligned, scale, bias), "b"), ((x, qweight, shifted, bias), "col_scale")):
        for overload in (op, operator("w8a8_linear", "early_read")):
            _, records, by_native = setting.served(lambda c=call, o=overload: o(*c, activation))
            product = decoded(records[-1], setting.driver.params[records[-1].function])
            assert not by_native
            assert product[name] % 16 == 0


@pytest.mark.parametrize("op", _native.LINEAR_OPS)
def test_calls_with_gradients_are_pythons(setting: Setting, op: str) -> None:
    args = arguments(op, (5, 64), 128)
    operator(op)(*args)
    x = args[0].clone().requires_grad_()
    assert not setting.served(lambda: operator(op)(x, *args[1:]))[2]
    with torch.no_grad():
        assert setting.served(lambda: operator(op)(x, *args[1:]))[2]
    bias = max(i for i, value in enumerate(args) if isinstance(value, Tensor))
    args[bias] = args[bias].clone().requires_grad_()
    assert not setting.served(lambda: operator(op)(*args))[2]


@pytest.mark.parametrize("op", _native.LINEAR_OPS)
def test_calls_are_pythons_while_another_path_is_chosen(setting: Setting, op: str) -> None:
    given = arguments(op, (4, 64), 48)
    call = operator(op)
    call(*given)
    for blocks, by_cpp in ((1, False), (2, False), (0, True)):
        setting.library.leave_to_python(blocks)
        assert setting.served(lambda: call(*given))[2] is by_cpp


def test_later_tensor_at_an_address_is_another_layer(setting: Setting) -> None:
    args = arguments("w8a8_static_linear", (5, 64), 64)
    op = operator("w8a8_static_linear")
    op(*args)
    assert setting.served(lambda: op(*args))[2]
    _, qweight, scale, colsum, bias, *_ = args
    for i, other in (
        (1, qweight.t()),
        (1, qweight.as_strided((64, 64), (0, 1))),
        (2, scale[:1].expand(64)),
        (3, colsum[:1].expand(64)),
        (4, bias[:1].expand(64)),
    ):
        call = [*args[:i], other, *args[i + 1 :]]
        _, records, by_native = setting.served(lambda c=call: op(*c))
        product = decoded(records[-1], setting.driver.params[records[-1].function])
        name = {1: "b", 2: "col_scale", 3: "colsum", 4: "bias"}[i]
        assert not by_native
        assert product[name] != other.data_ptr(), "the kernel reads a dense copy"
    for i, other, message in (
        (1, qweight.view(torch.uint8), "qweight is uint8"),
        (2, scale.view(torch.int32), "col_scale is int32"),
        (3, colsum.view(torch.float32), "colsum is float32"),
        (4, bias.view(1, 64), r"bias has shape \[1, 64\]"),
        (1, qweight[:, :48], r"x has K = 64, qweight has shape \[64, 48\]"),
    ):
        call = [*args[:i], other, *args[i + 1 :]]
        with pytest.raises(QcutError, match=message):
            op(*call)


def test_range_of_x_is_no_part_of_plans(setting: Setting) -> None:
    op = operator("w8a8_static_linear")
    args = arguments("w8a8_static_linear", (5, 64), 128)
    op(*args)
    for scale, zero_point in ((0.5, 127), (1e-30, -128)):
        args[5:7] = scale, zero_point
        _, records, by_native = setting.served(lambda: op(*args))
        assert by_native
        first, second = (decoded(record, setting.driver.params[record.function]) for record in records)
        assert (first["scale"], first["zero_point"]) == (struct.unpack("f", struct.pack("f", scale))[0], zero_point)
        assert second["zero_point"] == zero_point
    for scale, zero_point in ((0.5, 128), (float("nan"), 0), (0.0, 0)):
        args[5:7] = scale, zero_point
        with pytest.raises(QcutError, match="allowed: "):
            op(*args)


def test_no_rows_and_errors_are_pythons(setting: Setting) -> None:
    op = operator("w8a8_linear")
    args = arguments("w8a8_linear", (5, 64), 128)
    op(*args)
    empty, records, by_native = setting.served(lambda: op(args[0][:0], *args[1:]))
    assert (empty.shape, records, by_native) == ((0, 128), [], False)
    with pytest.raises(QcutError, match=r"w8a8_linear: x has shape \[\]"):
        op(torch.tensor(1.0), *args[1:])
    with pytest.raises(QcutError, match="activation 'a name of more than 15 characters' does not exist"):
        op(*args[:4], "a name of more than 15 characters")
    with pytest.raises(QcutError, match="qweight has shape"):
        op(torch.randn(5, 100).half(), *args[1:])


@pytest.mark.parametrize("failing", [QUANTIZE, GEMM, "stream"])
def test_python_repeats_what_the_driver_refuses(setting: Setting, failing: Any) -> None:
    op = operator("w8a8_linear")
    args = arguments("w8a8_linear", (5, 64), 128)
    _, python, _ = setting.served(lambda: op(*args))
    if failing == "stream":
        setting.driver.stream_status = 1
    else:
        setting.driver.status[failing] = 400
    got, records, by_native = setting.served(lambda: op(*args))
    assert not by_native
    assert got.shape == (5, 128)
    tried = {"stream": 0, QUANTIZE: 1, GEMM: 2}[failing]
    assert [r.function for r in records] == [QUANTIZE, GEMM][:tried] + [r.function for r in python]


def test_launches_with_a_workspace_stay_in_python(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaunchPlan, "for_native", lambda self: None)
    args = arguments("w8a8_linear", (5, 64), 128)
    for _ in range(3):
        assert not setting.served(lambda: operator("w8a8_linear")(*args))[2]


def test_a_full_table_is_emptied_in_cpp_too(setting: Setting) -> None:
    op, args = operator("w8a8_linear"), arguments("w8a8_linear", (5, 64), 128)
    op(*args)
    assert setting.served(lambda: op(*args))[2]
    others = [arguments("w8a8_linear", (5, 64), 16 * n) for n in range(9, 9 + LIMIT)]
    for other in others:
        assert not setting.served(lambda other=other: op(*other))[2]
    assert not setting.served(lambda: op(*args))[2]
    assert setting.served(lambda: op(*others[-1]))[2], "the plan that found the table full stays"


def test_threads(setting: Setting) -> None:
    calls = [(op, arguments(op, (m, 64), 128)) for op in _native.LINEAR_OPS for m in (3, 70)]
    for op, args in calls:
        operator(op)(*args)
    before, failures = setting.library.hits, []
    setting.driver.records.clear()

    def work(seed: int) -> None:
        for i in range(200):
            op, args = calls[(i + seed) % len(calls)]
            if operator(op)(*args).shape != (len(args[0]), 128):
                failures.append((op, len(args[0])))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for n in range(50):  # a writer among the readers
        other = arguments("w8a16_linear", (1, 64), 144 + n)
        operator("w8a16_linear")(*other)
    for thread in threads:
        thread.join()
    assert not failures
    assert 1600 <= setting.library.hits - before <= 1650


def test_bucket_is_pythons(library: _native.Library) -> None:
    every = (*range(1, 5001), 2**20 - 1, 2**20, 2**20 + 1, 2**31 - 1)
    assert [library.bucket(m) for m in every] == [m_bucket(m) for m in every]


def test_registering_while_threads_call(driver: Driver) -> None:
    namespace, stop, wrong = f"{NAMESPACE}_busy", threading.Event(), []
    definitions = defined(namespace, lambda name: lambda x, *_: x.clone())
    op, args = getattr(torch.ops, namespace).w8a8_linear.default, arguments("w8a8_linear", (5, 64), 128)

    def work() -> None:
        while not stop.is_set():
            if not torch.equal(op(*args), args[0]):
                wrong.append(args)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    loaded = _native.load()
    assert loaded is not None
    loaded.register(namespace, "cpu", driver.kernel, driver.stream)
    assert torch.equal(op(*args), args[0]), "C++ has no plan, and leaves the call to Python"
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert loaded.hits == 0
    definitions._destroy()


def test_registering_an_unknown_namespace(library: _native.Library) -> None:
    other = _native.load()
    assert other is not None
    with pytest.raises(QcutError, match="refuses the operators"):
        other.register("qcut_no_such_namespace", "cpu", 0, 0)
