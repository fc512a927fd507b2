"""Refinement: it comes nearer to the float model, changes what it says, and leaves the rest as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import qcut
from qcut.errors import CalibrationError, ConfigError, QuantizationError, ShapeError
from tests.support.zoo import tiny_hf

RATES = {"rate": 3e-3, "code_rate": 3e-2}


def pair(scheme: str = "codebook2", kind: str = "llama") -> tuple[nn.Module, nn.Module]:
    """A quantized model and the float one."""
    reference = tiny_hf(kind).requires_grad_(False)
    for p in reference.parameters():
        if p.dim() > 1:
            p *= 4.0  # layers that matter
    model = copy.deepcopy(reference)
    qcut.quantize(model, scheme, allow_growth=True, progress=False)
    return model, reference


def texts(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 64, (8, 24), generator=generator) for _ in range(count)]


@torch.no_grad()
def divergence(model: nn.Module, reference: nn.Module) -> float:
    ids = texts(1, seed=9)[0]
    found, wanted = (m(ids).logits.float().log_softmax(-1) for m in (model, reference))
    return float(nn.functional.kl_div(found, wanted, reduction="batchmean", log_target=True))


def vectors(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.dim() == 1}


@pytest.mark.parametrize(
    ("scheme", "kind"), [("codebook2", "llama"), ("codebook3", "gpt2"), ("codebook4_pairs", "llama")]
)
def test_predictions_come_nearer(scheme: str, kind: str):
    model, reference = pair(scheme, kind)
    before, weights = divergence(model, reference), copy.deepcopy(reference.state_dict())
    own, norms_only = vectors(model), copy.deepcopy(model)
    report = qcut.refine(model, reference, texts(20), steps=40, **RATES, progress=False)
    assert len(report.losses) == 40
    assert 0 < report.changed < 0.5
    assert f"{report.changed:.1%} of codes" in str(report)
    after = divergence(model, reference)
    assert after < 0.75 * before
    assert own
    assert not any(torch.equal(value, own[name]) for name, value in vectors(model).items())
    assert qcut.refine(norms_only, reference, texts(40), rate=3e-3, code_rate=0, progress=False).changed == 0
    assert after < divergence(norms_only, reference) < 0.99 * before
    assert all(torch.equal(value, weights[name]) for name, value in reference.state_dict().items())
    layers = [m for m in model.modules() if isinstance(m, qcut.Linear)]
    assert not any("forward" in layer.__dict__ for layer in layers)
    assert all(layer.scheme.name.startswith(scheme) for layer in layers)


def test_float16_keeps_its_dtypes():
    model, reference = (m.half() for m in pair())
    before = divergence(model, reference)
    qcut.refine(model, reference, texts(20), steps=40, **RATES, progress=False)
    assert divergence(model, reference) < 0.9 * before
    assert {p.dtype for p in model.parameters()} == {torch.float16}


def test_loss_is_that_of_refined_model():
    model, reference = pair("codebook3", "gpt2")
    batches = texts(1)
    again = copy.deepcopy(model)
    first = qcut.refine(model, reference, batches, steps=3, **RATES, progress=False)
    qcut.refine(again, reference, batches, steps=2, rate=0, code_rate=0, progress=False)
    same = qcut.refine(again, reference, batches, rate=0, code_rate=0, progress=False)
    assert same.losses[0] == pytest.approx(first.losses[0], rel=1e-5)  # nothing moved at rates of 0
    ids = batches[0]
    with torch.no_grad():
        found, wanted = (m(ids).logits.log_softmax(-1) for m in (model, reference))
    stored = float(nn.functional.kl_div(found, wanted, reduction="sum", log_target=True)) / ids.numel()
    now = qcut.refine(model, reference, batches, rate=0, code_rate=0, progress=False)
    assert now.losses[0] == pytest.approx(stored, rel=1e-4)


def test_only_second_pass_of_named_layers_changes():
    model, reference = pair("codebook2+2")
    before = {name: m.passes for name, m in model.named_modules() if isinstance(m, qcut.Linear)}
    qcut.refine(model, reference, texts(4), layers=["*.down_proj"], **RATES, progress=False)
    for name, (first, second) in before.items():
        now = model.get_submodule(name).passes
        assert torch.equal(now[0].indices, first.indices)
        assert torch.equal(now[0].norms, first.norms)
        assert torch.equal(now[1].norms, second.norms) != name.endswith("down_proj")


def test_outputs_without_logits_come_nearer():
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.Linear(128, 128, bias=False), nn.ReLU())
    model = copy.deepcopy(reference)
    qcut.quantize(model, qcut.Codebook(bits=2, rotation="qr", group_size=96), allow_growth=True, progress=False)
    batches = [torch.randn(64, 128, generator=torch.Generator().manual_seed(i)) for i in range(20)]
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(99))

    def error() -> float:
        with torch.no_grad():
            return float((model(x) - reference(x)).square().mean())

    before = error()
    qcut.refine(model, reference, batches, steps=60, **RATES, progress=False)
    assert error() < 0.9 * before


def test_what_is_refused():
    model, reference = pair()
    state = copy.deepcopy(model.state_dict())
    narrower = copy.deepcopy(reference)
    mlp = narrower.model.layers[0].mlp
    mlp.up_proj = nn.Linear(mlp.up_proj.in_features, 8)
    deeper, wider = copy.deepcopy(reference), copy.deepcopy(reference)
    deeper.model.layers.append(copy.deepcopy(deeper.model.layers[-1]))
    wider.lm_head = nn.Linear(wider.lm_head.in_features, 9)

    for options, error, message in (
        ({"batches": []}, CalibrationError, "found none"),
        ({"rate": -1}, ConfigError, r"^rate: found -1"),
        ({"code_rate": float("inf")}, ConfigError, "code_rate: found inf"),
        ({"steps": 0}, ConfigError, "steps: found 0"),
        ({"steps": "all"}, ConfigError, "steps: found 'all'"),
        ({"reference": narrower}, ShapeError, r"layer 'model.layers.0.mlp.up_proj': the reference has \[8, "),
        ({"layers": ["*.nothing"]}, ConfigError, r"no untied layer with rotated codebooks among \*\.nothing"),
        ({"layers": ["*.q_proj", "*.nothing"]}, ConfigError, r"no untied .* among \*\.nothing$"),
        ({"model": reference}, ConfigError, "no untied layer"),
        (
            {"reference": reference.model},
            ConfigError,
            r"layer 'model.embed_tokens' of the Llama.*a LlamaModel, has none",
        ),
        (
            {"reference": tiny_hf("gpt2")},
            ConfigError,
            r"layer 'model.embed_tokens' of the Llama.*a GPT2LMHead.* float mod",
        ),
        ({"reference": deeper}, ConfigError, r"layer 'model.layers.2.self_attn.q_proj' of the reference, a Llama"),
        ({"reference": wider}, ShapeError, r"layer 'lm_head': the reference has \[9, 32\]; allowed: \[64, 32\]"),
    ):
        given = {"model": model, "reference": reference, "batches": texts(1), "progress": False}
        with pytest.raises(error, match=message):
            qcut.refine(**given | options)
    broken = copy.deepcopy(reference)
    broken.model.norm.weight.fill_(torch.nan)
    with pytest.raises(CalibrationError, match="batch 0: the loss is nan"):
        qcut.refine(model, broken, texts(1), progress=False)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_a_worse_model_is_refused_and_undone():
    model, reference = pair("codebook4")
    state = copy.deepcopy(model.state_dict())
    wild = {"rate": 3.0, "code_rate": 0.0, "steps": 6, "progress": False}
    with pytest.raises(QuantizationError, match=r"verify: the loss on a batch is .* after refining, and was"):
        qcut.refine(model, reference, texts(2), **wild)
    other = copy.deepcopy(reference)
    other.model.layers[1].mlp.up_proj.weight.neg_()
    with pytest.raises(QuantizationError, match=r"layer 'model.layers.1.mlp.up_proj': verify: the codebook4 weight is"):
        qcut.refine(model, other, texts(1), progress=False)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    qcut.refine(model, reference, texts(2), **wild, verify=False)
    assert not all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
