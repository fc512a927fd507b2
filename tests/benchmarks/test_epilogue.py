"""The epilogue ablation without a GPU: two kernels that differ in the epilogue alone, and all that surrounds them."""

from __future__ import annotations

import csv
import ctypes
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import bench_epilogue, harness
from benchmarks.bench_epilogue import EPILOGUES, FIXED, NODE, SHAPES, STOCK, Case
from benchmarks.bench_gemm import OUTPUTS, Operands, require_equal
from benchmarks.harness import CheckError
from benchmarks.shapes import Shape
from qcut import jit
from qcut.dispatch.gemm import Choice
from qcut.dispatch.gpus import Target
from qcut.emitters.core.source import KernelSource
from qcut.emitters.gemm.problem import GemmProblem
from qcut.numerics import int8 as numerics

H200 = Target("sm_90a", 132, "NVIDIA H200")
SMALL = Shape(33, 48, 272)


def reference(data: Operands, output: str) -> torch.Tensor:
    epilogue, dtype = EPILOGUES[output], OUTPUTS[output]
    args: dict[str, object] = {}
    if epilogue.zero_point != "none":
        args |= {"zero_point": data.zero_point, "colsum": data.colsum}
    if dtype is torch.int8:
        args |= {"out_inv_scale": data.out_inv_scale, "out_zero_point": data.out_zero_point}
    scales = {"row_scale": data.row_scale, "col_scale": data.col_scale, "bias": data.bias}
    return numerics.gemm_s8_ref(data.a, data.b[0], **scales, out_dtype=dtype, **args)  # type: ignore[arg-type]


@pytest.mark.parametrize("output", EPILOGUES)
def test_stock_tree_differs_from_the_node_in_the_epilogue_alone(output: str) -> None:
    problem = GemmProblem(epilogue=EPILOGUES[output])
    before = bench_epilogue.emit_node(problem, FIXED.tile)
    stock = bench_epilogue.emit_stock(problem, FIXED.tile)
    node = bench_epilogue.emit_node(problem, FIXED.tile)
    assert before == node, "the emitter stayed patched"
    assert "qcut::Sm90Dequantize<" in node.text
    assert "Sm90Dequantize" not in stock.text
    vectors = sum(p.kind == "ptr" for p in EPILOGUES[output].params())
    assert stock.text.count("fusion::Sm90RowBroadcast<") + stock.text.count("fusion::Sm90ColBroadcast<") == vectors
    assert "Broadcast<" not in node.text.replace("Sm90ScalarBroadcast<", "")
    assert stock.name != node.name
    assert stock.entry == stock.name
    assert f"void {stock.name}(" in stock.text
    assert stock.host_text is not None
    assert f"using Kernel = {stock.name}_type;" in stock.host_text
    assert (stock.params, stock.defines, stock.arch) == (node.params, node.defines, node.arch)
    main_loops = {s.text.replace(s.name, "K").split("using CollectiveMainloop")[1] for s in (node, stock)}
    assert len(main_loops) == 1


def test_every_shape_meets_dispatchs_tile_and_the_fixed_one() -> None:
    cases = bench_epilogue.cases(H200)
    assert {(c.shape, c.output) for c in cases} == {(s, o) for s in SHAPES for o in EPILOGUES}
    for shape in SHAPES:
        for output in EPILOGUES:
            choices = [c.choice for c in cases if (c.shape, c.output) == (shape, output)]
            assert choices[-1].tile == FIXED.tile
            assert choices[0].reason == "tuned"
    assert len({s.name for c in cases for s in c.sources.values()}) == 2 * len(
        {(c.output, c.choice.tile) for c in cases}
    )
    assert set(bench_epilogue.QUICK_SHAPES) <= set(SHAPES)


@pytest.mark.parametrize("output", EPILOGUES)
def test_oracle_and_reference_agree_bitwise(output: str) -> None:
    data = Operands.random(SMALL, device="cpu", copies=1)
    want = bench_epilogue.expected(data, output)
    assert want.unique().numel() > 100
    bench_epilogue.require_same_bits(reference(data, output), want)


def test_a_zeros_sign_is_a_difference() -> None:
    zeros = torch.zeros(4, dtype=torch.float16)
    require_equal(-zeros, zeros)
    with pytest.raises(CheckError, match="4 of 4"):
        bench_epilogue.require_same_bits(-zeros, zeros)


