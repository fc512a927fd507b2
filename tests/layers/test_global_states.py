"""What a program has switched on in torch changes neither what quantizing gives nor what quantized layers compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.errors import UnsupportedError
from tests.integrations.transformers.mixtures import quantized_mixture

SCHEMES = (
    *("w8a8", "w8a8_static", "w8a16", "int16x8", "int16x8_static", "codebook4", "codebook3", "codebook2"),
    *("fp8_dynamic", "fp8_static"),
    *("codebook4+4", "codebook4+2", "codebook4_int8", "codebook4_pairs", "codebook4_g64_qr", "int4", "codebook3_none"),
    "nvfp4",
)


@contextmanager
def _switched(switch: Callable[[], object], back: Callable[[], object]) -> Iterator[None]:
    switch()
    try:
        yield
    finally:
        back()


def _default_dtype(dtype: torch.dtype) -> object:
    return _switched(lambda: torch.set_default_dtype(dtype), lambda: torch.set_default_dtype(torch.float32))


STATES: dict[str, Callable[[], object]] = {
    "default dtype bfloat16": lambda: _default_dtype(torch.bfloat16),
    "default dtype float16": lambda: _default_dtype(torch.float16),
    "default dtype float64": lambda: _default_dtype(torch.float64),
    "default device": lambda: torch.device("meta"),
    "autocast bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", torch.float16),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "deterministic algorithms": lambda: _switched(
        lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)
    ),
    "short float32 products": lambda: _switched(
        lambda: torch.set_float32_matmul_precision("medium"), lambda: torch.set_float32_matmul_precision("highest")
    ),
    "denormals flushed": lambda: _switched(
        lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)
    ),
}


def _data() -> tuple[nn.Linear, Tensor]:
    generator = torch.Generator().manual_seed(3)
    layer = nn.Linear(128, 48)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(48, 128, generator=generator) / 11)
        layer.bias.copy_(torch.randn(48, generator=generator))
    return layer, torch.randn(5, 128, generator=generator)


def _made(layer: nn.Linear, scheme: str) -> qcut.Linear:
    with_range = qcut.StaticRange(-3.5, 4.25) if "static" in scheme else None
    return qcut.Linear.from_float(layer, scheme, static_range=with_range)


@cache
def _plain(scheme: str) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    layer, x = _data()
    made = _made(layer, scheme)
    return made.state_dict(), made(x), made.dequantized_weight(), made.rows(torch.tensor([4, 0]))


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_are_the_same_in_any_state(scheme: str, state: str) -> None:
    wanted, y, weight, rows = _plain(scheme)
    (layer, x), ids = _data(), torch.tensor([4, 0])
    before = torch.get_rng_state()
    with STATES[state]():  # type: ignore[attr-defined]
        made = _made(layer, scheme)
        found, made_weight, made_rows, held = made(x), made.dequantized_weight(), made.rows(ids), made.state_dict()
        again = qcut.Linear(128, 48, True, scheme, device="cpu")
        again.load_state_dict(held)
        read = again(x)
    assert torch.equal(torch.get_rng_state(), before)
    assert held.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert held[key].dtype == tensor.dtype, key
        assert torch.equal(held[key], tensor), key
    for one, other in ((found, y), (read, y), (made(x), y), (made_weight, weight), (made_rows, rows)):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert not any(buffer.is_inference() for buffer in made.buffers())


def _transformed(layer: nn.Module, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    return {
        "jvp": lambda: torch.func.jvp(layer, (x,), (x,)),
        "jacfwd": lambda: torch.func.jacfwd(layer)(x),
        "grad": lambda: torch.func.grad(lambda one: layer(one).sum())(x),
    }


@pytest.mark.parametrize("scheme", ["w8a8", "w8a16", "codebook4", "int4", "fp8_dynamic", "w8a8_rotated"])
def test_transformations_are_equal_or_refused(scheme: str) -> None:
    torch.manual_seed(0)
    layer, other = (qcut.Linear.from_float(nn.Linear(64, 64), scheme, name="proj") for _ in range(2))
    x = torch.randn(4, 3, 64)
    for call in _transformed(layer, x[0]).values():
        with pytest.raises(UnsupportedError, match=r"layer 'proj': .*; (allowed|quantized layers have only)"):
            call()
    calls = (
        (lambda: torch.func.vmap(layer)(x), layer(x)),
        (lambda: torch.func.functional_call(layer, dict(other.named_buffers()), (x,)), other(x)),
        (lambda: torch.func.functional_call(layer, other.state_dict(), (x,)), other(x)),
    )
    refused = 0
    for compute, wanted in calls:
        try:
            torch.testing.assert_close(compute(), wanted)
        except UnsupportedError as error:
            refused += "layer 'proj': " in str(error)
    assert refused == (2 if scheme in ("codebook4", "int4") else 0)


def test_experts_and_tables_refuse_vmap() -> None:
    table = qcut.Embedding.from_float(nn.Embedding(8, 64), "w8a16")
    with pytest.raises(UnsupportedError, match=r"torch\.func\.vmap"):
        torch.func.vmap(table)(torch.zeros(2, 3, dtype=torch.int64))
    experts = quantized_mixture(scheme="w8a8").model.layers[0].mlp.experts
    x, index, weights = torch.randn(2, 3, 64), torch.randint(0, 4, (2, 3, 2)), torch.rand(2, 3, 2)
    for dims in ((0, 0, 0), (0, None, None), (None, None, 0)):
        given = [one if dim == 0 else one[0] for one, dim in zip((x, index, weights), dims, strict=True)]
        with pytest.raises(UnsupportedError, match=r"mlp\.experts': .*torch\.func\.vmap"):
            torch.func.vmap(experts, in_dims=dims)(*given)


def test_stacks_refuse_tensors_of_a_state_dict() -> None:
    mine, other = (quantized_mixture(scheme="codebook4_g32").model.layers[i].mlp.experts for i in (0, 1))
    given = torch.randn(3, 64), torch.randint(0, 4, (3, 2)), torch.rand(3, 2)
    found = torch.func.functional_call(mine, dict(other.named_buffers()), given)
    assert torch.equal(found, other(*given))
    with pytest.raises(UnsupportedError, match=r"experts\.\w+': it is called with tensors of a state dict"):
        torch.func.functional_call(mine, other.state_dict(), given)
