"""The ledger of a step: roles of made-up nodes, sums of a made-up graph, rows and plots; what a real model reads."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import qcut
from benchmarks import bench_ledger, harness, step_graph
from benchmarks.bench_engine import CASES, build
from benchmarks.bench_ledger import STEP, Memory, Role, cache_of, general, ledger, roles_of, weights_of
from benchmarks.step_graph import Node, StepGraph

ROWS = 1 << 20
MEMORY = [
    *(Memory(ROWS * i, ROWS * i + 8192, "mlp.down_proj", 8000.0) for i in (1, 2)),
    Memory(ROWS * 3, ROWS * 3 + 8192, "cache", 500.0),
    Memory(ROWS * 4, ROWS * 4 + 16, "mlp.down_proj", 16.0),
    Memory(ROWS * 5, ROWS * 5 + 8192, "lm_head", 9000.0),
]
NODES = [
    Node(0, "embed", (ROWS * 5,)),
    *(
        node
        for i in (1, 2)
        for node in (
            Node(0, "attend", (ROWS * 3 + 256, 7)),
            Node(0, "norm", (1 << 60,)),
            Node(0, "product", (12, ROWS * i, ROWS * 4)),
        )
    ),
    Node(0, "product", (ROWS * 5,)),
    Node(0, "argmax"),
]


class _Graph:
    """A node takes 10 µs, 5 of which no other node sees; a launch takes 3."""

    nodes = NODES

    def time_us(self, chosen: set[int]) -> float:
        return 3.0 + 10.0 * len(chosen) - (5.0 * (len(chosen) - 1) if len(chosen) == len(NODES) else 0.0)


def test_kernels_of_one_name_are_told_apart_by_what_they_read() -> None:
    roles = {role.name: role for role in roles_of(NODES, MEMORY)}
    assert {name: role.places for name, role in roles.items()} == {
        "embed: lm_head": (0,),
        "attend: cache": (1, 4),
        "norm: before mlp.down_proj": (2, 5),
        "product: mlp.down_proj": (3, 6),
        "product: lm_head": (7,),
        "argmax: before the end": (8,),
    }
    assert roles["product: mlp.down_proj"].nbytes == 2 * 8016  # its small tensors, too
    assert roles["attend: cache"].nbytes == 2 * 500
    assert roles["embed: lm_head"].nbytes == 0  # a row of the table


def test_a_role_is_timed_alone_and_by_its_absence() -> None:
    step, entries = ledger(_Graph(), [Role("one", (3,), 1.0), Role("two", (1, 4), 1.0)])
    assert step == 3 + 90 - 40
    assert [(one.alone_us, one.added_us) for one in entries] == [(10.0, 53 - 83), (10.0, (53 - 73) / 2)]


def test_rows_sum_up_and_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = harness.Results("bench_ledger", harness.environment())
    entries = [bench_ledger.Entry(Role("a: x", (1, 2), 4000.0), 3.0, 2.5), bench_ledger.Entry(Role("b", (3,), 0), 1, 2)]
    bench_ledger.add_rows(results, "tiny-llama", 1, 9.0, entries, read_bytes=2e9)
    first, _, last = results.rows
    assert (first["count"], first["floor_us"], first["median_us"], first["added_us"]) == (2, 1.0, 3.0, 2.5)
    assert (last["role"], last["median_us"], last["added_us"], last["floor_us"]) == (STEP, 9.0, 7.0, 2.0)
    shown = bench_ledger.summary(results.rows, "tiny-llama", 1)
    assert shown.splitlines()[1].split() == ["a:", "x", "2", "3", "2.5", "1", "3"]
    results.write_csv(tmp_path, bench_ledger.KEY)
    bench_ledger.draw(tmp_path)
    drawn = (tmp_path / "ledger" / "tiny-llama-1.svg").read_text()
    assert "2 × x: a" in drawn
    assert "a step of 9 µs, 2 of memory" in drawn


def test_a_real_model_and_its_cache_lie_in_known_memory() -> None:
    with torch.no_grad():
        model = build(CASES["tiny-llama"], "cpu")
        engine = qcut.Engine(model, batch=2, context=64)
    names = {place.name for place in weights_of(model)}
    assert {"self_attn.q_proj", "mlp.down_proj", "input_layernorm", "lm_head"} <= names
    stacked = engine.decoder.blocks[1].attention.projections if hasattr(engine.decoder, "blocks") else ()
    for module in stacked:
        for tensor in module.buffers():
            assert any(place.start <= tensor.data_ptr() < place.end for place in weights_of(model))
    cache = cache_of(engine, 2, sequences=1, tokens=16)
    held = [part for index in range(2) for part in engine.cache.layer(index) if part is not None]
    assert [place.start for place in cache] == [part.data_ptr() for part in held]
    places = held[0].shape[2]
    assert sum(place.nbytes for place in cache) == pytest.approx(engine.cache.nbytes / 2 * 16 / places)


def test_names_of_layers_are_general() -> None:
    assert general("model.layers.31.mlp.down_proj.units") == "mlp.down_proj"
    assert general("transformer.h.0.attn.c_attn.qweight") == "attn.c_attn"
    assert general("lm_head.weight") == "lm_head"


def test_addresses_are_found_among_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parameters: an address, and a structure that ends in one; the third is refused."""
    import ctypes

    held = [
        ctypes.create_string_buffer(data, len(data)) for data in (struct.pack("@Q", 77), struct.pack("@iiQ", 1, 2, 99))
    ]
    arguments = (ctypes.c_void_p * 2)(*(ctypes.addressof(one) for one in held))

    class Driver:
        class CUresult:
            CUDA_SUCCESS = 0

        @staticmethod
        def cuFuncGetParamInfo(kernel: Any, index: int) -> tuple[int, int, int]:
            return (0, 0, len(held[index])) if index < 2 else (1, 0, 0)

    graph = object.__new__(StepGraph)
    graph._driver = Driver
    assert graph._words("cuFunc", None, ctypes.addressof(arguments)) == (77, 1 | 2 << 32, 99)
    assert graph._words("cuFunc", None, 0) == ()
    assert step_graph.WORD.size == 8


def test_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        bench_ledger.main([])
    assert ended.value.code == 2
