"""The decoder's kernels between products: every element has a thread, sizes that no kernel holds."""

from __future__ import annotations

import pytest

from qcut.emitters.core.source import DType, EmitError
from qcut.emitters.decoder.append import RotateAndAppend
from qcut.emitters.decoder.embed import EmbedRows
from qcut.emitters.decoder.norm import NormRows
from qcut.emitters.decoder.quantize import ColSum, Dequantize, QuantizePerTensor, QuantizePerToken
from tests.emitters.conformance.decoder import CODEBOOK, F16, F32, S8, appends


@pytest.mark.parametrize("desc", appends("sm_90a"), ids=lambda d: d.name)
def test_appending_reaches_every_head_of_every_token(desc: RotateAndAppend) -> None:
    assert desc.head % (2 * desc.vector) == 0
    for tokens, heads, kv_heads in ((1, 32, 8), (1024, 0, 20), (77, 71, 1), (8192, 32, 8)):
        x, y, z = desc.grid(tokens, heads, kv_heads)
        shares = desc.head // 2 // desc.vector
        groups = desc.block // min(32, 1 << (shares - 1).bit_length())
        at_once = groups if desc.many else 1
        assert (x - 1) * at_once < tokens <= x * at_once
        each = max(1, 64 // desc.x.bits // -(-shares // 32)) if desc.many else groups
        assert (y - 1) * each < heads + 2 * kv_heads <= y * each
        assert z == 1


@pytest.mark.parametrize("k", [1, 32, 172, 768, 1280, 4096, 5120, 8192, 14336])
@pytest.mark.parametrize("x", [F16, F32])
def test_norms_hold_their_rows(k: int, x: DType) -> None:
    desc = NormRows.for_shape(x, True, "sm_90a", k)
    assert desc.threads * desc.vectors * 128 // x.bits >= k
    assert desc.grid(7) == (7, 1, 1)


def test_rows_that_no_cta_holds() -> None:
    with pytest.raises(EmitError, match="vectors: of a thread are 1 to 4"):
        NormRows.for_shape(F32, False, "sm_90a", 16385)


@pytest.mark.parametrize("k", [1, 33, 172, 1280, 4096])
@pytest.mark.parametrize("rows", [1, 77, 8192])
def test_every_element_has_a_thread(k: int, rows: int) -> None:
    for desc in (EmbedRows(F16, F16, "sm_90a"), EmbedRows(F32, S8, "sm_90a")):
        x, y, z = desc.grid(rows, k)
        threads = rows * -(-k // (128 // desc.x.bits))
        assert (x - 1) * desc.block < threads <= x * desc.block
        assert y == z == 1


@pytest.mark.parametrize("k", [32, 160, 1280, 4096])
@pytest.mark.parametrize("rows", [1, 77, 8192])
def test_every_column_has_a_thread(k: int, rows: int) -> None:
    x, y, z = CODEBOOK.grid(rows, k)
    assert (x - 1) * CODEBOOK.block < rows * k // 16 <= x * CODEBOOK.block
    assert y == z == 1


@pytest.mark.parametrize("m", [1, 64, 600, 8192])
@pytest.mark.parametrize("k_padded", [16, 1280, 4096, 14336, 32768, 131_072])
@pytest.mark.parametrize("x", [DType.F16, DType.F32])
def test_per_token_layout_covers_the_row(x: DType, k_padded: int, m: int):
    desc = QuantizePerToken.for_shape(x, "sm_90a", m, k_padded)
    desc.emit()
    assert desc.vectors == 0 or desc.row_elements >= k_padded
    rows = desc.grid(m, k_padded)[0] * desc.rows
    assert m <= rows < m + desc.rows


def test_few_rows_take_more_threads_than_many():
    few, many = (QuantizePerToken.for_shape(DType.F16, "sm_90a", m, 4096) for m in (1, 8192))
    assert (few.threads, few.vectors) == (512, 1)
    assert (many.threads, many.vectors) == (128, 4)
    some, many = (QuantizePerToken.for_shape(DType.F16, "sm_90a", m, 1280) for m in (1024, 4096))
    assert ((some.threads, some.vectors), (many.threads, many.vectors)) == ((64, 3), (32, 5))


@pytest.mark.parametrize(("m", "k"), [(1, 1), (7, 48), (129, 4096), (3, 131_072)])
def test_elementwise_grid_covers_the_matrix(m: int, k: int):
    for desc in (
        QuantizePerTensor.for_shape(DType.F32, "sm_80", m, k),
        Dequantize.for_shape(DType.BF16, "sm_80", m, k),
    ):
        rows, columns, _ = desc.grid(m, k)
        assert m <= rows * desc.rows < m + desc.rows
        assert k <= columns * desc.row_elements < k + desc.row_elements


def test_rows_beyond_a_kernel_are_refused() -> None:
    with pytest.raises(EmitError, match="257 columns; this kernel holds rows of up to 256"):
        QuantizePerToken(F16, "sm_80", 32, 1).grid(1, 257)
    with pytest.raises(EmitError, match="architecture 'sm_75' is not one of"):
        ColSum("sm_75").emit()
