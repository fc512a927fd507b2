"""Norms, activations, the next token and embeddings: what their kernels are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qcut.backends.cuda import activation, codebook, embed, next_token, norm
from qcut.emitters.codebook.rotate_rows import RowsRotation
from qcut.emitters.core.source import DType
from qcut.emitters.decoder.norm import MANY_ROWS, NormRows
from qcut.errors import DeviceError
from qcut.layers.codebook import CodebookLinear
from qcut.numerics.codebook.tokens import operands
from qcut.ops.activation import ActivateRotatedOp, GeluTanhOp, SiluMulOp
from qcut.ops.embed import EmbedCodebookOp, EmbedRowsOp
from qcut.ops.next_token import AcceptOp, AdvanceOp, ArgmaxOp
from qcut.ops.norm import AddNormInt8Op, AddNormOp, AddNormRotatedOp
from qcut.ops.quantize import QuantizePerTokenOp
from tests.support.fakes.launches import H200, Launches, note_launches

HALF = torch.float16
GATE = ("alpha", "limit", "plus_one")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Launches]:
    return lambda module: note_launches(module, H200, monkeypatch)


def has(launch: dict[str, Any], **tensors: Tensor | int) -> None:
    """Whether the kernel gets these tensors' own memory, and these values."""
    for name, value in tensors.items():
        assert launch[name] == (value.data_ptr() if isinstance(value, Tensor) else value), name


def test_norms(noted: Callable[[Any], Launches]) -> None:
    launches = noted(norm)
    x, residual = torch.randn(2, 5, 64).half()
    weight, bias = torch.randn(2, 64).half()
    total, y = norm.add_norm(AddNormOp(x, residual, weight, bias, True, 1e-5))
    has(launches[-1], x=x, residual=residual, sum=total, weight=weight, bias=bias, y=y, x_stride=64, k=64, eps=1e-5)
    total, y = norm.add_norm(AddNormOp(x, None, weight, None, True, 1e-5))
    has(launches[-1], x=x, weight=weight, bias=0, y=y)
    assert total.shape == (0,)
    total, q, scale = norm.add_norm_int8(AddNormInt8Op(x, residual, weight, None, False, 1e-6, 80))
    has(launches[-1], x=x, residual=residual, sum=total, weight=weight, y=q, scale=scale, k_padded=80, eps=1e-6)
    assert (q.shape, q.dtype, scale.shape) == ((5, 80), torch.int8, (5,))
    norm.add_norm(AddNormOp(torch.randn(5, 65).half()[:, 1:], residual, weight, None, False, 1e-6))
    norm.add_norm(AddNormOp(x, residual, torch.randn(65).half()[1:], None, False, 1e-6))
    assert [launch["kernel"].endswith("_u") for launch in launches] == [False] * 4 + [True]  # rows apart are copied
    many = torch.randn(MANY_ROWS, 5120).half()
    for x in (many[1:], many):
        norm.add_norm(AddNormOp(x, None, torch.ones(5120).half(), None, False, 1e-6))
    assert launches[-1]["kernel"] != launches[-2]["kernel"]
    assert norm.add_norm(AddNormOp(many[:0], many[:0], many[0], None, False, 1e-6))[0].shape == (0, 5120)
    assert len(launches) == 7


def test_activations(noted: Callable[[Any], Launches]) -> None:
    launches = noted(activation)
    rows, absmax = torch.randn(5, 2 * 72).half(), torch.zeros(5)
    gate, up = rows.chunk(2, 1)
    y = activation.silu_mul(SiluMulOp(gate, up, absmax))
    has(launches[-1], x=gate, up=up, y=y, absmax=absmax, x_stride=144, up_stride=144, columns=72)
    y = activation.gelu_tanh(GeluTanhOp(up))
    has(launches[-1], x=up, y=y, absmax=0, x_stride=144, columns=72)
    activation.gelu_tanh(GeluTanhOp(rows[:, 1:9]))
    activation.gelu_tanh(GeluTanhOp(torch.randn(8, 5).half().t()))
    assert [launch["kernel"].endswith("_u") for launch in launches] == [False, False, True, False]
    activation.gelu_tanh(GeluTanhOp(up[:0]))
    assert len(launches) == 4
    for numbers, given in (((1.5, 7.0, True), (1.5, 7.0, 1)), ((1.0, 0.0, True), (1.0, float("inf"), 1))):
        activation.silu_mul(SiluMulOp(gate, up, absmax, *numbers))
        has(launches[-1], x=gate, up=up, absmax=absmax, columns=72, **dict(zip(GATE, given, strict=True)))
        assert launches[-1]["kernel"] == launches[0]["kernel"].replace("silu_mul", "clamped_silu_mul")
    activation.silu_mul(SiluMulOp(gate, up, None, 1.0, 0.0, False))
    assert launches[-1]["kernel"] == launches[0]["kernel"]


