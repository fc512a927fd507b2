"""The C++ operators of codebook layers against Python's, on CPU tensors, as whole layers call them.

Kernels are chosen and described for GPUs that are not there; callbacks stand in for the driver. C++ and Python must
pass the same bytes to the same kernels in the same order. Addresses of the buffers a call allocates differ from call to
call; they are compared by what they point to.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from qcut.backends.cuda import codebook as codebook_cuda
from qcut.backends.cuda.launch import native as _native
from qcut.backends.cuda.launch.plans import LaunchPlan, LaunchSpec, PlanCache
from qcut.dispatch.gpus import Target
from qcut.errors import QcutError
from qcut.layers import codebook as codebook_layers
from qcut.layers import rotations
from qcut.layers.codebook import CodebookLinear
from qcut.layers.shifted import ShiftedCodebookLinear
from qcut.schemes import ACTIVATIONS, ShiftedCodebook
from tests.support.fakes.launches import A100, H200
from tests.support.fakes.native import STREAM, Driver, Kernel, Record, Setting, decoded, registered

NAMESPACE = "qcut_native_codebook_test"
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
LIMIT = 20
"""Products that the plan cache holds."""
SCHEMES = (
    *("codebook4", "codebook3", "codebook2_rows", "codebook4+4", "codebook3+3_g64", "codebook4+2", "codebook4_g32"),
    *("codebook4_pairs", "codebook3_qr", "codebook4+4_g48_qr", "codebook4_none", "int4_g32", "shifted"),
    *("codebook4_int8", "codebook4_rows_int8", "codebook4+4_int8", "codebook4+3_int8", "codebook4_pairs_int8"),
    *("codebook2_qr_int8", "codebook4_none_int8", "codebook4_rows_qr", "codebook4_rows_qr_int8"),
)
ROWS = (1, 2, 8, 33, 65, 300, 2048)
WRITTEN = {"x": "y", "row_scale": "scale", "residual": "d"}
"""What a launch reads of those before it, by the names that these have for it."""


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver()


@pytest.fixture(scope="module")
def library(driver: Driver) -> Iterator[_native.Library]:
    with registered(NAMESPACE, driver) as loaded:
        yield loaded


def operator(name: str) -> Any:
    return getattr(getattr(torch.ops, NAMESPACE), name).default


@pytest.fixture(params=[H200, A100], ids=lambda gpu: gpu.arch)
def setting(
    request: pytest.FixtureRequest, driver: Driver, library: _native.Library, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Setting]:
    gpu: Target = request.param
    driver.reset()
    handles: dict[str, int] = {}

    def load(spec: LaunchSpec, device: int) -> LaunchPlan:
        handle = handles.setdefault(spec.source.name, 0x7F00_0000_0010 + len(handles))
        kernel = Kernel(driver, handle, spec.source.params, host=spec.source.params[-1].name == "workspace")
        return LaunchPlan(kernel, spec)

    monkeypatch.setattr(LaunchSpec, "load", load)
    monkeypatch.setattr(codebook_cuda, "target", lambda device: gpu)
    monkeypatch.setattr(codebook_cuda, "has_cutlass", lambda: True)
    monkeypatch.setattr(codebook_cuda, "current_stream", lambda device: STREAM)
    for name, ops in (("_rotation_plans", ["rotate_tokens"]), ("_product_plans", ["codebook_gemm", "codebook_gemv"])):
        cache = PlanCache(vars(codebook_cuda)[name].maker, limit=LIMIT, on_clear=partial(library.clear, *ops))
        monkeypatch.setattr(codebook_cuda, name, cache)
    monkeypatch.setattr(_native, "library", lambda **_: library)
    monkeypatch.setattr(rotations, "has_kernels", lambda device: True)
    monkeypatch.setattr(codebook_layers, "_GEMM", operator("codebook_gemm"))
    monkeypatch.setattr(codebook_layers, "_GEMV", operator("codebook_gemv"))
    monkeypatch.setattr(rotations, "_ROTATE", operator("rotate_tokens"))
    monkeypatch.setattr(rotations, "stream_state", lambda device: None)  # each call rotates
    library.clear(*_native.OPS)
    yield Setting(driver, library)
    library.clear(*_native.OPS)


def layer(scheme: str, k: int = 320, n: int = 80, *, bias: bool = True, activation: str = "none") -> CodebookLinear:
    linear = torch.nn.Linear(k, n, bias=bias)
    if scheme != "shifted":
        made = CodebookLinear.from_float(linear, scheme, activation=activation)
        assert isinstance(made, CodebookLinear)
        return made
    plain = layer("codebook4_g32_none", k, n)
    shifted = ShiftedCodebook(group_size=32, shifted=True)
    offsets = torch.randn_like(plain.norms)
    own = ShiftedCodebookLinear.from_parts(
        plain.passes, plain.bias if bias else None, shifted, offsets=offsets, order=None
    )
    own.activation = activation
    return own


def facts(records: list[Record], driver: Driver) -> list[Any]:
    """Launches, without the addresses they write to; what they read of launches before is a difference to these."""
    written: dict[str, int] = {}
    found = []
    for record in records:
        args = decoded(record, driver.params[record.function])
        for name, source in WRITTEN.items():
            if name in args and source in written:
                args[name] = (source, args[name] - written[source])
        written |= {name: args.pop(name) for name in ("y", "scale", "d") if name in args}
        found.append((record._replace(block=b""), args))
    return found


def same_calls(setting: Setting, linear: CodebookLinear, x: Tensor) -> None:
    """Python serves the first call of a layer, C++ all operators of the second, with the same launches."""
    setting.driver.records.clear()
    hits = setting.library.hits
    expected, python = linear(x), list(setting.driver.records)
    assert setting.library.hits == hits
    setting.driver.records.clear()
    got, native = linear(x), list(setting.driver.records)
    assert python
    calls = 1 if len(x) == 1 and linear._rotates_one and x.dtype is not SINGLE else 1 + len(linear.set_bits)
    assert setting.library.hits - hits == calls
    assert facts(native, setting.driver) == facts(python, setting.driver)
    assert {record.stream for record in native} == {STREAM}
    assert (got.shape, got.stride(), got.dtype) == (expected.shape, expected.stride(), expected.dtype)
    if len(linear.set_bits) == 1:
        for y, records in ((expected, python), (got, native)):
            assert decoded(records[-1], setting.driver.params[records[-1].function])["d"] == y.data_ptr()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("activation", ["none", "gelu_tanh"])
def test_launches_are_pythons(setting: Setting, scheme: str, activation: str) -> None:
    k = 336 if "g48" in scheme else 512 if "_rows" in scheme else 320
    linear = layer(scheme, k, bias=activation == "none", activation=activation)
    for m in ROWS:
        for dtype in (HALF, BRAIN, SINGLE) if linear.int8 and linear.kind != "qr" else (HALF, BRAIN):
            forget(setting)
            same_calls(setting, linear, torch.randn(m, k).to(dtype))


def forget(setting: Setting) -> None:
    codebook_cuda._rotation_plans.clear()
    codebook_cuda._product_plans.clear()


def test_host_launcher_serves_prefill_of_row_norms(setting: Setting) -> None:
    linear = layer("codebook4_rows_int8", 1024, 512)
    same_calls(setting, linear, torch.randn(2048, 1024).half())
    hosted = setting.driver.records[-1].grid is None
    assert hosted is (codebook_cuda.target(0) is H200)


def test_grids_end_at_the_multiprocessors(setting: Setting) -> None:
    linear, gpu = layer("codebook4_int8", 256, 4096), codebook_cuda.target(0)
    same_calls(setting, linear, torch.randn(2048, 256).half())
    grid = setting.driver.records[-1].grid
    assert grid is not None
    assert (grid[0] == gpu.sm_count) is (gpu is H200), "tiles are more"


def test_more_dimensions_and_strided_rows(setting: Setting) -> None:
    linear, wide = layer("codebook4_int8"), torch.randn(34, 336).half()
    for x in (torch.randn(2, 3, 320).half(), wide[:, :320], wide[::2, 16:], wide[:, 1:321], wide[5:6, 3:323]):
        forget(setting)
        expected, python, hit = served(setting, lambda x=x: linear(x))
        assert not hit
        got, native, hit = served(setting, lambda x=x: linear(x))
        assert hit
        assert (got.shape, got.stride()) == (expected.shape, expected.stride())
        assert facts(native, setting.driver) == facts(python, setting.driver)
    across = torch.randn(320, 7).half().t()
    linear(across)
    _, records, _ = served(setting, lambda: linear(across))
    assert decoded(records[0], setting.driver.params[records[0].function])["x"] != across.data_ptr(), "a copy in rows"


def served(setting: Setting, call: Any) -> tuple[Any, list[Record], bool]:
    """Result, launches, and whether C++ served all operators of a call."""
    setting.driver.records.clear()
    before = setting.library.hits
    result = call()
    records = list(setting.driver.records)
    return result, records, setting.library.hits - before == len(records)


@pytest.fixture
def rotation(setting: Setting) -> list[Any]:
    """Arguments of ``rotate_tokens``, served once."""
    linear = layer("codebook4_int8")
    x = torch.randn(40, 320).half()
    args = [x, linear._rotation.operands(HALF, x.device), "hadamard", 128, [42], torch.int8]
    operator("rotate_tokens")(*args)
    return args


@pytest.fixture
def product(setting: Setting) -> list[Any]:
    """Arguments of ``codebook_gemm``, served once."""
    linear = layer("codebook4_int8")
    blocks, scale = torch.zeros(3, 5, 8, 128, dtype=torch.int8), torch.ones(40)
    weight = [linear.units, linear.packed_norms, linear.fold, linear.col_scale, list(linear._books()[0][HALF])]
    args = [blocks, scale, 40, *weight, linear.bias, 4, "none", None, HALF, False]
    operator("codebook_gemm")(*args)
    return args


@pytest.fixture
def whole(setting: Setting) -> list[Any]:
    """Arguments of ``codebook_gemv``, served once."""
    linear = layer("codebook4", 384)
    x = torch.randn(1, 384).half()
    weight = [linear.units, linear.packed_norms, linear.fold, linear.col_scale, list(linear._books()[0][HALF])]
    signs = linear._rotation.operands(HALF, x.device)
    args = [x, signs, 128, [42], *weight, linear.bias, 4, "none", None, HALF]
    operator("codebook_gemv")(*args)
    return args


OPS = ("rotate_tokens", "codebook_gemm", "codebook_gemv")
FIXTURES = {"rotate_tokens": "rotation", "codebook_gemm": "product", "codebook_gemv": "whole"}


@pytest.fixture(params=OPS)
def call(request: pytest.FixtureRequest) -> tuple[str, list[Any]]:
    """Each operator, and arguments that were served once."""
    return request.param, request.getfixturevalue(FIXTURES[request.param])


def test_a_plan_knows_no_address(setting: Setting, call: tuple[str, list[Any]]) -> None:
    op, args = call
    for _ in range(3):  # other tensors of the same layout, as another layer has them
        given = [value.clone() if isinstance(value, Tensor) else value for value in args]
        _, (record,), hit = served(setting, lambda given=given: operator(op)(*given))
        assert hit
        passed = decoded(record, setting.driver.params[record.function]).values()
        assert {t.data_ptr() for t in given if isinstance(t, Tensor)} <= set(passed)


def test_calls_with_gradients_are_pythons(setting: Setting, call: tuple[str, list[Any]]) -> None:
    op, args = call
    for i, value in enumerate(args):
        if isinstance(value, Tensor) and value.is_floating_point():
            given = [*args[:i], value.clone().requires_grad_(), *args[i + 1 :]]
            assert not served(setting, lambda given=given: operator(op)(*given))[2]
            with torch.no_grad():
                assert served(setting, lambda given=given: operator(op)(*given))[2]


def test_calls_are_pythons_while_another_path_is_chosen(setting: Setting, call: tuple[str, list[Any]]) -> None:
    op, args = call
    for blocks, by_cpp in ((1, False), (0, True)):
        setting.library.leave_to_python(blocks)
        assert served(setting, lambda: operator(op)(*args))[2] is by_cpp


def test_tensors_of_other_layouts_are_pythons(setting: Setting, call: tuple[str, list[Any]]) -> None:
    op, args = call
    for i, value in enumerate(args):
        if not isinstance(value, Tensor):
            continue
        memory = value.new_zeros(value.numel() + 1)
        unaligned = memory[1:].view(value.shape).copy_(value)
        given = [*args[:i], unaligned, *args[i + 1 :]]
        if (op, i) == ("rotate_tokens", 0):  # tokens may start anywhere: another plan
            operator(op)(*given)
            assert served(setting, lambda given=given: operator(op)(*given))[2]
            continue
        for _ in range(2):
            _, (record,), hit = served(setting, lambda given=given: operator(op)(*given))
            assert not hit
            passed = decoded(record, setting.driver.params[record.function]).values()
            assert unaligned.data_ptr() not in passed, "the kernel reads a copy"
        if value.dim() == 1:
            given = [*args[:i], value[:1].expand(len(value)), *args[i + 1 :]]
            assert not served(setting, lambda given=given: operator(op)(*given))[2]


def test_errors_are_pythons(setting: Setting, call: tuple[str, list[Any]]) -> None:
    op, args = call
    hits = setting.library.hits
    for i, value in enumerate(args):
        if isinstance(value, Tensor):
            for wrong in (value.expand(2, *value.shape), value.double(), value[:0]):
                if (op, i, len(wrong)) == ("rotate_tokens", 0, 0):  # no tokens are allowed
                    continue
                with pytest.raises(QcutError, match=f"qcut::{op}: "):
                    operator(op)(*args[:i], wrong, *args[i + 1 :])
    wrong_values = {
        "rotate_tokens": {2: "another", 3: 96, 4: [], 5: torch.int16},
        "codebook_gemm": {1: None, 2: 41, 5: None, 7: [0] * 7, 9: 5, 10: "a name of more than 15 characters"},
        "codebook_gemv": {2: 256, 3: [1, 2], 8: [0] * 9, 10: 3, 11: "another", 13: torch.int8},
    }[op]
    for i, wrong in wrong_values.items():
        with pytest.raises(QcutError, match=r"allowed: |does not exist|goes with int8 tokens"):
            operator(op)(*args[:i], wrong, *args[i + 1 :])
    assert setting.library.hits == hits


def test_words_beyond_32_bits_are_pythons(setting: Setting, product: list[Any]) -> None:
    product[7] = [1 << 31, *product[7][1:]]
    setting.driver.records.clear()
    with pytest.raises(Exception, match="format requires"):  # as the packing of the stand-in's arguments has it
        operator("codebook_gemm")(*product)
    assert not setting.driver.records


def test_residuals(setting: Setting, product: list[Any], whole: list[Any]) -> None:
    for op, args, place in (("codebook_gemm", product, 11), ("codebook_gemv", whole, 12)):
        m = 40 if op == "codebook_gemm" else 1
        args[place] = torch.randn(m, 80).half()
        _, python, hit = served(setting, lambda op=op, args=args: operator(op)(*args))
        assert not hit
        _, native, hit = served(setting, lambda op=op, args=args: operator(op)(*args))
        assert hit
        assert facts(native, setting.driver) == facts(python, setting.driver)
        args[place] = torch.randn(m, 81).half()
        with pytest.raises(QcutError, match=f"qcut::{op}: residual has shape"):
            operator(op)(*args)


def test_another_call_is_another_plan(setting: Setting, call: tuple[str, list[Any]]) -> None:
    op, args = call
    changes: dict[str, list[dict[int, Any]]] = {
        "rotate_tokens": [
            {0: torch.randn(65, 320).half()},
            {0: torch.randn(40, 320).bfloat16()},
            {3: 64},
            {1: torch.zeros(2, 12, dtype=torch.int32), 4: [1, 2]},
            {5: HALF},
            {2: "none"},
        ],
        "codebook_gemm": [{8: None}, {10: "relu"}, {12: BRAIN}, {11: torch.zeros(40, 80).half()}],
        "codebook_gemv": [{9: None}, {11: "relu"}, {13: SINGLE}, {12: torch.zeros(1, 80).half()}],
    }
    for changed in changes[op]:
        given = [changed.get(i, value) for i, value in enumerate(args)]
        assert not served(setting, lambda given=given: operator(op)(*given))[2]
        assert served(setting, lambda given=given: operator(op)(*given))[2]
    assert served(setting, lambda: operator(op)(*args))[2]


def test_no_tokens_are_pythons(setting: Setting, rotation: list[Any], product: list[Any]) -> None:
    rotation[0] = rotation[0][:0]
    product[:3] = product[0][:, :0], product[1][:0], 0
    (blocks, scale), records, _ = served(setting, lambda: operator("rotate_tokens")(*rotation))
    assert (blocks.shape, scale.shape, records) == ((3, 0, 8, 128), (0,), [])
    y, records, _ = served(setting, lambda: operator("codebook_gemm")(*product))
    assert (y.shape, records) == ((0, 80), [])


@pytest.mark.parametrize("failing", ["launch", "stream"])
def test_python_repeats_what_the_driver_refuses(setting: Setting, call: tuple[str, list[Any]], failing: str) -> None:
    op, args = call
    _, (record,), _ = served(setting, lambda: operator(op)(*args))
    if failing == "stream":
        setting.driver.stream_status = 1
    else:
        setting.driver.status[record.function] = 400
    hits = setting.library.hits
    _, records, _ = served(setting, lambda: operator(op)(*args))
    assert setting.library.hits == hits
    assert [r.function for r in records] == [record.function] * (1 if failing == "stream" else 2)


def test_full_tables_are_emptied_in_cpp_too(setting: Setting, rotation: list[Any], product: list[Any]) -> None:
    for m in (1, 8, 16, 32, 80):
        blocks, scale = torch.zeros(3, (m + 7) // 8, 8, 128, dtype=torch.int8), torch.ones(m)
        for activation in ACTIVATIONS:
            operator("codebook_gemm")(blocks, scale, m, *product[3:10], activation, *product[11:])
    assert not served(setting, lambda: operator("codebook_gemm")(*product))[2]
    assert served(setting, lambda: operator("codebook_gemm")(*product))[2]
    assert served(setting, lambda: operator("rotate_tokens")(*rotation))[2], "another operator's plans stay"


def test_layers_share_rotations(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotations, "stream_state", lambda device: (STREAM, 0))
    monkeypatch.setattr(rotations.shared, "_last", None)
    q, k, v = (layer("codebook4_int8") for _ in range(3))
    for _ in range(2):  # by Python, by C++
        x = torch.randn(33, 320).half()
        _, records, hit = served(setting, lambda x=x: (q(x), k(x), v(x)))
        assert len(records) == 4
        first, *rest = (decoded(record, setting.driver.params[record.function]) for record in records)
        assert {args["x"] for args in rest} == {first["y"]}
        assert {args["row_scale"] for args in rest} == {first["scale"]}
    assert hit
