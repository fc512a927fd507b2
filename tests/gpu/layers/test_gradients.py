"""Gradients with respect to the inputs of quantized layers on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.layers.test_gradients import SCHEMES, gradient, layer_of, wanted


@pytest.fixture(autouse=True)
def _sums_in_float32() -> Iterator[None]:
    """The bound is of products that cuBLAS adds in float32, which it need not where it splits them."""
    settings = torch.backends.cuda.matmul
    names = [f"allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16")]
    before = {name: getattr(settings, name) for name in names}
    for name in before:
        setattr(settings, name, False)
    yield
    for name, value in before.items():
        setattr(settings, name, value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ["none", "gelu_tanh"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_gradient_is_that_of_the_dequantized_weight(scheme: str, activation: str, dtype: torch.dtype) -> None:
    layer = layer_of(scheme, activation=activation).cuda()
    x, dy = torch.randn(7, 64, device="cuda").to(dtype), torch.randn(7, 48, device="cuda").to(dtype)
    value, error = wanted(layer, x, dy)
    assert ((gradient(layer, x, dy).double() - value).abs() <= error).all()
    tokens = x.clone().requires_grad_()
    with torch.no_grad():
        want = layer(tokens)
    assert torch.equal(layer(tokens), want)
