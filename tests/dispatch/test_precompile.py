"""Ahead-of-time kernels: all that layers and engines ask for on a GPU with a wheel's kernels."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import product

import pytest
import torch

from qcut.backends.cuda import gemm as gemm_cuda
from qcut.backends.cuda import integers as integers_cuda
from qcut.backends.cuda import linear as linear_cuda
from qcut.backends.cuda.codebook import CodebookLayer, Rotation
from qcut.backends.cuda.codebook import Product as CodebookProduct
from qcut.backends.cuda.gemm import Product
from qcut.backends.cuda.integers import IntegerLayer
from qcut.backends.cuda.launch.plans import m_bucket
from qcut.backends.cuda.linear import Int8Layer, LinearLayer
from qcut.dispatch.ahead_of_time import GROUPS, HEADS, has_head_norms, norm_columns
from qcut.dispatch.attention import select_attention
from qcut.dispatch.gpus import GPUS, Target
from qcut.dispatch.precompile import ahead_of_time_kernels
from qcut.emitters.attention.append import AttentionAppend
from qcut.emitters.attention.mma import AttentionMma
from qcut.emitters.core.arch import ARCHITECTURES
from qcut.emitters.core.epilogue import ACTIVATIONS
from qcut.emitters.core.source import INCLUDE_DIR, DType, EmitError, KernelSource
from qcut.emitters.decoder.norm import NormRows
from tests.support.binaries import build

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)
SIZES = (
    *(8, 50, 64, 96, 128, 768, 1000, 1280, 1536, 2048),
    *(2560, 3584, 4096, 5120, 5632, 8192, 11008, 14336, 18944, 32768),
)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def arch(request: pytest.FixtureRequest) -> str:
    """An architecture. Its tests follow one another, so that `sources` writes its kernels once."""
    return str(request.param)


@lru_cache(maxsize=1)
def sources(arch: str) -> tuple[KernelSource, ...]:
    return tuple(ahead_of_time_kernels(arch))


@lru_cache
def names(arch: str) -> frozenset[str]:
    return frozenset(source.name for source in sources(arch))


def gpus(arch: str) -> list[Target]:
    """The known GPUs of an architecture, and ones with other numbers of multiprocessors, with a wheel's kernels."""
    counts = {(gpu.sm_count, gpu.name) for gpu in GPUS if gpu.arch == arch} | {(20, "a"), (60, "b"), (200, "c")}
    return [Target(arch, count, name, ahead_of_time=True) for count, name in sorted(counts)]