@pytest.mark.parametrize(("to", "passes"), [(HALF, 2), (torch.int8, 1)])
def test_rotated_rows(
    noted: Callable[[Any], Launches], monkeypatch: pytest.MonkeyPatch, to: torch.dtype, passes: int
) -> None:
    norms, activations, rotations = noted(norm), noted(activation), noted(codebook)
    x, residual = torch.randn(2, 9, 192).half()
    weight, seeds = torch.randn(192).half(), list(range(passes))
    signs = operands("hadamard", 64, 192, seeds, HALF)
    turned = (signs, 64, seeds, to)
    of_norm = AddNormRotatedOp(x, residual, weight, None, False, 1e-6, *turned, early_read=True)
    total, blocks, scale = norm.add_norm_rotated(of_norm)
    scales = {"scale": scale} if to is torch.int8 else {}
    has(norms[-1], x=x, residual=residual, sum=total, weight=weight, y=blocks, x_stride=192, k=192, **scales)
    has(norms[-1], signs=signs, k_padded=256, eps=1e-6)
    of_gate = ActivateRotatedOp(x, residual, *turned, early_read=True)
    blocks, scale = activation.activate_rotated(of_gate)
    scales = {"scale": scale} if to is torch.int8 else {}
    has(activations[-1], x=x, up=residual, y=blocks, columns=192, signs=signs, k_padded=256, **scales)
    assert activations[-1]["grid"] == (9, 1, 1)
    activation.activate_rotated(ActivateRotatedOp(x, None, *turned, early_read=True))
    assert ("up" in activations[-1], len(norms), len(activations), len(rotations)) == (False, 1, 2, 0)
    clamped = ActivateRotatedOp(x, residual, *turned, 1.5, 7.0, True)
    blocks, _ = activation.activate_rotated(clamped)
    has(activations[-1], x=x, up=residual, y=blocks, alpha=1.5, limit=7.0, plus_one=1, signs=signs, k_padded=256)
    activations.pop()
    for module, serve, call in (
        (norm, norm.add_norm_rotated, of_norm),
        (activation, activation.activate_rotated, clamped),
    ):
        monkeypatch.setattr(module, "rotates_rows", lambda *_, **__: False)
        serve(call)
    assert (len(norms), len(activations), len(rotations)) == (2, 3, 2)
    assert [launch["signs"] for launch in rotations] == [signs.data_ptr()] * 2
    has(activations[-1], alpha=1.5, limit=7.0, plus_one=1)


def test_kernels_that_make_int8_rows_rotate_them(
    noted: Callable[[Any], Launches], monkeypatch: pytest.MonkeyPatch
) -> None:
    norms, activations, rotations = noted(norm), noted(activation), noted(codebook)
    x, residual = torch.randn(2, 9, 160).half()
    signs = operands("hadamard", 32, 160, (3,), HALF)
    turned = {"operands": signs, "group_size": 32, "seeds": [3], "out_dtype": torch.int8, "in_rows": True}
    of_norm = AddNormRotatedOp(x, residual, torch.randn(160).half(), None, False, 1e-6, **turned)
    of_gate = ActivateRotatedOp(x, residual, **turned)
    _, q, scale = norm.add_norm_rotated(of_norm)
    assert (q.shape, q.dtype) == ((9, 160), torch.int8)
    has(norms[-1], x=x, residual=residual, y=q, scale=scale, signs=signs, k=160, k_padded=160)
    q, scale = activation.activate_rotated(of_gate)
    has(activations[-1], x=x, up=residual, y=q, scale=scale, signs=signs, columns=160, k_padded=160)
    assert all("_h32p1s8_rows_t" in launch["kernel"] for launch in (norms[-1], activations[-1]))
    assert not rotations
    for module, serve, call in (
        (norm, norm.add_norm_rotated, of_norm),
        (activation, activation.activate_rotated, of_gate),
    ):
        monkeypatch.setattr(module, "rotates_rows", lambda *_, **__: False)
        *_, q, scale = serve(call)
        has(rotations[-1], y=q, scale=scale, signs=signs, m=9, k=160, k_padded=160)
        assert rotations[-1]["kernel"].endswith("_n_rows")
    assert (len(norms), len(activations), len(rotations)) == (2, 2, 2)


