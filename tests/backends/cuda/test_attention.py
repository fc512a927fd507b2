"""`qcut.backends.cuda.attention`: kernels of a shape, their arguments, and the counters of launches and graphs."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qcut.backends.cuda import attention as attention_cuda
from qcut.backends.cuda.attention import Counters
from qcut.dispatch.gpus import Target
from qcut.numerics.codebook.tokens import operands
from qcut.ops.attention.decode import AppendAttentionOp, AppendKvOp, DecodeAttentionOp
from qcut.ops.codebook import RotateTokensOp
from tests.support.fakes.launches import A100, H200, Launches, note_launches

HEAD, KV_HEADS, CONTEXT = 64, 2, 1024


@pytest.fixture(params=[H200, A100], ids=lambda gpu: gpu.arch)
def gpu(request: pytest.FixtureRequest) -> Target:
    return request.param


@pytest.fixture
def launches(gpu: Target, monkeypatch: pytest.MonkeyPatch) -> Launches:
    monkeypatch.setattr(attention_cuda, "_counters", Counters(lambda device: 0, lambda: False))
    return note_launches(attention_cuda, gpu, monkeypatch)


def step(
    dtype: torch.dtype = torch.float16,
    *,
    batch: int = 3,
    int8: bool = False,
    rotary: bool = True,
    head: int = HEAD,
    queries: int = 2,
) -> Any:
    """An `AppendAttentionOp` of rows that lie in one projection."""
    widths = [queries * KV_HEADS * head, KV_HEADS * head, KV_HEADS * head]
    q, k, v = (t.unflatten(1, (-1, head)) for t in torch.randn(batch, sum(widths)).to(dtype).split(widths, 1))
    cos, sin = torch.randn(2, CONTEXT, head).to(dtype) if rotary else (None, None)
    keys, values = torch.zeros(2, batch, KV_HEADS, CONTEXT, head, dtype=torch.int8 if int8 else dtype)
    scales = torch.zeros(2, batch, KV_HEADS, CONTEXT) if int8 else (None, None)
    positions, slots = torch.arange(2 * batch, dtype=torch.int32).view(2, batch)
    return AppendAttentionOp(q, k, v, cos, sin, positions, slots, keys, values, *scales, 0.125)


def tokens_of_each(one: Any, rows: int) -> Any:
    """The same of so many tokens of each sequence."""
    names = ("q", "k", "v", "positions", "slots")
    return one._replace(rows=rows, **{name: getattr(one, name).repeat_interleave(rows, 0) for name in names})


def same(launch: dict[str, Any], call: Any, *names: str) -> None:
    """Whether the kernel gets the call's own memory."""
    for name in names:
        tensor = getattr(call, name)
        assert tensor is None or launch[name] == tensor.data_ptr(), name


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_tokens_go_to_the_cache(launches: Launches, int8: bool, rotary: bool) -> None:
    one = step(int8=int8, rotary=rotary)
    for interleaved in (False, True):
        attention_cuda.append_kv(AppendKvOp(*one[:11], interleaved=interleaved))
    first, second = launches
    for launch in launches:
        same(launch, one, "q", "k", "v", "slots", "keys", "values", *(("key_scales", "value_scales") if int8 else ()))
        assert (launch["heads"], launch["kv_heads"], launch["context"]) == (4 * rotary, KV_HEADS, CONTEXT)
        assert (launch["tokens"], launch["length"]) == (3, 1)
        assert launch["q_stride"] == launch["kv_stride"] == one.q.stride(0)
    assert (first["kernel"] == second["kernel"]) == (not rotary)
    if rotary:
        same(first, one, "cos", "sin", "positions")


def test_only_aligned_rows_are_read_as_vectors(launches: Launches) -> None:
    one = step()
    apart = torch.empty(1 + one.k.numel(), dtype=one.k.dtype)[1:].view(one.k.shape)
    attention_cuda.append_kv(AppendKvOp(*one[:11]))
    attention_cuda.append_kv(AppendKvOp(*one._replace(k=apart, v=apart.clone())[:11]))
    assert [launch["kernel"].endswith("_u") for launch in launches] == [False, True]


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_a_step_on_tensor_cores_is_one_launch(launches: Launches, int8: bool, rotary: bool) -> None:
    one = step(int8=int8, rotary=rotary)._replace(absmax=torch.zeros(3), counters=torch.zeros(12, dtype=torch.int32))
    y = attention_cuda.append_attention(one)
    (launch,) = launches
    assert launch["out"] == y.data_ptr()
    same(launch, one, "q", "k", "v", "positions", "slots", "keys", "values", "absmax")
    same(launch, one, *(("cos", "sin") if rotary else ()), *(("key_scales", "value_scales") if int8 else ()))
    assert (launch["kv_heads"], launch["queries"], launch["context"]) == (KV_HEADS, 2, CONTEXT)
    assert launch["grid"][2] == launch["rows"] == 3


