"""Oracles of layers' benchmarks on the CPU, what they count, and rows that several calls share."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import qcut
from benchmarks.harness import CheckError, Environment, Results, Timing, read_rows
from benchmarks.layers import (
    capture,
    codebook,
    crossover,
    epilogue,
    experts,
    float8,
    gemm,
    linear,
    schemes,
    shapes,
    triton,
)
from benchmarks.layers.shapes import Shape
from qcut.backends.cuda import gemm as gemm_cuda
from qcut.backends.cuda import linear as linear_cuda
from qcut.backends.cuda.launch import plans
from qcut.emitters.core.source import KernelSource
from qcut.emitters.gemm.problem import GemmProblem
from qcut.layers.experts.experts import Experts
from qcut.layers.experts.linear_stack import LinearStack
from qcut.numerics import int8 as numerics
from qcut.numerics.gating import Gating
from tests.support.fakes.launches import H200 as TARGET

H200 = Environment("NVIDIA H200", "580", "13.0", "2.11", "abc")
SMALL, LONG = Shape(1, 1280, 1280), Shape(4096, 4096, 4096)


def timing(us: float) -> Timing:
    return Timing(us, us, us, 5)


@pytest.mark.parametrize("output", list(gemm.OUTPUTS))
def test_gemm_oracle_and_reference_agree_bitwise(output: str) -> None:
    """Two derivations of the epilogue: the benchmark's, and the one that kernels are tested against."""
    data = gemm.Operands.random(shapes.Shape(33, 48, 272), device="cpu", copies=2)
    dtype = gemm.OUTPUTS[output]
    expected = data.expected(dtype)
    assert expected.unique().numel() > 100
    for i in range(2):
        gemm.require_equal(data.qcut(dtype)(i), expected)
    assert torch.equal(data.acc, data.a.int() @ data.b[0].int().t())
    assert torch.equal(data.colsum, numerics.colsum_ref(data.b[0]))


def test_checks_catch_one_wrong_element_and_nan() -> None:
    x = torch.zeros(4, 4, dtype=torch.int8)
    y = x.clone()
    y[3, 3] = 1
    with pytest.raises(CheckError, match="1 of 16 elements"):
        gemm.require_equal(y, x)
    with pytest.raises(CheckError, match=r"int8 \(4, 4\) instead"):
        gemm.require_equal(x, x.half())
    ones = torch.ones(8, dtype=torch.double)
    gemm.require_close(ones + 1e-4, ones, 1e-3)
    for bad in (ones * 1.01, ones * math.nan):
        with pytest.raises(CheckError, match="relative error"):
            gemm.require_close(bad, ones, 1e-3)


@pytest.mark.parametrize("scheme", linear.SCHEMES)
def test_linear_variant_is_within_its_tolerance(scheme: str) -> None:
    torch.manual_seed(0)
    float16 = torch.nn.Linear(512, 64, dtype=torch.float16)
    torch.nn.init.normal_(float16.weight, std=512**-0.5)
    x = torch.randn(33, 512).half()
    reference = x.double() @ float16.weight.double().t() + float16.bias.double()
    layer = linear.qcut_layer(float16, scheme, x)
    check = linear.variant(f"qcut_{scheme}", [layer], x, reference).check
    assert check is not None
    check()
    layer.weight_scale *= 1.1
    if scheme.endswith("_static"):
        layer.col_scale *= 1.1
    with pytest.raises(CheckError):
        check()


@pytest.mark.parametrize("scheme", [*crossover.SCHEMES, crossover.FLOAT8[0]])
def test_a_wrong_layer_is_caught(scheme: str) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(512, 64, dtype=torch.float16)
    torch.nn.init.normal_(linear.weight, std=512**-0.5)
    x = torch.randn(9, 512).half()
    layer: Any = crossover.qcut_layer(linear, scheme, x)
    variant = crossover.variant(scheme, [layer, layer], (x, x.clone()))
    assert variant.check is not None
    with torch.no_grad():
        variant.check()
        right = layer.forward
        layer.forward = lambda t: 1.1 * right(t)
        with pytest.raises(CheckError):
            variant.check()


