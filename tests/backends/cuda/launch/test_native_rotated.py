"""The C++ operators of layers with rotated int8 tokens against Python's, on CPU tensors, as whole layers call them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import qcut
from qcut.backends.cuda import codebook as codebook_cuda
from qcut.backends.cuda import gemm as gemm_cuda
from qcut.backends.cuda import linear as linear_cuda
from qcut.backends.cuda.launch import native as _native
from qcut.backends.cuda.launch import plans
from qcut.backends.cuda.launch.plans import LaunchPlan, LaunchSpec, PlanCache
from qcut.dispatch.gpus import Target
from qcut.errors import QcutError
from qcut.layers import rotated, rotations
from tests.support.fakes.launches import A100, H200
from tests.support.fakes.native import STREAM, Driver, Kernel, Record, Setting, decoded, registered

NAMESPACE = "qcut_native_rotated_test"
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def driver() -> Driver:
    return Driver()


@pytest.fixture(scope="module")
def library(driver: Driver) -> Iterator[_native.Library]:
    with registered(NAMESPACE, driver) as loaded:
        yield loaded


def operator(name: str, overload: str = "default") -> Any:
    return getattr(getattr(getattr(torch.ops, NAMESPACE), name), overload)


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
    for module in (codebook_cuda, linear_cuda):
        monkeypatch.setattr(module, "target", lambda device: gpu)
    for module in (codebook_cuda, plans):
        monkeypatch.setattr(module, "current_stream", lambda device: STREAM)
    for module, name, op in (
        (codebook_cuda, "_rotation_plans", "quantize_rotated"),
        (linear_cuda, "_int8_plans", "int8_linear"),
        (linear_cuda, "_token_plans", "w8a8_rotated_linear"),
    ):
        monkeypatch.setattr(module, name, PlanCache(vars(module)[name].maker, on_clear=partial(library.clear, op)))
    monkeypatch.setattr(_native, "library", lambda **_: library)
    monkeypatch.setattr(rotations, "_QUANTIZE", operator("quantize_rotated", "early_read"))
    monkeypatch.setattr(rotated, "_INT8", operator("int8_linear_pure"))
    monkeypatch.setattr(rotated, "_OF_TOKENS", operator("int8_linear", "early_read"))
    monkeypatch.setattr(rotated, "_OF_ONE", operator("w8a8_rotated_linear", "early_read"))
    monkeypatch.setattr(rotations, "has_kernels", lambda device: True)
    monkeypatch.setattr(rotations, "stream_state", lambda device: None)  # each call rotates
    library.clear(*_native.OPS)
    yield Setting(driver, library)
    library.clear(*_native.OPS)


def layer(scheme: str, k: int, n: int = 80, *, bias: bool = True, activation: str = "none") -> Any:
    return qcut.Linear.from_float(torch.nn.Linear(k, n, bias=bias), scheme, activation=activation)


def forget() -> None:
    codebook_cuda._rotation_plans.clear()
    linear_cuda._int8_plans.clear()
    linear_cuda._token_plans.clear()


def served(setting: Setting, call: Callable[[], Any]) -> tuple[Any, list[Any], int]:
    """Result, launches without the addresses that calls allocate, and how many operators C++ served."""
    setting.driver.records.clear()
    before = setting.library.hits
    result = call()
    return result, facts(setting.driver.records, setting.driver), setting.library.hits - before


def facts(records: list[Record], driver: Driver) -> list[Any]:
    """Launches; the product reads what the rotation has written."""
    found, written = [], {}
    for record in records:
        args = decoded(record, driver.params[record.function])
        if "y" in args:
            written = {name: args.pop(name) for name in ("y", "scale")}
        elif written:
            assert (args.pop("a"), args.pop("row_scale")) == (written["y"], written["scale"])
        args.pop("d", None)
        found.append((record._replace(block=b""), args))
    return found


@pytest.mark.parametrize(
    ("scheme", "k"),
    [
        ("w8a8_rotated", 320),
        ("w8a8_rotated_g32", 40),
        ("w8a8_rotated_rows", 1024),
        ("w8a8_rotated_g64", 320),
        ("w8a8_rotated_g64", 20_000),
    ],
)
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_launches_are_pythons(setting: Setting, scheme: str, k: int, activation: str) -> None:
    made = layer(scheme, k, bias=activation == "none", activation=activation)
    for dtype in (HALF, BRAIN, SINGLE):
        for m in (1, 2, 8, 33, 65, 300, 2048):
            x = torch.randn(m, k).to(dtype)
            forget()
            expected, python, hits = served(setting, lambda x=x: made(x))
            calls = 1 if m == 1 and made._rotates_one and dtype is not SINGLE else 2
            assert (len(python), hits) == (calls, 0)
            got, native, hits = served(setting, lambda x=x: made(x))
            assert hits == calls
            assert native == python
            assert (got.shape, got.stride(), got.dtype) == (expected.shape, expected.stride(), expected.dtype)
            product = setting.driver.records[-1]
            assert decoded(product, setting.driver.params[product.function])["d"] == got.data_ptr()


@pytest.mark.parametrize("m", [17, 65, 300])
def test_products_have_whole_tiles_of_tokens(setting: Setting, monkeypatch: pytest.MonkeyPatch, m: int) -> None:
    """Of TMA, where memory goes on behind the tokens; results have the rows of the tokens."""
    monkeypatch.setattr(gemm_cuda, "has_cutlass", lambda: True)
    made, x = layer("w8a8_rotated", 1280, 1280), torch.randn(m, 1280).half()
    signs = made._rotation.operands(HALF, x.device)
    int8 = partial(operator("int8_linear_pure"), activation="none", dtype=HALF)
    weight = made.qweight, made.weight_scale, made.bias
    forget()
    plan = linear_cuda._int8_plans[linear_cuda.Int8Layer(HALF, plans.m_bucket(m), 1280, 1280, True, "none", False), 0]
    assert plan.product.row_multiple >= 64 or "sm90a" not in plan.product.name
    for _ in range(2):  # Python's, then C++'s
        q, scale = operator("quantize_rotated")(x, signs, 128, 42)
        for given, whole in (((q, scale), True), ((q.clone(), scale), False), ((q, scale.clone()), False)):
            y = int8(*given, *weight)
            product = setting.driver.records[-1]
            args = decoded(product, setting.driver.params[product.function])
            rows = plan.product.rows_for(m) if whole else m
            assert (args["m"], args["d"], y.shape, y.stride()) == (rows, y.data_ptr(), (m, 1280), (1280, 1))
            assert y.untyped_storage().nbytes() == 2 * 1280 * rows


def test_more_dimensions_and_strided_rows(setting: Setting) -> None:
    made, wide = layer("w8a8_rotated_g64", 320), torch.randn(34, 336).half()
    for x in (
        torch.randn(2, 3, 320).half(),
        wide[7:8, 8:328],
        wide[:, :320],
        wide[::2, 16:],
        wide[:, 1:321],
        wide[5:6, 3:323],
    ):
        forget()
        expected, python, hits = served(setting, lambda x=x: made(x))
        assert hits == 0
        got, native, hits = served(setting, lambda x=x: made(x))
        one_unaligned = len(x) == 1 and x.data_ptr() % 16 > 0  # Python rotates it by a kernel of its own
        assert (hits, native) == (0 if one_unaligned else len(python), python)
        assert (got.shape, got.stride()) == (expected.shape, expected.stride())


@pytest.fixture
def calls(setting: Setting) -> dict[str, tuple[Any, list[Any]]]:
    """Operators, and arguments that were served once."""
    made, x = layer("w8a8_rotated_g64", 320), torch.randn(40, 320).half()
    signs = made._rotation.operands(HALF, x.device)
    product = [torch.zeros(40, 320, dtype=torch.int8), torch.ones(40), made.qweight, made.weight_scale, made.bias]
    found = {
        "quantize_rotated": (operator("quantize_rotated"), [x, signs, 64, 42]),
        "w8a8_rotated_linear": (operator("w8a8_rotated_linear"), [x[:1], signs, 64, 42, *product[2:], "none"]),
        "int8_linear": (operator("int8_linear"), [*product, "none", HALF, None]),
        "int8_linear_pure": (operator("int8_linear_pure"), [*product, "none", HALF]),
    }
    for op, args in found.values():
        op(*args)
        assert served(setting, lambda op=op, args=args: op(*args))[2] == 1
    return found


def test_calls_left_to_python(setting: Setting, calls: dict[str, tuple[Any, list[Any]]]) -> None:
    """Those with gradients, with parameters elsewhere, without tokens, and with another path chosen."""
    for op, args in calls.values():
        for i, value in enumerate(args):
            if not isinstance(value, Tensor):
                continue
            if value.is_floating_point():
                given = [*args[:i], value.clone().requires_grad_(), *args[i + 1 :]]
                assert served(setting, lambda op=op, given=given: op(*given))[2] == 0
            if value is not args[0] or value.dtype is torch.int8 or len(value) == 1:
                unaligned = value.new_zeros(value.numel() + 1)[1:].view(value.shape)
                given = [*args[:i], unaligned, *args[i + 1 :]]
                assert served(setting, lambda op=op, given=given: op(*given))[2] == 0
        if len(args[0]) == 1:
            continue
        empty = [args[0][:0], args[1] if len(args) == 4 else args[1][:0], *args[2:]]
        assert served(setting, lambda op=op, empty=empty: op(*empty))[1:] == ([], 0)
        setting.library.leave_to_python(1)
        assert served(setting, lambda op=op, args=args: op(*args))[2] == 0
        setting.library.leave_to_python(0)
        assert served(setting, lambda op=op, args=args: op(*args))[2] == 1


def test_magnitudes_are_pythons(setting: Setting, calls: dict[str, tuple[Any, list[Any]]]) -> None:
    op, args = calls["int8_linear"]
    for _ in range(2):
        assert served(setting, lambda: op(*args[:-1], torch.zeros(40)))[2] == 0


def test_errors_are_pythons(setting: Setting, calls: dict[str, tuple[Any, list[Any]]]) -> None:
    hits = setting.library.hits
    for name, (op, args) in calls.items():
        for i, value in enumerate(args):
            if isinstance(value, Tensor):
                wrong_tensors = (value.expand(2, *value.shape), value.double())
                for wrong in wrong_tensors:
                    with pytest.raises(QcutError, match=f"qcut::{name.removesuffix('_pure')}: "):
                        op(*args[:i], wrong, *args[i + 1 :])
        values: dict[int, Any] = {5: "another", 6: torch.int16}
        if "rotated" in name:
            values = {2: 96, 7: "another"} if name == "w8a8_rotated_linear" else {2: 96}
        for i, wrong_value in values.items():
            with pytest.raises(QcutError, match=r"allowed: |does not exist"):
                op(*args[:i], wrong_value, *args[i + 1 :])
    assert setting.library.hits == hits