def plain_norms(x: Tensor, **options: Any) -> list[tuple[Callable[..., Any], Any]]:
    """Norms of rows of 192 columns that are written as they are, next to rotated and quantized ones."""
    weight, signs = torch.randn(192).half(), operands("hadamard", 64, 192, [1], HALF)
    given = (x, x + 1, weight, None, False, 1e-6)
    turned = [AddNormRotatedOp(*given, signs, 64, [1], to, **options) for to in (HALF, torch.int8)]
    quantized = (norm.add_norm_int8, AddNormInt8Op(*given, 208, **options))
    return [*((norm.add_norm_rotated, call) for call in turned), quantized]


def test_norms_write_plain_rows_beside(noted: Callable[[Any], Launches]) -> None:
    norms, rotations = noted(norm), noted(codebook)
    x, plain = torch.randn(9, 192).half(), torch.zeros(9, 192).half()
    shifted = torch.zeros(9 * 192 + 1).half()[1:].view(9, 192)
    for serve, call in plain_norms(x, plain=plain):
        total, y, _ = serve(call)
        has(norms[-1], x=x, residual=call.residual, sum=total, weight=call.weight, y=y, plain=plain, k=192)
        assert "_p_t" in norms[-1]["kernel"]
    for (serve, call), (_, other) in zip(plain_norms(x, plain=shifted), plain_norms(x), strict=True):
        serve(call)
        has(norms[-1], plain=shifted)
        assert norms[-1]["kernel"].endswith("_u")
        serve(other)
        assert "plain" not in norms[-1]
    assert (len(norms), len(rotations)) == (9, 0)


def test_plain_rows_are_rotated_where_norms_cannot(
    noted: Callable[[Any], Launches], monkeypatch: pytest.MonkeyPatch
) -> None:
    norms, rotations = noted(norm), noted(codebook)
    quantized: list[QuantizePerTokenOp] = []

    def quantize(call: QuantizePerTokenOp) -> tuple[Tensor, Tensor]:
        quantized.append(call)
        return call.fake()

    monkeypatch.setattr(norm, "quantize_per_token", quantize)
    monkeypatch.setattr(norm, "target", lambda device: replace(H200, ahead_of_time=True))
    monkeypatch.setattr(norm, "norm_columns", lambda k, *_, **__: k)
    x, plain = torch.randn(9, 192).half(), torch.zeros(9, 192).half()
    for serve, call in plain_norms(x, plain=plain):
        _, y, _ = serve(call)
        has(norms[-1], x=x, y=plain)
        if serve is norm.add_norm_rotated:
            has(rotations[-1], x=plain, y=y)
        assert "_p_t" not in norms[-1]["kernel"]
    assert (len(norms), len(rotations)) == (3, 2)
    ((quantized_rows, k_padded),) = quantized
    assert quantized_rows is plain
    assert k_padded == 208


def test_long_rows_are_rotated_apart(noted: Callable[[Any], Launches]) -> None:
    _, _, rotations = noted(norm), noted(activation), noted(codebook)
    k = 65536
    signs = operands("hadamard", 128, k, (1,), HALF)
    activation.activate_rotated(ActivateRotatedOp(torch.randn(2, k).half(), None, signs, 128, [1], torch.int8))
    assert len(rotations) == 1