@pytest.mark.parametrize("rows", [2, 3, 4, 8])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"softcap": 2.0}, {"window": 5, "ring": 5000}], ids=str)
def test_several_tokens_of_a_sequence_are_one_launch(
    launches: Launches, rows: int, int8: bool, options: dict[str, Any]
) -> None:
    """In the form of one token, four tokens of two queries in a CTA."""
    one = step(batch=3, int8=int8)._replace(**options)
    many = tokens_of_each(one, rows)._replace(absmax=torch.zeros(3 * rows))
    attention_cuda.append_attention(one)
    y = attention_cuda.append_attention(many)
    assert y.shape == many.q.shape
    first, launch = launches
    assert launch["kernel"] == first["kernel"].replace("_append_", "_append_tokens_") + f"_x{rows}"
    ctas = -(-rows // 4)
    assert launch["grid"] == (first["grid"][0], first["grid"][1] * ctas, 3)
    same(launch, many, "q", "k", "v", "positions", "slots", "keys", "values", "absmax")


@pytest.mark.parametrize("rows", [1, 2])
def test_results_are_rotated_in_the_same_launch(launches: Launches, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except where a CTA's queries are no whole groups, where blocks have padding, and of a wheel's kernels."""
    rotated: list[RotateTokensOp] = []

    def rotate(call: RotateTokensOp) -> tuple[Tensor, Tensor]:
        rotated.append(call)
        return call.fake()

    monkeypatch.setattr(attention_cuda, "rotate", rotate)
    one = tokens_of_each(step(), rows)
    turn: dict[str, Any] = {"operands": operands("hadamard", 128, 4 * HEAD, [1], torch.float16), "seeds": [1]}
    turn["group_size"] = 128
    blocks = attention_cuda.append_attention(one._replace(**turn))
    assert blocks.shape == (4, 1, 8, 64)
    (launch,) = launches
    assert (launch["out"], launch["signs"]) == (blocks.data_ptr(), turn["operands"].data_ptr())
    assert launch["k_padded"] == 4 * HEAD
    assert "_h128p1" in launch["kernel"]
    assert not rotated
    narrow = step(queries=1)
    turn["operands"] = operands("hadamard", 128, 2 * HEAD, [1], torch.float16)
    assert attention_cuda.append_attention(narrow._replace(**turn)).shape == (2, 1, 8, 64)
    padded = {"operands": operands("hadamard", 32, 64, [1], torch.float16), "group_size": 32, "seeds": [1]}
    assert attention_cuda.append_attention(step(head=32, queries=1)._replace(**padded)).shape == (2, 1, 8, 64)
    monkeypatch.setattr(attention_cuda, "target", lambda device: replace(launches.gpu, ahead_of_time=True))
    attention_cuda.append_attention(narrow._replace(**turn))
    assert [call.group_size for call in rotated] == [128, 32, 128]
    assert not any("_h128p1" in launch["kernel"] or "_h32p1" in launch["kernel"] for launch in launches[1:])


def test_settled_tokens_are_read_early(launches: Launches, gpu: Target) -> None:
    attention_cuda.append_attention(tokens_of_each(step(), 2)._replace(early_read=True))
    assert ("_settled_x2" in launches[0]["kernel"]) == (gpu is H200)


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_counters_are_enough_for_all_tokens(launches: Launches, batch: int) -> None:
    """One for each CTA of a part, of the ``B rows heads`` that a caller gives."""
    many = tokens_of_each(step(batch=batch), 8)
    attention_cuda.append_attention(many._replace(counters=torch.zeros(batch * 8 * 4, dtype=torch.int32)))
    parts, y, z = launches[0]["grid"]
    assert parts == 1 or y * z <= batch * 8 * 4


def test_tokens_without_a_kernel_are_launched_apart(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of float32, of more than 8, of heads with new rows that shared memory does not hold, and of a wheel's kernels."""
    attention_cuda.append_attention(tokens_of_each(step(torch.float32), 2)._replace(absmax=torch.zeros(6)))
    attention_cuda.append_attention(tokens_of_each(step(), 9))
    wide = tokens_of_each(step(head=256, queries=8), 8)
    attention_cuda.append_attention(wide)
    monkeypatch.setattr(attention_cuda, "target", lambda device: replace(launches.gpu, ahead_of_time=True))
    attention_cuda.append_attention(tokens_of_each(step(), 2))
    kinds = ["attention" if "attention" in launch["kernel"] else "append" for launch in launches]
    assert kinds == [kind for rows in (2, 9, 8, 2) for kind in ("append", *["attention"] * rows)]
    assert {launch["length"] for launch in launches if "length" in launch} == {2, 8, 9}
    append, first, second, *_ = launches
    assert append["tokens"] == 6
    assert second["q"] - first["q"] == 4 * HEAD * 4
    assert first["q_stride"] == second["q_stride"] == 2 * 4 * HEAD


@pytest.mark.parametrize("rotary", [False, True])
def test_norms_of_heads_are_in_the_same_launch(launches: Launches, rotary: bool) -> None:
    norms = {"query_norm": torch.ones(HEAD).half(), "key_norm": torch.ones(HEAD).half()}
    one = step(rotary=rotary)._replace(**norms, eps=0.25, window=5)
    attention_cuda.append_attention(one)
    (launch,) = launches
    same(launch, one, "q", "k", "v", "query_norm", "key_norm")
    assert (launch["window"], launch["eps"]) == (5, 0.25)


def test_rings_are_bounded_by_places(launches: Launches) -> None:
    ring = {"window": 5, "ring": 5000}
    one = step()._replace(**ring)
    attention_cuda.append_attention(one)
    attention_cuda.append_attention(step(torch.float32)._replace(**ring, softcap=2.0))
    attention_cuda.decode_attention(one.parts[1][0])
    attention_cuda.append_kv(one.parts[0])
    for launch in launches:
        assert "_ring" in launch["kernel"]
        assert (launch["ring"], launch["context"]) == (5000, CONTEXT)
    plain = step()._replace(window=5)
    attention_cuda.append_attention(plain)
    assert "_ring" not in launches[-1]["kernel"]
    assert launches[0]["kernel"].replace("_ring", "") == launches[-1]["kernel"]
    assert launches[0]["grid"] == launches[-1]["grid"]


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"window": 5, "ring": 5000, "softcap": 2.0}], ids=str)
def test_sinks_are_an_argument_of_a_kernel(launches: Launches, int8: bool, options: dict[str, Any]) -> None:
    sinks = torch.randn(4)
    for dtype in (torch.float16, torch.float32):
        one = step(dtype, int8=int8)._replace(**options, sinks=sinks)
        for call in (one, one._replace(sinks=None)):
            attention_cuda.append_attention(call)
            attention_cuda.decode_attention(call.parts[1][0])
    attend = [launch for launch in launches if "_attention_" in launch["kernel"]]
    assert len(attend) == 8
    for sunk, plain in zip((*attend[:2], *attend[4:6]), (*attend[2:4], *attend[6:]), strict=True):
        assert sunk["sinks"] == sinks.data_ptr()
        assert "sinks" not in plain
        assert sunk["kernel"].replace("_sink", "") == plain["kernel"]
        assert sunk["grid"] == plain["grid"]
        assert {sunk[name] == plain[name] for name in ("scale", *(set(options) & {"window", "ring"}))} == {True}


