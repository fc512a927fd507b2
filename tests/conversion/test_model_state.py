"""What runs a model leaves its state and torch's random numbers as they were, and gives each batch the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import qcut
from qcut.errors import ConfigError
from qcut.models.evaluation import compare, perplexity


class Chain(nn.Module):
    """Two layers that subclasses call in their own way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)
        self.prepare()
        self.eval()

    def prepare(self) -> None:
        """Set attributes of a subclass."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.gelu(self.first(x)))


class Counts(Chain):
    def prepare(self) -> None:
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * self.count


class ReplacesBuffer(Chain):
    def prepare(self) -> None:
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.mean = self.mean + y.mean(0)
        return y + self.mean


class WritesTensor(Chain):
    def prepare(self) -> None:
        self.mean = torch.zeros(64)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.mean += y.detach().mean(0)
        return y + self.mean


class Lists(Chain):
    def prepare(self) -> None:
        self.past: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.past.append(super().forward(x))
        return torch.stack(self.past).sum(0)


class Makes(Chain):
    def forward(self, x: Tensor) -> Tensor:
        self.past = {"y": super().forward(x) + vars(self).get("past", {}).get("y", 0)}
        return self.past["y"]


class Normalizes(Chain):
    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(super().forward(x), self.norm.running_mean, self.norm.running_var, training=True)


class Draws(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, training=True))


class WritesInput(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


MODELS = (Counts, ReplacesBuffer, WritesTensor, Lists, Makes, Normalizes, Draws, WritesInput)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 64, generator=generator) for _ in range(3)]


def refined(model: nn.Module, given: list[Tensor]) -> Any:
    quantized = copy.deepcopy(model)
    qcut.quantize(quantized, "codebook4", verify=False, progress=False)
    before = state(quantized)
    found = qcut.refine(quantized, model, given, steps=3, code_rate=0.0, rate=0.0, progress=False)
    assert same(state(quantized), before)
    return found.losses


USES: dict[str, Callable[[nn.Module, list[Tensor]], Any]] = {
    "calibrate": lambda m, b: {n: (s.lo, s.hi) for n, s in qcut.calibrate(m, b, progress=False).layers.items()},
    "moments": lambda m, b: dict(qcut.collect_second_moments(m, b, progress=False)),
    "curvature": lambda m, b: {n: c.outputs for n, c in qcut.collect_curvature(m, b, progress=False).items()},
    "plan": lambda m, b: str(qcut.plan(m, b, bits=6, candidates=["codebook4", "w8a16"], progress=False)),
    "gradient": lambda m, b: str(qcut.plan(m, b, bits=6, measure="gradient", progress=False)),
    "verify": lambda m, b: qcut.quantize(copy.deepcopy(m), "w8a16", verify=b[0], progress=False).verified,
    "refine": refined,
}


def state(model: nn.Module) -> list[Any]:
    """Everything that a call may change: buffers, attributes, and torch's generator."""
    own = [vars(m)[key] for m in model.modules() for key in ("mean", "past") if key in vars(m)]
    keys = [sorted(vars(m).keys() - {"input_gradients"}) for m in model.modules()]
    return copy.deepcopy([dict(model.named_buffers()), own, keys, torch.get_rng_state()])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", MODELS)
def test_state_is_kept_and_results_are_reproducible(kind: type[Chain], use: str) -> None:
    model, given = kind(), batches()
    torch.manual_seed(7)
    before = state(model)
    first = USES[use](model, given)
    assert same(state(model), before)
    assert same(given, batches())
    torch.manual_seed(8)
    assert same(USES[use](model, given), first)


@pytest.mark.parametrize("kind", MODELS)
def test_equal_models_have_no_loss(kind: type[Chain]) -> None:
    found = qcut.plan(kind(), batches(), budget=0.5, candidates=["fp16", "w8a16"], progress=False)
    losses = [layer.sensitivity["w8a16"] for layer in found.layers.values()]
    assert max(losses) < 1e-3


def test_batches_may_draw_from_torch() -> None:
    model = Draws()
    torch.manual_seed(5)
    qcut.calibrate(model, (torch.randn(8, 64) for _ in range(2)), progress=False)
    after = torch.randn(3)
    torch.manual_seed(5)
    drawn = [torch.randn(8, 64) for _ in range(2)]
    assert len(drawn) == 2
    assert torch.equal(after, torch.randn(3))


