"""Siblings as one product: the same results, no second copy of a weight, and what must stay as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from qcut.layers import rotations as shared_rotations
from qcut.layers import stacking
from qcut.layers.linear import Linear
from qcut.layers.stacking import Stacker
from qcut.schemes import Codebook, StaticRange
from tests.support.zoo import same, snapshot

EXACT = ("w8a8", "codebook4_int8", "codebook4+4_g64_int8", "codebook4+2_int8", "int4_g32_int8", "nvfp4_int8")
FLOAT = (
    *(None, "w8a16", "fp8_dynamic"),
    *("codebook4", "codebook3_g64", "codebook2+2_g32_qr", "codebook4+2", "int4", "nvfp4"),
)
ROWS = (128, 64, 80)
"""Of the siblings: blocks of 64, except the last."""
K = 160


def sibling(scheme: Any, n: int, *, k: int = K, bias: bool = True, seed: int = 0, **options: Any) -> nn.Module:
    torch.manual_seed(n + seed)
    linear = nn.Linear(k, n, bias=bias)
    with torch.no_grad():
        linear.weight[0] = 0
        linear.weight[n // 2, k // 2] = 9.0
    return linear if scheme is None else Linear.from_float(linear, scheme, **options)


def siblings_of(scheme: Any, *, bias: bool = True, **options: Any) -> nn.ModuleList:
    return nn.ModuleList(sibling(scheme, n, bias=bias, **options) for n in ROWS).eval()


def stack(model: nn.Module, siblings: Iterable[nn.Module] | None = None) -> Any:
    """The siblings' stack, all modules of a list being siblings unless given otherwise."""
    with torch.no_grad():
        return Stacker(model).stack(list(model.children() if siblings is None else siblings))


def storage_bytes(*modules: nn.Module) -> int:
    tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def addresses(model: nn.Module) -> list[tuple[int, int]]:
    return [(id(t), t.data_ptr()) for t in (*model.parameters(), *model.buffers())]