def test_sinks_go_with_norms_of_heads(launches: Launches) -> None:
    norms = {"query_norm": torch.ones(HEAD).half(), "key_norm": torch.ones(HEAD).half(), "eps": 0.25}
    one = step()._replace(**norms, sinks=torch.randn(4))
    attention_cuda.append_attention(one)
    (launch,) = launches
    same(launch, one, "query_norm", "key_norm", "sinks")
    assert launch["eps"] == 0.25


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_reach_chooses_kernels_and_cache_gives_strides(launches: Launches, dtype: torch.dtype) -> None:
    long, short = step(dtype, batch=1), step(dtype, batch=1)
    short = short._replace(keys=short.keys[:, :, :100].clone(), values=short.values[:, :, :100].clone())
    for call in (long, long._replace(reach=100), short, long._replace(window=50, reach=60), long._replace(window=50)):
        attention_cuda.append_attention(call)
        attention_cuda.decode_attention(call.parts[1][0])
    attend = [launch for launch in launches if "attention" in launch["kernel"]]
    whole, near, small, seen, window = ([(a["kernel"], a["grid"]) for a in attend[i : i + 2]] for i in range(0, 10, 2))
    assert near == small != whole
    assert seen == window
    assert {(a["context"], a["batch_stride"]) for a in attend[2:4]} == {(CONTEXT, KV_HEADS * CONTEXT * HEAD)}


def test_a_promise_counts_where_kernels_begin_early(launches: Launches, gpu: Target) -> None:
    for call in (step(), step()._replace(early_read=True), step(torch.float32)._replace(early_read=True)):
        attention_cuda.append_attention(call)
    assert ["_settled" in launch["kernel"] for launch in launches] == [False, gpu is H200, False, False]
    assert launches[0]["grid"] == launches[1]["grid"]


