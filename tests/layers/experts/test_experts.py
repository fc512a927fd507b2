"""`Experts`: routes of every kind, sums, refusals."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.errors import DeviceError, DtypeError, RangeError, ShapeError, UnsupportedError
from qcut.layers.experts.experts import Experts, layer_of
from qcut.layers.experts.forms import BatchedExperts, DenseExperts, ParallelExperts, SharedExperts
from qcut.numerics.gating import Gating
from tests.layers.experts.classes import routes
from tests.layers.experts.stacks import EXACT, experts_of, stack_of
from tests.support.oracles import FLOATS, INF, NAN

E, H = 6, 64
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
SCHEMES = (None, "w8a8", "w8a8_static", "w8a16", "fp8_dynamic", "fp8_static", "codebook4", "codebook4_int8")


def tokens(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(seed)).to(dtype)


def one_route(experts: Experts, e: int, x: Tensor) -> Tensor:
    """What an expert gives for a single token."""
    y: Tensor = layer_of(experts.down, e)(experts.gating(layer_of(experts.up, e)(x[None])))
    return (y if experts.post_expert_norm is None else experts.post_expert_norm(y))[0]


def oracle(experts: Experts, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The sum in float64 of the routes' results, and how far a float32 sum, rounded once, may be from it.

    A product and an addition each round by half a unit of at most the sum of magnitudes.
    """
    total, size = (torch.zeros(len(x), H, dtype=torch.float64) for _ in range(2))
    for t, r in torch.cartesian_prod(torch.arange(len(x)), torch.arange(index.shape[1])).tolist():
        if index[t, r] < experts.num_experts:
            part = weights[t, r].double() * one_route(experts, int(index[t, r]), x[t]).double()
            total[t] += part
            size[t] += part.abs()
    return total, 2 * index.shape[1] * UNIT[torch.float32] * size + UNIT[x.dtype] * (
        total.abs() + size * 1e-6 + torch.finfo(x.dtype).smallest_normal
    )


@torch.no_grad()
@pytest.mark.parametrize("scheme", EXACT)
@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_are_within_the_bound_of_float64(scheme: str, dtype: torch.dtype) -> None:
    for gating in (Gating("silu"), Gating("silu", alpha=1.702, limit=1.0, plus_one=True), Gating("relu2", gated=False)):
        experts = experts_of(scheme, gating=gating)
        for k in (1, 2, E):
            x, (index, weights) = tokens(9, dtype), routes(9, E, k)
            got = experts(x, index, weights)
            want, allowed = oracle(experts, x, index, weights)
            assert got.dtype is dtype
            assert ((got.double() - want).abs() <= allowed).all()


@torch.no_grad()
@pytest.mark.parametrize("scheme", SCHEMES)
def test_routes_of_every_number(scheme: str | None) -> None:
    experts = experts_of(scheme)
    for count in (0, 1, 5, 40):
        for k in (1, 2, E):
            x, (index, weights) = tokens(count), routes(count, E, k)
            got = experts(x, index, weights)
            want, _ = oracle(experts, x, index, weights)
            assert got.shape == x.shape
            torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-4)
    x, weights = tokens(7), torch.ones(7, 2)
    for e in (0, E - 1):  # nobody chose another, and twice the same
        twice = experts(x, torch.full((7, 2), e), weights)
        want = torch.stack([2 * one_route(experts, e, row) for row in x])
        torch.testing.assert_close(twice, want, rtol=1e-4, atol=1e-4)
    assert experts(x, torch.zeros(7, 0, dtype=torch.int64), torch.zeros(7, 0)).equal(torch.zeros(7, H))


@torch.no_grad()
@pytest.mark.parametrize("scheme", EXACT)
def test_other_tokens_change_no_bit(scheme: str) -> None:
    experts, x, (index, weights) = experts_of(scheme), tokens(33), routes(33, E, 3)
    whole = experts(x, index, weights)
    order = torch.randperm(33, generator=torch.Generator().manual_seed(1))
    assert torch.equal(experts(x[order], index[order], weights[order]), whole[order])
    for t in (0, 7, 32):
        assert torch.equal(experts(x[t : t + 1], index[t : t + 1], weights[t : t + 1])[0], whole[t])


