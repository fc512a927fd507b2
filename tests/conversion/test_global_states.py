"""Calibrating, collecting, planning, refining and whole models do not depend on what torch has switched on."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import qcut
from tests.layers.test_global_states import STATES


def net() -> nn.Sequential:
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Linear(64, 64, device="cpu"), nn.ReLU(), nn.Linear(64, 32, device="cpu")).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu")
            parameter.copy_(values / 8)
    return model


def results(made: list[nn.Sequential], batches: list[Tensor]) -> dict[str, Any]:
    """What everything gives; the float models were made before."""
    model = made[0]
    calibration = qcut.calibrate(model, batches, progress=False)
    ranges = [calibration.range(name, method) for name in ("0", "2") for method in ("minmax", "mse", "quantile")]
    moments = qcut.collect_second_moments(model, batches, progress=False)
    curvature = qcut.collect_curvature(model, batches, progress=False)
    found: dict[str, Any] = {"ranges": [[r.lo, r.hi] for r in ranges], "moments": moments}
    for i, (scheme, moment) in enumerate(
        (("codebook3", moments), ("codebook4_pairs", curvature), ("w8a8_static", None))
    ):
        options = {"second_moments": moment, "calibration": calibration, "allow_growth": True, "progress": False}
        found[scheme] = str(qcut.quantize(made[1 + i], scheme, **options)), made[1 + i].state_dict()
    found["moments"] = dict(moments), {name: (one.inputs, one.outputs) for name, one in curvature.items()}
    found["losses"] = list(qcut.refine(made[1], made[4], batches, steps=3, progress=False).losses)
    found["refined"] = made[1].state_dict()
    options = {"candidates": ["w8a8", "w8a8_static", "codebook3", "fp16"], "progress": False}
    found["plan"] = str(qcut.plan(made[5], batches, budget=0.05, **options))
    chain = qcut.IntegerChain.from_float(made[6], batches)
    found["chain"] = chain.state_dict(), chain(batches[0])
    return found


def inputs() -> list[Tensor]:
    return list(torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(9), dtype=torch.float32).unbind())


@cache
def plain() -> tuple[list[Any], Any]:
    leaves, spec = pytree.tree_flatten(results([net() for _ in range(7)], inputs()))
    return leaves, spec


@pytest.mark.parametrize("state", STATES)
def test_conversion_is_the_same_in_any_state(state: str) -> None:
    wanted, spec = plain()
    made, batches = [net() for _ in range(7)], inputs()
    with STATES[state]():  # type: ignore[attr-defined]
        found, its_spec = pytree.tree_flatten(results(made, batches))
    assert its_spec == spec
    for one, other in zip(found, wanted, strict=True):
        same = one.dtype == other.dtype and torch.equal(one, other) if isinstance(one, Tensor) else one == other
        assert same, (one, other)


def test_models_quantized_in_inference_mode_serve_training() -> None:
    with torch.inference_mode():
        model = net()
        qcut.quantize(model, "codebook4_qr", allow_growth=True, progress=False)
    qcut.enable_input_gradients(model)
    x = torch.randn(4, 64, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert not any(buffer.is_inference() for buffer in model.buffers())


def test_engine_generates_the_same_inside_autocast() -> None:
    from tests.integrations.transformers.support import small

    model = small("llama")
    qcut.quantize(model, "codebook4_g32", allow_growth=True, progress=False)
    prompts = [torch.arange(3, 9)]
    wanted = qcut.Engine(model, context=32).generate(prompts, 5)[0].tokens
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        engine = qcut.Engine(model, context=32)
        assert engine.generate(prompts, 5)[0].tokens == wanted
        assert [event.token for event in engine.stream(prompts, 5) if event.token is not None] == list(wanted)
