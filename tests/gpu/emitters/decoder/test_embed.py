"""Rows of tables, bitwise the eager modules': every type and width, rows anywhere, indices outside of their tables."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qcut.ops  # noqa: F401  (registers)
from qcut.emitters.core.source import DType
from qcut.emitters.decoder.embed import EmbedRows
from qcut.emitters.decoder.embed_codebook import EmbedCodebook
from qcut.layers.codebook import CodebookTable
from qcut.layers.embedding import Embedding, Table, table_of
from qcut.numerics import int8 as numerics
from qcut.numerics.codebook.layout import Geometry, unit_bytes
from tests.gpu.support.launching import Guarded, arch, launch
from tests.gpu.support.oracles import DEVICE, TORCH_DTYPE, assert_same

F16, BF16, F32, S8 = DType.F16, DType.BF16, DType.F32, DType.S8
ROWS, PLACES = 70, 9


@pytest.mark.parametrize("x", [F16, BF16, F32])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("places", [False, True])
@pytest.mark.parametrize(
    ("k", "aligned"), [(1, False), (33, False), (172, False), (1280, True), (64, True), (64, False)]
)
def test_rows(x: DType, int8: bool, places: bool, k: int, aligned: bool) -> None:
    dtype, tokens = TORCH_DTYPE[x], 37
    generator = torch.Generator().manual_seed(k)
    desc = EmbedRows(x, S8 if int8 else x, arch(), places, aligned, zeroes=places)
    # Rows lie apart, with something between them.
    stride, place_stride = (k + 16, k + 32) if aligned else (k + 3, k + 1)
    table = torch.randn(ROWS, stride, generator=generator).to(dtype)
    scale = torch.rand(ROWS, generator=generator) * 0.01
    if int8:
        table = torch.randint(-128, 128, (ROWS, stride), generator=generator, dtype=torch.int8)
    place_table = torch.randn(PLACES, place_stride, generator=generator).to(dtype)
    ids = torch.randint(0, ROWS, (tokens,), generator=generator)
    at = torch.randint(0, PLACES, (tokens,), generator=generator, dtype=torch.int32)
    ids[:4] = torch.tensor([-1, ROWS, -(2**40), 2**40])
    at[:4] = torch.tensor([PLACES, -5, 2**31 - 1, -(2**31)])
    given = [ids, table, *([scale] if int8 else []), *([at, place_table] if places else [])]
    strides, counts = (stride, *[place_stride] * places), (ROWS, *[PLACES] * places)
    results = []
    for _ in range(2):
        out = Guarded(tokens, k, dtype)
        on_gpu = [t.to(DEVICE) for t in given]
        zeroed = Guarded(1, 3000, torch.float32)
        zeros = [zeroed.tensor, 3000] if places else []
        launch(desc.emit(), desc.grid(tokens, k), *on_gpu, out.tensor, *strides, *counts, tokens, k, *zeros)
        results.append(out.take(k))
        assert not places or not zeroed.take(3000).any()
    assert_same(results[0], results[1])
    inside = ids.clamp(0, ROWS - 1)
    want = table[inside, :k]
    if int8:
        want = numerics.dequantize_ref(want, scale[inside], dtype)
    if places:
        want = want + place_table[at.clamp(0, PLACES - 1), :k]
    assert_same(results[0], want)


# ── the operator ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("columns", [33, 172, 1280])
def test_the_operator_is_the_modules(dtype: torch.dtype, int8: bool, columns: int) -> None:
    tokens: nn.Module = nn.Embedding(500, columns, dtype=dtype, device=DEVICE)
    if int8:
        tokens = Embedding.from_float(tokens, "w8a16")
    positions = nn.Embedding(64, columns, dtype=dtype, device=DEVICE)
    table = table_of(tokens)
    assert isinstance(table, Table)
    for rows in (1, 8, 3000):
        ids = torch.randint(0, 500, (rows,), device=DEVICE)
        places = torch.randint(0, 64, (rows,), device=DEVICE, dtype=torch.int32)
        with torch.no_grad():
            want = tokens(ids)
            got = torch.ops.qcut.embed_rows(ids, table.rows, table.scale, None, None, dtype)
            assert_same(got, want)
            given = (ids, table.rows, table.scale, places, positions.weight, dtype)
            assert_same(torch.ops.qcut.embed_rows(*given), want + positions(places))


def test_a_graph_reads_new_ids() -> None:
    table, ids = torch.randn(50, 64, device=DEVICE).half(), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    torch.ops.qcut.embed_rows(ids, table, None, None, None, torch.float16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.ops.qcut.embed_rows(ids, table, None, None, None, torch.float16)
    ids.copy_(torch.tensor([3, 49, 0, 3]))
    graph.replay()
    assert_same(y, table[ids])


# ── codebooks ────────────────────────────────────────────────────────────────────────────────────


def codebook_table(scheme: str, columns: int, dtype: torch.dtype) -> CodebookTable:
    """Of 500 tokens, one of them zeros."""
    tokens = nn.Embedding(500, columns, dtype=dtype, device=DEVICE)
    with torch.no_grad():
        tokens.weight[7] = 0
    table = table_of(Embedding.from_float(tokens, scheme))
    assert isinstance(table, CodebookTable)
    return table


@pytest.mark.parametrize("places", [False, True])
def test_rows_of_a_codebook_are_written_alone(places: bool) -> None:
    """One kernel by hand: what it writes, twice, for numbers of rows that end within a CTA."""
    table, k, tokens = codebook_table("codebook4", 384, torch.float16), 384, 37
    layer, geometry = table.linear, Geometry(384, 128)
    desc = EmbedCodebook(F16, F16, (4,), 128, arch(), places=places, zeroes=places)
    ids = torch.randint(0, 500, (tokens,), device=DEVICE)
    ids[:4] = torch.tensor([-1, 500, -(2**40), 2**40])
    at = torch.randint(-3, PLACES + 3, (tokens,), device=DEVICE, dtype=torch.int32)
    place_table = torch.randn(PLACES, k + 8, device=DEVICE).half()
    want = layer.rows(ids.clamp(0, 499)).half()
    if places:
        want = want + place_table[at.clamp(0, PLACES - 1).long(), :k]
    for _ in range(2):
        out, zeroed = Guarded(tokens, k, torch.float16), Guarded(1, 3000, torch.float32)
        tile_bytes = geometry.units * unit_bytes(4)
        given = [ids, layer.units, layer.codebook, tile_bytes, layer.norms, layer.signs]
        given += [at, place_table, out.tensor, k + 8, 500, PLACES] if places else [out.tensor, 500]
        given += [tokens, k, geometry.k_padded, 128, *([zeroed.tensor, 3000] if places else [])]
        launch(desc.emit(), desc.grid(tokens, k), *given)
        assert_same(out.take(k), want.cpu())
        assert not places or not zeroed.take(3000).any()


@pytest.mark.parametrize(
    ("scheme", "columns", "dtype"),
    [
        ("codebook4", 4096, torch.float16),
        ("codebook4", 1280, torch.bfloat16),
        ("codebook3_g64", 320, torch.float32),
        ("codebook2_g32_fp32norms", 96, torch.float16),
        ("codebook4_pairs", 1280, torch.float16),
        ("codebook4+4", 1280, torch.float16),
        ("codebook4+2", 384, torch.float32),
        ("codebook4_rows", 64, torch.float16),
        ("int4", 160, torch.float16),
        ("codebook4+3_none", 224, torch.bfloat16),
        ("int4_g16", 160, torch.float16),
        ("codebook4+4_g16_none", 96, torch.float32),
    ],
)
def test_the_operator_is_the_modules_of_codebooks(scheme: str, columns: int, dtype: torch.dtype) -> None:
    table = codebook_table(scheme, columns, dtype)
    tokens, positions = Embedding.tied_to(table.linear, dtype), nn.Embedding(64, columns, dtype=dtype, device=DEVICE)
    with torch.no_grad():
        for rows in (1, 8, 3000):
            ids = torch.randint(0, 500, (rows,), device=DEVICE)
            ids[-1] = 7
            want = tokens(ids)
            assert_same(table.embed(ids, None, None, None), want)
            places = torch.randint(0, 64, (rows,), device=DEVICE, dtype=torch.int32)
            zeroed = torch.ones(3, rows, device=DEVICE)
            assert_same(table.embed(ids, places, positions.weight, zeroed), want + positions(places))
            assert not zeroed.any()
    # Butterflies are sums of two: the CPU's bits are the same.
    assert_same(want.cpu(), Embedding.tied_to(table.linear.cpu(), dtype)(ids.cpu()))


def test_a_graph_reads_new_ids_of_a_codebook() -> None:
    table, ids = codebook_table("codebook4", 256, torch.float16), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    table.embed(ids, None, None, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = table.embed(ids, None, None, None)
    ids.copy_(torch.tensor([3, 499, 0, 3]))
    graph.replay()
    assert_same(y, table.linear.rows(ids).half())
