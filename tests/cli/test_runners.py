"""Models that the engine does not know: transformers runs them, quantized or not, and standard error says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, OPTConfig, OPTForCausalLM

import qcut
from qcut.models.evaluation import compare, perplexity
from tests.cli.commands import DEMO, PROMPT
from tests.cli.commands import on_cpu as run
from tests.support import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An OPT with random weights and the demo's tokenizer."""
    path = tmp_path_factory.mktemp("opt")
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=8192,
        hidden_size=64,
        ffn_dim=128,
        word_embed_proj_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
        init_std=0.5,
    )
    OPTForCausalLM(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(DEMO, local_files_only=True).save_pretrained(path)
    return path


@pytest.mark.parametrize("scheme", [None, "w8a8"])
def test_transformers_generates(folder: Path, scheme: str | None, capfd: pytest.CaptureFixture[str]) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if scheme:
        qcut.quantize(model, scheme, progress=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt")
    want = model.generate(**ids, max_new_tokens=10, do_sample=False, pad_token_id=0)[0].tolist()
    words = ("generate", folder, "--prompt", PROMPT, "--steps", 10, *(("--scheme", scheme) if scheme else ()))
    status, out, err = run(capfd, *words)
    assert (status, out) == (0, tokenizer.decode(want) + "\n")
    assert "running on transformers, since the engine does not support the model: OPTForCausalLM" in err
    answer = json.loads(run(capfd, *words, "--json")[1])
    assert answer["tokens"] == want[answer["prompt_tokens"] :]
    assert (answer["runs_on"], answer["reason"]) == ("transformers", "length")
    assert PROMPT + answer["text"] + "\n" == out


def test_draws_follow_the_seed_within_the_context(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("generate", folder, "--prompt", PROMPT, "--temperature", 1, "--top-k", 50, "--top-p", 0.9, "--json")
    answers = [json.loads(run(capfd, *words, "--seed", seed)[1]) for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]
    assert answers[0]["reason"] == "context"
    assert answers[0]["prompt_tokens"] + len(answers[0]["tokens"]) == 64
    status, _, err = run(capfd, "generate", folder, "--prompt", "word " * 70)
    assert status == 1
    assert "the model's context is 64" in err


def test_penalties_that_transformers_lacks_are_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("generate", folder, "--prompt", PROMPT, "--steps", 8, "--json")
    plain = json.loads(run(capfd, *words)[1])["tokens"]
    assert json.loads(run(capfd, *words, "--repetition-penalty", 0.01)[1])["tokens"] != plain
    for option in ("--presence-penalty", "--frequency-penalty"):
        status, _, err = run(capfd, *words, option, 1)
        assert status == 1
        assert "allowed on transformers: 0" in err


def test_a_token_that_ends_texts_ends_them(folder: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--prompt", PROMPT, "--steps", 10, "--json")
    tokens = json.loads(run(capfd, "generate", folder, *words)[1])["tokens"]
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": tokens[3]}))
    answer = json.loads(run(capfd, "generate", tmp_path, *words)[1])
    assert answer["reason"] == "stop"
    assert answer["tokens"] == tokens[: tokens.index(tokens[3]) + 1]


def test_transformers_predicts(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = ROOT / "README.md"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor(tokenizer(text.read_text(), verbose=False)["input_ids"])
    want = perplexity(model, tokens, window=64, max_windows=4, progress=False)
    words = ("eval", folder, "--text", text, "--max-windows", 4, "--batch", 2)
    answer = json.loads(run(capfd, *words, "--json")[1])
    assert answer["perplexity"] == pytest.approx(want, rel=1e-6)
    assert (answer["window"], answer["runs_on"]) == (64, "transformers")  # the context is shorter than 512
    compared = json.loads(run(capfd, *words, "--reference", DEMO, "--json")[1])
    assert compared["perplexity"] == pytest.approx(want, rel=1e-6)
    wanted = compare(
        model,
        AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32),
        tokens,
        window=64,
        max_windows=4,
        progress=False,
    )
    assert compared["divergence"] == pytest.approx(wanted.divergence, rel=1e-4)
    assert run(capfd, *words, "--window", 65)[0] == 1
    status, out, err = run(capfd, "eval", DEMO, "--text", text, "--reference", folder)
    assert (status, out) == (1, "")
    assert f"qcut: --reference {folder}: --window 512: allowed: 2 to 64, the model's context" in err
    status, out, err = run(capfd, *words, "--kv-cache", "int8")
    assert (status, out) == (1, "")
    assert "--kv-cache int8 is for qcut's engine" in err
    status, out, err = run(capfd, "generate", folder, "--prompt", PROMPT, "--regex", "a+")
    assert status == 1
    assert "a constraint, regex, is for qcut's engine" in err
    status, out, err = run(capfd, "generate", folder, "--prompt", PROMPT, "--speculate", 4)
    assert (status, out) == (1, "")
    assert "--speculate 4 is for qcut's engine" in err


def test_bench_says_that_transformers_runs(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("bench", folder, "--schemes", "w8a8", "--max-windows", 1, "--batches", 2, "--prompt-tokens", 4, "--new", 3)
    status, out, err = run(capfd, *words)
    assert (status, err) == (0, "")
    printed = " ".join(out.split())
    assert "run by transformers, since the engine does not support the model: OPTForCausalLM" in printed
    got = json.loads(run(capfd, *words, "--json")[1])
    assert [(row["scheme"], row["runs_on"], row["error"]) for row in got["rows"]] == [
        ("float32", "transformers", ""),
        ("w8a8", "transformers", ""),
    ]
    assert got["window"] == 64  # the context is shorter than 512
    assert min(row["first_token_ms"] for row in got["rows"]) > 0
    assert all(set(row["tokens_per_s"]) == {"2"} for row in got["rows"])


def test_a_model_from_end_to_end(folder: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Quantized to a folder, the same text as quantized on the fly."""
    out = tmp_path / "out"
    assert run(capfd, "quantize", folder, "--scheme", "codebook4", "--out", out)[0] == 0
    words = ("--prompt", PROMPT, "--steps", 6)
    assert run(capfd, "generate", out, *words)[1] == run(capfd, "generate", folder, *words, "--scheme", "codebook4")[1]
