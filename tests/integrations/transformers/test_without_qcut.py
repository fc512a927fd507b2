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
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaForCausalLM, pipeline

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
print("all were tried", flush=True)
LlamaForCausalLM.from_pretrained(sys.argv[1], ignore_mismatched_sizes=True)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Llama as `qcut.save` writes it, and GPT-2 with quantized embeddings as transformers does."""
    llama, gpt2 = (tmp_path_factory.mktemp(name) for name in ("llama-qcut", "gpt2-transformers"))
    qcut.save(quantized("llama", "w8a8"), llama)
    quantized("gpt2", "w8a8", embeddings="w8a16").save_pretrained(gpt2)
    return llama, gpt2


@pytest.fixture(scope="module")
def ended(folders: tuple[Path, Path]) -> subprocess.CompletedProcess[str]:
    """What one program has said that reads the folders in every way; its last reader's error ends it."""
    command = [sys.executable, "-c", READERS, *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_other_programs_are_told_to_import_qcut(
    folders: tuple[Path, Path], ended: subprocess.CompletedProcess[str]
) -> None:
    assert ended.stdout == "all were tried\n", ended.stderr
    assert ended.stderr.count("import qcut before from_pretrained") >= 4 * len(folders) + 1, ended.stderr


def test_ignored_sizes_do_not_hide_the_advice(
    folders: tuple[Path, Path], ended: subprocess.CompletedProcess[str]
) -> None:
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].endswith(f": {ADVICE}"), ended.stderr
    again = opened(folders[0], ignore_mismatched_sizes=True)
    assert torch.equal(logits(again), logits(quantized("llama", "w8a8")))
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
