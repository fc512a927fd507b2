from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qcut.conversion.calibration.calibrate import METHODS, calibrate
from qcut.conversion.smooth import smooth
from qcut.errors import CalibrationError, ConfigError
from qcut.layers.linear import Linear
from qcut.models.modules import weight_nk
from qcut.models.tracing import NormTracer
from tests.support.zoo import inject_outliers, same, snapshot, tiny_hf, tiny_lm, token_batches

WIDTH = 8


class Wired(nn.Module):
    """One norm, two linear layers, and a body to wire them with."""

    def __init__(self, body: Callable[[Wired, Tensor], Tensor], norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = norm or nn.LayerNorm(WIDTH)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other = nn.Sequential(nn.Tanh())
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class OnePlus(nn.Module):
    """Gemma's norm: the output is not proportional to the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


def trace(model: nn.Module, *inputs: Tensor):
    tracer = NormTracer(model.eval())
    with torch.no_grad():
        tracer.run(lambda: model(*inputs))
    tracer.remove()
    return tracer.verdict()


def pairs_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    return {pair.norm: pair.layers for pair in trace(model, token_batches()[0])[0]}


def test_pairs_of_gpt2_llama_and_plain_models() -> None:
    assert pairs_of(tiny_hf("gpt2")) == {
        f"transformer.h.{i}.{norm}": (f"transformer.h.{i}.{layer}",)
        for i in range(2)
        for norm, layer in (("ln_1", "attn.c_attn"), ("ln_2", "mlp.c_fc"))
    }
    layer = "model.layers.{}."
    expected = {}
    for i in range(2):
        p = layer.format(i)
        expected[p + "input_layernorm"] = tuple(f"{p}self_attn.{x}_proj" for x in "qkv")
        expected[p + "post_attention_layernorm"] = (f"{p}mlp.gate_proj", f"{p}mlp.up_proj")
    assert pairs_of(tiny_hf("llama")) == expected
    plain = pairs_of(tiny_lm())
    assert plain["blocks.0.ln1"] == ("blocks.0.q", "blocks.0.v")
    assert plain["blocks.1.ln2"] == ("blocks.1.up",)
    # The last norm feeds the classifier, which has the embedding's weight.
    assert "norm" not in plain


def test_gemma_norms_are_refused_by_name() -> None:
    pairs, refused = trace(tiny_hf("gemma"), token_batches()[0])
    assert not pairs
    assert "GemmaRMSNorm" in refused["model.layers.0.input_layernorm"]
    assert "1 + weight" in refused["model.layers.0.input_layernorm"]


REFUSED = {
    "residual": (lambda m, x: m.a(h := m.norm(x)) + h, "also read by add"),
    "residual before": (lambda m, x: (h := m.norm(x)) * 2 + m.a(h), "also read by mul"),
    "view": (lambda m, x: m.a(m.norm(x).reshape(-1, 2, WIDTH // 2).flatten(1)), "also read by reshape"),
    "view in place": (lambda m, x: m.a(m.norm(x).view(-1, WIDTH).add_(1.0)), "also read by add_"),
    "slice": (lambda m, x: m.a(h := m.norm(x)) + m.b(h[:1]), "also read by __getitem__"),
    "module": (lambda m, x: m.a(h := m.norm(x)) + m.other(h), "also read by tanh"),
    "functional": (lambda m, x: m.a(h := m.norm(x)) + nn.functional.linear(h, m.b.weight), "also read by linear"),
    "in place": (lambda m, x: m.a(m.norm(x).add_(1.0)), "also read by add_"),
    "value": (lambda m, x: m.a(h := m.norm(x)) * h.tolist()[0][0], "also read by tolist"),
    "output": (lambda m, x: (m.a(h := m.norm(x)), h), "part of the model's output"),
    "unread": (lambda m, x: (m.norm(x), m.a(x))[1], "no linear layer"),
    "two sources": (lambda m, x: m.a(m.norm(x)) + m.a(x), "also reads other tensors"),
}


def test_views_of_the_same_rows_are_the_output() -> None:
    def body(m: Wired, x: Tensor) -> Tensor:
        h = m.norm(x).view(1, -1, WIDTH)
        return m.a(h) + m.b(h.reshape(-1, WIDTH))

    pairs, refused = trace(Wired(body), torch.randn(4, WIDTH))
    assert [pair.layers for pair in pairs] == [("a", "b")], refused


def test_view_that_other_inputs_read_is_refused() -> None:
    def body(m: Wired, x: Tensor) -> Tensor:
        h = m.norm(x)
        y = m.a(h) + m.b(h)
        seen = h.view(-1, WIDTH)
        return y + seen if x.sum() > 1e9 else y

    pairs, refused = trace(Wired(body), torch.randn(4, WIDTH))
    assert not pairs
    assert "where other inputs may take it" in refused["norm"]


@pytest.mark.parametrize("case", REFUSED)
def test_norms_with_other_readers_are_refused(case: str) -> None:
    body, reason = REFUSED[case]
    pairs, refused = trace(Wired(body), torch.randn(4, WIDTH))
    assert not pairs
    assert reason in refused["norm"]


def test_what_does_not_read_is_allowed() -> None:
    def body(m: Wired, x: Tensor) -> Tensor:
        h = m.norm(x)
        assert h.shape[-1] == WIDTH
        assert h.dtype.is_floating_point
        h = h.contiguous().to(x.dtype)
        return m.a(h) + m.b(nn.functional.dropout(h, 0.5, m.training))

    pairs, _ = trace(Wired(body), torch.randn(4, WIDTH))
    assert [p.layers for p in pairs] == [("a", "b")]


def test_shared_weights_and_unproportional_norms_are_refused() -> None:
    both = REFUSED["two sources"][0]
    model = Wired(lambda m, x: m.a(m.norm(x)) + m.b(x))
    model.b.weight = model.a.weight
    assert "the weight of 'a' is shared with 'b'" in trace(model, torch.randn(4, WIDTH))[1]["norm"]
    model = Wired(lambda m, x: m.a(h := m.norm(x)) + m.b(h))
    model.b.weight = model.a.weight
    assert "share one weight" in trace(model, torch.randn(4, WIDTH))[1]["norm"]
    assert "not proportional" in trace(Wired(both, OnePlus()), torch.randn(4, WIDTH))[1]["norm"]


def test_a_quantized_layer_is_another_reader() -> None:
    model = Wired(lambda m, x: m.a(h := m.norm(x)) + m.b(h))
    model.b = Linear.from_float(model.b)  # type: ignore[assignment]
    pairs, refused = trace(model, torch.randn(4, WIDTH))
    assert not pairs
    assert "also read by" in refused["norm"]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_smoothing_is_bitwise_exact(kind: str, dtype: torch.dtype) -> None:
    model = (tiny_lm() if kind == "plain" else tiny_hf(kind)).to(dtype)
    batches = token_batches()
    modules = dict(model.named_modules())
    for pair in trace(model, batches[0])[0]:
        inject_outliers(modules[pair.norm], [modules[name] for name in pair.layers])
    cal = calibrate(model, batches, progress=False)
    wide = {name: cal.range(name) for name in cal.layers}

    def logits() -> Tensor:
        out = model(batches[0])
        return out if isinstance(out, Tensor) else out.logits

    before = logits()
    done = smooth(model, cal, 0.5)
    assert torch.equal(logits(), before)
    assert all(m.moved >= 3 for m in done.migrations)
    again = calibrate(model, batches, progress=False)
    for name in cal.layers:
        for part in ("lo", "hi", "sample"):
            assert torch.equal(getattr(cal.layers[name], part), getattr(again.layers[name], part))
        for method in METHODS:
            assert cal.range(name, method) == again.range(name, method)
    for migration in done.migrations:
        for name in migration.layers:
            assert cal.range(name).hi - cal.range(name).lo < 0.3 * (wide[name].hi - wide[name].lo)


def test_scales_follow_the_formula() -> None:
    model = Wired(lambda m, x: m.a(h := m.norm(x)) + m.b(h))
    inject = torch.tensor([64.0, 1, 1, 1, 1, 1, 1, 1])
    with torch.no_grad():
        model.norm.weight.mul_(inject)
    cal = calibrate(model, [torch.randn(64, WIDTH)], progress=False)
    x = cal.absmax("a")
    w = torch.stack([weight_nk(model.a), weight_nk(model.b)]).abs().amax((0, 1))
    for alpha in (0.0, 0.5, 0.8, 1.0):
        s = x**alpha / w ** (1 - alpha)
        fresh = Wired(model.body)
        fresh.load_state_dict(model.state_dict())
        got = smooth(fresh, cal.copy(), alpha, exact=False).migrations[0].scale
        ratio = got / s
        assert torch.allclose(ratio, ratio[0].expand(WIDTH), rtol=1e-5)
        assert got.log2().median().abs() < 1e-5
        fresh.load_state_dict(model.state_dict())
        exact = smooth(fresh, cal.copy(), alpha).migrations[0].scale
        assert torch.equal(exact, exact.log2().round().exp2())
        assert ((exact / got).log2().abs() <= 0.5 + 1e-5).all()


def test_dead_channels_keep_their_scale() -> None:
    model = Wired(lambda m, x: m.a(h := m.norm(x)) + m.b(h))
    with torch.no_grad():
        model.norm.weight[0] = model.norm.bias[0] = 0.0
        model.a.weight[:, 1] = model.b.weight[:, 1] = 0.0
        model.norm.weight[2] = 100.0
    cal = calibrate(model, [torch.randn(64, WIDTH)], progress=False)
    scale = smooth(model, cal, 0.5).migrations[0].scale
    assert scale[:2].tolist() == [1.0, 1.0]
    assert scale[2] > 2
    assert scale.isfinite().all()


def test_a_column_that_would_underflow_keeps_its_scale() -> None:
    model = Wired(lambda m, x: m.a(h := m.norm(x)) + m.b(h)).half()
    with torch.no_grad():
        model.a.weight[0, 0] = 3 * 2.0**-24
        # Channel 0 would be divided by less than 1: a weight of three subnormal steps loses a bit.
        model.norm.weight[0] = 2.0**-6
    x = torch.randn(64, WIDTH).half()
    cal = calibrate(model, [x], progress=False)
    before = model.eval()(x)
    scale = smooth(model, cal, 0.5).migrations[0].scale
    assert scale[0] == 1
    assert model.a.weight[0, 0] == 3 * 2.0**-24
    assert torch.equal(model(x), before)


def test_failures_leave_model_and_calibration_alone() -> None:
    model, batches = tiny_lm(), token_batches()
    cal = calibrate(model, batches, progress=False)
    before, lo = snapshot(model), cal.layers["blocks.0.q"].lo.clone()
    with pytest.raises(ConfigError, match=r"alpha = 1\.5"):
        smooth(model, cal, 1.5)
    with pytest.raises(CalibrationError, match="another model's"):
        smooth(tiny_lm(blocks=1), cal)
    with pytest.raises(CalibrationError, match="channels"):
        smooth(tiny_lm(width=16), cal)
    assert same(before, snapshot(model))
    with torch.no_grad():
        model.blocks[1].up.weight[0, 0] = float("nan")
    nan = snapshot(model)["tensors"]
    with pytest.raises(CalibrationError, match=r"blocks\.1\.up: found NaN"):
        smooth(model, cal)
    assert snapshot(model)["tensors"] == nan
    assert torch.equal(cal.layers["blocks.0.q"].lo, lo)


def test_uncalibrated_layers_of_a_norm_are_scaled_too() -> None:
    model, batches = tiny_lm(), token_batches()
    inject_outliers(model.blocks[0].ln1, [model.blocks[0].q, model.blocks[0].v])
    cal = calibrate(model, batches, layers=["*.q"], progress=False)
    before = model(batches[0])
    done = smooth(model, cal)
    assert torch.equal(model(batches[0]), before)
    assert done.migrations[0].layers == ("blocks.0.q", "blocks.0.v")
    assert "none of its layers" in done.refused["blocks.0.ln2"]
    assert "blocks.0.ln1" in str(done)


class Routed(nn.Module):
    """A norm; the second input decides where its output goes."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        with torch.no_grad():
            self.norm.weight[::4] *= 50

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return self.experts[int(kind)](self.norm(x))


def smoothed_by(model: nn.Module, seen: list[int], **options: object) -> float:
    """How far any result of a smoothed model is from before, where calibration saw inputs of these kinds."""
    model.eval()
    batches = [(torch.randn(4, WIDTH), torch.tensor(kind)) for kind in range(3)]
    with torch.no_grad():
        before = [model(*batch) for batch in batches]
        smooth(model, calibrate(model, [batches[i] for i in seen], progress=False, **options))  # type: ignore[arg-type]
        return max(float((model(*b) - want).abs().max()) for b, want in zip(batches, before, strict=True))


def test_readers_that_later_batches_reach_are_scaled() -> None:
    model = Routed()
    weight = model.norm.weight.detach().clone()
    assert smoothed_by(model, [0, 1, 2]) == 0
    assert not torch.equal(model.norm.weight, weight)


def test_readers_that_no_batch_reaches_keep_the_norm() -> None:
    assert smoothed_by(Routed(), [0], layers=["experts.0"]) == 0
    calibration = calibrate(Routed().eval(), [(torch.randn(4, WIDTH), torch.tensor(0))], layers=["experts.0"])
    assert "'experts.1' did not run with these batches" in calibration.refused["norm"]


class Branches(Routed):
    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        h = self.norm(x)
        y = self.experts[0](h)
        if int(kind):
            y = y + h
        return y


class Changed(Routed):
    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        h = self.norm(x)
        if int(kind):
            h += x
        y: Tensor = self.experts[0](h)
        return y


class Early(Routed):
    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        h = self.norm(x)
        return h if int(kind) else self.experts[0](h)


class Reassigned(Routed):
    """The name that held the norm's output holds something else in the branch."""

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        h = self.norm(x)
        h = self.experts[0](h)
        if int(kind):
            h = h * 2
        return h


class Helper(Routed):
    def mix(self, h: Tensor, kind: Tensor) -> Tensor:
        y: Tensor = self.experts[0](h)
        return y + h if int(kind) else y

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return self.mix(self.norm(x), kind)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, kind: Tensor) -> Tensor:
        y: Tensor = self.layer(h)
        while int(kind):
            y, kind = y + h, kind // 2
        return y


