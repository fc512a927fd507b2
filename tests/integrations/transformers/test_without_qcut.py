"""A quantized folder read by a program that has not imported qcut fails, and what is shown says ``import qcut``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qcut
from qcut.checkpoints.marks import ADVICE, KEYS, mark, marks_among, marks_pattern
from tests.integrations.transformers.support import logits, opened, quantized
from tests.support.files import rewrite

READERS = """
import sys
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, pipeline

readers = {
    "causal": AutoModelForCausalLM.from_pretrained,
    "base": AutoModel.from_pretrained,
    "classifier": AutoModelForSequenceClassification.from_pretrained,
    "pipeline": lambda folder: pipeline("feature-extraction", model=folder),
}
for folder in sys.argv[1:]:
    for name, read in readers.items():
        try:
            read(folder)
        except Exception as error:
            print(name, type(error).__name__, file=sys.stderr, flush=True)
        else:
            print("LOADED", folder, name)
"""


def test_other_programs_are_told_to_import_qcut(tmp_path: Path) -> None:
    folders = []
    for kind, embeddings in (("llama", None), ("gpt2", "w8a16")):
        for how in ("transformers",) if embeddings else ("qcut",):
            model = quantized(kind, "w8a8", embeddings=embeddings)
            folder = tmp_path / f"{kind}-{how}"
            model.save_pretrained(folder) if how == "transformers" else qcut.save(model, folder)
            folders.append(str(folder))
    run = subprocess.run([sys.executable, "-c", READERS, *folders], capture_output=True, text=True, check=False)
    assert "LOADED" not in run.stdout
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("import qcut before from_pretrained") >= 4 * len(folders), run.stderr


def test_ignored_sizes_do_not_hide_the_advice(tmp_path: Path) -> None:
    model = quantized("llama", "w8a8")
    qcut.save(model, tmp_path)
    text = "from transformers import LlamaForCausalLM as M; M.from_pretrained({!r}, ignore_mismatched_sizes=True)"
    command = [sys.executable, "-c", text.format(str(tmp_path))]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].endswith(f": {ADVICE}"), run.stderr
    again = opened(tmp_path, ignore_mismatched_sizes=True)
    assert torch.equal(logits(again), logits(model))
    assert not hasattr(again.config, "transformers_weights")


@pytest.mark.parametrize("embeddings", [None, "w8a16"])
def test_marks_are_not_read_by_qcut(embeddings: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = quantized(embeddings=embeddings)
    model.save_pretrained(tmp_path)
    again = opened(tmp_path)
    assert "import qcut" not in caplog.text
    assert not any(ADVICE in name for name in again.state_dict())
    assert torch.equal(logits(again), logits(model))


def test_folders_without_marks_are_read(tmp_path: Path) -> None:
    def unmark(tensors: dict[str, torch.Tensor]) -> None:
        marks = [name for name, t in tensors.items() if t.dtype == torch.uint8]
        assert marks
        for name in marks:
            del tensors[name]

    model = quantized("llama", "w8a8")
    model.save_pretrained(tmp_path)
    rewrite(tmp_path / "model.safetensors", unmark)
    rewrite(tmp_path / "config.json", lambda data: data["quantization_config"].update(format_version=1))
    assert torch.equal(logits(opened(tmp_path)), logits(model))
    assert torch.equal(logits(qcut.load(tmp_path, progress=False)), logits(model))


def test_pattern_finds_marks_alone() -> None:
    import re

    pattern = re.compile(marks_pattern(["a.b", "c.table"], {"c": {}}))
    assert set(mark(["a.b", "c.table"], {"c": {}})) == {f"{name}.{key}" for name in ("a.b", "c") for key in KEYS}
    files = ["h.0.weight", *mark(["a.b"], {}), "a.b.bias"]
    assert marks_among(files) == set(mark(["a.b"], {}))
    assert all(pattern.search(f"model.{name}") for name in mark(["a.b"], {"c": {}}))
    assert not any(pattern.search(name) for name in ("a.b.bias", "a.b.qweight", "xa.b.weight", "a.bc.weight"))
