"""Which kernels may begin before their predecessor ends: with a weight that may just have been written, none that reads
it so early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qcut.backends.cuda import codebook as codebook_cuda
from qcut.backends.cuda import gemm as gemm_cuda
from qcut.backends.cuda import linear as linear_cuda
from qcut.backends.cuda import norm as norm_cuda
from qcut.backends.cuda.codebook import CodebookLayer
from qcut.backends.cuda.launch.plans import LaunchSpec, PlanCache
from qcut.backends.cuda.linear import Int8Layer, LinearLayer
from qcut.layers import codebook, int8, rotations
from qcut.layers.linear import Linear
from qcut.numerics.codebook import tokens as rotated_tokens
from qcut.ops.codebook import CodebookGemmOp, CodebookGemvOp, RotateTokensOp
from qcut.ops.linear import Int8LinearOp, LinearWithAbsmaxOp
from qcut.ops.norm import AddNormInt8Op, AddNormOp, AddNormRotatedOp
from tests.support.fakes.launches import H200

HALF = torch.float16


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linear_cuda, codebook_cuda, norm_cuda):
        monkeypatch.setattr(module, "target", lambda device: H200)
    monkeypatch.setattr(gemm_cuda, "has_cutlass", lambda: False)
    monkeypatch.setattr(norm_cuda, "pdl", lambda device: True)


def linear(scheme: str, m: int, early_read: bool) -> tuple[LaunchSpec | None, LaunchSpec]:
    return LinearLayer(scheme, HALF, m, 1280, 1280, True, "none", True, early_read).specs(0)


def test_product_of_few_tokens_begins_early_if_promised() -> None:
    for scheme, m in (("w8a8", 1), ("w8a8", 8), ("w8a16", 1), ("w8a16", 8), ("fp8_dynamic", 8)):
        for early_read in (True, False):
            quantize, product = linear(scheme, m, early_read)
            assert product.pdl is early_read, (scheme, m)
            assert quantize is None or quantize.pdl, "it waits before it reads"
    for early_read in (True, False):
        spec, _ = Int8Layer(HALF, 1, 1280, 1280, True, "none", True, early_read).spec(0)
        assert spec.pdl is early_read


def test_kernels_that_read_nothing_early_need_no_promise() -> None:
    for scheme in ("w8a8", "w8a8_static"):
        _, product = linear(scheme, 512, False)
        assert product.pdl
    few = gemm_cuda.Product(linear_cuda.linear_problem(*DESCRIPTION), 1, 1280, 1280).stream_spec("none", H200)
    assert few is not None
    assert few.pdl, "gemm_s8 waits before it reads"


DESCRIPTION: tuple[Any, ...] = (linear_cuda.DTYPES[HALF], 1280, 1280, True, "none", "w8a8")


@pytest.mark.parametrize("kind", ["hadamard", "qr", "none"])
def test_codebook_kernels_begin_early_only_if_promised(kind: str) -> None:
    layer = CodebookLayer(
        rows=4, n=256, k=256, dtype=HALF, bits=4, passes=1, kind=kind, group_size=128, int8=False, bias=True,
        activation="none",
    )  # fmt: skip
    for rows in (1, 4, 64):
        described = replace(layer, rows=rows)
        assert described.product.spec(H200).pdl
        assert not described.product._replace(early_read=False).spec(H200).pdl
        assert all(spec.pdl for spec in described.rotation.specs(H200))
        early = [spec.pdl for spec in described.rotation._replace(early_read=False).specs(H200)]
        assert early == [kind == "none"] * len(early)


# ── what calls ask for ───────────────────────────────────────────────────────────────────────────


class Asked(PlanCache[Any]):
    """Plans that launch nothing; the keys that calls asked for."""

    def __init__(self, plan: Any) -> None:
        super().__init__()
        self.keys: list[Any] = []
        self.plan = plan

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key]

    def __missing__(self, key: Any) -> Any:
        self.keys.append(key)
        return self.plan


class Idle:
    """A plan that launches nothing."""

    rows_for, needs_workspace, raises_absmax = staticmethod(lambda m: m), False, True
    product = property(lambda self: self)

    def launch(self, *_: Any) -> None:
        return None

    run = launch


def unaligned(t: Tensor) -> Tensor:
    memory = torch.zeros(t.numel() + 1, dtype=t.dtype)[1:]
    return memory.view(t.shape).copy_(t)


def int8_calls(early_read: bool, change: Callable[[Tensor], Tensor]) -> dict[str, tuple[Callable[[], Any], str]]:
    q, scale, rows = torch.ones(64, 64).char(), torch.ones(64), torch.ones(4)
    x = torch.randn(4, 64).half()
    weight = (change(q), scale, None, "none")
    int8 = Int8LinearOp(q[:4], rows, *weight, HALF, None, early_read)
    noted = LinearWithAbsmaxOp(x, rows, *weight, early_read)
    return {
        "int8_linear": (lambda: linear_cuda.int8_linear(int8), "_int8_plans"),
        "noted_linear": (lambda: linear_cuda.linear_with_absmax(noted), "_absmax_plans"),
    }


@pytest.mark.parametrize("name", ["int8_linear", "noted_linear"])
def test_int8_operators_ask_for_what_was_promised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for early_read, change, early in ((True, same, True), (False, same, False), (True, unaligned, False)):
        call, cache = int8_calls(early_read, change)[name]
        asked = Asked(Idle())
        monkeypatch.setattr(linear_cuda, cache, asked)
        call()
        ((layer, _),) = asked.keys
        assert layer.early_read is early


def same(t: Tensor) -> Tensor:
    return t


def test_codebook_operators_ask_for_what_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Linear.from_float(torch.nn.Linear(128, 64), "codebook4")
    part, book = layer.sets()[0], layer._books()[0][HALF]  # type: ignore[attr-defined]
    signs = rotated_tokens.operands("hadamard", 128, 128, layer.scheme.seeds, HALF)  # type: ignore[attr-defined]
    seeds = list(layer.scheme.seeds)  # type: ignore[attr-defined]
    monkeypatch.setattr(codebook_cuda, "current_stream", lambda device: 0)
    tail = (part.col_scale, book, None, 4, "none", None, HALF)

    def calls(early_read: bool, change: Callable[[Tensor], Tensor]) -> dict[str, tuple[Callable[[], Any], Any]]:
        units, operands = change(part.units), change(signs)
        gemm = CodebookGemmOp(
            torch.zeros(2, 1, 8, 64).half(), None, 4, units, part.packed_norms, None, *tail, early_read=early_read
        )
        row = torch.randn(1, 128).half()
        gemv = CodebookGemvOp(
            row, operands, 128, seeds, part.units, part.packed_norms, None, *tail, early_read=early_read
        )
        rotate = RotateTokensOp(row, operands, "hadamard", 128, seeds, HALF, early_read)
        return {
            "_product_plans": [lambda: codebook_cuda.codebook_gemm(gemm), lambda: codebook_cuda.codebook_gemv(gemv)],
            "_rotation_plans": [lambda: codebook_cuda.rotate_tokens(rotate)],
        }

    for early_read, change, early in ((True, same, True), (False, same, False), (True, unaligned, False)):
        for cache, every in calls(early_read, change).items():
            for call in every:
                asked = Asked((Idle(),) if cache == "_rotation_plans" else Idle())
                monkeypatch.setattr(codebook_cuda, cache, asked)
                call()
                assert asked.keys[0][0].early_read is early


def test_norms_ask_for_what_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_cuda, "current_stream", lambda device: 0)
    monkeypatch.setattr(norm_cuda, "target", lambda device: H200)
    x, weight = torch.randn(4, 64).half(), torch.ones(64).half()
    turned: tuple[Any, ...] = (torch.zeros(1, 4, dtype=torch.int32), 64, [1], HALF, None)
    for given, early_read, early in (
        (weight, True, True),
        (weight, False, False),
        (weight[:1].expand(64), True, False),
    ):
        for call, launch in (
            (AddNormOp(x, None, given, None, False, 1e-6, None, early_read), norm_cuda.add_norm),
            (AddNormInt8Op(x, None, given, None, False, 1e-6, 64, None, None, early_read), norm_cuda.add_norm_int8),
            (
                AddNormRotatedOp(x, None, given, None, False, 1e-6, *turned, None, early_read=early_read),
                norm_cuda.add_norm_rotated,
            ),
        ):
            asked = Asked(Idle())
            monkeypatch.setattr(norm_cuda, "_plans", asked)
            launch(call)  # type: ignore[operator]
            ((*_, asked_for, _),) = asked.keys
            assert asked_for is early


def test_norms_begin_early_only_if_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    class Spec:
        def __init__(self, source: Any, grid: Any, pdl: bool) -> None:
            seen.append(pdl)

        def load(self, device: int) -> None:
            return None

    monkeypatch.setattr(norm_cuda, "LaunchSpec", Spec)
    for early_read in (True, False):
        norm_cuda._plans.maker(HALF, False, 64, False, False, False, True, None, False, False, early_read, 0)
    assert seen == [True, False]


def test_layers_promise() -> None:
    for module, names in (
        (int8, ("_W8A8", "_INT8", "_WITH_ABSMAX", "_W8A8_STATIC", "_W8A16", "_INT16X8", "_INT16X8_STATIC")),
        (codebook, ("_GEMM", "_GEMV")),
        (rotations, ("_ROTATE",)),
    ):
        for name in names:
            assert getattr(module, name)._overloadname == "early_read", name


def test_callers_of_operators_promise_nothing() -> None:
    """torch takes the first overload with matching arguments; this must be the one without the promise."""
    layer = Linear.from_float(torch.nn.Linear(64, 32))
    called: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func)
            return func(*args, **(kwargs or {}))

    x, op = torch.randn(3, 64), torch.ops.qcut.w8a8_linear
    with Watch():
        op(x, layer.qweight, layer.weight_scale, layer.bias, "none")
        layer(x)
    assert called == [op.default, op.early_read]
