"""The benchmark of sentence encoders, on a small random one and a CPU."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import encoder_quality
from benchmarks.demo import language_reference

transformers = pytest.importorskip("transformers", reason="the benchmark needs the hf extra")


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    """A folder with an encoder of the words of the language reference."""
    words = sorted(set(re.findall(r"[a-z]+", language_reference().lower())))[:600]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=len(vocabulary), initializer_range=0.1, **sizes)
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(tmp_path)
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    return tmp_path


def test_fitted_embeddings_are_nearer(encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(language_reference()[30_000:60_000])
    options: list[Any] = ["--model", encoder, "--name", "tiny", "--text", text, "--schemes", "codebook2", "w8a8"]
    options += ["--sentences", 64, "--calibration-sentences", 128, "--refine-steps", 12, "--longest", 32]
    assert encoder_quality.main([*map(str, options), "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    rows = list(csv.DictReader((tmp_path / "out" / "encoder_quality.csv").open()))
    assert [(row["scheme"], row["weights"]) for row in rows] == [
        *(("codebook2", weights) for weights in encoder_quality.WEIGHTS),
        ("w8a8", "rounded"),
    ]
    means = [float(row["mean_cosine"]) for row in rows]
    assert means[0] < means[1] < means[2] < means[4] <= 1
    assert means[2] < means[3] < 1
    assert all(float(row["least_cosine"]) < mean for row, mean in zip(rows, means, strict=True))
    assert "| tiny | codebook2 | 0." in capsys.readouterr().out


def test_sentences_are_cut_pooled_and_missing_files_named(encoder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        " = A heading of six words = \n \nOne two three four five six. Too short.\nSix words are enough for\none! "
        + "long " * 70
        + "."
    )
    found = encoder_quality.sentences_of(text, 9)
    assert found == ["One two three four five six.", "Six words are enough for one!"]
    assert encoder_quality.sentences_of(". ".join(f"a b c d e f{i}" for i in range(10)) + ".", 2) == [
        "a b c d e f0.",
        "a b c d e f5.",
    ]
    ids = torch.arange(10, 18)[None]
    mean = encoder_quality.SentenceEncoder(encoder).eval()
    (encoder / "1_Pooling").mkdir()
    (encoder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    first = encoder_quality.SentenceEncoder(encoder).eval()
    hidden = mean.encoder(input_ids=ids).last_hidden_state
    for made, wanted in ((mean(ids), hidden.mean(1)), (first(ids), hidden[:, 0])):
        assert torch.allclose(made, wanted / wanted.norm(), atol=1e-6)
    with pytest.raises(SystemExit, match="2"):
        encoder_quality.main(["--model", str(encoder / "no"), "--text", __file__])
    assert "no does not exist" in capsys.readouterr().err
