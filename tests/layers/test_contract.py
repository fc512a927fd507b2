"""What every quantized layer keeps to: shapes, state, moves, copies, compilation, refusals. A new kind is a row."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut import errors
from qcut.layers.embedding import Embedding
from qcut.layers.experts.linear_stack import LinearStack
from qcut.layers.linear import Linear
from tests.layers import test_codebook, test_embedding, test_integers, test_shifted
from tests.layers.experts import stacks
from tests.layers.test_linear import FLOAT8, SCHEMES, conv1d, quantized, same_state
from tests.support.oracles import INF, NAN


class Kind(NamedTuple):
    made: Callable[[], nn.Module]
    empty: Callable[[Any], nn.Module]
    """The layer without weights, on a device."""
    x: Callable[[], Tensor]
    """Inputs of 2 x 3 tokens."""
    outputs: int


def linear(make: Callable[..., Any], scheme: str, n: int, k: int, bias: bool = True) -> Kind:
    return Kind(
        lambda: make(scheme, n, k, bias, activation="silu")[1],
        lambda device: Linear(k, n, bias, scheme, "silu", device),
        lambda: torch.randn(2, 3, k),
        n,
    )


def shifted(case: dict[str, Any]) -> Kind:
    n, k = test_shifted.N, test_shifted.K
    scheme = test_shifted.made(**case)[0].scheme
    return Kind(
        lambda: test_shifted.made(**case)[0],
        lambda device: Linear(k, n, True, scheme, device=device),
        lambda: torch.randn(2, 3, k),
        n,
    )


def embedding(scheme: str) -> Kind:
    def empty(device: Any) -> nn.Module:
        return Embedding.empty(70, 160, scheme).to(device)

    return Kind(
        lambda: Embedding.from_float(test_embedding.table(), scheme), empty, lambda: torch.randint(0, 70, (2, 3)), 160
    )


def chain(bits: int) -> Kind:
    sizes = ((37, 64, True), (64, 33, False), (33, 48, True), (48, 10, False))

    def empty(device: Any) -> nn.Module:
        layers = [qcut.IntegerLinear(k, n, bits=bits, relu=relu) for k, n, relu in sizes]
        return qcut.IntegerChain(layers).to(device)

    return Kind(lambda: test_integers.made(bits)[1], empty, lambda: torch.randn(2, 3, 37), 10)


def stacked(scheme: str) -> Kind:
    """Experts of two stacks, and a router."""

    def empty(device: Any) -> nn.Module:
        experts = stacks.experts_of(scheme)
        parts = [LinearStack.from_json(part.to_json(), "empty").to_empty(device=device) for part in experts.children()]
        return stacks.Routed(experts.with_projections(*parts))

    return Kind(lambda: stacks.Routed(stacks.experts_of(scheme)), empty, lambda: torch.randn(2, 3, 64), 64)


BYTES = (*SCHEMES, *FLOAT8)
ROTATED = ("w8a8_rotated", "w8a8_rotated_g32_seed7")
LINEAR = {
    **{scheme: linear(quantized, scheme, 33, 21) for scheme in BYTES},
    **{f"{scheme} without bias": linear(quantized, scheme, 33, 21, False) for scheme in BYTES},
    **{s: linear(quantized, s, 77, 320) for s in ROTATED},
    **{s: linear(test_codebook.quantized, s, 77, 320) for s in (*test_codebook.SCHEMES, *test_codebook.INT8)},
    **{f"shifted {case}": shifted(case) for case in test_shifted.CASES},
}
CHAINS = {f"chain of int{bits}": chain(bits) for bits in (8, 16)}
STACKED = (
    *("w8a8", "w8a8_static", "w8a8_rotated", "w8a16", "fp8_static", "int16x8"),
    *("codebook4", "codebook2", "codebook4+4_int8", "int4", "nvfp4"),
)
STACKS = {f"experts of {scheme}": stacked(scheme) for scheme in STACKED}
EMBEDDINGS = {
    f"embedding of {scheme}": embedding(scheme) for scheme in ("w8a16", "w8a8_rotated", "codebook4", "codebook4+4")
}
KINDS = LINEAR | CHAINS | STACKS | EMBEDDINGS
COMPILED = (*BYTES, *ROTATED, f"shifted {test_shifted.CASES[0]}", *CHAINS)


@pytest.mark.parametrize("name", KINDS)
def test_shapes_of_tokens(name: str) -> None:
    kind = KINDS[name]
    layer, x = kind.made(), kind.x()
    for given in (x, x[0, 0], x[:0], x[0, :0], x[:, :0]):
        leading = given.shape if "embedding" in name else given.shape[:-1]
        assert layer(given).shape == (*leading, kind.outputs)


@pytest.mark.parametrize("name", KINDS)
def test_state_dict_round_trip(name: str) -> None:
    kind = KINDS[name]
    layer, x, file = kind.made(), kind.x(), io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    for device, assign in (("cpu", False), ("meta", True)):
        other = kind.empty(device)
        assert {key: (t.shape, t.dtype) for key, t in other.state_dict().items()} == {
            key: (t.shape, t.dtype) for key, t in state.items()
        }
        other.load_state_dict(state, assign=assign)
        assert same_state(layer, other)
        assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), other.buffers(), strict=True))
        assert torch.equal(layer(x), other(x))


@pytest.mark.parametrize("name", LINEAR | CHAINS | STACKS)
def test_moves_keep_every_dtype(name: str) -> None:
    kind = KINDS[name]
    layer, x = kind.made(), kind.x()
    before = copy.deepcopy(layer)
    for move in (
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.double(),
        lambda m: m.to(torch.float16),
        lambda m: m.to("cpu", torch.bfloat16),
        lambda m: m.type(torch.int8),
        lambda m: nn.Sequential(m).half()[0],
    ):
        assert move(layer) is layer
        assert [b.dtype for b in layer.buffers()] == [b.dtype for b in before.buffers()]
        assert same_state(layer, before)
    assert torch.equal(layer(x), before(x))


@pytest.mark.parametrize("name", LINEAR | STACKS)
def test_moves_to_another_device(name: str) -> None:
    kind = KINDS[name]
    layer, x = kind.made(), kind.x()
    moved = copy.deepcopy(layer).to("meta", torch.float16)
    assert {b.device.type for b in moved.buffers()} == {"meta"}
    assert [b.dtype for b in moved.buffers()] == [b.dtype for b in layer.buffers()]
    assert moved(x.to("meta")).shape == (2, 3, kind.outputs)
    moved.to_empty(device="cpu").load_state_dict(layer.state_dict())
    assert torch.equal(moved(x), layer(x))


def pickled(layer: nn.Module) -> nn.Module:
    """The layer through pickle, or through torch's files where a buffer has 8-bit floats, which torch cannot pickle."""
    if torch.float8_e4m3fn not in {buffer.dtype for buffer in layer.buffers()}:
        return pickle.loads(pickle.dumps(layer))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("name", KINDS)
