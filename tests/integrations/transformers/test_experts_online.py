"""Experts that are quantized while transformers loads them: the same bits, and one layer in float at a time."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import qcut
from qcut.errors import CheckpointError, QuantizationError, UnsupportedError
from qcut.integrations.transformers.online import OnlineLoading
from qcut.layers.experts.opening import opened as laid_open
from qcut.layers.linear import Linear
from qcut.numerics.codebook import passes
from qcut.numerics.codebook.fitting.fit import fit_experts
from tests.integrations.transformers.mixtures import FAMILIES, mixture
from tests.integrations.transformers.support import IDS, opened, same
from tests.support.files import rewrite


def both(folder: Path, scheme: Any, **options: Any) -> tuple[Any, Any, Any, Any]:
    """A folder's model that is quantized after and while it is loaded, with its report each."""
    after = opened(folder)
    kept = {"report": True, "verify": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = qcut.quantize(after, scheme, progress=False, verify=True, allow_growth=True, **options)
        config = qcut.QcutConfig(scheme, allow_growth=True, **kept, **options)
        during = opened(folder, quantization_config=config)
    return after, during, report, during.hf_quantizer.report


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_quantized_while_loading(family: str, tmp_path: Path) -> None:
    mixture(family).save_pretrained(tmp_path, max_shard_size="30KB")
    after, during, report, online = both(tmp_path, "codebook4_g32" if family == "GptOss" else "w8a8")
    assert same(during, after)
    assert online.to_json() == report.to_json()
    assert sum(layer.experts == 4 for layer in online.layers) == (2 if family in ("DeepseekV3", "NemotronH") else 4)
    during.save_pretrained(tmp_path / "out")
    assert same(opened(tmp_path / "out"), after)


def test_bfloat16_experts_are_quantized_while_loading(tmp_path: Path) -> None:
    mixture("GptOss").bfloat16().save_pretrained(tmp_path)
    after, during, *_ = both(tmp_path, "w8a16")
    assert during.dtype is torch.bfloat16
    assert same(during, after)


def test_ranges_and_moments_reach_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixture().save_pretrained(tmp_path)
    model = opened(tmp_path)
    batches = [torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(0))]
    with laid_open(model):
        calibration = qcut.calibrate(model, batches, progress=False)
        moments = qcut.collect_second_moments(model, batches, progress=False)
    after, during, *_ = both(tmp_path, "w8a8_static", calibration=calibration)
    assert same(during, after)
    assert during.model.layers[0].mlp.experts.up.input_scale.shape == (4, 1)
    counts: list[int] = []

    def counted(weights: Any, *args: Any, **options: Any) -> Any:
        counts.append(len(weights))
        return fit_experts(weights, *args, **options)

    monkeypatch.setattr(passes, "fit_experts", counted)
    after, during, *_ = both(tmp_path, "codebook4_g32", second_moments=moments)
    assert same(during, after)
    assert counts.count(4) == 2 * 2 * len(model.model.layers)  # both ways, up and down
    rounded = both(tmp_path, "codebook4_g32")[0]
    fitted, nearest = (model.model.layers[0].mlp.experts.up for model in (during, rounded))
    assert not torch.equal(fitted.norms, nearest.norms)


def test_some_experts_stay_by_choice(tmp_path: Path) -> None:
    mixture().save_pretrained(tmp_path)
    after, during, *_ = both(tmp_path, "w8a8", include=["*.0.mlp.experts.down.*", "q_proj"])
    assert same(during, after)
    assert isinstance(during.model.layers[0].mlp.experts.up, torch.nn.ModuleList)
    assert type(during.model.layers[1].mlp.experts).__name__ == "Qwen3MoeExperts"


def test_one_layer_of_experts_is_in_float(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_layer = 4 * 3 * 32 * 64 * 4  # experts, matrices of each, their sizes, bytes
    mixture(num_hidden_layers=3).save_pretrained(tmp_path)
    held = []
    from_float = Linear.all_from_float.__func__  # type: ignore[attr-defined]

    def watching(cls: Any, *args: Any) -> Any:
        held.extend(sum(_float_experts()) for name in args[-1] if name.endswith(("experts.up.0", "experts.down.3")))
        return from_float(cls, *args)

    monkeypatch.setattr(Linear, "all_from_float", classmethod(watching))
    gc.collect()
    gc.freeze()  # what is there already is not looked at
    try:
        opened(tmp_path, quantization_config=qcut.QcutConfig("w8a8", verify=False))
        assert _float_experts() == []
    finally:
        gc.unfreeze()
    assert held == 6 * [of_layer]


def _float_experts() -> list[int]:
    """Bytes of each memory that a float tensor with the weights of four experts is in."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (Tensor, torch.nn.Parameter)]
    floats = [one for one in tensors if one.ndim == 3 and len(one) == 4 and one.is_floating_point() and not one.is_meta]
    return list({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in floats}.values())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop("model.layers.1.mlp.experts.2.up_proj.weight"), r"experts\.2\.up_proj\.weight' is missing"),
        (
            lambda t: t.pop("model.layers.0.mlp.experts.3.down_proj.weight"),
            r"experts\.3\.down_proj\.weight' is missing",
        ),
        (lambda t: _add(t, "4.up_proj"), r"experts\.4\.up_proj\.weight' does not belong to the model, which has 4"),
        (
            lambda t: t.update(
                dict.fromkeys([f"{_EXPERTS}.{e}.down_proj.weight" for e in range(4)], torch.ones(64, 8))
            ),
            r"experts\.down_proj'.*found \[4, 64, 8\], the configuration needs \[4, 64, 32\]",
        ),
        (lambda t: t[f"{_EXPERTS}.1.gate_proj.weight"].fill_(float("nan")), r"experts\.gate_up_proj': found nan"),
    ],
    ids=["up", "down", "extra", "shape", "nan"],
)
def test_damaged_float_experts_are_refused(
    change: Callable[[dict[str, Tensor]], object], match: str, tmp_path: Path
) -> None:
    mixture().save_pretrained(tmp_path)
    rewrite(tmp_path / "model.safetensors", lambda tensors: _changed(tensors, change))
    with pytest.raises((CheckpointError, QuantizationError), match=match):
        opened(tmp_path, quantization_config=qcut.QcutConfig("w8a8"))


_EXPERTS = "model.layers.0.mlp.experts"


def _add(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"{_EXPERTS}.{name}.weight"] = torch.zeros(32, 64)


def _changed(tensors: dict[str, Tensor], change: Callable[[dict[str, Tensor]], object]) -> None:
    change(tensors)
    tensors.update({name: tensor.clone() for name, tensor in tensors.items()})


def test_experts_are_not_cut_while_loading() -> None:
    parallel: Any = SimpleNamespace(size=2)
    with torch.device("meta"):
        model = mixture()
    with pytest.raises(UnsupportedError, match=r"experts: tp_size=2 for experts to quantize.*modules_to_not_convert"):
        OnlineLoading(model, qcut.QcutConfig("w8a8"), parallel)


def test_quantized_mixture_computes_while_loaded(tmp_path: Path) -> None:
    mixture("Mixtral").save_pretrained(tmp_path)
    made = opened(tmp_path, quantization_config=qcut.QcutConfig("w8a8"), device_map={"": "cpu"})
    assert made(IDS).logits.isfinite().all()
    assert not any(parameter.is_meta for parameter in made.parameters())
