"""qcut.gemm_s8 on the GPU: every layout, size and raw output as dispatch serves them, against int64 and the CPU."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import qcut
from qcut import jit
from qcut.backends.cuda.gemm import Product, gemm_problem, has_cutlass
from qcut.backends.cuda.gemm import gemm_s8 as gemm_on_cuda
from qcut.backends.cuda.launch.plans import m_bucket, target
from qcut.cli import main as cli
from qcut.dispatch.gemm import Choice
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.families import FAMILIES, family
from qcut.emitters.gemm.problem import GemmProblem
from qcut.ops.gemm import GemmS8Op
from qcut.schemes import K_MAX
from tests.gpu.support.oracles import DEVICE, assert_same, full_range, pattern
from tests.gpu.support.pools import guard_pool

LAYOUTS = tuple("".join(flags) for flags in itertools.product("tn", repeat=3))
"""Of A, B and D, t row-major and n column-major, as `GemmProblem.layouts`."""
ALIGNED, ODD, LARGE = (144, 272, 208), (131, 257, 101), (2053, 3071, 261)
SMALL = ((1, 1, 1), (1, 17, 33), (33, 1, 7), (16, 48, 1), (7, 128, 256))
OUTPUTS = {
    "s8": {"out_dtype": torch.int8, "out_inv_scale": 40 / (5461 * 200**0.5), "out_zero_point": 3},
    "wrap": {"out_dtype": torch.int8, "wrap": True},
    "s32": {"out_dtype": torch.int32},
}
EPILOGUES = {"s8": Epilogue(DType.S8), "wrap": Epilogue(DType.S8, wrap=True), "s32": Epilogue(DType.S32)}
FILLER = 127


def place(q: Tensor, row_major: bool, gap: int, offset: int) -> Tensor:
    """The matrix on the GPU in a memory order, ``gap`` elements between runs and ``offset`` before the first."""
    rows, columns = q.shape
    runs, run = (rows, columns) if row_major else (columns, rows)
    memory = torch.full((offset + runs * (run + gap) + 64,), FILLER, dtype=q.dtype, device=DEVICE)
    view = memory[offset : offset + runs * (run + gap)].view(runs, run + gap)[:, :run]
    return (view if row_major else view.t()).copy_(q)


@dataclass(frozen=True)
class Case:
    """One call: what it computes, and where its operands lie."""

    layouts: str
    shape: tuple[int, int, int]
    out: str = "s8"
    tensor_cores: bool = True
    gap: int = 0
    offset: int = 0

    def data(self) -> tuple[Tensor, Tensor]:
        m, n, k = self.shape
        return full_range(m, k, seed=m), full_range(n, k, seed=n + 1)

    def placed(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        where = (self.gap, self.offset)
        return place(a, self.layouts[0] == "t", *where), place(b, self.layouts[1] == "n", *where)

    @property
    def options(self) -> dict[str, Any]:
        return {**OUTPUTS[self.out], "out_layout": "row" if self.layouts[2] == "t" else "column"}

    def source(self) -> KernelSource:
        """What dispatch takes for it."""
        m, n, k = self.shape
        problem = gemm_problem(*self.placed(*self.data()), EPILOGUES[self.out], self.options["out_layout"])
        product = Product(problem, m_bucket(m), n, k, self.tensor_cores)
        return product.spec(target(torch.cuda.current_device()), cutlass=has_cutlass()).source

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        cores = "" if self.tensor_cores else "-simt"
        return f"{self.layouts}-{sizes}-{self.out}{cores}-gap{self.gap}-offset{self.offset}"


CASES = (
    *(Case(layouts, ALIGNED) for layouts in LAYOUTS),
    *(Case(layouts, ALIGNED, gap=16, offset=16) for layouts in LAYOUTS),
    *(Case(layouts, ALIGNED, gap=3, offset=5) for layouts in LAYOUTS),
    *(Case(layouts, ALIGNED, gap=gap, offset=gap) for layouts in ("tnt", "ntn") for gap in (4, 8)),
    *(Case(layouts, ODD) for layouts in LAYOUTS),
    *(Case(layouts, LARGE) for layouts in LAYOUTS),
    *(Case(layouts, ODD, gap=11, offset=1) for layouts in LAYOUTS),
    *(Case(layouts, shape, out) for layouts in ("tnt", "nnn") for shape in (ALIGNED, ODD) for out in ("wrap", "s32")),
    *(Case(layouts, shape, "s32") for layouts in ("tnt", "ntn") for shape in SMALL),
    *(Case(layouts, shape, tensor_cores=False) for layouts in ("tnt", "nnt", "ttn") for shape in (ALIGNED, ODD)),
)


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    """Builds what the cases reach, in parallel."""
    sources = {source.name: source for source in (case.source() for case in CASES)}
    for result in jit.build_many(sources.values()).values():
        if isinstance(result, Exception):
            raise result


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bitwise(case: Case) -> None:
    a, b = case.data()
    operands = case.placed(a, b)
    first = qcut.gemm_s8(*operands, **case.options, tensor_cores=case.tensor_cores)
    m, n, _ = case.shape
    assert first.stride() == ((n, 1) if case.layouts[2] == "t" else (1, m))
    if case.out == "s8":
        assert_same(first.cpu(), qcut.gemm_s8(a, b, **case.options))
        assert first.unique().numel() > 100
    else:
        sums = a.long() @ b.long().t()
        assert torch.equal(first.cpu().long(), sums if case.out == "s32" else (sums + 128) % 256 - 128)
    assert torch.equal(qcut.gemm_s8(*operands, **case.options, tensor_cores=case.tensor_cores), first)


@pytest.mark.parametrize("layouts", ["tnt", "nnn"])
@pytest.mark.parametrize("kind", ["all_min", "checkerboard", "identity", "min_times_max"])
def test_extreme_sums(kind: str, layouts: str) -> None:
    case = Case(layouts, ODD, "s32")
    a, b = pattern(kind, *ODD)
    got = qcut.gemm_s8(*case.placed(a, b), **case.options)
    assert torch.equal(got.cpu().long(), a.long() @ b.long().t())


@pytest.mark.parametrize(("out", "value"), [("s32", -128), ("wrap", -127)])
def test_the_largest_k(out: str, value: int) -> None:
    a = torch.full((3, K_MAX), value, dtype=torch.int8, device=DEVICE)
    got = qcut.gemm_s8(a, a[:2], **OUTPUTS[out])
    total = value * value * K_MAX
    assert (got == (total if out == "s32" else (total + 128) % 256 - 128)).all()


@pytest.mark.parametrize("case", [Case("tnn", (129, 512, 272), "s32"), Case("ntn", (512, 131, 96))], ids=str)
def test_writes_every_element_and_no_other(case: Case) -> None:
    a, b = case.data()
    operands = case.placed(a, b)
    m, n, _ = case.shape
    qcut.gemm_s8(*operands, **case.options)  # builds the kernel
    size = m * n * EPILOGUES[case.out].out.bits // 8
    assert size % 512 == 0
    with torch.cuda.use_mem_pool(guard_pool()):
        before, slot, after = (torch.full((size,), 0x5A, dtype=torch.uint8, device=DEVICE) for _ in range(3))
        address = slot.data_ptr()
        del slot
        out = qcut.gemm_s8(*operands, **case.options)
        assert out.data_ptr() == address, "the allocator put the result elsewhere: this test proves nothing"
        assert_same(out.cpu(), qcut.gemm_s8(a, b, **case.options))
        assert (before == 0x5A).all()
        assert (after == 0x5A).all()


def test_everything_fused_into_a_column_major_result() -> None:
    m, n, k = ODD
    a, b = full_range(m, k), full_range(n, k, seed=1)
    options: dict[str, Any] = {
        "zero_point": torch.randint(-128, 128, (m,), dtype=torch.int32),
        "colsum": b.sum(1, dtype=torch.int32),
        "row_scale": torch.rand(m) / 74,
        "col_scale": torch.rand(n) / 740,
        "bias": torch.randn(n),
        "activation": "relu",
        "residual": torch.randn(m, n).half(),
        "out_layout": "column",
    }
    moved = {key: value.to(DEVICE) if isinstance(value, Tensor) else value for key, value in options.items()}
    got = qcut.gemm_s8(a.to(DEVICE), b.to(DEVICE), **moved)
    assert_same(got.cpu(), qcut.gemm_s8(a, b, **options))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_given_kernel_runs_whatever_dispatch_thinks(name: str) -> None:
    m, n, k = ALIGNED
    arch = target(torch.cuda.current_device()).arch
    a, b = full_range(m, k).to(DEVICE), full_range(n, k, seed=1).to(DEVICE)
    options = {"out_dtype": torch.float32}
    tile = family(name).menu(GemmProblem(epilogue=Epilogue(DType.F32)), arch)[0]
    got = gemm_on_cuda(GemmS8Op(a, b, **options), Choice(name, tile, reason="asked for"))
    assert_same(got.cpu(), qcut.gemm_s8(a.cpu(), b.cpu(), **options))


@pytest.mark.parametrize("case", [Case("ntn", ODD), Case("tnn", ALIGNED, "s32"), Case("tnt", ODD, "wrap")], ids=str)
def test_opcheck(case: Case) -> None:
    torch.library.opcheck(torch.ops.qcut.gemm_s8.default, case.placed(*case.data()), case.options)


def test_graph_replays_on_new_data() -> None:
    case = Case("ntn", ODD)
    a, b = case.placed(*case.data())
    eager = qcut.gemm_s8(a, b, **case.options)
    held = a.clone()
    held.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = qcut.gemm_s8(held, b, **case.options)
    held.copy_(a)
    graph.replay()
    assert_same(out, eager)


@pytest.mark.parametrize(
    "flags", ["1 0 1 1", "0 1 0 1", "1 0 1 0", "1 0 1 1 --mode wrap", "1 0 1 1 --kernel wmma", "1 1 0 1 --kernel mma"]
)
def test_command(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["gemm", "1024", "512", "768", *flags.split(), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["device"] == torch.cuda.get_device_name()
    assert answer["kernel"]
    assert (answer["checked"], answer["wrong"]) == (True, 0)
    assert answer["timing"]["median_us"] > 0
    assert answer["tops"] > 0
    assert answer["x_cublaslt"] > 0, answer["notes"]


def test_command_takes_any_size(capsys: pytest.CaptureFixture[str]) -> None:
    for sizes in ("1 1 1", "3 5 7"):
        assert cli.main(["gemm", *sizes.split(), "0", "1", "1", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["wrong"] == 0
        assert answer["cublaslt"] or answer["notes"]