class Speaks(nn.Module):
    """A language model of 16 tokens that draws or counts in each call."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table, self.out, self.draws = nn.Embedding(16, 64), nn.Linear(64, 16), draws
        self.register_buffer("count", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        self.count += 1
        x = self.table(ids)
        return self.out(F.dropout(x, 0.5, training=True) if self.draws else x * self.count)


@pytest.mark.parametrize("draws", [False, True])
def test_perplexity_takes_windows_in_one_state(draws: bool) -> None:
    model, ids = Speaks(draws), torch.arange(64) % 16
    options: dict[str, Any] = {"window": 16, "batch_size": 1, "progress": False}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = perplexity(model, ids, **options)
    assert perplexity(model, ids, **options) == first
    assert compare(model, copy.deepcopy(model), ids, **options).divergence == 0
    assert model.count == 0
    assert torch.equal(torch.get_rng_state(), before)


class AutocastInside(Chain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


def test_moments_are_float32_inside_autocast() -> None:
    given = batches()
    found = qcut.collect_second_moments(AutocastInside(), given, progress=False)["first"].double()
    exact = sum(x.double().t() @ x.double() for x in given) / 24
    assert (found - exact).norm() < 1e-6 * exact.norm()


class InferenceInside(Chain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return super().forward(x)


def test_inference_mode_inside_is_served_or_refused() -> None:
    model, given = InferenceInside(), batches()
    found = qcut.collect_second_moments(model, given, progress=False)
    assert torch.equal(found["first"], qcut.collect_second_moments(Chain(), given, progress=False)["first"])
    with pytest.raises(ConfigError, match="cannot be differentiated"):
        qcut.plan(model, given, bits=6, measure="gradient", progress=False)


class RowByRow(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([super(RowByRow, self).forward(row) for row in x])


class Checkpoints(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(checkpoint(lambda t: F.gelu(self.first(t)), x, use_reentrant=False))


@pytest.mark.parametrize("kind", [RowByRow, Checkpoints])
def test_gradients_are_those_of_the_plain_chain(kind: type[Chain]) -> None:
    plans = [qcut.plan(m(), batches(), bits=6, measure="gradient", progress=False) for m in (Chain, kind)]
    for name, layer in plans[0].layers.items():
        assert plans[1].layers[name].sensitivity == pytest.approx(layer.sensitivity, rel=1e-3)


class Forgets(Chain):
    """Differentiates itself, and frees what the backward pass needs."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.sum().backward()
        return y


def test_refinement_without_derivatives_is_refused() -> None:
    reference = Forgets()
    model = copy.deepcopy(reference)
    qcut.quantize(model, "codebook4", progress=False)
    with pytest.raises(ConfigError, match="cannot be differentiated: Trying to backward"):
        qcut.refine(model, reference, batches(), steps=1, progress=False)


@pytest.mark.parametrize("use", ["curvature", "gradient"])
def test_models_of_inference_mode_are_refused(use: str) -> None:
    with torch.inference_mode():
        model = Chain()
    with pytest.raises(ConfigError, match=r"parameter 'first\.(weight|bias)' was made under torch.inference_mode"):
        USES[use](model, batches())
    assert all(p.requires_grad for p in model.parameters())


class Interrupted(Counts):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(F.dropout(x, 0.5, training=True))
        if x.amax() > 3:
            raise KeyboardInterrupt
        return y


@pytest.mark.parametrize("use", ["calibrate", "moments", "curvature", "plan", "gradient"])
def test_interruption_leaves_state_as_it_was(use: str) -> None:
    model, given = Interrupted(), batches()
    given[1] += 4
    model.first.weight.requires_grad_(False)
    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        USES[use](model, given)
    assert same(state(model), before)
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True]


def test_compiled_models_are_measured_eagerly() -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled.append(1)
        return graph.forward

    model = Chain()
    model.compile(backend=backend)
    with torch.no_grad():
        model(batches()[0])
    once = len(compiled)
    for measure in ("model", "gradient"):
        qcut.plan(model, batches(), bits=6, measure=measure, progress=False)  # type: ignore[arg-type]
    quantized = Chain()
    qcut.quantize(quantized, "codebook4", progress=False)
    qcut.refine(quantized, model, batches(), steps=2, progress=False)
    assert once == len(compiled) > 0