def test_torchs_float8_layer_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "_compiled", lambda: float8._quantized)  # compiling takes seconds
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 32, dtype=torch.float16)
    x, layer = torch.randn(5, 64).half(), float8.TorchFloat8(linear)
    variant = crossover.variant("torch_fp8", [layer], (x, x))
    assert variant.check is not None
    with torch.no_grad():
        variant.check()
        cast(torch.Tensor, layer.scale).mul_(2)
        assert layer(x.bfloat16()).dtype is torch.bfloat16
        layer.bias = 2 * cast(torch.Tensor, layer.bias)
        layer.dequantized_weight = lambda: linear.weight.double()  # type: ignore[method-assign]
        with pytest.raises(CheckError):
            variant.check()


def results_of(*cells: tuple[Shape, dict[str, float]], env: Environment = H200) -> Results:
    results = Results("bench_crossover", env)
    for shape, times in cells:
        names = dict.fromkeys(times, "qcut_x")
        crossover.add_rows(results, shape, {name: timing(us) for name, us in times.items()}, names)
    return results


def test_a_row_holds_its_float16() -> None:
    results = results_of((SMALL, {"fp16": 5.0, "w8a8": 4.0, "codebook4": 10.0}), (LONG, {"w8a8": 80.0}))
    assert [(row["variant"], row["fp16_us"], row["x_fp16"]) for row in results.rows] == [
        ("w8a8", 5.0, 1.25),
        ("codebook4", 5.0, 0.5),
    ]


def test_layers_of_float8_are_compared_with_int8() -> None:
    some, few = Shape(64, 128, 128), Shape(32, 128, 128)
    times = {"fp16": 9.0, "w8a8": 4.0, "torch_fp8": 3.0, "fp8_dynamic": 4.05}
    rows = [{name: str(value) for name, value in row.items()} for row in results_of((some, times), (few, times)).rows]
    assert not any(crossover.is_slow(row) for row in rows if row["variant"] in crossover.FLOAT8)
    assert crossover.float8_faster(rows) == [
        "fp8_dynamic: faster than w8a8 in 0 of 1 cells from 64 tokens on: none",
        "torch_fp8: faster than w8a8 in 1 of 1 cells from 64 tokens on: 64x128x128 1.33x",
    ]


def test_rows_of_several_calls_make_one_table(tmp_path: Path) -> None:
    results_of((SMALL, {"fp16": 5.0, "w8a8": 4.0}), (LONG, {"fp16": 9.0, "w8a8": 3.0})).write_csv(tmp_path)
    later = Environment("NVIDIA H200", "580", "13.0", "2.11", "def")
    path = results_of((SMALL, {"fp16": 5.0, "w8a8": 2.5}), env=later).write_csv(tmp_path, crossover.KEY)
    cells = {(row["m"], row["x_fp16"], row["commit"]) for row in read_rows(path)}
    assert cells == {("4096", "3.0", "abc"), ("1", "2.0", "def")}
    path = results_of((LONG, {"fp16": 9.0, "w8a8": 3.0})).write_csv(tmp_path)
    assert len(read_rows(path)) == 1, "without a key the file is written anew"


def test_bytes_are_of_weights_tokens_and_results() -> None:
    shape = Shape(2, 256, 128)
    n_k, outputs = 256 * 128, 2 * 256 * 2
    moved = codebook.bytes_moved
    assert moved("kernel", "codebook4", shape) == n_k / 2 + 256 * 2 + 2 * 128 * 2 + outputs
    assert moved("kernel", "codebook4_int8", shape) == moved("kernel", "codebook4", shape) - 2 * 128
    assert moved("layer", "codebook4_int8", shape) == moved("layer", "codebook4", shape)
    assert moved("kernel", "w8a16", shape) == n_k + 2 * 128 * 2 + outputs
    assert moved("layer", "fp16", shape) == 2 * n_k + 2 * 128 * 2 + outputs
    layer = qcut.Linear.from_float(torch.nn.Linear(128, 256, bias=False), "codebook4")
    kept = layer.units.nbytes + layer.packed_norms.nbytes
    assert codebook.weight_bytes("codebook4", 256, 128) == kept