class FakeKernel:
    """Looks an address up among known operands, as a kernel would, and writes the reference's result to D."""

    def __init__(self, source: KernelSource, operands: dict[int, Operands], wrong: bool) -> None:
        self._source, self._operands, self._wrong = source, operands, wrong

    def launch(self, grid: tuple[int, int, int], args: Sequence[int | float], stream: int, pdl: bool) -> None:
        a = dict(zip((p.name for p in self._source.params), args, strict=True))
        data = self._operands[int(a["a"])]
        for param in self._source.params:
            if param.kind == "ptr" and param.name not in ("b", "d", "workspace"):
                assert a[param.name] == getattr(data, param.name).data_ptr()
        assert a["b"] in [b.data_ptr() for b in data.b]
        assert (a["m"], a["n"], a["k"], a["lda"], a["ldb"], a["ldd"]) == (*data.acc.shape, *data.a.shape[1:] * 3, 48)
        assert (a["sm_count"], a["splits"], a["workspace"]) == (132, 1, 0)
        result = reference(data, "s8" if "out_inv_scale" in a else "f16")
        result[0, 0] += self._wrong
        ctypes.memmove(int(a["d"]), result.data_ptr(), result.nbytes)


class FakeClock:
    """Of the two variants of a case, calls of the first take 3 µs and of the second 6."""

    def __init__(self) -> None:
        self._captured = 0

    def warm_up(self, body: Callable[[], object]) -> None:
        body()

    def capture(self, body: Callable[[], object]) -> Callable[[], object]:
        self._captured += 1
        cost = 3.0 * (2 - self._captured % 2) * 400
        return lambda: cost

    def time_us(self, replay: Callable[[], object]) -> float:
        cost = replay()
        return cost if isinstance(cost, float) else 10.0


@pytest.mark.parametrize("wrong", [False, True])
def test_run_checks_measures_and_writes(
    wrong: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    operands: dict[int, Operands] = {}

    def random(shape: Shape) -> Operands:
        data = make_random(shape, device="cpu", copies=2)
        operands[data.a.data_ptr()] = data
        return data

    make_random = Operands.random
    binary = jit.Binary("", "", "sm_90a", "", b"", None, "", jit.Resources(168, 0, 0, 16, 16))
    monkeypatch.setattr(Operands, "random", random)
    monkeypatch.setattr(jit, "build_many", lambda sources, progress: {s.name: binary for s in sources})
    monkeypatch.setattr(
        jit, "load", lambda binary, source, device: FakeKernel(source, operands, wrong and "_stock" in source.name)
    )
    monkeypatch.setattr(harness, "CudaClock", FakeClock)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(bench_epilogue, "SHAPES", (SMALL,))
    options = harness.parser("").parse_args(["--out", str(tmp_path)])
    assert bench_epilogue.run(options, H200) == int(wrong)
    rows = list(csv.DictReader((tmp_path / "bench_epilogue.csv").open(newline="")))
    said = capsys.readouterr().out
    if wrong:
        assert {r["variant"] for r in rows} == {NODE}
        assert said.count(f"WRONG {STOCK}: 1 of 1584 elements differ") == len(rows)
        return
    assert len(rows) == 2 * 2 * len(EPILOGUES)
    assert {r["x_stock"] for r in rows if r["variant"] == NODE} == {"2.0"}
    assert {r["x_stock"] for r in rows if r["variant"] == STOCK} == {"1.0"}
    assert {r["spill_bytes"] for r in rows} == {"16"}
    assert all(r["kernel"].endswith("_stock") == (r["variant"] == STOCK) for r in rows)
    assert "0 wrong results" in said


def test_summary_groups_by_output_and_tile() -> None:
    tuned = Choice("int8_cutlass", FIXED.tile, swizzle=4, reason="tuned")
    text = bench_epilogue.summary(
        {Case(SHAPES[0], "s8", tuned): 2.0, Case(SHAPES[1], "s8", tuned): 0.5, Case(SHAPES[0], "s8", FIXED): 1.25}
    )
    header, first, second = text.splitlines()
    assert header.split()[:3] == ["output", "tile", "by"]
    assert first.split() == ["s8", "dispatch", "2", "1", "0.5", SHAPES[1].name, "2", SHAPES[0].name]
    assert second.split() == ["s8", "benchmark", "1", "1.25", "1.25", SHAPES[0].name, "1.25", SHAPES[0].name]


def test_without_a_gpu_a_clear_message_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        bench_epilogue.main(["--out", str(tmp_path)])
    assert stop.value.code == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert math.isnan(bench_epilogue.spill_bytes(jit.Binary("", "", "", "", b"", None, "", None)))
