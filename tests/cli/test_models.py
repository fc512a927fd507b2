"""``qcut generate`` and ``qcut eval``: only text on standard output, the engine's tokens, clear errors."""

from __future__ import annotations

import copy
import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import qcut
from qcut.engine.speculation import DraftedLoop
from qcut.models.evaluation import compare, perplexity
from tests.cli.commands import DEMO, PROMPT
from tests.cli.commands import on_cpu as run
from tests.support import ROOT, llama2c_oracle


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, local_files_only=True).eval()
    return model, AutoTokenizer.from_pretrained(DEMO, local_files_only=True)


def test_files_of_llama2c_word_for_word(
    capfd: pytest.CaptureFixture[str], llama2c_sample: llama2c_oracle.Sample
) -> None:
    files = ("--llama2c", llama2c_sample.model, "--tokenizer", llama2c_sample.tokens)
    want, prompt = llama2c_sample.text.read_text(), llama2c_oracle.PROMPT
    assert run(capfd, "generate", *files, "--steps", llama2c_sample.steps) == (0, want, "")
    # A prompt is text that is forced, a step each token; the steps that it takes all print nothing else.
    status, text, _ = run(capfd, "generate", *files, "--steps", 40, "--prompt", prompt)
    assert status == 0
    assert len(text) > len(prompt) + 10
    assert llama2c_sample.prompted.startswith(text.rstrip("\n"))
    assert run(capfd, "generate", *files, "--steps", 3, "--prompt", prompt)[1] == f"{prompt}\n"


