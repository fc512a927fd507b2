"""``qcut quantize`` of models for any task: the class that the folder states, quantized while it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import qcut
from qcut.cli import main as cli
from qcut.cli import models
from qcut.layers.linear import Linear
from tests.cli.commands import DEMO, answer
from tests.cli.commands import run as command
from tests.fuzz.formats import build_huggingface
from tests.support import ROOT
from tests.support.alive import watch_float_weights
from tests.support.architectures import inputs_of, run, tiny_model

transformers = pytest.importorskip("transformers")

CLASSES = (
    *("BertModel", "BertForMaskedLM", "BertForSequenceClassification", "T5ForConditionalGeneration", "T5EncoderModel"),
    *("ViTForImageClassification", "WhisperForConditionalGeneration", "CLIPModel", "Wav2Vec2ForCTC"),
    *("VideoMAEForVideoClassification", "BlipForQuestionAnswering", "Wav2Vec2ForAudioFrameClassification"),
)
NO_BATCH = ("VideoMAEForVideoClassification", "BlipForQuestionAnswering")
"""Classes that the tests have no inputs for: only their state is compared."""


def folder_of(name: str, path: Path) -> Path:
    """A float model of a class of transformers, with what prepares images or sound."""
    tiny_model(name).save_pretrained(path)
    (path / "preprocessor_config.json").write_text('{"size": 32}')
    return path


def refusal(capfd: pytest.CaptureFixture[str], *words: object) -> str:
    """The message that a command ends with."""
    status, _, err = command(capfd, *words)
    assert status != 0
    return err


@pytest.mark.parametrize("name", CLASSES)
def test_a_model_for_any_task(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, out = folder_of(name, tmp_path / "float"), tmp_path / "out"
    options = ("--embeddings", "w8a16") if name.startswith("Bert") else ()
    made = answer(capfd, "quantize", folder, "--scheme", "codebook4", "--out", out, *options)
    expected = getattr(transformers, name).from_pretrained(folder)
    embeddings = options[1] if options else None
    report = qcut.quantize(expected, "codebook4", embeddings=embeddings, verify=True, progress=False)
    assert made["report"] == json.loads(json.dumps(report.to_json()))
    found: Any = qcut.load(out, progress=False)
    want, got = expected.state_dict(), found.state_dict()
    assert type(found).__name__ == name
    assert want.keys() == got.keys()
    assert all(torch.equal(want[key], got[key]) for key in want)
    again = type(found).from_pretrained(out).eval()
    assert all(torch.equal(want[key], value) for key, value in again.state_dict().items())
    batch = inputs_of(expected)
    assert (batch is None) == (name in NO_BATCH)
    if batch is not None:
        with torch.no_grad():
            assert torch.equal(run(found, batch), run(expected, batch))
            assert torch.equal(run(again, batch), run(expected, batch))
    assert (out / "preprocessor_config.json").read_text() == '{"size": 32}'
    info = answer(capfd, "info", out)
    assert (info["format"], info["model"]) == ("qcut", name)
    assert len(info["layers"]) == len(report.layers)
    assert "format of qcut\n" in command(capfd, "info", out)[1]
    assert answer(capfd, "info", folder)["layers"] == []


def test_one_float_weight_is_alive_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of("ViTForImageClassification", tmp_path / "float")
    weights = watch_float_weights(monkeypatch)
    assert cli.main(["quantize", str(folder), "--scheme", "w8a8", "--out", str(tmp_path / "out")]) == 0
    assert len(weights.watched) >= 12
    assert max(weights.alive) <= 1


def test_a_plan_is_served_while_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = ROOT / "README.md"
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    words = ["--calibrate", text, "--window", 64, "--max-windows", 2, "--measure", "layer", "--budget", 1]
    assert cli.main(["plan", str(DEMO), *map(str, words), "--objective", "memory", "--out", str(plan)]) == 0
    monkeypatch.setattr(models.Quantizing, "apply", None)  # the float model is not quantized afterwards
    assert cli.main(["quantize", str(DEMO), "--plan", str(plan), "--dtype", "float32", "--out", str(out)]) == 0
    expected = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    qcut.quantize(expected, qcut.Plan.load(plan), progress=False)
    got = qcut.load(out, progress=False).state_dict()
    assert all(torch.equal(value, got[key]) for key, value in expected.state_dict().items())
    assert transformers.AutoTokenizer.from_pretrained(out)("a")["input_ids"]


def test_a_text_calibrates_what_reads_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def calibrated(name: str, out: str) -> tuple[object, ...]:
        folder = tmp_path / name
        if not folder.exists():
            build_huggingface(folder)
            folder_of(name, folder)
        words = ("--scheme", "w8a8_static", "--calibrate", text, "--window", 16, "--out", tmp_path / out)
        return ("quantize", folder, *words)

    text = tmp_path / "text.txt"
    text.write_text("abc " * 400)
    answer(capfd, *calibrated("BertForMaskedLM", "bert"))
    schemes = {module.scheme.name for module in qcut.load(tmp_path / "bert").modules() if isinstance(module, Linear)}
    assert schemes == {"w8a8_static"}
    message = refusal(capfd, *calibrated("T5ForConditionalGeneration", "t5"))
    assert "T5ForConditionalGeneration reads a text and its continuation, not only text" in message
    message = refusal(capfd, *calibrated("ViTForImageClassification", "vit"))
    assert "ViTForImageClassification reads pixel_values" in message
    (tmp_path / "ViTForImageClassification" / "tokenizer.json").unlink()
    assert "--calibrate TEXT needs a tokenizer" in refusal(capfd, *calibrated("ViTForImageClassification", "vit"))
    assert not (tmp_path / "vit").exists()


def test_what_reads_no_text_alone_generates_none(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("BertForMaskedLM", "T5ForConditionalGeneration"):
        folder = tmp_path / name
        build_huggingface(folder)
        folder_of(name, folder)
        out = tmp_path / f"{name}-out"
        answer(capfd, "quantize", folder, "--scheme", "w8a8", "--out", out)
        message = refusal(capfd, "generate", out, "--prompt", "a")
        assert f"found a {name}; a causal language model is needed" in message


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (["MyOwnModel"], "config.json: architectures is ['MyOwnModel']; one model class of transformers is needed"),
        (["BertModel", "BertForMaskedLM"], "architectures is ['BertModel', 'BertForMaskedLM']; one model class"),
        ("torch.nn.Linear", "architectures is 'torch.nn.Linear'"),
        (["PreTrainedModel"], "architectures is ['PreTrainedModel']"),
    ],
)
def test_the_class_is_one_of_transformers(
    stated: object, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of("BertModel", tmp_path / "float")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": stated}))
    assert message in refusal(capfd, "quantize", folder, "--scheme", "w8a8", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_old_class_name_of_a_causal_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "float"
    build_huggingface(folder)
    config = json.loads((folder / "config.json").read_text())
    for stated in (["LLaMAForCausalLM"], None):
        (folder / "config.json").write_text(json.dumps({**config, "architectures": stated}))
        made = answer(capfd, "quantize", folder, "--scheme", "w8a8", "--out", tmp_path / str(stated), "--overwrite")
        assert made["schemes"]["w8a8"]
        assert type(qcut.load(tmp_path / str(stated))).__name__ == "LlamaForCausalLM"


def test_a_model_of_the_hub_brings_its_preprocessor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    repository = tmp_path / "hub" / "models--someone--vit"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    folder_of("ViTForImageClassification", repository / "snapshots" / ("0" * 40))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    monkeypatch.chdir(tmp_path)
    answer(capfd, "quantize", "someone/vit", "--scheme", "w8a8", "--out", "out")
    assert (tmp_path / "out" / "preprocessor_config.json").read_text() == '{"size": 32}'
    assert answer(capfd, "info", "out")["model"] == "ViTForImageClassification"