def layers(chance: random.Random) -> Iterator[tuple[str, object]]:
    """Calls of a random layer, at random numbers of tokens."""
    n, k = chance.choice((*SIZES, 50257, 151936, chance.randrange(1, 40000))), chance.choice(SIZES)
    bias, activation = chance.random() < 0.5, chance.choice(ACTIVATIONS)
    dtype, half = chance.choice(FLOATS), chance.choice(HALVES)
    for m in (1, chance.randrange(2, 65), chance.randrange(65, 9000)):
        rows = m_bucket(m)
        aligned = k % 8 == 0
        for scheme, x in (
            ("w8a8", dtype),
            ("w8a8_static", dtype),
            ("w8a16", half),
            ("int16x8", dtype),
            ("int16x8_static", dtype),
        ):
            yield scheme, LinearLayer(scheme, x, rows, n, k, bias, activation, aligned)
        for tokens in (torch.int8, torch.int16):
            whole = -(-k // 16) * 16
            yield (
                "integers",
                IntegerLayer(tokens, rows, n, whole, tokens is torch.int8 or whole == k, chance.random() < 0.5),
            )
        yield "int8", Int8Layer(dtype, rows, n, -(-k // 16) * 16, bias, activation, chance.random() < 0.5)
        yield "rows", LinearLayer("w8a8", dtype, rows, n, k, bias, activation, aligned)
        group = chance.choice(GROUPS)
        kind = chance.choice(("hadamard", "qr", "none"))
        if k % group == 0:
            options = {"bits": chance.choice((2, 3, 4)), "passes": chance.choice((1, 2)), "kind": kind}
            options |= {"group_size": group, "bias": bias, "activation": activation, "rows": m, "n": n, "k": k}
            yield "codebook", CodebookLayer(dtype=half, int8=False, **options)
            yield "codebook", CodebookLayer(dtype=half if kind == "qr" else dtype, int8=True, **options)
            if kind == "none" and k % 16 == 0:
                options |= {"bits": 4, "group_size": 16}
                yield "codebook", CodebookLayer(dtype=half, int8=False, **options)
            if kind != "none":
                options |= {"bits": 4, "passes": 1, "pairs": True}
                yield "codebook", CodebookLayer(dtype=half, int8=m % 2 == 0, **options)


def test_layers_find_their_kernels(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(arch)
    monkeypatch.setattr(gemm_cuda, "has_cutlass", lambda: pytest.fail("asked for nvcc"))
    asked = 0
    for gpu in gpus(arch):
        for module in (linear_cuda, integers_cuda):
            monkeypatch.setattr(module, "target", lambda device, gpu=gpu: gpu)
        for _ in range(3):
            for what, call in layers(chance):
                if isinstance(call, CodebookLayer):
                    specs = call.specs(gpu)
                elif isinstance(call, Int8Layer):
                    specs = (call.spec(0)[0],)
                elif what == "rows":
                    rows = Product(call.problem(), call.rows, call.n, call.k)
                    specs = (rows.stream_spec("rows", gpu, aligned=call.aligned),)
                else:
                    specs = call.specs(0)
                for spec in specs:
                    if spec is not None:
                        asked += 1
                        assert spec.source.name in names(arch), (gpu, call)
    assert asked > 250


def test_decoders_find_their_kernels(arch: str) -> None:
    chance = random.Random(arch)
    for i, gpu in enumerate(gpus(arch)):
        for x, head in ((x, head) for x in (DType.F16, DType.BF16, DType.F32) for head in HEADS):
            for queries in range(1 + i % 2, 17, 2):  # GPUs take turns
                cache = chance.choice((x, DType.S8))
                sizes = {"batch": chance.randrange(1, 65), "kv_heads": chance.randrange(1, 33)}
                try:
                    desc, _ = select_attention(
                        x, cache, head, queries, gpu, context=chance.randrange(1, 1 << 17), **sizes
                    )
                except EmitError:
                    continue
                assert desc.emit().name in names(arch)
                if isinstance(desc, AttentionMma):
                    for rotary, norms in product((False, True), repeat=2):
                        if norms <= has_head_norms(head, rotary, gpu):
                            step = AttentionAppend(desc, rotary, norms).emit()
                            assert step.name in names(arch)
            k, aligned = chance.randrange(1, 16384), chance.random() < 0.5
            columns = norm_columns(k, x, gpu, aligned=aligned)
            flags = {flag: chance.random() < 0.5 for flag in ("many", "residual", "quantized")}
            assert columns >= k
            assert NormRows.for_shape(x, head == 64, arch, columns, aligned=aligned, **flags).emit().name in names(arch)


def test_the_set_is_whole_and_small(arch: str) -> None:
    found = sources(arch)
    wgmma = arch == "sm_90a"
    wanted = {"int8_cutlass", "int8_mma", "int8_stream", "w8a16_mma", "w8a16_stream", "codebook_stream", "rotate"}
    wanted |= {"codebook_stream_wgmma", "codebook_wgmma"} if wgmma else {"codebook_mma", "codebook_stream_rounds"}
    families = {re.split("_sm[0-9]", source.name)[0].removeprefix("qcut_") for source in found}
    assert wanted < families
    wanted = {"norm", "append", "attention_append", "argmax", "accept", "embed", "quantize_per_token"}
    assert wanted | {"route", "sort_routes", "sum_routes"} < families
    assert len({source.name for source in found}) == len(found) < 8500
    assert sum(source.toolchain == "nvcc" for source in found) < 200
    assert {source.arch for source in found} == {arch}


def test_passes_of_two_widths_find_their_kernels(arch: str) -> None:
    """The first product makes float32 sums, to which the second adds its own and the bias."""
    for gpu, tokens, bits, m in product(gpus(arch), (*HALVES, torch.int8), (2, 3, 4), (1, 20, 700)):
        for residual, bias in ((False, False), (True, False), (True, True)):
            rows = m_bucket(m)
            options = {"n": 3000, "units": 20, "bits": bits, "slots": 1, "out": torch.float32, "rows": rows}
            found = CodebookProduct(tokens, bias=bias, activation="none", residual=residual, **options)
            assert found.spec(gpu).source.name in names(arch)


def test_other_targets_choose_as_before() -> None:
    """A target with a compiler has tiles of each shape's own, and kernels of one activation."""
    free = next(gpu for gpu in GPUS if gpu.arch == "sm_90a")
    chosen = {
        CodebookLayer(
            rows=1,
            n=n,
            k=4096,
            dtype=torch.float16,
            bits=4,
            passes=1,
            kind="hadamard",
            group_size=128,
            int8=True,
            bias=True,
            activation="relu",
        )
        .specs(free)[-1]
        .source.name
        for n in (1024, 3000, 9000, 20000)
    }
    assert len(chosen) > 2
    assert all("relu" in name for name in chosen)


def test_rotations_of_short_rows_keep_their_group(arch: str) -> None:
    gpu = gpus(arch)[0]
    for k, group in ((32, 128), (64, 128), (256, 64)):
        sources = Rotation("hadamard", torch.float16, torch.int8, 1, k, group, 1).specs(gpu)
        assert f"hadamard{min(k, group)}p1" in sources[0].source.name
        assert sources[0].source.name in names(arch)


def test_activation_is_the_last_argument_of_products(arch: str) -> None:
    """A launch adds it to the arguments of a call, in the order of `ACTIVATIONS`."""
    for source in sources(arch):
        names_of = [param.name for param in source.params]
        if "_any" not in source.name:
            assert "activation" not in names_of
        elif source.toolchain == "nvrtc":
            assert names_of[-1] == "activation"
            assert "args.activation = activation;" in source.text
    device = (INCLUDE_DIR / "qcut" / "core" / "epilogue.cuh").read_text()
    (listed,) = re.findall(r"enum class Activation {([^}]*)}", device)
    order = [word.strip().removeprefix("k").lower() for word in listed.split(",")]
    assert order == [*(name.replace("_", "") for name in ACTIVATIONS), "any"]


def test_one_kernel_of_each_family_compiles(arch: str) -> None:
    """Families take turns among the architectures."""
    families: dict[str, list[KernelSource]] = {}
    for source in sources(arch):
        if source.toolchain == "nvrtc":
            families.setdefault(re.split("_sm[0-9]", source.name)[0], []).append(source)
    turn = ARCHITECTURES.index(arch)
    mine = [kernels for i, (_, kernels) in enumerate(sorted(families.items())) if i % len(ARCHITECTURES) == turn]
    assert all(binary.cubin for binary in build(*(kernels[len(kernels) // 2] for kernels in mine)))
