"""`LinearStack`: the layers of all experts, bit by bit, in one set of tensors."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.errors import QuantizationError, ShapeError, UnsupportedError
from qcut.layers.experts.linear_stack import MOST_EXPERTS, LinearStack
from qcut.layers.linear import Linear
from qcut.numerics.checks import same_values
from qcut.schemes import ACTIVATIONS
from tests.layers.experts.stacks import SCHEMES, layers_of, stack_of
from tests.support.oracles import FLOATS

SIZES = {True: (77, 320), False: (64, 128)}
"""Rows and columns of one expert, uneven and even."""


def held(layer: nn.Module) -> dict[str, Tensor]:
    return {key: buffer for key, buffer in layer._buffers.items() if buffer is not None}


@torch.no_grad()
@pytest.mark.parametrize("uneven", SIZES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_are_bitwise_the_layers_of_experts(scheme: str, uneven: bool) -> None:
    n, k = SIZES[uneven]
    layers = layers_of(scheme, 3, n, k, bias=uneven, name="mlp.experts.up")
    stack = LinearStack.of(layers, "mlp.experts.up")
    assert stack.weight_bytes == sum(layer.weight_bytes for layer in layers)
    for e, (layer, view) in enumerate(zip(layers, stack.layers, strict=True)):
        assert type(view) is type(layer)
        assert (view.name, view.scheme, repr(view)) == (f"mlp.experts.up.{e}", layer.scheme, repr(layer))
        assert held(view).keys() == held(layer).keys()
        for key, buffer in held(view).items():
            assert torch.equal(buffer, held(layer)[key])
            assert buffer.untyped_storage().data_ptr() == held(stack)[key].untyped_storage().data_ptr()
        assert torch.equal(view.dequantized_weight(), layer.dequantized_weight())
        for tokens in (0, 1, 17):
            for dtype in FLOATS:
                x = torch.randn(tokens, k).to(dtype)
                assert torch.equal(view(x), layer(x))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_state_is_the_layers_states_stacked(scheme: str) -> None:
    layers = layers_of(scheme, 3, 33, 128)
    stack = LinearStack.of(layers)
    state = stack.state_dict()
    for key, tensor in state.items():
        assert same_values(tensor, torch.stack([layer.state_dict()[key] for layer in layers]))
    assert {key: (tuple(t.shape), t.dtype) for key, t in state.items()} == {
        key: (entry.shape, entry.dtype) for key, entry in stack.stored().items()
    }
    assert all(same_values(entry.read(), state[key]) for key, entry in stack.stored().items())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    spec = stack.to_json()
    for device, assign in (("cpu", False), ("cpu", True), ("meta", True)):
        other = LinearStack.from_json(spec, "x")
        other = other if device == "meta" else other.to_empty(device=device)
        other.load_state_dict(read, assign=assign)
        assert all(same_values(a, b) for a, b in zip(held(other).values(), held(stack).values(), strict=True))
        assert other.state_problem(read) is None


@pytest.mark.parametrize("scheme", ["w8a8", "codebook4", "int4_int8"])
def test_state_of_another_form_is_refused(scheme: str) -> None:
    stack = stack_of(scheme)
    state = stack.state_dict()
    first = next(iter(state))
    before = {key: buffer.clone() for key, buffer in held(stack).items()}
    for changed, message in (
        ({**state, first: state[first][:2]}, rf"{first}: found shape .* allowed: "),
        ({key: t for key, t in state.items() if key != first}, rf"Missing key.*{first}"),
        ({**state, "more": torch.zeros(3)}, "Unexpected key.*more"),
    ):
        with pytest.raises(RuntimeError, match=message):
            stack.load_state_dict(changed)
    assert all(torch.equal(buffer, before[key]) for key, buffer in held(stack).items())


def test_a_bad_value_names_the_expert() -> None:
    stack = stack_of("w8a8")
    state = {key: t.clone() for key, t in stack.state_dict().items()}
    state["weight_scale"][2, 5] = float("nan")
    key, what = stack.state_problem(state) or ("", "")
    assert (key, what.split(":")[0]) == ("weight_scale", "expert 2")


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8_static", "int16x8", "codebook4", "codebook4+4_int8"])
def test_copies_and_moves_keep_what_is_computed(scheme: str) -> None:
    stack, x = stack_of(scheme, name="e.up"), torch.randn(5, 64)
    want = [layer(x) for layer in stack.layers]
    shared = io.BytesIO(pickle.dumps(stack))
    twins = [copy.deepcopy(stack), pickle.load(shared), copy.deepcopy(nn.Sequential(stack))[0]]
    for move in (lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double(), lambda m: m.float()):
        dtypes = [buffer.dtype for buffer in held(stack).values()]
        assert move(stack) is stack
        assert [buffer.dtype for buffer in held(stack).values()] == dtypes
        assert {layer.weight_dtype for layer in stack.layers} == {stack.weight_dtype}
        assert stack.layers[1].weight.dtype == stack.weight_dtype
    assert all(torch.equal(layer(x), y) for layer, y in zip(stack.layers, want, strict=True))
    for buffer in held(stack).values():
        buffer.zero_()
    for twin in twins:
        assert repr(twin) == repr(stack)
        assert all(torch.equal(layer(x), y) for layer, y in zip(twin.layers, want, strict=True))


def test_what_a_model_sees_of_a_stack() -> None:
    stack = stack_of("w8a8", experts=3, n=33, k=64)
    (parameter,) = stack.parameters()
    assert parameter.numel() == stack.float_count == 3 * (33 * 64 + 33)
    assert (parameter.requires_grad, parameter.dtype, parameter.nbytes) == (False, torch.float32, 0)
    assert stack.half().weight_dtype is torch.float16
    assert next(stack.parameters()) is parameter
    assert "weight" not in stack.state_dict()
    assert stack.dequantized_weight().shape == (3, 33, 64)
    with pytest.raises(ShapeError, match=r"a stack of 3 experts is called by expert\(e\)"):
        stack(torch.randn(2, 64))
    for e in (-1, 3):
        with pytest.raises(IndexError, match=f"expert {e}; allowed: 0 to 2"):
            stack.expert(e)


def test_views_have_the_mode_and_nothing_else() -> None:
    stack = stack_of("w8a8")
    view = stack.expert(1)
    called = []
    view.register_forward_hook(lambda *_: called.append(1))
    view.register_buffer("more", torch.zeros(1))
    other = stack.expert(1)
    other(torch.randn(1, 64))
    assert not called
    assert "more" not in dict(other.named_buffers())
    assert not hasattr(stack, "more")
    assert (stack.train().expert(0).training, stack.eval().expert(0).training) == (True, False)
    view._buffers["weight_scale"].mul_(2)
    assert torch.equal(stack.expert(1)._buffers["weight_scale"], view._buffers["weight_scale"])
    del stack, other
    gc.collect()
    assert view(torch.randn(1, 64)).isfinite().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_layers_are_kept(activation: str) -> None:
    layers = [Linear.from_float(nn.Linear(64, 16), "w8a8", activation=activation) for _ in range(2)]
    stack, x = LinearStack.of(layers), torch.randn(3, 64)
    assert stack.activation == stack.expert(1).activation == activation
    assert torch.equal(stack.expert(1)(x), layers[1](x))
    assert LinearStack.from_json(stack.to_json(), "x").activation == activation


def test_layers_that_differ_make_no_stack() -> None:
    first = Linear.from_float(nn.Linear(64, 16), "w8a8", name="e.0")
    others: dict[str, Any] = {
        "scheme": Linear.from_float(nn.Linear(64, 16), "w8a16", name="e.1"),
        "rows": Linear.from_float(nn.Linear(64, 17), "w8a8", name="e.1"),
        "columns": Linear.from_float(nn.Linear(65, 16), "w8a8", name="e.1"),
        "bias": Linear.from_float(nn.Linear(64, 16, False), "w8a8", name="e.1"),
        "activation": Linear.from_float(nn.Linear(64, 16), "w8a8", activation="relu", name="e.1"),
        "device": copy.deepcopy(first).to("meta"),
    }
    for other in others.values():
        with pytest.raises(QuantizationError, match="is not as the first layer of the stack"):
            LinearStack.of([first, other])
    with pytest.raises(QuantizationError, match="a stack of no layer"):
        LinearStack.of([])


def test_sizes_beyond_the_limits_are_refused() -> None:
    one = Linear(64, 1 << 15, scheme="w8a8", device="meta", name="e.up")
    for experts in (0, MOST_EXPERTS + 1, MOST_EXPERTS):
        with pytest.raises(QuantizationError, match=f"{experts} experts of 32768 rows; allowed: 1 to 65536 experts"):
            LinearStack(experts, one, "meta")
    assert LinearStack(MOST_EXPERTS - 1, one, "meta").experts == MOST_EXPERTS - 1
    spec = LinearStack(3, one, "meta").to_json()
    with pytest.raises(QuantizationError, match="98305 rows of 3 experts"):
        LinearStack.from_json({**spec, "out_features": spec["out_features"] + 1}, "x")


def test_one_expert_and_many() -> None:
    for experts in (1, 200):
        stack = stack_of("w8a8", experts, n=8, k=16)
        assert len(stack.layers) == stack.experts == experts
        assert LinearStack.from_json(stack.to_json(), "x").experts == experts


def test_gradients_go_through_views_of_a_stack() -> None:
    stack, x = stack_of("w8a16"), torch.randn(3, 64, requires_grad=True)
    with pytest.raises(UnsupportedError, match="enable_input_gradients"):
        stack.expert(1)(x).sum().backward()
    qcut.enable_input_gradients(stack)
    stack.expert(1)(x).sum().backward()
    assert x.grad is not None
    want = stack.expert(1).dequantized_weight().sum(0).expand(3, -1)
    torch.testing.assert_close(x.grad, want, rtol=1e-5, atol=1e-5)
    qcut.disable_input_gradients(stack)
    assert not stack.expert(1).input_gradients


def test_tied_stacks_hold_one_set_of_tensors() -> None:
    stack = stack_of("codebook4")
    other = copy.deepcopy(stack)
    other.tie_to(stack)
    assert all(a is b for a, b in zip(held(stack).values(), held(other).values(), strict=True))
    assert next(other.parameters()) is next(stack.parameters())