# ── results ──────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
@pytest.mark.parametrize(
    ("scheme", "kernels"), [(s, False) for s in EXACT + FLOAT] + [(s, True) for s in EXACT + FLOAT if s and s[0] != "w"]
)
def test_a_stack_gives_all_the_results(scheme: str | None, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float sums of two orders: of K products, each rounded, and ``K 2**-24`` of their sizes apart at most, twice."""
    modules = siblings_of(scheme, bias=scheme != "w8a8")
    if kernels:  # the operators that CUDA has, by their references
        monkeypatch.setattr(shared_rotations, "has_kernels", lambda device: True)
        monkeypatch.setattr(shared_rotations, "stream_state", lambda device: (0, 0))
    dtype = torch.float16 if kernels else torch.float32
    inputs = [torch.randn(*shape, K).to(dtype) for shape in ((1,), (2, 3))]
    want = [torch.cat([m(x) for m in modules], -1) for x in inputs]
    state = {key: t.clone() for key, t in modules.state_dict().items()}
    stacked = stack(modules)
    assert type(stacked) is type(modules[0])
    assert stacked.out_features == sum(ROWS)
    assert not stacked.training
    for x, expected in zip(inputs, want, strict=True):
        got, again = stacked(x), torch.cat([m(x) for m in modules], -1)
        if scheme in EXACT:
            assert torch.equal(got, expected)
            assert torch.equal(again, expected)
        bound = K * 2.0**-23 + (2.0**-10 if kernels else 0)
        assert (got - expected).abs().max() <= bound * expected.abs().max()
        assert (again - expected).abs().max() <= bound * expected.abs().max()
    after = modules.state_dict()
    assert list(after) == list(state)
    assert all(torch.equal(after[key], t) for key, t in state.items())


def test_no_weight_is_there_twice() -> None:
    for scheme in [*EXACT, *FLOAT]:
        modules = siblings_of(scheme)
        before = storage_bytes(modules)
        ids = [id(t) for t in (*modules.parameters(), *modules.buffers())]
        stacked = stack(modules)
        assert storage_bytes(modules, stacked) == before
        assert [id(t) for t in (*modules.parameters(), *modules.buffers())] == ids
        assert [m.training for m in modules.modules()] == [False] * 4
        assert not any(p.requires_grad for p in stacked.parameters())
        assert all(p.requires_grad for p in modules.parameters() if p.nbytes)


@pytest.mark.parametrize("scheme", [None, "w8a8", "codebook4+2_int8"])
def test_a_stack_is_found_again(scheme: str | None) -> None:
    modules = siblings_of(scheme)
    first, x = stack(modules), torch.randn(4, K)
    twin = copy.deepcopy(modules)  # torch copies parameters one by one, and buffers with their storage
    for model, moves in ((modules, False), (twin, scheme is None), (twin, False)):
        places = addresses(model)
        stacker = Stacker(model)
        second: Any = stacker.stack(list(model))
        assert (stacker.moved_bytes > 0) == moves
        assert moves or addresses(model) == places
        assert storage_bytes(model, second) == storage_bytes(model) == storage_bytes(modules)
        assert torch.equal(second(x), first(x))


@torch.no_grad()
def test_stack_sees_written_weights_not_replaced_ones() -> None:
    modules = siblings_of("w8a8")
    stacked, x = stack(modules), torch.randn(3, K)
    other = sibling("w8a8", ROWS[1], seed=1).state_dict()
    before = stacked(x)
    modules[1].load_state_dict(other)
    assert torch.equal(stacked(x), torch.cat([m(x) for m in modules], -1))
    modules[1].load_state_dict(siblings_of("w8a8")[1].state_dict(), assign=True)
    assert torch.equal(stacked(x)[:, : ROWS[0]], before[:, : ROWS[0]])
    assert not torch.equal(stacked(x), before)
    again = stack(modules)
    assert torch.equal(again(x), before)
    assert storage_bytes(modules, again) == storage_bytes(siblings_of("w8a8"))


@torch.no_grad()
def test_views_in_another_order_are_stacked_anew() -> None:
    modules = siblings_of("w8a8")
    first, x = stack(modules), torch.randn(3, K)
    swapped = [modules[1], modules[0], modules[2]]
    assert torch.equal(stack(modules, swapped)(x), torch.cat([m(x) for m in swapped], -1))
    assert torch.equal(first(x), torch.cat([m(x) for m in modules], -1))


def test_weights_do_not_become_tensors_of_inference_mode() -> None:
    modules = siblings_of(None)
    with torch.inference_mode():
        assert stack(modules) is not None
    assert not any(p.is_inference() for p in modules.parameters())
    modules[0](torch.randn(2, K)).sum().backward()


# ── what cannot be one ───────────────────────────────────────────────────────────────────────────


def hooked(kind: str) -> nn.ModuleList:
    modules = siblings_of(None)
    getattr(modules[1], kind)(lambda *_: None)
    return modules


def patched() -> nn.ModuleList:
    modules = siblings_of("w8a16")
    monkey: Any = modules[2]
    monkey.forward = lambda x: x
    return modules


def changed(scheme: Any, change: Callable[[Any], object]) -> nn.ModuleList:
    modules = siblings_of(scheme)
    with torch.no_grad():
        change(modules)
    return modules


def replaced(scheme: Any, *args: Any, **options: Any) -> nn.ModuleList:
    modules = siblings_of(scheme)
    modules[1] = sibling(*args, **options)
    return modules


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnInt8(Linear):
    pass


class OwnParameter(nn.Parameter):
    pass


STATIC = {"static_range": StaticRange(-1.0, 2.0)}
REFUSED: dict[str, Callable[[], nn.Module]] = {
    "one": lambda: nn.ModuleList([sibling(None, 64)]),
    "none": lambda: nn.ModuleList(),
    "schemes": lambda: replaced("w8a8", "w8a16", 64),
    "float_and_int8": lambda: replaced("w8a8", None, 64),
    "columns": lambda: replaced(None, None, 64, k=128),
    "columns_within_a_vector": lambda: replaced("w8a8", "w8a8", 64, k=K - 1),
    "some_biases": lambda: replaced("w8a8", "w8a8", 64, bias=False),
    "activations": lambda: replaced("w8a8", "w8a8", 64, activation="silu"),
    "static": lambda: siblings_of("w8a8_static", **STATIC),
    "static_fp8": lambda: siblings_of("fp8_static", **STATIC),
    "dtypes": lambda: changed(None, lambda m: m[2].half()),
    "meta": lambda: siblings_of(None).to("meta"),
    "class": lambda: changed(None, lambda m: m.append(OwnForward(K, 64))),
    "conv1d": lambda: nn.ModuleList([Conv1D(64, K), Conv1D(64, K)]),
    "other_modules": lambda: nn.ModuleList([nn.Identity(), nn.Identity()]),
    "parametrized": lambda: changed(None, lambda m: nn.utils.parametrizations.orthogonal(m[0])),
    "more_parameters": lambda: changed(
        None, lambda m: [one.register_parameter("gain", nn.Parameter(torch.ones(64))) for one in m]
    ),
    "class_of_int8": lambda: changed("w8a8", lambda m: [setattr(one, "__class__", OwnInt8) for one in m]),
    "tensor_class": lambda: changed(
        None, lambda m: [setattr(one, "weight", OwnParameter(one.weight.detach())) for one in m]
    ),
    "hook": lambda: hooked("register_forward_hook"),
    "pre_hook": lambda: hooked("register_forward_pre_hook"),
    "forward_of_its_own": patched,
    "transposed": lambda: changed(None, lambda m: setattr(m[0].weight, "data", torch.randn(K, 128).t())),
    "unaligned": lambda: nn.ModuleList([sibling("w8a8", 66), sibling("w8a8", 64)]),
    "part_of_a_block": lambda: nn.ModuleList([sibling("codebook4_g32_int8", 80), sibling("codebook4_g32_int8", 64)]),
    "seeds": lambda: replaced("codebook4_g32", Codebook(group_size=32, seed=3), 64),
    "groups": lambda: replaced("codebook4_g32", "codebook4_g16", 64),
    "codebooks": lambda: changed("codebook4_g32", lambda m: m[1].codebook.mul_(1.5)),
    "second_codebooks": lambda: changed("codebook4+2_g32", lambda m: m[2].residual_codebook.mul_(1.5)),
    "the_same_twice": lambda: changed(None, lambda m: m.append(m[0])),
    "used_elsewhere": lambda: changed("w8a8", lambda m: m.add_module("3", nn.Sequential(m[0]))),
    "tied_to_each_other": lambda: changed(
        None, lambda m: setattr(m.append(nn.Linear(K, 80))[3], "weight", m[2].weight)
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_one_is_left_alone(case: str) -> None:
    model = REFUSED[case]()
    siblings = list(model.children()) if case != "the_same_twice" else [model[0], model[3]]  # type: ignore[index]
    siblings = siblings[:3] if case == "used_elsewhere" else siblings
    before = [(id(t), t.untyped_storage()._cdata, t._version) for t in (*model.parameters(), *model.buffers())]
    assert stack(model, siblings) is None
    assert Stacker(model).joined(tuple(siblings)) == tuple(siblings)
    assert [(id(t), t.untyped_storage()._cdata, t._version) for t in (*model.parameters(), *model.buffers())] == before


@pytest.mark.parametrize("scheme", [None, "w8a8", "fp8_dynamic"])
def test_a_weight_that_others_hold_stays_tied(scheme: str | None) -> None:
    modules = siblings_of(scheme)
    head = copy.deepcopy(modules[1])
    model = nn.ModuleDict({"siblings": modules, "head": head})
    if isinstance(head, Linear):
        head.tie_to(modules[1])  # type: ignore[arg-type]
    else:
        head.weight = nn.Parameter(modules[1].weight.detach()[:32], requires_grad=False)  # type: ignore[index]
    before = snapshot(model)
    assert stack(model, modules) is None
    assert same(before, snapshot(model))
    assert stack(model, [modules[0], modules[2]]) is not None
    assert stack(modules, [sibling(scheme, 64), sibling(scheme, 80)]) is None  # none of the model's


@pytest.mark.parametrize("scheme", [None, "w8a8"])
def test_tensors_of_inference_mode_stay_where_they_are(scheme: str | None) -> None:
    with torch.inference_mode():
        modules = copy.deepcopy(siblings_of(scheme))
    assert all(t.is_inference() for t in stacking._rows(modules[0]).values())
    before = snapshot(modules)
    assert stack(modules) is None
    assert same(before, snapshot(modules))


@pytest.mark.parametrize("scheme", [None, "codebook4_g32_int8"])
def test_short_memory_leaves_the_siblings_as_they_were(scheme: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    modules, cat = siblings_of(scheme), torch.cat
    count = len(stacking._rows(modules[0]))
    for fails in range(count):
        calls = iter(range(count))

        def short(tensors: Any, fails: int = fails, calls: Any = calls) -> Tensor:
            if next(calls) == fails:
                raise torch.OutOfMemoryError("no memory")
            return cat(tensors)

        before = snapshot(modules)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "cat", short)
            with pytest.raises(torch.OutOfMemoryError):
                stack(modules)
        assert same(before, snapshot(modules))
    assert stack(modules) is not None
