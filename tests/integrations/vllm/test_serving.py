"""Whole runs of vLLM: the tokens that transformers' greedy search gives, or a first difference between near ties."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from packaging.version import Version
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import qcut
from tests.support import ROOT

TOKENS = 16
GPT2 = ROOT / "models" / "gpt2-5m"
routed = pytest.mark.skipif(
    Version(vllm.__version__) < Version("0.30"),
    reason="vLLM's build for CPUs chooses experts for a plug-in's mixtures since 0.30",
)
PROMPTS = [[11, 7, 300, 5], [1000, 2, 2, 40, 77, 1234, 9], [8000], list(range(100, 140))]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers, two queries to a key."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 8192}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.05, tie_word_embeddings=False))
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers, with two of eight experts to a token."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "moe_intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 8192}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**sizes, **heads, **experts, initializer_range=0.05, tie_word_embeddings=False)
    folder = tmp_path_factory.mktemp("mixture")
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def served(model: Path, **arguments: Any) -> list[list[int]]:
    """What vLLM answers to `PROMPTS`."""
    asked = {"prompts": PROMPTS, "tokens": TOKENS, "arguments": {"model": str(model), **arguments}}
    command = [sys.executable, "-m", "tests.integrations.vllm.answering", json.dumps(asked)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS")]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    answers: list[list[int]] = json.loads(lines[0].removeprefix("ANSWERS"))
    return answers


@torch.no_grad()
def assert_greedy(model: Any, answers: list[list[int]], near: float) -> None:
    """Every token is the likeliest, or within ``near`` of the likeliest logit, behind those before it."""
    assert [len(answer) for answer in answers] == [TOKENS] * len(PROMPTS)
    model.eval()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert bool((logits.amax(1) - chosen <= near).all()), (answer, logits.argmax(1).tolist())


def quantized(folder: Path, scheme: str) -> Any:
    """The model of transformers, quantized while it loads."""
    config = qcut.QcutConfig(scheme)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)


def test_a_saved_folder_is_served_as_it_is(tmp_path: Path) -> None:
    model = quantized(GPT2, "codebook4_int8")
    model.save_pretrained(tmp_path)
    assert_greedy(model, served(tmp_path), near=1e-3)


def test_a_float_checkpoint_is_quantized_while_it_loads(llama: Path) -> None:
    overrides = {"quantization_config": qcut.QcutConfig("codebook4", include=["*.mlp.*"]).to_dict()}
    answers = served(llama, quantization="qcut", hf_overrides=overrides)
    model = AutoModelForCausalLM.from_pretrained(
        llama, dtype=torch.float32, quantization_config=qcut.QcutConfig("codebook4", include=["*.mlp.*"])
    )
    assert_greedy(model, answers, near=1e-3)


@routed
def test_a_mixture_is_quantized_while_it_loads(mixture: Path) -> None:
    answers = served(mixture, quantization="qcut-codebook4")
    assert_greedy(quantized(mixture, "codebook4"), answers, near=1e-3)


@routed
def test_a_saved_mixture_is_served_as_it_is(mixture: Path, tmp_path: Path) -> None:
    model = quantized(mixture, "w8a16")
    model.save_pretrained(tmp_path)
    assert_greedy(model, served(tmp_path), near=1e-3)


@torch.no_grad()
def test_two_processes_serve_int8_of_compressed_tensors(llama: Path, tmp_path: Path) -> None:
    model = quantized(llama, "w8a8")
    qcut.save_compressed_tensors(model, tmp_path)
    answers = served(tmp_path, quantization="qcut", tensor_parallel_size=2)
    # Tokens of layers that are split by rows are rounded by each process's own largest magnitude: not more than one
    # process rounds them, so that logits are as near to those of tokens that are not rounded.
    rounded, exact = (m(torch.tensor(PROMPTS[3:])).logits for m in (model, quantized(llama, "w8a16")))
    assert_greedy(model, answers, near=2 * float((rounded - exact).abs().max()))