@torch.no_grad()
def test_sums_are_in_the_order_of_routes() -> None:
    """1 and -1 cancel before a small one is added, or swallow it."""
    experts = experts_of("w8a8")
    x, index = tokens(1), torch.tensor([[2, 2, 3]])
    y, small = (one_route(experts, e, x[0]) for e in (2, 3))
    weights = torch.tensor([[1e6, -1e6, 1.0]])
    assert torch.equal(experts(x, index, weights)[0], small)
    swapped = experts(x, index[:, [0, 2, 1]], weights[:, [0, 2, 1]])[0]
    assert torch.equal(swapped, (y * 1e6 + small) + y * -1e6)
    assert not torch.equal(swapped, small)


@torch.no_grad()
@pytest.mark.parametrize("scheme", [None, "w8a8", "codebook4"])
def test_indices_beyond_the_experts_add_nothing(scheme: str | None) -> None:
    experts, x, (index, weights) = experts_of(scheme), tokens(9), routes(9, E, 3)
    index, weights = index.clone(), weights.clone()
    index[::2, 1], weights[::2, 1] = E + 3, 0.0
    index[5], weights[5] = E, 0.0
    want, _ = oracle(experts, x, index, weights)
    got = experts(x, index, weights)
    torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-4)
    assert not got[5].any()
    x[5] = INF  # of a token that other processes compute
    assert not experts(x, index, weights)[5].any()


@torch.no_grad()
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bad_tokens_change_no_others(scheme: str | None) -> None:
    experts, x, (index, weights) = experts_of(scheme), tokens(9), routes(9, E, E)
    want = experts(x, index, weights)
    for value in (NAN, INF):
        x[4, 7] = value
        got = experts(x, index, weights)
        others = torch.arange(9) != 4
        assert scheme in ("w8a8_static", "fp8_static") or not got[4].isfinite().all()  # a static range clips
        torch.testing.assert_close(got[others], want[others], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("e", "weight", "message"),
    [
        (E, 1.0, rf"token 2: found expert {E} with weight 1\.0; allowed: experts 0 to {E - 1} with finite weights"),
        (-1, 0.0, r"token 2: found expert -1 with weight 0\.0"),
        (-7, 1.0, "found expert -7"),
        (1, NAN, "found expert 1 with weight nan"),
        (1, INF, "found expert 1 with weight inf"),
        (E, NAN, f"found expert {E} with weight nan"),
        (1 << 40, -INF, "with weight -inf"),
    ],
)
@pytest.mark.parametrize("scheme", [None, "w8a8"])
def test_routes_out_of_range_are_refused(scheme: str | None, e: int, weight: float, message: str) -> None:
    experts, (index, weights) = experts_of(scheme), routes(4, E, 2)
    index, weights = index.clone(), weights.clone()
    index[2, 1], weights[2, 1] = e, weight
    with pytest.raises(RangeError, match=f"layer 'mlp.experts': .*{message}"):
        experts(tokens(4), index, weights)


def test_wrong_shapes_dtypes_and_devices_are_refused() -> None:
    experts, x, (index, weights) = experts_of("w8a8"), tokens(4), routes(4, E, 2)
    shapes: tuple[tuple[Any, ...], ...] = (
        (x[None], index, weights),
        (x[0], index, weights),
        (x[:3], index, weights),
        (x[:, :60], index, weights),
        (x, index[:, :1], weights),
        (x, index[:, 0], weights[:, 0]),
        (x, index[..., None], weights[..., None]),
    )
    for given in shapes:
        with pytest.raises(
            ShapeError, match=r"layer 'mlp.experts': tokens .* allowed: \[T, 64\], \[T, k\] and \[T, k\]"
        ):
            experts(*given)
    for dtype in (torch.float32, torch.bool, torch.complex64):
        with pytest.raises(DtypeError, match=r"indices are .*; allowed: integers"):
            experts(x, index.to(dtype), weights)
    with pytest.raises(DtypeError, match="weights are int64; allowed: floating point"):
        experts(x, index, weights.long())
    with pytest.raises(DtypeError, match="x is int64"):
        experts(x.long(), index, weights)
    with pytest.raises(DeviceError, match="tokens are on cpu, indices on meta, weights on cpu; allowed: one"):
        experts(x, index.to("meta"), weights)


