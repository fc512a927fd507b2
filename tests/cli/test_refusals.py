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
from tests.support import ROOT
from tests.support.zoo import tiny_hf

DEMO = ROOT / "models" / "gpt2-5m"
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
    (("eval", DEMO, *TEXT, "--device", "tpu"), "no device that qcut runs on"),
    (("generate", "truncated", *PROMPT), "truncated/model.safetensors: truncated or not"),
    (
        ("generate", "./truncated", *PROMPT, "--scheme", "w8a8"),
        "truncated/model.safetensors: truncated or not",
    ),
    (("eval", "truncated", *TEXT), "truncated/model.safetensors: truncated or not"),
    (("generate", "cut_header", *PROMPT), "cut_header/model.safetensors: truncated or not a safetensors file"),
    (("generate", "empty_weights", *PROMPT), "empty_weights/model.safetensors: truncated or not a safetensors file"),
    (("generate", "no_weights", *PROMPT), "no_weights: "),
    (("generate", "no_config", *PROMPT), "no_config/config.json: there is no such file"),
    (("generate", "no_tokenizer", *PROMPT), "no_tokenizer: there is no tokenizer"),
    (("eval", "no_tokenizer", *TEXT), "tokenizer.save_pretrained(directory) puts one beside the model"),
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
    (("generate", "many", *PROMPT), "asks for a model of more than"),
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
    (("generate", DEMO, "--top-k", "-1"), "top_k -1"),
    (("generate", DEMO, "--top-p", "nan"), "top_p nan"),
    (("generate", DEMO, "--temperature", "inf"), "temperature inf"),
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
    (("eval", DEMO, *TEXT, "--window", "9" * 18), "fewer than one window"),
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
    (("precompile", "--arch", ""), "--arch"),
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
    try:
        status: Any = cli.main([str(word) for word in command])
    except SystemExit as ended:  # argparse's
        status = ended.code
    out, err = capfd.readouterr()
    assert status in (1, 2), (status, out, err)
    assert "Traceback" not in err
    assert out == ""
    assert message in err
    lines = [line for line in err.splitlines() if line.startswith("qcut")]
    assert len(lines) == 1, err
    assert len(lines[0]) < 1000


def test_an_empty_prompt_begins_a_text(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", str(DEMO), "--prompt", "", "--steps", "2", "--device", "cpu"]) == 0
    assert capfd.readouterr().out.strip()


def test_a_fault_of_qcuts_own_shows_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("qcut.cli.doctor.examine", wrong)
    assert cli.main(["doctor"]) == 1
    error = capsys.readouterr().err
    assert "ZeroDivisionError: a fault" in error
    assert error.rstrip().endswith("qcut: this is a fault in qcut; please report it with the lines above")


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("qcut.cli.doctor.examine", interrupt)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "qcut: interrupted\n"


def test_no_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("qcut.cli.doctor.examine", full)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == "qcut: there is not enough memory\n"


@pytest.mark.parametrize("redirection", [">/dev/full", ">&-", "2>&-", ">&- 2>&-"])
def test_outputs_that_cannot_be_written(redirection: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    line = f'"$0" -m qcut precompile --arch sm_80 --list {redirection}'
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(["sh", "-c", line, sys.executable], cwd=ROOT, capture_output=True, text=True, env=environment)
    if "full" in redirection:
        assert (done.returncode, done.stderr) == (
            1,
            f"qcut: standard output cannot be written: {os.strerror(errno.ENOSPC)}\n",
        )
    else:
        assert (done.returncode, done.stderr) == (0, "")