def test_no_ahead_of_time_kernel_rotates_rows() -> None:
    shape = DType.F16, False, H200.arch, 4096
    for ahead_of_time in (False, True):
        gpu = replace(H200, ahead_of_time=ahead_of_time)
        rotation = RowsRotation(DType.S8, 128, 1)
        assert codebook.rotates_rows(gpu, NormRows.for_shape, *shape, rotation=rotation) is not ahead_of_time


def test_the_next_token(noted: Callable[[Any], Launches], monkeypatch: pytest.MonkeyPatch) -> None:
    launches = noted(next_token)
    logits = torch.randn(3, 20)[:, :17]
    best = next_token.argmax(ArgmaxOp(logits))
    has(launches[-1], x=logits, best=best, stride=20, columns=17)
    tokens, positions, slots = torch.zeros(3, dtype=torch.int64), *torch.zeros(2, 3, dtype=torch.int32)
    next_token.advance(AdvanceOp(logits, tokens, positions, slots, 9))
    has(launches[-1], x=logits, best=tokens, positions=positions, slots=slots, stride=20, columns=17, context=9)
    next_token.argmax(ArgmaxOp(torch.randn(17, 3).t()))
    assert launches[-1]["stride"] == 17
    host_copy, turn = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    telling = AdvanceOp(logits, tokens, positions, slots, 9, host_copy, turn)
    with pytest.raises(DeviceError, match="host_copy is in memory that is not pinned"):
        next_token.advance(telling)
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: tensor is host_copy)
    next_token.advance(telling)
    has(launches[-1], best=tokens, context=9, host_copy=host_copy, turn=turn, turns=2)
    del launches[-1]
    assert next_token.argmax(ArgmaxOp(logits[:0])).shape == (0,)
    assert len(launches) == 3
    wide = torch.zeros(17, next_token.SPLIT_BYTES // 4)
    for rows, columns, grid in ((16, 0, (8, 16, 1)), (17, 0, (17, 1, 1)), (2, 1, (2, 1, 1))):
        next_token.argmax(ArgmaxOp(wide[:rows, columns:]))
        assert launches[-1]["grid"] == grid


def test_accepted_tokens(noted: Callable[[Any], Launches], monkeypatch: pytest.MonkeyPatch) -> None:
    launches = noted(next_token)
    chosen, tokens, text = torch.zeros(3, 2).long(), torch.zeros(5, 3).long(), torch.zeros(3, 20).int()
    counts, positions, slots, ends, turn = torch.zeros(5, 3, dtype=torch.int32)
    call = AcceptOp(chosen, tokens, counts, positions, slots, text, ends, 9, 1, 3)
    next_token.accept(call)
    state = {"tokens": tokens, "counts": counts, "positions": positions, "slots": slots, "text": text, "ends": ends}
    sizes = {"read": 2, "width": 5, "capacity": 20, "context": 9, "least": 1, "most": 3}
    has(launches[-1], chosen=chosen, **state, **sizes, host_copy=0, turn=0)
    assert launches[-1]["grid"] == (3, 1, 1)
    host_copy = torch.zeros(4, 3, 7, dtype=torch.int64)
    with pytest.raises(DeviceError, match="qcut::accept: host_copy is in memory that is not pinned"):
        next_token.accept(call._replace(host_copy=host_copy, turn=turn))
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: tensor is host_copy)
    next_token.accept(call._replace(host_copy=host_copy, turn=turn))
    has(launches[-1], **state, **sizes, host_copy=host_copy, turn=turn, turns=4)
    none = (counts[:0],) * 3
    next_token.accept(AcceptOp(chosen[:0], tokens[:, :0].contiguous(), *none, text[:0], ends[:0], 9))
    assert len(launches) == 2


