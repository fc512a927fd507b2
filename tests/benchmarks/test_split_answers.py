"""Answers of layers in parts: where tokens stay 16 or 32 bits wide, parts change nothing but the order of sums."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import qcut
from benchmarks import bench_vllm, split_answers
from benchmarks.harness import read_rows


@pytest.mark.parametrize(("scheme", "far"), [("codebook4_g32", 1e-6), ("w8a8", 0.05)])
def test_parts_add_up(scheme: str, far: float) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(128, 48, bias=False)
    x = torch.randn(5, 128)
    whole = qcut.Linear.from_float(linear, scheme)(x)
    parts = split_answers.Parts(linear, scheme, 2)(x)
    assert (parts - whole).norm() <= far * whole.norm()
    assert torch.equal(parts, whole) is False


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=96)).save_pretrained(tmp_path / "tiny")
    monkeypatch.setattr(split_answers, "ANSWER", 4)
    monkeypatch.setattr(bench_vllm, "PROMPTS", 3)
    arguments = ["--model", str(tmp_path / "tiny"), "--schemes", "codebook4_g32", "--out", str(tmp_path)]
    assert split_answers.main(arguments) == 0
    rows = read_rows(tmp_path / "split_answers.csv")
    assert [(row["beside"], row["of"]) for row in rows] == [("in parts", "3"), ("the float model", "3")]
    assert rows[0]["same"] == "3"