class Child(Routed):
    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.experts[0] = Part()

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return self.experts[0](self.norm(x), kind)


class Chain(Routed):
    """The norm is the first of a Sequential, which other inputs index."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.chain = nn.Sequential(self.norm, nn.Linear(WIDTH, WIDTH))
        del self.experts

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        y = self.chain(x)
        return y + self.chain[0](x) if int(kind) else y


class Counted(Routed):
    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        h = self.norm(x)
        y = self.experts[0](h)
        for _ in range(int(kind)):
            y = y + h
        return y


class Packed(Routed):
    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        state = {"h": self.norm(x)}
        y = self.experts[0](state["h"])
        if int(kind):
            y = y + state["h"]
        return y


class Kept(Routed):
    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        self.last = self.norm(x)
        return self.later(self.experts[0](self.last), kind)

    def later(self, y: Tensor, kind: Tensor) -> Tensor:
        return y + self.last if int(kind) else y


class Lambdas(Routed):
    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        h = self.norm(x)
        y = self.experts[0](h)
        return (lambda: y + h)() if int(kind) else y


class Weighs(Routed):
    """Reads the norm's weight, and not its output."""

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        y = self.experts[0](self.norm(x))
        return y + self.norm.weight if int(kind) else y


class ByName(Routed):
    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        y = self.experts[0](self.norm(x))
        return y + self.get_submodule("norm").weight if int(kind) else y