@torch.no_grad()
def test_indices_and_weights_of_other_dtypes() -> None:
    experts, x, (index, weights) = experts_of("w8a8", experts=200), tokens(4), routes(4, 200, 2)
    want = experts(x, index, weights)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert torch.equal(experts(x, index.to(dtype), weights), want)
    half = weights.half()
    assert torch.equal(experts(x, index, half), experts(x, index, half.double()))


@torch.no_grad()
@pytest.mark.parametrize("scheme", [None, "w8a8"])
def test_a_norm_is_applied_before_the_weight(scheme: str | None) -> None:
    torch.manual_seed(0)
    experts = experts_of(scheme, post_expert_norm=nn.LayerNorm(H))
    x, (index, weights) = tokens(5), routes(5, E, 2)
    want, _ = oracle(experts, x, index, weights)
    torch.testing.assert_close(experts(x, index, weights), want.float(), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("scheme", [None, "w8a8"])
def test_identities_give_the_token(scheme: str | None) -> None:
    experts, x = experts_of(scheme, identities=2), tokens(3)
    index = torch.tensor([[E, E + 1], [0, E + 1], [E + 2, 1]])
    weights = torch.tensor([[0.5, 0.25], [1.0, 2.0], [0.0, 1.0]])
    got = experts(x, index, weights)
    assert torch.equal(got[0], x[0] * 0.5 + x[0] * 0.25)
    torch.testing.assert_close(got[1], one_route(experts, 0, x[1]) + x[1] * 2, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[2], one_route(experts, 1, x[2]), rtol=1e-4, atol=1e-4)
    with pytest.raises(RangeError, match=f"found expert {E + 2} with weight 1.0; allowed: experts 0 to {E + 1}"):
        experts(x, index, torch.ones(3, 2))


@torch.no_grad()
def test_copies_compute_the_same() -> None:
    experts, x, (index, weights) = experts_of("codebook4", identities=1), tokens(5), routes(5, E, 2)
    want = experts(x, index, weights)
    for twin in (
        copy.deepcopy(experts),
        pickle.loads(pickle.dumps(experts)),
        experts.with_projections(experts.up, experts.down),
    ):
        assert (repr(twin), twin.identities, twin.training) == (repr(experts), 1, False)
        assert torch.equal(twin(x, index, weights), want)
    half = copy.deepcopy(experts).half()
    assert torch.equal(half(x, index, weights), want)


def test_gradients_reach_tokens_and_weights() -> None:
    experts, (index, _) = experts_of("w8a16"), routes(5, E, 2)
    x, weights = tokens(5).requires_grad_(), routes(5, E, 2)[1].requires_grad_()
    with pytest.raises(UnsupportedError, match="enable_input_gradients"):
        experts(x, index, weights).sum().backward()
    qcut.enable_input_gradients(experts)
    weights.grad = None
    experts(x, index, weights).sum().backward()
    plain = experts_of(None)
    for mine, stack in ((plain.up, experts.up), (plain.down, experts.down)):
        for e, layer in enumerate(mine):
            layer.weight.data, layer.bias.data = layer_of(stack, e).dequantized_weight(), layer_of(stack, e).bias
    twin, gates = x.detach().clone().requires_grad_(), weights.detach().clone().requires_grad_()
    plain(twin, index, gates).sum().backward()
    for got, want in ((x.grad, twin.grad), (weights.grad, gates.grad)):
        assert got is not None
        assert want is not None
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_compiled_experts_compute_the_same() -> None:
    experts, x, (index, weights) = experts_of("w8a8"), tokens(5), routes(5, E, 2)
    torch.compiler.reset()
    compiled = torch.compile(experts, backend="eager")
    assert torch.equal(compiled(x, index, weights), experts(x, index, weights))
    with pytest.raises(RangeError):
        compiled(x, index + E, weights)


def test_export_is_refused() -> None:
    experts, args = experts_of("w8a8"), (tokens(5), *routes(5, E, 2))
    with pytest.raises(UnsupportedError, match=r"read their routes on the host; torch\.export cannot trace that"):
        torch.export.export(experts, args, strict=False)


@torch.no_grad()
def test_tokens_on_meta_have_a_result_without_values() -> None:
    experts = experts_of("w8a8").to("meta")
    y = experts(*(t.to("meta") for t in (tokens(5), *routes(5, E, 2))))
    assert (y.shape, y.is_meta) == ((5, H), True)


# ── forms of other classes ───────────────────────────────────────────────────────────────────────


def formed(form: type[Experts], scheme: str = "w8a8", **options: Any) -> Any:
    base = experts_of(scheme, **options)
    return form(base.up, base.down, base.gating, name="mlp.experts")


@torch.no_grad()
@pytest.mark.parametrize("form", [BatchedExperts, SharedExperts])
def test_forms_are_the_sum_of_routes(form: type[Experts]) -> None:
    experts, plain = formed(form), formed(Experts)
    x, (index, weights) = tokens(6), routes(6, E, 2)
    want = plain(x, index, weights)
    got = experts(*experts.arguments(x, index, weights))
    torch.testing.assert_close(got.view(6, H), want, rtol=1e-5, atol=1e-5)
    empty = experts(*experts.arguments(x[:0], index[:0], weights[:0]))
    assert empty.numel() == 0


@torch.no_grad()
def test_dense_experts_compute_chosen_tokens_only() -> None:
    base = experts_of("w8a8")
    stacks = stack_of("w8a8", E, 64, H, False), stack_of("w8a8", E, H, 32, False)
    experts = DenseExperts(*stacks, base.gating, name="mlp.experts")
    x, (index, weights) = tokens(6), routes(6, E, 1)
    (given,) = experts.arguments(x, index, weights)
    y = experts(given).view(E, 6, H)
    for e in range(E):
        for t in range(6):
            chosen = e == index[t, 0]
            want = one_route(experts, e, x[t] * weights[t, 0]) if chosen else torch.zeros(H)
            assert torch.equal(y[e, t], want)
    assert experts(given[:0]).shape == (0, H)
    for wrong in (given[:-1], given[:, :60], given[None]):
        with pytest.raises(ShapeError, match=rf"allowed: \[{E} \* T, {H}\]"):
            experts(wrong)


@torch.no_grad()
def test_dense_experts_skip_tokens_of_others() -> None:
    base, seen = experts_of(None), [0] * E
    experts = DenseExperts(base.up, base.down, base.gating)
    for e, layer in enumerate(base.up):  # type: ignore[arg-type]
        layer.register_forward_pre_hook(lambda _, args, e=e: seen.__setitem__(e, seen[e] + len(args[0])))
    index = torch.tensor([[0], [3], [3], [5]])
    experts(*experts.arguments(tokens(4), index, torch.ones(4, 1)))
    assert seen == [1, 0, 0, 2, 0, 1]


@torch.no_grad()
def test_parallel_experts_are_one_projection() -> None:
    stack = stack_of("w8a8", E, 33, H, name="input_linear.up")
    experts = ParallelExperts(stack, nn.ModuleList(), Gating("none", gated=False), name="input_linear")
    x, sizes = tokens(9), [0, 4, 0, 3, 2, 0]
    want = torch.cat([stack.expert(e)(part) for e, part in enumerate(x.split(sizes))])
    assert torch.equal(experts(x, sizes), want)
    assert experts(x[:0], [0] * E).shape == (0, 33)
    for wrong in ([9], [1] * E, [0] * E):
        with pytest.raises(ShapeError, match="layer 'input_linear': 9 rows and sizes"):
            experts(x, wrong)