def test_embeddings(noted: Callable[[Any], Launches]) -> None:
    launches = noted(embed)
    ids, places = torch.tensor([1, 5, 3]), torch.tensor([0, 2, 1], dtype=torch.int32)
    table, position_table = torch.randn(7, 16).half(), torch.randn(4, 16).half()
    y = embed.embed_rows(EmbedRowsOp(ids, table, None, places, position_table, HALF))
    has(launches[-1], ids=ids, table=table, places=places, place_table=position_table, y=y, count=7, place_count=4)
    has(launches[-1], stride=16, place_stride=16, rows=3, k=16)
    q, scale = torch.zeros(7, 16, dtype=torch.int8), torch.ones(7)
    y = embed.embed_rows(EmbedRowsOp(ids, q, scale, None, None, HALF))
    has(launches[-1], ids=ids, table=q, scale=scale, y=y, stride=16, count=7, rows=3, k=16)
    embed.embed_rows(EmbedRowsOp(ids, torch.randn(7, 17).half()[:, 1:], None, None, None, HALF))
    assert [launch["kernel"].endswith("_u") for launch in launches] == [False, False, True]
    zeroed = torch.ones(2, 3)
    embed.embed_rows(EmbedRowsOp(ids, table, None, None, None, HALF, zeroed))
    has(launches[-1], rows=3, k=16, zeroed=zeroed, zeros=6)
    assert embed.embed_rows(EmbedRowsOp(ids[:0], table, None, None, None, HALF, zeroed)).shape == (0, 16)
    assert not zeroed.any()
    assert len(launches) == 4


@pytest.mark.parametrize("scheme", ["codebook4", "codebook4+4", "codebook4+2", "int4"])
def test_embeddings_of_codebooks(scheme: str, noted: Callable[[Any], Launches]) -> None:
    launches, ids, places = noted(embed), torch.tensor([1, 5, 3]), torch.tensor([0, 2, 1], dtype=torch.int32)
    layer = CodebookLinear.from_float(nn.Linear(256, 70, bias=False), scheme)
    assert isinstance(layer, CodebookLinear)
    weight, signs = layer.row_operands, layer.signs
    y = embed.embed_codebook(EmbedCodebookOp(ids, *weight, signs, None, None, HALF))
    has(launches[-1], ids=ids, norms=layer.norms, y=y, count=70, rows=3, k=256, k_padded=256, group=128)
    has(launches[-1], units0=layer.units, codebook0=layer.codebook, tile_bytes0=layer.units[0].numel())
    assert ("signs" in launches[-1]) == (scheme != "int4")
    if scheme == "codebook4+4":
        assert launches[-1]["units1"] == layer.units.data_ptr() + 2 * 1024
        has(launches[-1], codebook1=layer.codebook, tile_bytes1=4 * 1024)
    if scheme == "codebook4+2":
        units, codebook = layer.residual_units, layer.residual_codebook
        has(launches[-1], units1=units, codebook1=codebook, tile_bytes1=2 * 512)
    table, zeroed = torch.randn(9, 264).half()[:, :256], torch.ones(5)
    embed.embed_codebook(EmbedCodebookOp(ids, *weight, signs, places, table, HALF, zeroed))
    has(launches[-1], places=places, place_table=table, place_stride=264, place_count=9, zeroed=zeroed, zeros=5)
    odd = torch.randn(9, 257).half()[:, 1:]  # rows that no vector begins at are copied
    embed.embed_codebook(EmbedCodebookOp(ids, *weight, signs, places, odd, HALF))
    has(launches[-1], place_stride=256)
    assert embed.embed_codebook(EmbedCodebookOp(ids[:0], *weight, signs, None, None, HALF, zeroed)).shape == (0, 256)
    assert not zeroed.any()
    assert len(launches) == 3


def test_torch_embeds_codebooks_without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = note_launches(embed, replace(H200, ahead_of_time=True), monkeypatch)
    layer = CodebookLinear.from_float(nn.Linear(128, 70, bias=False), "codebook4")
    assert isinstance(layer, CodebookLinear)
    ids, places = torch.tensor([-1, 70, 3]), torch.tensor([9, -1, 2], dtype=torch.int32)
    table, zeroed = torch.randn(9, 128).half(), torch.ones(5)
    y = embed.embed_codebook(EmbedCodebookOp(ids, *layer.row_operands, layer.signs, places, table, HALF, zeroed))
    assert torch.equal(y, layer.rows(torch.tensor([0, 69, 3])).half() + table[[8, 0, 2]])
    assert not zeroed.any()
    assert not launches
