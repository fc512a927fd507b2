"""Rows of tables by one operator: the modules' own, which modules it stands for, registration, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
import qcut.ops  # registers torch.ops.qcut
from qcut import errors
from qcut.engine.families import decoder_of
from qcut.layers.codebook import CodebookLinear, CodebookTable
from qcut.layers.embedding import Embedding, Table, table_of
from qcut.schemes import ShiftedCodebook
from tests.support.decoders import WIDE, small
from tests.support.oracles import FLOATS

OP = torch.ops.qcut.embed_rows
CODEBOOK = torch.ops.qcut.embed_codebook
IDS = torch.tensor([3, 0, 69, 3, 17])
PLACES = torch.tensor([0, 8, 4, 4, 1], dtype=torch.int32)


def tables(dtype: torch.dtype = torch.float32, int8: bool = False, columns: int = 33) -> tuple[nn.Module, nn.Embedding]:
    """Of 70 tokens, and of 9 positions."""
    torch.manual_seed(0)
    tokens: Any = nn.Embedding(70, columns).to(dtype)
    return Embedding.from_float(tokens, "w8a16") if int8 else tokens, nn.Embedding(9, columns).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("int8", [False, True])
def test_rows_are_the_modules(dtype: torch.dtype, int8: bool) -> None:
    tokens, positions = tables(dtype, int8)
    found = table_of(tokens)
    assert isinstance(found, Table)
    assert found.dtype is dtype
    with torch.no_grad():
        want = tokens(IDS)
        assert torch.equal(OP(IDS, found.rows, found.scale, None, None, dtype), want)
        got = OP(IDS, found.rows, found.scale, PLACES, positions.weight, dtype)
        assert torch.equal(got, want + positions(PLACES))
    assert got.dtype is dtype
    assert OP(IDS[:0], found.rows, found.scale, PLACES[:0], positions.weight, dtype).shape == (0, 33)


def test_modules_that_do_more_have_no_table() -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return 2 * super().forward(ids)

    class Sub(Embedding):
        pass

    plain = nn.Embedding(20, 16)
    assert table_of(plain) == (plain.weight, None, torch.float32)
    assert table_of(nn.Embedding(20, 16, padding_idx=3)) is not None
    tied = Embedding.tied_to(qcut.Linear.from_float(nn.Linear(16, 20), "w8a8"), torch.float16)
    table = table_of(tied)
    assert isinstance(table, Table)
    assert (table.dtype, table.rows.shape) == (torch.float16, (20, 16))
    hooked, patched = nn.Embedding(20, 16), nn.Embedding(20, 16)
    hooked.register_forward_hook(lambda *_: None)
    patched.forward = lambda ids: ids  # type: ignore[method-assign]
    for module in (
        nn.Embedding(20, 16, max_norm=1.0),
        Scaled(20, 16),
        Sub(tied.linear, tied=True),
        *(
            Embedding.from_float(nn.Embedding(20, 128), scheme)
            for scheme in ("codebook4_g16", "codebook4_qr", "int4_g8")
        ),
        Embedding.from_float(nn.Embedding(20, 160), "codebook4"),
        Embedding.tied_to(qcut.Linear(128, 20, False, ShiftedCodebook(shifted=True))),
        nn.Linear(16, 16),
        hooked,
        patched,
    ):
        assert table_of(module) is None, module


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("embeddings", [None, "w8a16", "codebook4_g16", "codebook4_g32"])
@pytest.mark.parametrize("hook", [False, True])
def test_a_decoder_reads_its_modules_rows(kind: str, embeddings: Any, hook: bool) -> None:
    model = small(kind, **WIDE)
    if embeddings is not None:
        qcut.quantize(model, "w8a16", embeddings=embeddings, progress=False)
    decoder = decoder_of(model)
    assert (table_of(decoder.tokens) is None) == (embeddings == "codebook4_g16")
    ids = torch.randint(0, decoder.vocabulary, (2, 5))
    places = torch.arange(5, dtype=torch.int32).repeat(2)
    seen: list[Any] = []
    if hook:
        decoder.tokens.register_forward_hook(lambda module, given, y: seen.append(given[0].shape))
    with torch.no_grad():
        zeroed = torch.ones(3, 2)
        got = decoder.embed(ids.flatten(), places, 2, zeroed)
        assert not zeroed.any()
        assert seen == [(2, 5)] * hook
        want = decoder.tokens(ids)
        if decoder.positions is not None:
            want = want + decoder.positions(places.view(2, 5))
    assert torch.equal(got, want.flatten(0, 1))


CODEBOOKS = (
    *("codebook4", "codebook3_g64", "codebook2_g32_fp32norms", "codebook4+4", "codebook4+2_g64", "codebook4_pairs"),
    *("int4", "int4_g16", "int4_rows", "codebook4+3_none", "codebook4+4_g16_none"),
)


def codebook_table(scheme: str, dtype: torch.dtype, columns: int = 128) -> tuple[Embedding, CodebookLinear]:
    """Of 70 tokens, and the layer that it reads; one row is zeros that keep their signs."""
    torch.manual_seed(0)
    tokens = nn.Embedding(70, columns, dtype=dtype)
    with torch.no_grad():
        tokens.weight[3] = 0
    made = Embedding.from_float(tokens, scheme)
    assert isinstance(made.linear, CodebookLinear)
    return made, made.linear


@pytest.mark.parametrize("scheme", CODEBOOKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_of_codebooks_are_the_modules(scheme: str, dtype: torch.dtype) -> None:
    table, layer = codebook_table(scheme, dtype)
    found, positions = table_of(table), nn.Embedding(9, 128, dtype=dtype)
    assert found == CodebookTable(layer, dtype)
    with torch.no_grad():
        got = found.embed(IDS, None, None, None)
        assert torch.equal(got, layer.dequantized_weight()[IDS].to(dtype))
        assert torch.equal(got.signbit(), table(IDS).signbit())
        zeroed = torch.ones(3)
        assert torch.equal(found.embed(IDS, PLACES, positions.weight, zeroed), table(IDS) + positions(PLACES))
        assert not zeroed.any()
        for out in FLOATS:
            assert torch.equal(found._replace(dtype=out).embed(IDS, None, None, None), layer.rows(IDS).to(out))
        assert found.embed(IDS[:0], None, None, None).shape == (0, 128)


@pytest.mark.parametrize("scheme", ["codebook4+2", "int4"])
def test_opcheck_of_codebooks(scheme: str) -> None:
    _, layer = codebook_table(scheme, torch.float32)
    given = (IDS, *layer.row_operands, layer.signs)
    torch.library.opcheck(CODEBOOK.default, (*given, None, None, torch.float16))
    torch.library.opcheck(CODEBOOK.default, (*given, PLACES, torch.randn(9, 128), torch.float32, torch.ones(4)))


def test_positions_of_another_kind_are_the_modules() -> None:
    model = small("gpt2")
    decoder = decoder_of(model)
    ids, places = torch.tensor([5, 7]), torch.tensor([1, 2], dtype=torch.int32)
    want = decoder.embed(ids, places, 1)
    assert decoder.positions is not None
    decoder.positions.register_forward_hook(lambda module, given, y: y + 1)
    assert torch.equal(decoder.embed(ids, places, 1), model.transformer.wte(ids) + model.transformer.wpe(places))
    assert not torch.equal(decoder.embed(ids, places, 1), want)


@pytest.mark.parametrize("int8", [False, True])
def test_opcheck(int8: bool) -> None:
    tokens, positions = tables(int8=int8)
    found = table_of(tokens)
    assert isinstance(found, Table)
    rows = found.rows.detach()
    torch.library.opcheck(OP.default, (IDS, rows, found.scale, None, None, torch.float32))
    given = (IDS, rows, found.scale, PLACES, positions.weight.detach(), torch.float32)
    torch.library.opcheck(OP.default, given)


def test_cpu_refuses_ids_outside_the_table() -> None:
    table = torch.zeros(4, 8)
    for bad in (-1, 4):
        with pytest.raises(errors.RangeError, match="allowed: 0 to"):
            OP(torch.tensor([bad]), table, None, None, None, torch.float32)
        with pytest.raises(errors.RangeError, match="allowed: 0 to"):
            OP(IDS[1:2], table, None, torch.tensor([bad], dtype=torch.int32), table, torch.float32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dtype": torch.float64}, errors.DtypeError, "dtype is float64"),
        ({"ids": PLACES}, errors.DtypeError, "ids is int32; allowed: int64"),
        ({"ids": IDS[None]}, errors.ShapeError, r"ids have shape \[1, 5\]; allowed: \[R\]"),
        ({"table": torch.zeros(70, 8).half()}, errors.DtypeError, "table is float16; allowed: float32"),
        ({"table": torch.zeros(70, 8).char()}, errors.DtypeError, "table is int8; allowed: float32"),
        ({"table": torch.zeros(0, 8)}, errors.ShapeError, r"table has shape \[0, 8\]"),
        ({"table": torch.zeros(8)}, errors.ShapeError, r"table has shape \[8\]; allowed: \[rows, N\]"),
        ({"scale": torch.zeros(70)}, errors.DtypeError, "table is float32; allowed: int8"),
        (
            {"table": torch.zeros(70, 8).char(), "scale": torch.zeros(69)},
            errors.ShapeError,
            r"scale has shape \[69\]; allowed: \[70\]",
        ),
        ({"positions": None}, errors.ConfigError, "positions and their table go together"),
        ({"positions": IDS}, errors.DtypeError, "positions is int64; allowed: int32"),
        ({"positions": PLACES[1:]}, errors.ShapeError, r"positions has shape \[4\]; allowed: \[5\]"),
        ({"position_table": torch.zeros(9, 7)}, errors.ShapeError, r"position_table has shape \[9, 7\]"),
        ({"position_table": torch.zeros(9, 8).half()}, errors.DtypeError, "position_table is float16"),
        ({"table": torch.zeros(70, 8, device="meta")}, errors.DeviceError, "table is on meta"),
    ],
)
def test_refusals(changes: dict[str, Any], error: Any, message: str) -> None:
    given = {"ids": IDS, "table": torch.zeros(70, 8), "scale": None, "positions": PLACES}
    given |= {"position_table": torch.zeros(9, 8), "dtype": torch.float32}
    with pytest.raises(error, match=f"^qcut::embed_rows: .*{message}"):
        OP(**{**given, **changes})


def test_cpu_refuses_ids_outside_a_codebook() -> None:
    _, layer = codebook_table("codebook4", torch.float32)
    for bad in (-1, 70):  # units have rows of padding
        with pytest.raises(errors.RangeError, match="allowed: 0 to 69"):
            CODEBOOK(torch.tensor([bad]), *layer.row_operands, layer.signs, None, None, torch.float32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dtype": torch.float64}, errors.DtypeError, "dtype is float64"),
        ({"ids": PLACES}, errors.DtypeError, "ids is int32; allowed: int64"),
        ({"kind": "qr"}, errors.ConfigError, "kind 'qr' in groups of 128 of 128 columns; allowed: 'hadamard'"),
        ({"group_size": 16}, errors.ConfigError, "kind 'hadamard' in groups of 16"),
        ({"kind": "none", "k": 48}, errors.ConfigError, "groups of 128 of 48 columns"),
        ({"kind": "none", "group_size": 8}, errors.ConfigError, "groups of 8 of 128 columns.*'none' in groups of 16"),
        ({"seeds": []}, errors.ConfigError, "0 seeds; allowed: one for each pass, 1 or 2"),
        ({"seeds": [1, 2, 3]}, errors.ConfigError, "3 seeds"),
        ({"bits": [4, 4]}, errors.ConfigError, "1 sets of weights and 1 passes"),
        ({"bits": [3]}, errors.ShapeError, r"units has shape \[8, 1, 1024\]; allowed: \[8, 1, 768\]"),
        ({"bits": [5]}, errors.ConfigError, "indices of 5 bits"),
        ({"seeds": [1, 2], "norms": torch.zeros(70, 2)}, errors.ShapeError, r"units has shape .* allowed: \[8, 2,"),
        ({"norms": torch.zeros(70)}, errors.ShapeError, r"norms have shape \[70\]"),
        ({"norms": torch.zeros(70, 2)}, errors.ShapeError, r"norms has shape \[70, 2\]; allowed: \[70, 1\]"),
        ({"norms": torch.zeros(70, 1).bfloat16()}, errors.DtypeError, "norms is bfloat16"),
        ({"codebooks": [torch.zeros(8)]}, errors.ShapeError, r"codebook has shape \[8\]; allowed: \[16\]"),
        ({"operands": torch.zeros(1, 4)}, errors.DtypeError, "operands is float32; allowed: int32"),
        ({"position_table": torch.zeros(9, 7)}, errors.ShapeError, r"position_table has shape \[9, 7\]"),
        ({"positions": None}, errors.ConfigError, "positions and their table go together"),
        ({"zeroed": torch.zeros(2, 2).t()[:1]}, errors.ShapeError, "zeroed has strides"),
        ({"norms": torch.zeros(70, 1, device="meta")}, errors.DeviceError, "norms is on meta"),
    ],
)
def test_refusals_of_codebooks(changes: dict[str, Any], error: Any, message: str) -> None:
    _, layer = codebook_table("codebook4", torch.float32)
    names = ("units", "norms", "codebooks", "bits", "kind", "group_size", "seeds", "k")
    given: dict[str, Any] = {"ids": IDS, **dict(zip(names, layer.row_operands, strict=True)), "operands": layer.signs}
    given |= {"positions": PLACES, "position_table": torch.zeros(9, 128), "dtype": torch.float32}
    with pytest.raises(error, match=message):
        CODEBOOK(**{**given, **changes})


def test_pairs_go_with_one_pass() -> None:
    _, layer = codebook_table("codebook4_pairs", torch.float32)
    units, _, codebooks, *_ = layer.row_operands
    given = (IDS, units * 2, torch.zeros(70, 2), codebooks * 2, [4, 4], "hadamard", 128, [1, 2], 128)
    with pytest.raises(errors.ConfigError, match="pairs in 2 passes; allowed: 1"):
        CODEBOOK(*given, torch.zeros(2, 4, dtype=torch.int32), None, None, torch.float32)