def test_copies_are_independent(name: str) -> None:
    kind = KINDS[name]
    layer, x = kind.made(), kind.x()
    want = layer(x)
    twins = copy.deepcopy(layer), pickled(layer)
    for buffer in layer.buffers():
        buffer.zero_()
    for twin in twins:
        assert type(twin) is type(layer)
        assert repr(twin) == repr(layer)
        assert torch.equal(twin(x), want)


@torch.no_grad()
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_to_one_graph(name: str) -> None:
    kind = KINDS[name]
    layer = kind.made()
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for repeats in (1, 3):
        x = torch.cat([kind.x()] * repeats, 1)
        assert torch.equal(compiled(x), layer(x))


# ── layers made of float layers ──────────────────────────────────────────────────────────────────


def from_float(module: nn.Module, scheme: str, name: str = "") -> Linear:
    static_range = qcut.StaticRange(-3.0, 4.0) if scheme.endswith("_static") else None
    return Linear.from_float(module, scheme, static_range=static_range, name=name)


FROM_FLOAT = (*BYTES, "codebook4", "int4", "nvfp4")


@pytest.mark.parametrize("scheme", FROM_FLOAT)
def test_conv1d_is_the_transposed_linear(scheme: str) -> None:
    conv: Any = conv1d(33, 64)
    module = nn.Linear(64, 33)
    module.weight.data, module.bias.data = conv.weight.data.t().contiguous(), conv.bias.data
    got, want = from_float(conv, scheme), from_float(module, scheme)
    assert (got.in_features, got.out_features) == (64, 33)
    assert same_state(got, want)


@pytest.mark.parametrize("scheme", FROM_FLOAT)
def test_bad_weights_and_biases_name_the_layer(scheme: str) -> None:
    for bad in (NAN, INF):
        module = nn.Linear(32, 3)
        module.bias.data[1] = bad
        with pytest.raises(errors.QuantizationError, match=r"layer 'h\.0': bias holds NaN or Inf") as info:
            from_float(module, scheme, "h.0")
        assert info.value.layer == "h.0"
        module.weight.data[2, 1] = bad
        found = "weight holds NaN or Inf" + " in 1 of 3 rows" * (scheme in BYTES)
        with pytest.raises(errors.QuantizationError, match=rf"layer 'h\.0': {found}"):
            from_float(module, scheme, "h.0")


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("scheme", FROM_FLOAT)
def test_empty_weights_are_refused(scheme: str) -> None:
    for k, n in ((0, 3), (3, 0)):
        message = rf"layer 'l': weight is \[N={n}, K={k}\]; {scheme} allows N >= 1"
        with pytest.raises(errors.QuantizationError, match=message):
            from_float(nn.Linear(k, n), scheme, "l")


@pytest.mark.parametrize("module", [nn.Embedding(3, 4), nn.Conv1d(1, 1, 1), nn.LayerNorm(3), nn.Identity()])
def test_other_modules_are_refused(module: nn.Module) -> None:
    kind = type(module).__name__
    for scheme in FROM_FLOAT:
        with pytest.raises(errors.UnsupportedError, match=f"layer 'x': cannot quantize a {kind}; allowed: nn.Linear"):
            from_float(module, scheme, "x")


@pytest.mark.parametrize("scheme", FROM_FLOAT)
def test_wrong_inputs_are_refused(scheme: str) -> None:
    layer = from_float(nn.Linear(64, 16), scheme, "h.3.fc")
    with pytest.raises(errors.ShapeError, match=r"layer 'h\.3\.fc': x has shape \[2, 20\]; allowed: \[\.\.\., 64\]"):
        layer(torch.randn(2, 20))
    with pytest.raises(errors.ShapeError, match=r"x has shape \[\]"):
        layer(torch.tensor(1.0))
    with pytest.raises(errors.DtypeError, match=r"layer 'h\.3\.fc': .*x is int64; allowed: float16, bfloat16, float32"):
        layer(torch.zeros(2, 64, dtype=torch.int64))
    tensor = "qweight" if scheme in BYTES else "norms"
    with pytest.raises(
        errors.DeviceError, match=rf"layer 'h\.3\.fc': .*{tensor} is on meta; the first argument is on cpu"
    ):
        layer.to("meta")(torch.randn(2, 64))