def test_a_model_continues_a_prompt(capfd: pytest.CaptureFixture[str], demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    ids = tokenizer(PROMPT, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    want = tokenizer.decode(out[0], skip_special_tokens=True) + "\n"
    assert run(capfd, "generate", DEMO, "--prompt", PROMPT, "--steps", 12) == (0, want, "")


def test_text_has_the_form_that_is_asked_for(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    (tmp_path / "schema.json").write_text(json.dumps({**schema, "additionalProperties": False}))
    words = ("generate", DEMO, "--prompt", PROMPT, "--temperature", 1, "--json")
    answer = json.loads(run(capfd, *words, "--json-schema", tmp_path / "schema.json")[1])
    assert list(json.loads(answer["text"])) == ["a"]
    assert answer["reason"] == "stop"
    assert re.fullmatch("[0-9]{4}", json.loads(run(capfd, *words, "--regex", "[0-9]{4}")[1])["text"])
    assert "unclosed group" in run(capfd, *words[:-1], "--regex", "a(")[2]


def test_sampling_and_quantization_are_options(capfd: pytest.CaptureFixture[str]) -> None:
    base = ("generate", DEMO, "--prompt", PROMPT, "--steps", 8)
    hot = ("--temperature", 2, "--top-k", 50, "--top-p", 0.9, "--scheme", "w8a8", "--kv-cache", "int8", "--seed")
    texts = [run(capfd, *base, *hot, seed) for seed in (1, 1, 2)]
    assert [status for status, _, _ in texts] == [0, 0, 0]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith(PROMPT) for _, text, _ in texts)


def test_penalties_and_min_p_are_options(capfd: pytest.CaptureFixture[str], demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    given = {"temperature": 1.5, "min_p": 0.02, "repetition_penalty": 1.3, "presence_penalty": 0.5}
    given["frequency_penalty"] = 0.25
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    status, text, _ = run(capfd, "generate", DEMO, "--prompt", PROMPT, "--steps", 12, *words, "--seed", 4)
    engine = qcut.Engine(model, tokenizer=tokenizer)
    (want,) = engine.generate(PROMPT, 12, sampling=qcut.Sampling(seed=4, **given), stop=engine.end_tokens)  # type: ignore[arg-type]
    assert (status, text) == (0, f"{PROMPT}{want.text}\n")


def test_drafts_change_no_text(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftedLoop, "cost", lambda loop, width, choose=None: 1.0)
    words = ("generate", DEMO, "--prompt", "one two three " * 8, "--steps", 24, "--json")
    options = ((), ("--speculate", 0), ("--speculate", 7), ("--speculate", 3, "--draft-model", DEMO))
    plain, none, drafted, by_model = (json.loads(run(capfd, *words, *more)[1]) for more in options)
    assert plain == none
    assert by_model["tokens"] == plain["tokens"]
    assert by_model["accepted_tokens"] > 12  # the model itself drafts
    assert (plain["drafted_tokens"], plain["accepted_tokens"]) == (0, 0)
    assert drafted["drafted_tokens"] >= drafted["accepted_tokens"] > 5
    counts = {name: plain[name] for name in ("drafted_tokens", "accepted_tokens")}
    assert {**drafted, **counts} == plain


def test_directories_of_qcut_are_models_too(
    capfd: pytest.CaptureFixture[str], demo: tuple[Any, Any], tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, local_files_only=True).eval()
    qcut.quantize(model, "w8a8", progress=False)
    qcut.save(model, tmp_path)
    demo[1].save_pretrained(tmp_path)
    saved = run(capfd, "generate", tmp_path, "--prompt", PROMPT, "--steps", 8)
    assert saved == run(capfd, "generate", DEMO, "--prompt", PROMPT, "--steps", 8, "--scheme", "w8a8")
    assert saved[0] == 0


def test_eval_is_the_librarys_perplexity(capfd: pytest.CaptureFixture[str], demo: tuple[Any, Any]) -> None:
    text = ROOT / "README.md"
    base = ("eval", DEMO, "--text", text, "--window", 64, "--max-windows", 6, "--batch", 4)
    model, tokenizer = demo
    tokens = torch.tensor(tokenizer(text.read_text(), verbose=False)["input_ids"])
    want = perplexity(model, tokens, window=64, max_windows=6, progress=False)
    status, out, err = run(capfd, *base)
    assert (status, err) == (0, "")
    assert out == f"perplexity {want:.4f} on 6 windows of 64 tokens (cpu)\n"
    found = json.loads(run(capfd, *base, "--kv-cache", "int8", "--json")[1])
    assert found["kv_cache"] == "int8"
    assert 0 < abs(found["perplexity"] / want - 1) < 0.01


def test_eval_compares_with_a_reference(capfd: pytest.CaptureFixture[str], demo: tuple[Any, Any]) -> None:
    text = ROOT / "README.md"
    base = ("eval", DEMO, "--text", text, "--window", 64, "--max-windows", 6, "--reference", DEMO)
    model, tokenizer = demo
    tokens = torch.tensor(tokenizer(text.read_text(), verbose=False)["input_ids"])
    quantized = copy.deepcopy(model)
    qcut.quantize(quantized, "codebook3", progress=False)
    want = compare(quantized, model, tokens, window=64, max_windows=6, progress=False)
    found = json.loads(run(capfd, *base, "--scheme", "codebook3", "--json")[1])
    assert (found["reference"], found["positions"]) == (str(DEMO), 6 * 64)
    assert {name: found[name] for name in asdict(want)} == pytest.approx(asdict(want), rel=1e-3)
    assert 0 < found["divergence"] < found["divergence_999"]
    assert found["same_top"] < 1
    status, out, err = run(capfd, *base)
    assert (status, err) == (0, "")
    assert out.splitlines()[1].endswith("; divergence 0, its 99.9 % quantile 0; same top token 100.00 %")
    without = json.loads(run(capfd, *base[:-2], "--json")[1])
    assert [without[name] for name in ("reference", "divergence", "same_top", "reference_perplexity")] == [None] * 4


def test_references_of_other_tokens_are_refused(
    capfd: pytest.CaptureFixture[str], demo: tuple[Any, Any], tmp_path: Path
) -> None:
    text = ROOT / "README.md"
    for name in ("words", "merges"):
        shutil.copytree(DEMO, tmp_path / name)
        path = tmp_path / name / "tokenizer.json"
        data = json.loads(path.read_text())
        words, merges = data["model"]["vocab"], data["model"]["merges"]
        if name == "words":
            words["H"], words["p"] = words["p"], words["H"]
        else:
            data["model"]["merges"] = merges[:100]
        path.write_text(json.dumps(data))
    wider = copy.deepcopy(demo[0])
    wider.resize_token_embeddings(8200)
    wider.save_pretrained(tmp_path / "wider")
    demo[1].save_pretrained(tmp_path / "wider")
    for name, message in {
        "words": "the tokenizer has 'H' as token 80; allowed: 40, as the model's tokenizer",
        "merges": f"its tokenizer cuts --text {text} into other tokens than that of MODEL",
        "wider": "found shape [1, 512, 8192]; allowed: [1, 512, 8200], as of the reference. Both models need one",
    }.items():
        words = ("eval", DEMO, "--text", text, "--max-windows", 2, "--reference", tmp_path / name)
        status, out, err = run(capfd, *words)
        assert (status, out) == (1, "")
        assert message in err


def test_models_without_a_start_want_a_prompt(
    capfd: pytest.CaptureFixture[str], demo: tuple[Any, Any], tmp_path: Path
) -> None:
    config = LlamaConfig(
        vocab_size=8192, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config.bos_token_id = None
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(DEMO, local_files_only=True, bos_token=None)
    tokenizer.save_pretrained(tmp_path)
    status, out, err = run(capfd, "generate", tmp_path)
    if tokenizer.bos_token_id is None:
        assert (status, out) == (1, "")
        assert "has no token for the start of a text; give it a --prompt" in err