def test_head_norms_without_kernel_are_computed_before(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    norms = {"query_norm": torch.ones(HEAD), "key_norm": torch.ones(HEAD)}
    attention_cuda.append_attention(step(torch.float32)._replace(**norms))
    assert len(launches) == 2
    monkeypatch.setattr(attention_cuda, "target", lambda device: replace(launches.gpu, ahead_of_time=True))
    one = step()._replace(**{name: weight.half() for name, weight in norms.items()})
    attention_cuda.append_attention(one)
    assert "query_norm" not in launches[-1]
    assert launches[-1]["q"] != one.q.data_ptr()
    assert launches[-1]["v"] != 0


def test_a_step_of_float32_is_two_launches(launches: Launches) -> None:
    one = step(torch.float32)._replace(absmax=torch.zeros(3))
    attention_cuda.append_attention(one)
    append, attention = launches
    same(append, one, "k", "v", "cos", "sin", "slots", "keys", "values")
    same(attention, one, "positions", "keys", "values")
    assert append["q"] == attention["q"] != one.q.data_ptr()  # a copy is rotated: the caller's queries stay


def test_only_several_parts_use_a_workspace(launches: Launches) -> None:
    few, many = step(batch=1), step(batch=256)
    given = torch.zeros(2048, dtype=torch.int32)
    for one in (step(torch.float32, batch=1), few, many):
        for counters in (None, given):
            attention_cuda.decode_attention(DecodeAttentionOp(one.q, *one[7:11], one.positions, 0.125, counters))
    for own, callers in zip(launches[::2], launches[1::2], strict=True):
        assert own["kernel"] == callers["kernel"]
        meets = own["grid"][0] > 1 and "_c" not in own["kernel"].rpartition("_w")[2]
        assert (own["workspace"] != 0) == (own["counters"] != 0) == meets
        assert callers["counters"] == given.data_ptr() * meets
    assert launches[0]["workspace"]
    assert launches[-1]["workspace"] == 0


def test_nothing_is_launched_for_no_sequences(launches: Launches) -> None:
    one = step()
    nobody = one._replace(**{name: getattr(one, name)[:0] for name in ("q", "k", "v", "positions", "slots")})
    assert attention_cuda.append_attention(nobody).shape == (0, 4, HEAD)
    assert attention_cuda.decode_attention(nobody.parts[1][0]).shape == (0, 4, HEAD)
    attention_cuda.append_kv(nobody.parts[0])
    assert not launches


# ── counters ─────────────────────────────────────────────────────────────────────────────────────


class Captures(TorchDispatchMode):
    """Streams and captures as `Counters` see them; what is asked of the device within a capture."""

    def __init__(self) -> None:
        super().__init__()
        self.stream, self.captured, self.capturing = 1, list[str](), False
        self.counters = Counters(lambda device: self.stream, lambda: self.capturing)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.capturing:
            self.captured.append(func.name())
        return func(*args, **(kwargs or {}))

    def take(self, count: int) -> Tensor:
        with self:
            return self.counters.take(count, torch.empty(0))


def test_threads_on_a_stream_share_counters() -> None:
    counters, like = Counters(lambda device: 1, lambda: False), torch.empty(0)
    barrier = threading.Barrier(8)

    class Slow(torch.Tensor):
        def new_zeros(self, *args: Any, **kwargs: Any) -> Tensor:
            time.sleep(0.01)
            return torch.empty(0).new_zeros(*args, **kwargs)

    def take(_: int) -> Tensor:
        barrier.wait()
        return counters.take(8, like.as_subclass(Slow))

    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(take, range(8)))
    assert {id(t) for t in taken} == {id(taken[0])}


def test_launches_on_a_stream_share_counters() -> None:
    cuda = Captures()
    first = cuda.take(8)
    assert first.dtype is torch.int32
    assert not first.any()
    assert cuda.take(4096) is first
    more = cuda.take(5000)
    assert len(more) >= 5000
    assert cuda.take(8) is more
    cuda.stream = 2
    assert cuda.take(8) is not more
    cuda.stream = 1
    assert cuda.take(8) is more


def test_a_graph_clears_counters_of_its_own() -> None:
    """The second graph may be replayed before the first, so that each has to set its counters to zero itself."""
    cuda = Captures()
    eager = cuda.take(8)
    cuda.capturing = True
    taken = []
    for _ in range(2):
        cuda.captured.clear()
        taken.append(cuda.take(8))
        assert "aten::new_zeros" in cuda.captured
    cuda.capturing = False
    assert len({t.data_ptr() for t in (eager, *taken)}) == 3
    assert cuda.take(8) is eager