@pytest.mark.parametrize("scheme", ["codebook4", "codebook4_int8", "w8a16"])
def test_a_wrong_scale_is_caught(scheme: str) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(512, 64, dtype=torch.float16)
    torch.nn.init.normal_(linear.weight, std=512**-0.5)
    layer, x = qcut.Linear.from_float(linear, scheme), torch.randn(9, 512).half()
    reference = codebook.reference_of(layer, x) + linear.bias.double()
    call = codebook.calls([layer, layer], x)
    codebook._check(call, reference, codebook.tolerance_of(scheme))
    scales = {"codebook4": "norms", "codebook4_int8": "col_scale", "w8a16": "weight_scale"}
    getattr(layer, scales[scheme]).mul_(1.1)
    with pytest.raises(CheckError):
        codebook._check(call, reference, codebook.tolerance_of(scheme))


def test_a_wrong_result_is_refused() -> None:
    layer = qcut.Linear.from_float(torch.nn.Linear(32, 16), "w8a8")
    x = torch.randn(2, 32)
    want = layer(x)
    triton.checks("explicit", "w8a8", layer, x, want)()
    for scheme, factor in (("w8a8", 1 + 2.0**-20), ("w8a16", 1.01)):
        with pytest.raises(CheckError, match="relative error"):
            triton.checks("explicit", scheme, layer, x, factor * want)()


@pytest.mark.parametrize("output", epilogue.EPILOGUES)
def test_stock_tree_differs_in_the_epilogue_only(output: str) -> None:
    problem = GemmProblem(epilogue=epilogue.EPILOGUES[output])
    before = epilogue.emit_node(problem, epilogue.FIXED.tile)
    stock = epilogue.emit_stock(problem, epilogue.FIXED.tile)
    node = epilogue.emit_node(problem, epilogue.FIXED.tile)
    assert before == node, "the emitter stayed patched"
    assert "qcut::Sm90Dequantize<" in node.text
    assert "Sm90Dequantize" not in stock.text
    vectors = sum(p.kind == "ptr" for p in epilogue.EPILOGUES[output].params())
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


@pytest.mark.parametrize(("slower", "same", "status"), [(1.0, True, 0), (2.4, True, 1), (1.0, False, 1)])
def test_slow_or_wrong_early_graph_is_a_miss(slower: float, same: bool, status: int, tmp_path: Path) -> None:
    case = {"scheme": "w8a16", "path": "fused", "m": 1, "capture_s": 0.1, "same": same}
    case |= {"early": [10.0 * slower], "late": [10.0]}
    assert capture.report(argparse.Namespace(mode="background", out=tmp_path), [case]) == status
    (row,) = read_rows(tmp_path / "bench_capture.csv")
    assert (float(row["median_us"]), float(row["late_us"]), float(row["x_late"])) == (10 * slower, 10.0, slower)


def test_bytes_are_of_what_is_kept() -> None:
    layer = nn.Linear(300, 10)
    assert schemes.tensor_bytes([layer, layer]) == 4 * (3000 + 10)


@torch.no_grad()
def test_mixtures_are_the_same_in_all_tiles() -> None:
    stacks = (
        LinearStack.of([qcut.Linear.from_float(nn.Linear(k, n, bias=False), "w8a8")] * 4)
        for n, k in ((128, 64), (64, 64))
    )
    layers = Experts(*stacks, Gating("silu"))
    index = torch.tensor([[0, 3], [3, 1], [2, 0]], dtype=torch.int32)
    batch = experts.Batch(torch.randn(3, 64), torch.randn(6, 64), torch.rand(3, 2), [index.flip(0), index])
    for size in (1, 8, 16):
        found = experts.in_tiles_of(layers, batch, size)(1)
        torch.testing.assert_close(found, layers(batch.x, index, batch.weights), rtol=1e-5, atol=1e-6)


def test_kernels_of_e4m3_are_built_before_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers, and of products with and without fast sums; few tokens are 16-bit floats, with no such tile."""
    built: list[KernelSource] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for module in (plans, gemm_cuda, linear_cuda):
        monkeypatch.setattr(module, "target", lambda device: TARGET)
    monkeypatch.setattr(gemm_cuda, "has_cutlass", lambda: True)
    monkeypatch.setattr(float8.jit, "build_many", lambda sources, **options: built.extend(sources) or {})
    float8.prebuild(("w8a8", "fp8", "fp8_dynamic"), [Shape(4096, 4096, 4096), Shape(1, 4096, 4096)])
    names = [source.name for source in built]
    assert sum("fp8_cutlass" in name for name in names) == 3
    assert sum(name.endswith("_fast") for name in names) == 1
    assert sum("quantize_per_token" in name for name in names) == 2
    assert not any("s8xs8" in name for name in names)
