"""Whatever is typed or downloaded: one line that says what is wrong, exit status 1 or 2, and no traceback."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import qcut
from qcut.cli import main as cli
from tests.cli.commands import DEMO, run
from tests.support import ROOT
from tests.support.zoo import tiny_hf

HUGE = "9" * 30


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models and files, each with one thing wrong."""
    base = tmp_path_factory.mktemp("there")

    def copy(name: str, *left_out: str) -> Path:
        folder = base / name
        folder.mkdir()
        for path in DEMO.iterdir():
            if path.name not in left_out:
                (folder / path.name).symlink_to(path)
        return folder

    def configured(name: str, **changes: Any) -> None:
        folder = copy(name, "config.json")
        config = json.loads((DEMO / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    weights = (DEMO / "model.safetensors").read_bytes()
    (copy("truncated", "model.safetensors") / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (copy("cut_header", "model.safetensors") / "model.safetensors").write_bytes(weights[:100])
    (copy("empty_weights", "model.safetensors") / "model.safetensors").write_bytes(b"")
    copy("no_weights", "model.safetensors")
    copy("no_config", "config.json")
    copy("no_tokenizer", "tokenizer.json", "tokenizer_config.json")
    (copy("broken_tokenizer", "tokenizer.json") / "tokenizer.json").write_text('{"version": 1')
    (copy("binary_tokenizer", "tokenizer.json") / "tokenizer.json").write_bytes(bytes(range(256)))
    (copy("list_config", "config.json") / "config.json").write_text("[]")
    (copy("binary_config", "config.json") / "config.json").write_bytes(b"\xff\xfe\x00")
    (copy("directory_config", "config.json") / "config.json").mkdir()
    configured("unknown", model_type="unheard-of")
    configured("kernel", attn_implementation="org/kernel")
    configured("endless", n_layer=10**9)
    configured("many", n_layer=30_000)
    configured("more", n_layer=9)
    configured("wider", n_embd=512)
    configured("words", n_embd="many")
    configured("quantized", quantization_config={"quant_method": "awq"})
    code = copy("code", "config.json")
    (code / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoModelForCausalLM": "m.M"}}')
    (code / "m.py").write_text("raise SystemExit('this was run')\n")

    model = tiny_hf("gpt2")
    qcut.quantize(model, "w8a8", progress=False)
    qcut.save(model, base / "saved")
    shutil.copytree(base / "saved", base / "saved_broken")
    shutil.copy(DEMO / "tokenizer.json", base / "saved_broken")
    (base / "saved_broken" / "qcut_config.json").write_text("{")
    (base / "empty").mkdir()
    (base / "empty.txt").touch()
    (base / "latin.txt").write_bytes("Käse".encode("latin-1"))
    (base / "short.txt").write_text("An import.")
    copy("outer")
    copy("outer/inner")
    (base / "outer" / "b.txt").touch()
    (base / "dangling").symlink_to("nowhere")
    os.mkfifo(base / "pipe")
    (base / "list.json").write_text("[]")
    (base / "typo.json").write_text('{"type": "strnig"}')
    (base / "other").mkdir()
    (base / "other" / "letter.txt").touch()
    sealed = copy("sealed", "model.safetensors")  # its index names a file that is not there
    (sealed / "model.safetensors.index.json").write_text('{"weight_map": {"a.weight": "model-1.safetensors"}}')
    (base / "text.txt").write_text("An import statement names a module.\n" * 60)
    return base


PROMPT = ("--prompt", "The import")
TEXT = ("--text", "text.txt")

COMMANDS: list[tuple[tuple[object, ...], str]] = [
    (("generate", DEMO, *PROMPT, "--device", "gpu"), "--device gpu: no device that qcut runs on; allowed: auto, cpu"),
    (("generate", DEMO, *PROMPT, "--device", ""), "no device that qcut runs on"),
    (("generate", DEMO, *PROMPT, "--device", "cuda:99999"), "no device that qcut runs on"),
    (("generate", DEMO, *PROMPT, "--device", "cuda:99"), "--device cuda:99: torch finds"),
    (("generate", DEMO, *PROMPT, "--device", "meta"), "no device that qcut runs on"),
    (("generate", DEMO, "--device", "cuda"), "--device cuda: torch finds no CUDA device; allowed: auto, cpu"),
    (("generate",), "name a MODEL, or --llama2c FILE with --tokenizer FILE"),
    (("generate", "x", "--llama2c", "y", "--tokenizer", "z"), "name a MODEL, or"),
    (("generate", "--llama2c", "y"), "name a MODEL, or"),
    (("generate", "x", "--tokenizer", "z"), "name a MODEL, or"),
    (("generate", "./nowhere"), "qcut: ./nowhere: not a directory"),
    (("generate", ROOT / "tests"), "qcut: "),
    (("generate", DEMO, "--temperature", "-1"), "temperature -1.0; allowed: 0 (greedy)"),
    (("generate", DEMO, "--scheme", "w9"), "scheme 'w9' does not exist"),
    (("eval", DEMO, *TEXT, "--device", "tpu"), "no device that qcut runs on"),
    (("generate", "truncated", *PROMPT), "truncated/model.safetensors: truncated or not"),
    (("generate", "./truncated", *PROMPT, "--scheme", "w8a8"), "truncated/model.safetensors: truncated or not"),
    (("eval", "truncated", *TEXT), "truncated/model.safetensors: truncated or not"),
    (("generate", "cut_header", *PROMPT), "cut_header/model.safetensors: truncated or not a safetensors file"),
    (("generate", "empty_weights", *PROMPT), "empty_weights/model.safetensors: truncated or not a safetensors file"),
    (("generate", "no_weights", *PROMPT), "no_weights: "),
    (("generate", "no_config", *PROMPT), "no_config/config.json: there is no such file"),
    (("generate", "no_tokenizer", *PROMPT), "no_tokenizer: there is no tokenizer"),
    (("eval", "no_tokenizer", *TEXT), "tokenizer.save_pretrained(directory) puts one next to the model"),
    (("generate", "saved", *PROMPT), "saved: there is no tokenizer"),
    (("generate", "saved_broken", *PROMPT), "saved_broken/qcut_config.json: "),
    (("generate", "broken_tokenizer", *PROMPT), "broken_tokenizer: its tokenizer cannot be read"),
    (("generate", "binary_tokenizer", *PROMPT), "binary_tokenizer: its tokenizer cannot be read"),
    (("generate", "list_config", *PROMPT), "list_config/config.json: found a JSON list"),
    (("generate", "binary_config", *PROMPT), "binary_config/config.json: not readable as JSON"),
    (("generate", "directory_config", *PROMPT), "directory_config/config.json: "),
    (("generate", "unknown", *PROMPT), "model_type is 'unheard-of'"),
    (("generate", "kernel", *PROMPT), "config.attn_implementation is 'org/kernel'; allowed: eager"),
    (("generate", "endless", *PROMPT), "config.n_layer is 1000000000; allowed: at most"),
    (("generate", "many", *PROMPT), "needs a model of more than"),
    (("generate", "more", *PROMPT), "more: 60 missing tensors; first transformer.h."),
    (("generate", "wider", *PROMPT), "wider: "),
    (("generate", "words", *PROMPT), "words/config.json: "),
    (("generate", "quantized", *PROMPT), "quantized: config.json has a quantization_config, and no layer has"),
    (("generate", "code", *PROMPT), "model_type is 'own'"),
    (("generate", "empty", *PROMPT), "empty: there is no tokenizer"),
    (("generate", "empty.txt", *PROMPT), "empty.txt: not a directory"),
    (("generate", "", *PROMPT), "'': not a directory"),
    (("generate", "~/nowhere-at-all", *PROMPT), "not a directory"),
    (("generate", "org/no-such-model", *PROMPT), "org/no-such-model: "),
    (("generate", "no such model!", *PROMPT), "no such model!: "),
    (("generate", DEMO, "--prompt", "\udcff\udcfe"), "--prompt is no text that the tokenizer takes"),
    (("generate", DEMO, "--prompt", "word " * 3_000), "tokens; the model's context is"),
    (("generate", DEMO, "--steps", HUGE * 200), "--steps"),
    (("generate", DEMO, "--steps", "-3"), "'-3' is not a whole number from 1 up"),
    (("generate", DEMO, "--seed", HUGE), "seed"),
    (("generate", DEMO, "--seed", "-1"), "seed"),
    (("generate", DEMO, "--top-k", "-1"), "'-1' is not a whole number from 0 up"),
    (("generate", DEMO, "--top-p", "nan"), "top_p nan"),
    (("generate", DEMO, "--temperature", "inf"), "temperature inf"),
    (("generate", DEMO, "--min-p", "2"), "min_p 2.0"),
    (("generate", DEMO, "--repetition-penalty", "0"), "repetition_penalty 0.0"),
    (("generate", DEMO, "--presence-penalty", "nan"), "presence_penalty nan"),
    (("generate", DEMO, "--temperature", "warm"), "--temperature"),
    (("generate", DEMO, "--scheme", ""), "scheme ''"),
    (("generate", DEMO, "--scheme", "codebook99"), "codebook99"),
    (("generate", "--llama2c", "nowhere.bin", "--tokenizer", "nowhere.tok"), "nowhere.bin: "),
    (("generate", "--llama2c", "empty.txt", "--tokenizer", "text.txt"), "empty.txt: "),
    (("generate", "--llama2c", "empty", "--tokenizer", "empty"), "empty: "),
    (("generate", "--llama2c", DEMO / "model.safetensors", "--tokenizer", "text.txt"), "model.safetensors: "),
    (("eval", DEMO, "--text", "nowhere.txt"), "--text nowhere.txt: "),
    (("eval", DEMO, "--text", "empty"), "--text empty: "),
    (("eval", DEMO, "--text", "empty.txt"), "fewer than one window"),
    (("eval", DEMO, "--text", "latin.txt"), "--text latin.txt: "),
    (("eval", DEMO, *TEXT, "--window", "1"), "window"),
    (("eval", DEMO, *TEXT, "--window", HUGE), "has 30 digits; allowed: 18"),
    (("eval", DEMO, *TEXT, "--batch", "0"), "--batch"),
    (("eval", DEMO, *TEXT, "--window", "9" * 18), "allowed: 2 to 512, the model's context"),
    (("eval", DEMO, "--text", "short.txt"), "--text short.txt: found 3 tokens, fewer than one window of 512"),
    (("eval", DEMO, *TEXT, "--scheme", "4bit"), "did you mean codebook4"),
    (("eval", DEMO, *TEXT, "--scheme", "w8a8", "--plan", "p.json"), "not allowed with argument --scheme"),
    *(
        (
            ("eval", DEMO, *TEXT, "--scheme", "w8a8", "--calibrate", "nowhere", f"--smooth={alpha}"),
            f"--smooth {alpha}; allowed: 0 to 1",
        )
        for alpha in ("nan", "-1.0", "1.5")
    ),
    (("eval", DEMO, *TEXT, "--fit"), "--fit needs --scheme, --plan or --bits"),
    (("eval", DEMO, *TEXT, "--scheme", "codebook4", "--fit-memory", "2"), "--fit-memory 2 needs --fit"),
    (("eval", DEMO, *TEXT, "--scheme", "codebook4", "--fit-memory", "0"), "--fit-memory"),
    (("plan", DEMO, "--calibrate", "nowhere", "--fit-memory", "2", "--out", "new"), "--fit-memory 2 needs --fit"),
    (("eval", DEMO, *TEXT, "--scheme", "codebook4", "--refine", "9"), "--refine needs --calibrate TEXT"),
    (("generate", DEMO, "--scheme", "w8a8_static"), "scheme w8a8_static needs --calibrate TEXT"),
    (("generate", DEMO, "--scheme", "W8A8-static", "--calibrate", "nowhere"), "--calibrate nowhere: No such file"),
    (("generate", DEMO, "--speculate", "16"), "--speculate 16; allowed: 1 to 15 drafted tokens, or 0 for none"),
    (("serve", DEMO, "--speculate", "99"), "--speculate 99; allowed: 1 to 15 drafted tokens, or 0 for none"),
    (("serve", DEMO, "--draft-model", DEMO), "gpt2-5m drafts nothing; allowed: with --speculate 1 to 15"),
    (("generate", DEMO, "--speculate", "-1"), "'-1' is not a whole number from 0 up"),
    (("generate", DEMO, "--top", "3"), "did you mean --top-p? unrecognized arguments: --top 3"),
    (("eval", DEMO, *TEXT, "--kv_cache=int8"), "qcut eval: error: did you mean --kv-cache? unrecognized arguments"),
    (("quantize", DEMO, "--out", "new"), "give --scheme NAME, such as w8a8 or codebook4, --plan FILE, or --bits B"),
    (("quantize", DEMO, "--scheme", "nf4", "--out", "new"), "did you mean codebook4"),
    (("quantize", DEMO, "--scheme", "int8", "--out", "new"), "did you mean w8a8"),
    (("quantize", DEMO, "--scheme", "w8a8"), "the following arguments are required: --out"),
    (("quantize", DEMO, "--scheme", "w8a8", "--out", "saved"), "there is a model already; --overwrite replaces it"),
    (("quantize", DEMO, "--scheme", "w8a8", "--out", "other", "--overwrite"), "other things than a model"),
    (("quantize", DEMO, "--scheme", "w8a8", "--out", "empty.txt"), "--out empty.txt: there is something that is no"),
    (
        ("quantize", "more", "--scheme", "w8a8", "--out", "more", "--overwrite"),
        "--out more: MODEL more is there, and would be lost",
    ),
    (("quantize", "outer/inner", "--scheme", "w8a8", "--out", "outer", "--overwrite"), "MODEL outer/inner is there"),
    (
        ("quantize", DEMO, "--scheme", "w8a8", "--calibrate", "outer/b.txt", "--out", "outer", "--overwrite"),
        "--out outer: --calibrate outer/b.txt is there",
    ),
    (("quantize", DEMO, "--scheme", "w8a8", "--out", "empty.txt/new"), "--out empty.txt/new: cannot be written: "),
    (("quantize", DEMO, "--scheme", "w8a8", "--out", "new", "--embeddings", "4"), "scheme '4' does not exist"),
    (("quantize", DEMO, "--scheme", "w8a8", "--out", "new", "--smooth", "0.5"), "--smooth needs --calibrate TEXT"),
    (("quantize", DEMO, "--scheme", "w8a8", "--out", "new", "--include", "z"), "'z' matches none of its 17 linear"),
    (("quantize", DEMO, "--scheme", "w8a8", "--out", "/proc/new"), "--out /proc/new: cannot be written: "),
    (("quantize", "truncated", "--scheme", "w8a8", "--out", "new/a/b"), "truncated/model.safetensors: truncated or"),
    (("quantize", DEMO, "--plan", "nowhere.json", "--out", "new"), "nowhere.json: "),
    (("quantize", DEMO, "--plan", "list.json", "--out", "new"), "list.json: "),
    (("quantize", "truncated", "--scheme", "w8a8", "--out", "new"), "truncated/model.safetensors: truncated or not"),
    (("quantize", "no_tokenizer", "--scheme", "w8a8", "--out", "new"), "no_tokenizer: there is no tokenizer"),
    (("quantize", "saved", "--scheme", "w8a8", "--out", "new"), "saved: there is no tokenizer"),
    (("quantize", "org/no-such-model", "--scheme", "w8a8", "--out", "new"), "org/no-such-model: "),
    (
        ("quantize", DEMO, "--scheme", "w8a8_static", "--calibrate", "short.txt", "--out", "new"),
        "--calibrate short.txt: found 3 tokens, fewer than one window of 512",
    ),
    (("bench", DEMO, "--schemes", "w8a8,w9"), "scheme 'w9' does not exist"),
    (("bench", DEMO, "--schemes", "w8a8,"), "scheme '' does not exist"),
    (("bench", DEMO, "--schemes", "fp16"), "--schemes fp16: the float model is measured in any case"),
    (("bench", DEMO, "--schemes", "w8a8_static"), "--schemes w8a8_static: its ranges come from a text; allowed: "),
    (("bench", DEMO, "--budget", "-1"), "--budget -1.0; allowed: 0 and more"),
    (("bench", DEMO, "--budget", "nan"), "--budget nan; allowed: 0 and more"),
    (("bench", DEMO, "--new", "1"), "--new 1; allowed: 2 and more"),
    (("bench", DEMO, "--batches", "0,1"), "argument --batches: '0' is not a whole number from 1 up"),
    (("bench", DEMO, "--batches", "1;8"), "argument --batches: '1;8' is not a whole number from 1 up"),
    (("bench", DEMO, "--text", "nowhere"), "--text nowhere: No such file"),
    (("bench", DEMO, "--text", "short.txt"), "--text short.txt: found 3 tokens, fewer than one window of 512"),
    (("bench", DEMO, "--window", "513"), "--window 513: allowed: 2 to 512"),
    (("bench", DEMO, "--prompt-tokens", "500", "--new", "13"), "513 tokens; allowed: up to 512, the model's context"),
    (("bench", DEMO, "--device", "cuda"), "--device cuda: torch finds no CUDA device"),
    (("bench", "./nowhere"), "qcut: ./nowhere: not a directory"),
    (("bench", "truncated"), "truncated/model.safetensors: truncated or not"),
    (("plan", DEMO, "--out", "p.json"), "the following arguments are required: --calibrate"),
    (("plan", DEMO, "--calibrate", "text.txt", "--out", "list.json"), "--out list.json: the file exists already"),
    *(
        (("plan", DEMO, "--calibrate", "list.json", "--out", name, *more), f"--out {name}: there is something that is")
        for name in ("dangling", "pipe")
        for more in ((), ("--overwrite",))
    ),
    (
        ("plan", DEMO, "--calibrate", "text.txt", "--out", "text.txt", "--overwrite"),
        "--out text.txt: --calibrate text.txt is there, and would be lost; allowed: another path",
    ),
    (
        ("plan", DEMO, "--calibrate", "text.txt", "--out", "p.json", "--report", "text.txt", "--overwrite"),
        "--report text.txt: --calibrate text.txt is there, and would be lost",
    ),
    (("plan", DEMO, "--calibrate", "text.txt", "--out", "empty"), "--out empty: there is a folder of that name"),
    (("plan", DEMO, "--calibrate", "text.txt", "--out", "no/p.json"), "--out no/p.json: there is no folder no"),
    (("plan", DEMO, "--calibrate", "text.txt", "--out", "p", "--report", "p"), "--report p: the same file as --out"),
    (("plan", DEMO, "--calibrate", "latin.txt", "--out", "p.json"), "--calibrate latin.txt: "),
    (("plan", DEMO, "--calibrate", "text.txt", "--out", "p.json", "--candidates", "w9"), "scheme 'w9' does not exist"),
    (
        ("plan", DEMO, "--calibrate", "text.txt", "--out", "p.json", "--window", "64", "--budget", "-1"),
        "budget: found -1.0",
    ),
    (("generate", DEMO, "--json-schema", "nowhere"), "--json-schema nowhere: No such file"),
    (("generate", DEMO, "--json-schema", "typo.json"), "--json-schema typo.json: json_schema: Invalid type: strnig"),
    (("generate", DEMO, "--regex", "("), "--regex '(': regex: "),
    (("generate", DEMO, "--json-schema", "latin.txt"), "--json-schema latin.txt: 'utf-8' codec"),
    (("generate", DEMO, "--json-schema", "text.txt"), "--json-schema text.txt: json_schema is no JSON"),
    (("generate", DEMO, "--regex", ""), "--regex '': regex is ''; allowed: "),
    (("generate", DEMO, "--regex", "a", "--json-schema", "text.txt"), "not allowed with argument --regex"),
    (
        ("generate", "--llama2c", "text.txt", "--tokenizer", "text.txt", "--regex", "a"),
        "--regex 'a': not with --llama2c",
    ),
    (("info", "nowhere"), "nowhere: not a directory"),
    (("info", "empty"), "empty: there are no safetensors files"),
    (("info", "truncated"), "truncated/model.safetensors: "),
    (("info", "cut_header"), "cut_header/model.safetensors: truncated or not a safetensors file"),
    (("info", "saved_broken"), "saved_broken/qcut_config.json: "),
    (("info", "sealed"), "sealed/model-1.safetensors: "),
    (("completion", "csh"), "invalid choice"),
    (("inf", DEMO), "did you mean info?"),
    (("doctor", "--device", "0"), "doctor: --device goes with --selftest"),
    (("doctor", "--selftest"), "there is no CUDA device here"),
    (("gemm", "1", "1", "131072"), "K is 131072; int32 sums are exact for K <= 131071"),
    (("gemm", "1", "1", "1", "--scale", "1e99"), "out_inv_scale is inf"),
    (("gemm", "0", "1", "1"), "'0' is not a whole number from 1 up"),
    (("gemm", "1", "1", HUGE), "has 30 digits; allowed: 18"),
    (("gemm", "9" * 18, "9" * 18, "16"), "GiB; the memory has"),
    (("gemm", "16", "16", "16", "--seed", HUGE), "--seed"),
    (("gemm", "16", "16", "16", "--scale", "-1"), "--scale"),
    (("tune", "--shape", "0x1x1"), "'0x1x1' is not MxNxK"),
    (("tune", "--model", "nowhere"), "'nowhere' is neither a directory nor one of"),
    (("tune", "--model", "words"), "words/config.json: "),
    (("tune", "--merge", "nowhere.json"), "nowhere.json"),
    (("tune", "--merge", "empty"), "empty"),
    (("tune", "--merge", "latin.txt"), "latin.txt"),
    (("precompile",), "the following arguments are required: --arch"),
    (("precompile", "--arch", "sm_75"), "sm_90a"),
    ((), "the following arguments are required: COMMAND"),
    (("\udcff",), "invalid choice"),
]


@pytest.mark.parametrize(("command", "message"), COMMANDS, ids=[" ".join(map(ascii, c))[:60] for c, _ in COMMANDS])
def test_one_line_says_what_is_wrong(
    command: tuple[object, ...],
    message: str,
    there: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(there)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, out, err = run(capfd, *command)
    assert status == (2 if err.startswith("usage: ") else 1), (status, out, err)
    assert "Traceback" not in err
    assert out == ""
    assert message in err
    lines = [line for line in err.splitlines() if line.startswith("qcut")]
    assert len(lines) == 1, err
    assert len(lines[0]) < 1000
    assert not (there / "new").exists()
    assert not list(there.glob(".*"))


@pytest.mark.parametrize(
    ("words", "status", "kind"),
    [
        (["info", "nowhere"], 1, "CheckpointError"),
        (["eval", str(DEMO), "--text", "nowhere"], 1, "ConfigError"),
        (["quantize", str(DEMO), "--scheme", "w9", "--out", "new"], 1, "ConfigError"),
        (["generate"], 2, "UsageError"),
        (["gemm", "0", "1", "1"], 2, "UsageError"),
        (["unheard-of"], 2, "UsageError"),
    ],
)
def test_failures_are_json_too(
    words: list[str], status: int, kind: str, there: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(there)
    got, out, err = run(capfd, *words, "--json")
    answer = json.loads(out)
    assert got == answer["status"] == status
    assert (answer["schema"], answer["error"]["kind"]) == ("qcut.error/1", kind)
    assert answer["error"]["message"] in err
    assert out.count("\n") == 1


def test_an_empty_prompt_begins_a_text(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", str(DEMO), "--prompt", "", "--steps", "2", "--device", "cpu"]) == 0
    assert capfd.readouterr().out.strip()


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/a/file"), 1, "/a/file: Permission denied"),
        (torch.OutOfMemoryError("tried\nmore"), 1, "the GPU has not enough memory: tried"),
        (MemoryError(), 1, "there is not enough memory"),
        (RuntimeError("can't allocate memory\nmore"), 1, "there is not enough memory: can't allocate memory"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_the_machine_refuses_is_one_line(
    error: BaseException, status: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("qcut.cli.doctor.examine", refuse)
    assert cli.main(["doctor"]) == status
    assert capsys.readouterr().err == f"qcut: {line}\n"


def test_internal_error_shows_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("qcut.cli.doctor.examine", wrong)
    assert cli.main(["doctor"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("qcut: this is a fault in qcut, please report it: ZeroDivisionError: a fault (")
    assert error.endswith("; QCUT_TRACEBACK=1 shows more\n")
    assert "Traceback" not in error
    monkeypatch.setenv("QCUT_TRACEBACK", "1")
    assert cli.main(["doctor"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folders_that_may_not_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    text = str(ROOT / "README.md")
    for words in (["quantize", "--scheme", "w8a8"], ["plan", "--calibrate", text]):
        assert cli.main([words[0], str(DEMO), *words[1:], "--out", str(tmp_path / "new")]) == 1
        assert f"--out {tmp_path / 'new'}: " in capfd.readouterr().err


@pytest.mark.parametrize(("redirection", "status"), [(">/dev/full", 1), ("| true", 0), ("2>/dev/full", 2)])
def test_wrong_commands_on_broken_outputs(redirection: str, status: int) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    line = f'"$0" -m qcut quantize --json {redirection}'
    done = subprocess.run(["sh", "-c", line, sys.executable], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert ("required: MODEL, --out" in done.stdout) == (status == 2)


LIST = "completion zsh"
"""Prints more than a buffer holds, and soon."""


@pytest.mark.parametrize(
    ("command", "redirection"),
    [
        *((words, ">/dev/full") for words in (LIST, "--version", "plan --help")),
        *((f"info {DEMO}", to) for to in (">/dev/full", ">&-", "2>&-", ">&- 2>&-")),
    ],
)
def test_outputs_that_cannot_be_written(command: str, redirection: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    line = f'"$0" -m qcut {command} {redirection}'
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(["sh", "-c", line, sys.executable], cwd=ROOT, capture_output=True, text=True, env=environment)
    full = f"qcut: standard output cannot be written: {os.strerror(errno.ENOSPC)}\n"
    assert (done.returncode, done.stderr) == ((1, full) if "full" in redirection else (0, ""))
