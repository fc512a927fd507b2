"""The C++ operators of codebook layers against Python's, on CPU tensors, as whole layers call them.

Kernels are chosen for GPUs that are not there, and described and packed as for those; callbacks stand in for the driver.
Both must pass the same bytes to the same kernels in the same order. Addresses of the buffers a call allocates differ from
call to call; they are compared by what they point to.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from qcut.config import ShiftedCodebook
from qcut.cuda import codebook as codebook_cuda
from qcut.cuda import native as _native
from qcut.cuda import plans
from qcut.cuda.plans import LaunchPlan, LaunchSpec, PlanCache
from qcut.dispatch.gpus import Target
from qcut.errors import QcutError
from qcut.layers import codebook as codebook_layers
from qcut.layers import rotations
from qcut.layers.codebook import CodebookLinear
from qcut.layers.shifted import ShiftedCodebookLinear
from tests.support.launches import A100, H200
from tests.support.native import STREAM, Driver, Kernel, Record, Setting, decoded, registered

NAMESPACE = "qcut_native_codebook_test"
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
LIMIT = 20
"""Products that the plan cache holds."""
SCHEMES = (
    *("codebook4", "codebook3", "codebook2_rows", "codebook4+4", "codebook3+3_g64", "codebook4+2", "codebook4_g32"),
    *("codebook4_pairs", "codebook3_qr", "codebook4+4_g48_qr", "codebook4_none", "int4_g32", "shifted"),
    *("codebook4_int8", "codebook4_rows_int8", "codebook4+4_int8", "codebook4+3_int8", "codebook4_pairs_int8"),
    *("codebook2_qr_int8", "codebook4_none_int8"),
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
        return LaunchPlan(kernel, spec.grid, tail=spec.tail, pdl=spec.pdl, needs_workspace=spec.needs_workspace)

    monkeypatch.setattr(LaunchSpec, "load", load)
    monkeypatch.setattr(codebook_cuda, "target", lambda device: gpu)
    monkeypatch.setattr(codebook_cuda, "has_cutlass", lambda: True)
    monkeypatch.setattr(codebook_cuda, "current_stream", lambda device: STREAM)
    for name, ops in (("_rotation_plans", ["rotate_tokens"]), ("_product_plans", ["codebook_gemm", "codebook_gemv"])):
        monkeypatch.setattr(codebook_cuda, name, PlanCache(limit=LIMIT, on_clear=partial(library.clear, *ops)))
    monkeypatch.setattr(_native, "library", lambda later=None: library)
    monkeypatch.setattr(codebook_layers, "_has_kernels", lambda device: True)
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
    own = ShiftedCodebookLinear.from_parts(plain.passes, plain.bias if bias else None, shifted, offsets=offsets, order=None)
    own.activation = activation
    return own


def facts(records: list[Record], driver: Driver) -> list[Any]:
    """Launches with addresses of memory that a launch before wrote as differences to it, and without those of results."""
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


def test_a_host_launcher_serves_prompts_of_one_norm_a_row(setting: Setting) -> None:
    linear = layer("codebook4_rows_int8", 1024, 512)
    same_calls(setting, linear, torch.randn(2048, 1024).half())
    hosted = setting.driver.records[-1].grid is None
    assert hosted is (codebook_cuda.target(0) is H200)
