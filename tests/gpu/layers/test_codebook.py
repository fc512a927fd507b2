"""Codebook layers on CUDA: the CPU's operators again, both paths, memory, graphs, shared rotations."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.errors import DeviceError, DtypeError
from qcut.layers import rotations as shared_rotations
from qcut.layers.codebook import CodebookLinear
from qcut.numerics.codebook import products as codebook_numerics
from qcut.numerics.int8 import sqnr_db
from qcut.ops.paths import execution_path
from qcut.schemes import Codebook, parse_scheme
from tests.gpu.support.oracles import DEVICE, assert_same

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
EXACT = ("codebook4_int8", "codebook3_g64_int8", "codebook4+4_int8", "int4_g32_int8", "codebook4_pairs_int8")
EXACT += ("codebook4_pairs_g32_int8", "int4_g16_int8")
FLOAT = ("codebook4", "codebook2_g64", "codebook4+4", "codebook4+2", "codebook4_g32_qr", "int4", "codebook4_pairs")
FLOAT += ("int4_g16", "int4_g12", "nvfp4")
LIMIT = {HALF: 2.0**-10, BRAIN: 2.0**-7}
"""Of the whole error, relative: one rounding of each weight and one of the output, in the tokens' type."""


def layer(scheme: str, k: int = 320, n: int = 136, *, bias: bool = True, activation: str = "none") -> CodebookLinear:
    """On the CPU; its weights hold a zero row and an outlier."""
    torch.manual_seed(k + n)
    linear = nn.Linear(k, n, bias=bias)
    with torch.no_grad():
        linear.weight[0] = 0
        linear.weight[n // 2, k // 2] = 9.0
    made = qcut.Linear.from_float(linear, scheme, activation=activation)
    assert isinstance(made, CodebookLinear)
    return made


def tokens(m: int, k: int = 320, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)


def on_the_cpu(cpu: CodebookLinear, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What the CPU's implementations of the kernels' operators make of it."""
    with monkeypatch.context() as patch:
        patch.setattr(shared_rotations, "has_kernels", lambda device: True)
        return cpu(x)


@pytest.mark.parametrize("dtype", [HALF, SINGLE])
@pytest.mark.parametrize("scheme", EXACT)
def test_int8_products_are_the_cpus(scheme: str, dtype: torch.dtype) -> None:
    cpu = layer(scheme)
    gpu = copy.deepcopy(cpu).to(DEVICE)
    for m in (1, 9, 130):
        x = tokens(m, dtype=dtype)
        got = gpu(x.to(DEVICE))
        assert got.dtype is dtype
        assert_same(gpu(x.to(DEVICE)), got)
        assert_same(got.cpu(), cpu(x))
        with execution_path("reference"):
            assert_same(gpu(x.to(DEVICE)), got)


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("scheme", FLOAT)
def test_16_bit_products_are_near_the_cpus(scheme: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = layer(scheme, activation="relu")
    gpu = copy.deepcopy(cpu).to(DEVICE)
    for m in (1, 9, 130):
        x = tokens(m, dtype=dtype)
        got = gpu(x.to(DEVICE))
        assert_same(gpu(x.to(DEVICE)), got)
        want = on_the_cpu(cpu, x, monkeypatch).double()
        assert (got.cpu().double() - want).norm() <= LIMIT[dtype] * want.norm()
        with execution_path("reference"):
            explicit = gpu(x.to(DEVICE))
        assert explicit.dtype is dtype
        assert (got.double() - explicit.double()).norm() <= 4 * LIMIT[dtype] * explicit.double().norm()


@pytest.mark.parametrize("scheme", ["codebook4", "codebook4_pairs", "int4_g16"])
def test_every_number_of_tokens_to_130(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through dispatch, hence on every family and at the edges of every tile."""
    exact, near = layer(f"{scheme}_int8"), layer(scheme)
    exact_gpu, near_gpu = (copy.deepcopy(cpu).to(DEVICE) for cpu in (exact, near))
    for m in range(1, 131):
        x = tokens(m)
        assert_same(exact_gpu(x.to(DEVICE)).cpu(), exact(x))
        want = on_the_cpu(near, x, monkeypatch).double()
        assert (near_gpu(x.to(DEVICE)).cpu().double() - want).norm() <= LIMIT[HALF] * want.norm()


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize(
    "scheme",
    [
        *("codebook4", "codebook3_g64", "codebook2+2_g32", "codebook4+4", "codebook4_int8", "codebook4_g32_int8"),
        *("codebook4_pairs", "codebook4_pairs_int8", "codebook4_pairs_g32_int8"),
    ],
)
def test_one_token_is_what_two_kernels_make_of_it(scheme: str, dtype: torch.dtype) -> None:
    """Bitwise: tiles with clusters, with several units to a warp, and with fewer threads than a warp's for a unit."""
    for n, k in ((136, 384), (33, 64), (1280, 1280), (272, 14336), (4096, 4096)):
        if k % cast(Codebook, parse_scheme(scheme)).group_columns(k) and k > 64:
            continue
        gpu = layer(scheme, k, n, activation="relu").to(DEVICE)
        for x in (tokens(1, k, dtype), 1e4 * tokens(1, k, dtype).sign(), torch.full((1, k), float("nan")).to(dtype)):
            x = x.to(DEVICE)
            assert gpu._rotates_one
            got = gpu(x)
            gpu._rotates_one = False
            assert_same(got, gpu(x))
            gpu._rotates_one = True
            assert_same(gpu(torch.cat((x[0, :1], x[0]))[1:]), got[0])  # 2 bytes off


def test_one_token_where_no_kernel_rotates_it() -> None:
    """More columns than the warps of one kernel hold."""
    gpu = layer("codebook4", 1 << 18, 16).to(DEVICE)
    x = tokens(1, 1 << 18).to(DEVICE)
    assert gpu._rotates_one
    got = gpu(x)
    gpu._rotates_one = False
    assert_same(got, gpu(x))


def test_arguments_of_any_strides_and_alignment() -> None:
    """Copies of several vectors at once: each must live until the launch."""
    gpu = layer("codebook4_int8", 256, 1024).to(DEVICE)
    x = tokens(9, 256).to(DEVICE)
    operands = gpu._rotation.operands(HALF, x.device)
    blocks, scale = torch.ops.qcut.rotate_tokens(x, operands, "hadamard", 128, gpu.scheme.seeds, torch.int8)
    residual = torch.randn(9, 1024, device=DEVICE).half()
    book = codebook_numerics.pack_book(gpu.codebook, HALF)
    assert gpu.bias is not None
    parts = [blocks, scale, gpu.units, gpu.packed_norms, gpu.fold, gpu.col_scale, gpu.bias, residual]

    def product(parts: list[Tensor]) -> Tensor:
        blocks, scale, units, norms, fold, col_scale, bias, residual = parts
        result: Tensor = torch.ops.qcut.codebook_gemm(
            blocks, scale, 9, units, norms, fold, col_scale, book, bias, 4, "none", residual, HALF
        )
        return result

    want = product(parts)

    def off(t: Tensor) -> Tensor:
        """Contiguous, one element off a multiple of 16 bytes."""
        return torch.empty(t.numel() + 1, dtype=t.dtype, device=DEVICE)[1:].view(t.shape).copy_(t)

    def apart(t: Tensor) -> Tensor:
        """Every other element of memory."""
        return torch.stack((t, t.flip(-1)), -1)[..., 0]

    for change in (off, apart):
        assert_same(product([change(t) for t in parts]), want)


def test_dense_rotations_with_int8_products() -> None:
    """Float32 products of another order: an int8 token may differ by one, so the outputs are near, not equal."""
    cpu = layer("codebook4_g32_qr_int8")
    x = tokens(33)
    assert sqnr_db(cpu(x), copy.deepcopy(cpu).to(DEVICE)(x.to(DEVICE)).cpu()) > 45


@pytest.mark.parametrize("scheme", ["codebook4", "codebook4+2_g64_int8", "codebook4_qr", "int4", "codebook4_pairs"])
def test_from_float_on_the_gpu(scheme: str) -> None:
    torch.manual_seed(3)
    linear = nn.Linear(1280, 336)
    cpu = qcut.Linear.from_float(linear, scheme)
    gpu = qcut.Linear.from_float(linear.to(DEVICE), scheme)
    assert {b.device.type for b in gpu.buffers()} == {"cuda"}
    for a, b in zip(cpu.passes[:1], gpu.passes[:1], strict=True):
        # A rotated value within rounding of a midpoint may fall on either side.
        assert (a.indices == b.indices.cpu()).float().mean() > 0.999
        assert torch.allclose(a.norms.float(), b.norms.float().cpu(), rtol=2.0**-10)


def test_state_goes_to_another_device(tmp_path: Path) -> None:
    for scheme in ("codebook4+4", "codebook4_int8", "codebook4_pairs_int8"):
        model = nn.Sequential(layer(scheme)).to(DEVICE)
        state = model.state_dict()
        assert {t.device.type for t in state.values()} == {"cuda"}
        cpu = nn.Sequential(qcut.Linear(320, 136, True, scheme))
        cpu.load_state_dict(state)
        for a, b in zip(model.buffers(), cpu.buffers(), strict=True):
            assert_same(a.cpu(), b)
        qcut.save(model, tmp_path)
        loaded = qcut.load(tmp_path, model=lambda: nn.Sequential(nn.Linear(320, 136)), device=DEVICE, progress=False)
        x = tokens(5).to(DEVICE)
        assert_same(loaded(x), model(x))


def test_shapes_and_strides_of_x() -> None:
    gpu = layer("codebook4_int8").to(DEVICE)
    x = tokens(12).to(DEVICE)
    want = gpu(x)
    assert_same(gpu(x.view(3, 4, 320)).view(12, 136), want)
    assert_same(gpu(x.t().contiguous().t()), want)
    assert_same(gpu(torch.cat((x, x), 1)[:, :320]), want)
    padded = torch.empty(12 * 320 + 1, dtype=HALF, device=DEVICE)[1:].view(12, 320).copy_(x)
    assert_same(gpu(padded), want)
    assert_same(gpu(x[3]), want[3])
    assert gpu(x[:0]).shape == (0, 136)
    with torch.inference_mode():
        assert_same(gpu(x.clone()), want)


def test_bad_tokens_stay_in_their_rows() -> None:
    for scheme in ("codebook4", "codebook4_int8"):
        gpu = layer(scheme).to(DEVICE)
        x = tokens(19).to(DEVICE)
        want = gpu(x)
        x[3, 7] = float("nan")
        got = gpu(x)
        assert got[3].isnan().all()
        assert_same(got[:3], want[:3])
        assert_same(got[4:], want[4:])


@pytest.mark.parametrize("scheme", ["codebook4", "codebook4+4", "codebook4_int8"])
def test_no_memory_of_the_weights_size(scheme: str) -> None:
    n = k = 4096
    gpu = layer(scheme, k, n, bias=False).to(DEVICE)
    for m in (1, 64, 512):
        x = tokens(m, k).to(DEVICE)
        gpu(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = gpu(x.clone())
        peak = torch.cuda.max_memory_allocated() - before
        element = 1 if gpu.int8 else 2
        rows = -(-m // 8) * 8
        rotated = rows * gpu.geometry.k_padded * len(gpu.scheme.widths) * element + 4 * m
        assert peak <= x.nbytes + y.nbytes + rotated + 0.01 * 2 * n * k


class Attention(nn.Module):
    """Three layers on one input, and one on their sum."""

    def __init__(self, scheme: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (layer(scheme, 320, 320) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.q(x) + self.k(x) * self.v(x))


@pytest.fixture
def rotations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    real = shared_rotations._ROTATE

    def counted(x: Tensor, *rest: object) -> object:
        calls.append(len(x))
        return real(x, *rest)

    monkeypatch.setattr(shared_rotations, "_ROTATE", counted)
    monkeypatch.setattr(shared_rotations.shared, "_last", None)
    return calls


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["codebook4", "codebook4_int8"])
def test_cuda_graph_with_shared_rotations(scheme: str, rotations: list[int]) -> None:
    model = Attention(scheme).to(DEVICE)
    first, second = (tokens(17).to(DEVICE) * s for s in (1, -2))
    expected = [model(x) for x in (first, second)]
    assert len(rotations) == 4
    static = first.clone()
    model.q(static)  # remembered outside of the capture: no part of the graph may rest on it
    rotations.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(static)
    assert len(rotations) == 2
    for x, y in zip((second, first), reversed(expected), strict=True):
        static.copy_(x)
        graph.replay()
        assert_same(out, y)
    model.k(static)  # nor may a call outside rest on what the graph remembered
    assert len(rotations) == 3
    assert_same(model.k(static), model.k(static.clone()))


@torch.no_grad()
def test_streams_do_not_share(rotations: list[int]) -> None:
    model = Attention("codebook4").to(DEVICE)
    x = tokens(17).to(DEVICE)
    model.q(x)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        model.k(x)
    torch.cuda.synchronize()
    assert len(rotations) == 2


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["codebook4", "codebook4_int8", "codebook4_g32_qr"])
def test_compile_fullgraph(scheme: str) -> None:
    model = Attention(scheme).to(DEVICE)
    compiled = torch.compile(model, fullgraph=True)
    x = tokens(17).to(DEVICE)
    got, want = compiled(x), model(x)
    # The additions between the layers are fused, and rounded once less.
    assert sqnr_db(want, got) > 40


def test_refusals() -> None:
    gpu = layer("codebook4").to(DEVICE)
    with pytest.raises(DtypeError, match=r"x is float32; codebook4 computes in float16, bfloat16 on CUDA"):
        gpu(tokens(2, dtype=SINGLE).to(DEVICE))
    with execution_path("reference"):
        assert gpu(tokens(2, dtype=SINGLE).to(DEVICE)).dtype is SINGLE
    with pytest.raises(DeviceError):
        gpu(tokens(2))
