"""Benchmarks of quality on the CPU: the start of the embedded checkpoint on a few tokens, and tiny models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import qcut
from benchmarks.demo import EMBEDDED
from benchmarks.harness import read_rows
from benchmarks.perplexity import caches, codebooks, divergence, encoder, plans, schemes, shards
from benchmarks.perplexity.models import Processes, tokens_of
from qcut.errors import UnsupportedError
from qcut.models.evaluation import language_reference, perplexity
from qcut.numerics.codebook.fitting.curvature import Curvature
from tests.support.mixtures import mixture_batches, tiny_mixture
from tests.support.zoo import first_block

transformers = pytest.importorskip("transformers", reason="the benchmarks need the hf extra")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers, which are soon quantized."""
    found = tmp_path_factory.mktemp("models") / "block"
    first_block(found)
    return found


@pytest.fixture
def words(folder: Path, tmp_path: Path) -> list[str]:
    """Options: the model on a few windows of a text, and a folder for rows."""
    text = tmp_path / "text.txt"
    text.write_text(language_reference()[:8000])
    model = ["--models-dir", str(folder.parent), "--models", folder.name, "--text", str(text)]
    return [*model, "--window", "64", "--max-windows", "4", "--device", "cpu", "--out", str(tmp_path)]


def exact_perplexity(folder: Path, text: str, window: int) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = tokens_of(AutoTokenizer.from_pretrained(folder), text)
    return perplexity(model, tokens, window=window, max_windows=4, progress=False)


def test_smoothing_takes_back_what_outliers_cost(words: list[str], folder: Path, tmp_path: Path) -> None:
    some = ["--calibration-windows", "8", "--plan-windows", "2", "--schemes", "w8a8_static,smooth,smooth_hybrid"]
    assert schemes.main([*words, *some]) == 0
    rows = read_rows(tmp_path / "quality.csv")
    assert len(rows) == 8
    plain, outliers = (
        {row["scheme"]: float(row["change_percent"]) for row in rows if row["condition"] == condition}
        for condition in ("plain", "outliers")
    )
    assert outliers["w8a8_static"] > 5 * abs(plain["w8a8_static"])
    assert outliers["smooth"] < outliers["w8a8_static"] / 2
    exact = exact_perplexity(folder, language_reference()[:8000], 64)
    assert all(float(row["perplexity"]) == pytest.approx(exact, rel=1e-4) for row in rows if row["layers"] == "0")


def test_fitted_and_refined_codebooks_lose_less(words: list[str], tmp_path: Path) -> None:
    variants = ["codebook2", "codebook2_inputs", "codebook2_refined"]
    some = ["--variants", ",".join(variants), "--calibration-windows", "8", "--refine-windows", "24"]
    # At their optimum, which the first block is not without the others, weights get worse by any change.
    some += ["--models-dir", str(EMBEDDED.parent), "--models", EMBEDDED.name]
    assert codebooks.main([*words, *some, "--refine-steps", "6", "--calibration", "reference"]) == 0
    rows = {row["variant"]: row for row in read_rows(tmp_path / "codebook_quality.csv")}
    assert list(rows) == ["float32", *variants]
    rounded, *fitted = (float(rows[name]["change_percent"]) for name in variants)
    assert 0 < max(fitted) < rounded
    assert float(rows["codebook2_refined"]["divergence"]) < float(rows["codebook2_refined"]["divergence_fitted"])
    assert "codebook2_inputs" in (tmp_path / "codebook_quality.md").read_text()


def test_processes_fit_as_this_one_does() -> None:
    torch.manual_seed(0)
    calls = [("codebook2_inputs", torch.randn(4, 128), Curvature(torch.eye(128), None), 1, 0.1)]
    with Processes(1) as one, Processes(0) as here:
        ((there,),), ((same,),) = one.map(codebooks.make, calls), here.map(codebooks.make, calls)
    assert torch.equal(there.indices, same.indices)


def test_a_plan_of_a_schemes_size_loses_less(words: list[str], tmp_path: Path) -> None:
    some = ["--plan-windows", "2", "--weights", "rounded", "--bits", "2.5", "--uniform", "codebook2_g32"]
    assert plans.main([*words, *some, "--measure", "gradient"]) == 0
    uniform, plan = sorted(read_rows(tmp_path / "plan_quality.csv"), key=lambda row: row["scheme"])
    assert (uniform["scheme"], float(uniform["bits"]), plan["scheme"]) == ("codebook2_g32", 2.5, "plan")
    assert float(plan["bits"]) <= 2.5
    assert float(plan["change_percent"]) < float(uniform["change_percent"])