class Choosing(nn.LayerNorm):
    """Its weight multiplies only small values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.abs().max() < 100 else x


class Indexed(Routed):
    """Other inputs take a part without parameters."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.experts.append(nn.Tanh())

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        h = self.norm(x)
        return self.experts[min(int(kind), 1)](h)


class Chosen(Routed):
    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.layer, self.tanh = self.experts[0], nn.Tanh()

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        part = self.tanh if int(kind) else self.layer
        return part(self.norm(x))


class Listed(Routed):
    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.__dict__["plain"] = [self.norm]

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        y = self.experts[0](self.norm(x))
        return y + self.plain[0](x) if int(kind) else y


class OwnNorm(Routed):
    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.norm.__class__ = Choosing

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return self.experts[0](self.norm(x * 1000 ** int(kind)))


class Fitting(Routed):
    """Says much about the norm's output, and reads it only by layers."""

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        if x.ndim != 2:
            raise ValueError(x.shape)
        h, cache = self.norm(x), None
        if cache is None and isinstance(h, Tensor):
            y = sum(expert(h) for expert in self.experts)
        return y.view(h.shape) if int(kind) else y


KEEPING = (
    *(Branches, Changed, Early, Helper, Child, Chain, Counted, Packed, Kept, Lambdas),
    *(Weighs, ByName, Indexed, Chosen, Listed, OwnNorm),
)


@pytest.mark.parametrize(("cls", "kept"), [*((cls, True) for cls in KEEPING), (Reassigned, False), (Fitting, False)])
def test_branches_that_read_the_norm_keep_it(cls: type[Routed], kept: bool) -> None:
    model = cls(1)
    weight = model.norm.weight.detach().clone()
    assert smoothed_by(model, [0]) == 0
    assert torch.equal(model.norm.weight, weight) == kept


def test_hooks_on_norms_and_readers_keep_the_norm() -> None:
    for name in ("norm", "experts.0"):
        model = Routed(1)
        model.get_submodule(name).register_forward_hook(lambda module, args, y: y * 2)
        _, refused = trace(model, torch.randn(4, WIDTH), torch.tensor(0))
        assert "has hooks" in refused["norm"]
