"""Weights that the kernel just before writes: raw operators read the new ones, on a stream and in a graph.

The writers let their successors start early, as kernels of qcut do, so that a kernel that read its weight before it
waited would find what the memory held before: the other source's values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.errors import UnsupportedError
from qcut.numerics.codebook import layout, products
from qcut.numerics.codebook import tokens as rotated_tokens
from qcut.numerics.int8 import sqnr_db
from tests.gpu.support.oracles import DEVICE, assert_same

OPS = torch.ops.qcut
HALF = torch.float16
SIDE = 4096
ROUNDS = 40

Write = Callable[[Tensor], tuple[Tensor, ...]]
Use = Callable[..., Tensor]


def quantized(source: Tensor) -> tuple[Tensor, ...]:
    q, scale = OPS.quantize_per_token(source, SIDE)
    return q, scale


def activated(source: Tensor) -> tuple[Tensor, ...]:
    return (OPS.gelu_tanh(source)[-1],)


def sources() -> list[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    return [torch.randn(SIDE, SIDE, generator=generator, device=DEVICE).half() for _ in range(2)]


def linear(op: str, m: int) -> Use:
    x = torch.randn(m, SIDE, device=DEVICE).half()
    q, scale = OPS.quantize_per_token(x, SIDE)
    peaks = x.float().abs().amax(1)

    def use(weight: Tensor, weight_scale: Tensor) -> Tensor:
        parts = (weight, weight_scale, None, "none")
        result: Tensor
        if op == "int8_linear":
            result = OPS.int8_linear(q, scale, *parts, HALF)
        elif op == "noted_linear":
            result = OPS.noted_linear(x, peaks, *parts)
        elif op == "gemm_s8":
            result = OPS.gemm_s8(q, weight, row_scale=scale, col_scale=weight_scale)
        else:
            result = getattr(OPS, op)(x, *parts)
        return result

    return use


def codebook(op: str, m: int) -> Use:
    tiles, units_k = layout.row_tiles(SIDE), SIDE // 128
    shape = (tiles, units_k, layout.unit_bytes(4))
    norms = torch.ones(tiles, units_k, 1, 8, 2, device=DEVICE, dtype=HALF)
    scale, book = torch.ones(SIDE, device=DEVICE) / SIDE, products.pack_book(torch.linspace(-1, 1, 16), HALF)
    signs = rotated_tokens.operands("hadamard", 128, SIDE, (1,), HALF, DEVICE)
    x = torch.randn(m, SIDE, device=DEVICE).half()
    blocks, _ = OPS.rotate_tokens(x, signs, "hadamard", 128, [1], HALF)
    tail = (scale, book, None, 4, "none", None, HALF)

    def use(written: Tensor, _: Tensor) -> Tensor:
        result: Tensor
        if op == "rotate_tokens":  # of signs that were written last
            own = written.view(torch.int32).flatten()[-signs.numel() :].view(signs.shape)
            return OPS.rotate_tokens(x, own, "hadamard", 128, [1], HALF)[0].clone()
        units = written.view(torch.uint8).flatten()[-tiles * units_k * shape[2] :].view(shape)
        if op == "codebook_gemv":
            result = OPS.codebook_gemv(x, signs, 128, [1], units, norms, None, *tail)
        else:
            result = OPS.codebook_gemm(blocks, None, m, units, norms, None, *tail)
        return result

    return use


def norm(op: str) -> Use:
    x = torch.randn(4, SIDE, device=DEVICE).half()

    def use(weight: Tensor) -> Tensor:
        if op == "add_norm":
            y: Tensor = OPS.add_norm(x, None, weight, None, False, 1e-6)[1]
            return y
        _, q, scale = OPS.add_norm_int8(x, None, weight, None, False, 1e-6, SIDE)
        return torch.cat((q.flatten().float(), scale))

    return use


CASES: dict[str, tuple[Write, Callable[[], Use]]] = {
    **{
        f"{op}-{m}": (quantized, lambda op=op, m=m: linear(op, m))
        for op in ("w8a8_linear", "w8a16_linear", "int8_linear", "noted_linear", "gemm_s8")
        for m in (1, 8, 16, 64)
        if m <= 16 or op in ("w8a8_linear", "w8a16_linear")
    },
    **{
        f"{op}-{m}": (quantized, lambda op=op, m=m: codebook(op, m))
        for op, m in (("codebook_gemv", 1), ("codebook_gemm", 4), ("codebook_gemm", 64), ("rotate_tokens", 8))
    },
    **{op: (activated, lambda op=op: norm(op)) for op in ("add_norm", "add_norm_int8")},
}


@pytest.fixture(scope="module")
def given() -> list[Tensor]:
    return sources()


def settled(write: Write, use: Use, source: Tensor) -> Tensor:
    written = write(source)
    torch.cuda.synchronize()
    result = use(*written)
    torch.cuda.synchronize()
    return result


@pytest.mark.parametrize("name", CASES)
def test_on_a_stream(given: list[Tensor], name: str) -> None:
    write, make = CASES[name]
    use = make()
    want = [settled(write, use, source) for source in given]
    assert not torch.equal(*want)
    for i in range(ROUNDS):
        torch.cuda._sleep(1_000_000)  # until all that follows is queued
        got = use(*write(given[i % 2]))
        torch.cuda.synchronize()
        assert_same(got, want[i % 2])


@pytest.mark.parametrize("name", CASES)
def test_in_a_graph(given: list[Tensor], name: str) -> None:
    write, make = CASES[name]
    use, static = make(), given[0].clone()
    want = [settled(write, use, source) for source in given]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = use(*write(static))
    for i in range(1, ROUNDS):
        static.copy_(given[i % 2])
        graph.replay()
        torch.cuda.synchronize()
        assert_same(got, want[i % 2])


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_static", "w8a16", "codebook4", "codebook4_int8", "codebook4_qr"])
def test_a_later_layer_at_the_same_address_has_its_own_values(scheme: str) -> None:
    x, places = torch.randn(3, 512).half(), []
    for seed in range(6):
        torch.manual_seed(seed)
        extra: dict[str, Any] = {}
        if scheme == "w8a8_static":
            extra["static_range"] = qcut.StaticRange(-4.0 - seed, 4.0)
        cpu = qcut.Linear.from_float(nn.Linear(512, 256), scheme, **extra)
        expected = cpu(x).double()
        gpu = cpu.to(DEVICE)
        places.append(next(gpu.buffers()).data_ptr())
        for rows in (3, 1):
            assert sqnr_db(expected[:rows], gpu(x[:rows].to(DEVICE)).cpu().double()) > 35
        del gpu, cpu
    assert len(set(places)) < len(places), "no address was used twice"


def test_a_backward_pass_is_refused() -> None:
    layer = qcut.Linear.from_float(nn.Linear(64, 64), "w8a8", name="mid").to(DEVICE)
    x = torch.randn(3, 64, device=DEVICE).half()
    for _ in range(2):  # planned by Python, then found by C++
        with torch.no_grad():
            layer(x)
            want = OPS.w8a8_linear(x, layer.qweight, layer.weight_scale, layer.bias, "none")
        y = layer(x.clone().requires_grad_())
        assert_same(y.detach(), want)
        with pytest.raises(UnsupportedError, match="layer 'mid'"):
            y.sum().backward()
        y = OPS.w8a8_linear(x.clone().requires_grad_(), layer.qweight, layer.weight_scale, layer.bias, "none")
        with pytest.raises(UnsupportedError, match="qcut::w8a8_linear"):
            y.sum().backward()