def test_caches_lose_by_their_bits(words: list[str], folder: Path, tmp_path: Path) -> None:
    assert caches.main(words) == 0
    rows = {row["cache"]: row for row in read_rows(tmp_path / "cache_quality.csv")}
    assert tuple(rows) == caches.CACHES
    exact = exact_perplexity(folder, language_reference()[:8000], 64)
    for cache, row in rows.items():
        change = float(row["change_percent"])
        assert float(row["perplexity"]) == pytest.approx(exact * (1 + change / 100), rel=1e-3)
        assert (change == 0) == (cache == "float")
        assert abs(change) < {"int8": 0.5}.get(cache, 20)
    stored = [float(rows[cache]["bytes_token"]) for cache in ("float", "int8", "int8/int4", "int4")]
    assert stored == sorted(stored, reverse=True)
    assert caches.main([*words, "--caches", "int8"]) == 0  # rows of caches that a call does not measure stay
    assert len(read_rows(tmp_path / "cache_quality.csv")) == len(rows)


def test_divergence_has_a_row_for_each_method(words: list[str], folder: Path, tmp_path: Path) -> None:
    methods = ["w8a8_static", "codebook2", "codebook2_fitted", "codebook2_refined", "Q4_0", "int4 symmetric"]
    some = ["--methods", ",".join(methods), "--calibration-windows", "8", "--refine-steps", "8", "--refine-batch", "4"]
    assert divergence.main([*words, *some]) == 0
    rows = {row["method"]: row for row in read_rows(tmp_path / "divergence.csv")}
    assert set(rows) == {"float32", *methods}
    float_model = rows["float32"]
    assert [float(float_model[name]) for name in ("divergence", "same_top_percent", "bits")] == [0, 100, 32]
    exact = exact_perplexity(folder, language_reference()[:8000], 64)
    assert float(float_model["perplexity"]) == pytest.approx(exact, rel=1e-4)
    assert [rows[name]["by"] for name in ("codebook2", "Q4_0")] == ["qcut", "others"]
    far = {name: float(row["divergence"]) for name, row in rows.items()}
    assert 0 < far["w8a8_static"] < far["Q4_0"] < far["codebook2_refined"] < far["codebook2"]
    assert far["codebook2_refined"] < far["codebook2_fitted"]
    bits = {name: float(row["bits"]) for name, row in rows.items()}
    assert (bits["Q4_0"], bits["int4 symmetric"]) == (4.5, 4.125)
    assert 2.125 < bits["codebook2"] == bits["codebook2_refined"] < 2.13
    assert divergence.main([*words, "--methods", "NF4"]) == 0  # rows of methods that a call does not measure stay
    assert len(read_rows(tmp_path / "divergence.csv")) == len(rows) + 1


@torch.no_grad()
def test_formats_of_others_round_experts() -> None:
    model, other = tiny_mixture(), tiny_mixture()
    assert divergence.rounded(model, "MXFP4") == 4.25
    qcut.quantize(other, "mxfp4", progress=False)
    ids = mixture_batches(1)[0]
    torch.testing.assert_close(model(ids).logits, other(ids).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(UnsupportedError, match="its weight is a copy of the model's"):
        divergence.rounded(tiny_mixture("GptOss"), "MXFP4")


@pytest.fixture
def encoder_folder(tmp_path: Path) -> Path:
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


def test_fitted_embeddings_are_nearer(encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(language_reference()[30_000:60_000])
    options: list[Any] = ["--model", encoder_folder, "--name", "tiny", "--text", text, "--schemes", "codebook2", "w8a8"]
    options += ["--sentences", 64, "--calibration-sentences", 128, "--refine-steps", 12, "--longest", 32]
    assert encoder.main([*map(str, options), "--device", "cpu", "--out", str(tmp_path / "out")]) == 0
    rows = read_rows(tmp_path / "out" / "encoder_quality.csv")
    assert [(row["scheme"], row["weights"]) for row in rows] == [
        *(("codebook2", weights) for weights in encoder.WEIGHTS),
        ("w8a8", "rounded"),
    ]
    means = [float(row["mean_cosine"]) for row in rows]
    # Of so small a model neither of the fits is nearer for certain.
    assert means[0] + 0.1 < min(means[1:3])
    assert max(means[1:3]) < means[3] < means[4] <= 1
    assert all(float(row["least_cosine"]) < mean for row, mean in zip(rows, means, strict=True))
    assert "| tiny | codebook2 | 0." in capsys.readouterr().out


def test_sentences_are_cut_and_spread() -> None:
    text = " = A heading of six words = \n \nOne two three four five six. Too short.\nSix words are enough for\none! "
    assert encoder.sentences_of(text, 9) == ["One two three four five six.", "Six words are enough for one!"]
    many = ". ".join(f"a b c d e f{i}" for i in range(10)) + "."
    assert encoder.sentences_of(many, 2) == ["a b c d e f0.", "a b c d e f5."]


@pytest.mark.parametrize(("scheme", "far"), [("codebook4_g32", 1e-6), ("w8a8", 0.05)])
def test_parts_add_up(scheme: str, far: float) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(128, 48, bias=False)
    x = torch.randn(5, 128)
    whole = qcut.Linear.from_float(linear, scheme)(x)
    parts = shards.Parts(linear, scheme, 2)(x)
    assert (parts - whole).norm() <= far * whole.norm()
    assert torch.equal(parts, whole) is False
