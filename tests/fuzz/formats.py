"""Every format that qcut reads: a small right file of it, how qcut reads it, and what a strict reader makes of it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import qcut
from qcut.checkpoints.detect import GGUF, PRETRAINED, QCUT, READERS, TURBOQUANT
from qcut.checkpoints.formats.llama2c.files import load_llama2c
from qcut.checkpoints.formats.llama2c.tokenizer import Llama2cTokenizer
from qcut.checkpoints.formats.turboquant.format import Config as TurboquantConfig
from qcut.checkpoints.formats.turboquant.writer import quantize_model, save_turboquant
from qcut.checkpoints.pretrained import load_pretrained
from qcut.conversion.calibration.calibrate import Calibration
from qcut.conversion.planning.plan import LayerPlan, Plan
from qcut.dispatch import gemm, gpus, tables
from qcut.emitters.core.source import KernelSource, Param
from qcut.emitters.gemm.problem import GemmProblem, TileConfig
from qcut.errors import QcutError
from qcut.jit import cache
from qcut.layers.codebook import CodebookLinear
from qcut.layers.linear import Linear
from qcut.layers.quantized import FrozenWeight, QuantizedLayer
from qcut.tuning.journal import Journal
from tests.checkpoints.formats import samples
from tests.fuzz import readers
from tests.support import llama2c_oracle
from tests.support.zoo import tiny_lm, token_batches

builder = import_module("qcut.jit.build")

State = Any
"""What was read, in plain data that compares with ==."""

CODES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16", "torch.int64": "I64"}


@dataclass(frozen=True)
class Read:
    """What came of reading a file.

    Attributes:
        state: what was read.
        ignored: whether the reader said that it left something out, or made the thing anew.
    """

    state: State
    ignored: bool = False


@dataclass(frozen=True)
class Format:
    """A format.

    Attributes:
        name: for the command line.
        kinds: glob of each file to break → the kind of its bytes, see `tests.fuzz.mutations.mutate`.
        build: write the right files into an empty folder.
        read: read the folder by qcut's public means.
        agrees: whether what was read is what the broken files say, by an independent reader; None where the format has
            digests, and nothing but the right result will do.
        mend: write over the broken file by qcut's means, and show that the new one holds; after the rest.
        folder_is_enough: an error may name only the folder, if transformers does not say which file it means.
    """

    name: str
    kinds: dict[str, str]
    build: Callable[[Path], None]
    read: Callable[[Path], Read]
    agrees: Callable[[Path, State], bool] | None = None
    mend: Callable[[Path], None] | None = None
    folder_is_enough: bool = False


def tensor_state(tensor: Tensor) -> tuple[str, tuple[int, ...], str]:
    """Dtype, shape and a digest of the bytes."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), readers.digest(raw)


def model_state(model: Any) -> dict[str, Any]:
    """Every tensor, every quantized layer, class and configuration of a model."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    config = getattr(model, "config", None)
    generation = getattr(model, "generation_config", None)
    return {
        "class": type(model).__name__,
        "tensors": {name: tensor_state(tensor) for name, tensor in named},
        "modules": [(name, type(m).__name__, m.extra_repr()) for name, m in model.named_modules()],
        "schemes": {name: m.scheme.to_json() for name, m in model.named_modules() if isinstance(m, Linear)},
        "config": config and config.to_json_string(use_diff=False),
        "generation": generation and generation.to_json_string(),
    }


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=28, n_positions=16)
    return GPT2LMHeadModel(config).eval()


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(4)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=28,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config).eval()


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(97 + i): i for i in range(26)} | {"ab": 26, "<s>": 27}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>").save_pretrained(folder)


# ── qcut's own checkpoints ───────────────────────────────────────────────────────────────────────


def _batches() -> list[Tensor]:
    return token_batches(count=1, rows=1, length=8, vocabulary=28)


def build_checkpoint(folder: Path) -> None:
    """A GPT-2 with a layer of every kind, an embedding tied to the classifier, and a fused activation."""
    model = _gpt2()
    calibration = qcut.calibrate(model, _batches(), progress=False)
    for scheme, layers in {"w8a8_static": "*c_attn", "w8a8": "*c_fc", "w8a16": "*attn.c_proj"}.items():
        qcut.quantize(model, scheme, calibration=calibration, include=[layers], allow_growth=True, progress=False)
    codebook = qcut.Codebook(group_size=16, residual_bits=2)
    qcut.quantize(model, codebook, include=["*mlp.c_proj"], embeddings="w8a16", allow_growth=True, progress=False)
    qcut.save(model, folder)


def read_checkpoint(folder: Path) -> Read:
    return Read(model_state(qcut.load(folder, progress=False)))


def build_with_tokenizer(folder: Path) -> None:
    """A checkpoint with the tokenizer that people put next to it, for the commands."""
    build_checkpoint(folder)
    _tokenizer(folder)


def read_pretrained(folder: Path) -> Read:
    model, tokenizer = load_pretrained(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    tokenizer("ab")
    return Read(model_state(model))


# ── the turboquant-model package's ───────────────────────────────────────────────────────────────


def build_turboquant(folder: Path) -> None:
    model = _llama()
    quantize_model(model, TurboquantConfig(group_size=8, residual_bit_width=2), progress=False)
    save_turboquant(model, folder)


def read_turboquant(folder: Path) -> Read:
    model = qcut.load(folder, progress=False)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, CodebookLinear)}
    inside = {id(b) for m in layers.values() for b in m.buffers()}
    kept = [item for item in model.named_parameters() if not isinstance(item[1], FrozenWeight)]
    rest = [*kept, *model.named_buffers()]
    return Read(
        {
            "layers": {
                name: [
                    (
                        tensor_state(p.indices)[2],
                        tensor_state(p.norms.float())[2],
                        tensor_state(p.values)[2],
                        p.group_size,
                        p.rotation,
                        p.seed,
                    )
                    for p in layer.passes
                ]
                for name, layer in layers.items()
            },
            "rest": {name: tensor_state(t)[1:] for name, t in rest if id(t) not in inside},
            "config": json.loads(json.dumps(model.config.to_dict(), default=str)),
            "generation": model.generation_config.to_json_string(),
        }
    )


def _floats(entry: tuple[str, tuple[int, ...], bytes]) -> np.ndarray:
    code, shape, data = entry
    if code == "BF16":
        words = np.frombuffer(data, "<u2").astype("<u4") << 16
        return words.view("<f4").reshape(shape)
    return np.frombuffer(data, {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[code]).astype("<f4").reshape(shape)


def turboquant_agrees(folder: Path, state: State) -> bool:
    config = vars(TurboquantConfig()) | readers.document(folder / "turboquant_config.json")
    quantized = readers.safetensors(folder / "model.safetensors")
    rest = readers.safetensors(folder / "non_quantized.safetensors")
    strategy = config["rotation_strategy"]
    for i, (name, passes) in enumerate(state["layers"].items()):
        stem = name.replace(".", "_")
        found = []
        for prefix, bits, seed in (
            ("", config["bit_width"], config["seed"]),
            ("pass2_", config["residual_bit_width"], config["residual_seed"]),
        ):
            if bits is None:
                continue
            seed = config["seed"] if strategy == "shared" else seed
            seed += 10007 * i if strategy == "per_layer" else 0
            packed = np.frombuffer(quantized[f"{stem}.{prefix}indices"][2], np.uint8)
            indices = np.stack([packed & 15, packed >> 4], 1)
            values = _floats(quantized[f"{stem}.pass2_codebook" if prefix else "codebook"])
            norms = _floats(quantized[f"{stem}.{prefix}norms"])
            columns = 2 * quantized[f"{stem}.indices"][1][1]
            size = columns if config["group_size"] is None else config["group_size"]
            if int(indices.max()) >= 1 << bits or not np.isfinite(norms).all() or (norms < 0).any():
                raise readers.Unreadable
            pieces = (readers.digest(part.tobytes()) for part in (indices, norms, values))
            found.append((*pieces, size, config["rotation"], seed))
        if [p[:3] for p in found] != [p[:3] for p in passes]:
            return False
        # A group larger than the layer is the whole layer.
        if any(a[4:] != b[4:] or min(a[3], columns) != min(b[3], columns) for a, b in zip(found, passes, strict=True)):
            return False
    if {name: (shape, readers.digest(data)) for name, (_, shape, data) in rest.items()} != state["rest"]:
        return False
    return config_agrees(folder, state)


def float_tensors(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and a digest of each float tensor of ``model.safetensors``, in float32."""
    tensors = readers.safetensors(folder / "model.safetensors")
    floats = {name: entry for name, entry in tensors.items() if entry[0] in ("F32", "F16", "BF16", "F64")}
    return {name: (entry[1], readers.digest(_floats(entry).tobytes())) for name, entry in floats.items()}


def config_agrees(folder: Path, state: State) -> bool:
    """Whether the fields of ``config.json`` that transformers kept are as the file has them."""
    stated = readers.document(folder / "config.json")
    # null asks for what transformers takes where nothing is stated
    return all(state["config"][key] == value for key, value in stated.items() if key in PLAIN and value is not None)


PLAIN = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
PLAIN += ("vocab_size", "max_position_embeddings", "rms_norm_eps", "hidden_act", "tie_word_embeddings", "head_dim")


# ── what other libraries, and transformers, write of quantized models ────────────────────────────


def build_pretrained(folder: Path) -> None:
    model = _llama()
    qcut.quantize(model, "w8a16", allow_growth=True, progress=False)
    model.save_pretrained(folder)


def build_mixture(folder: Path) -> None:
    samples.write_mixture(folder, "qwen3_moe", samples.AWQ, lambda _, weight: samples.awq(weight, 32))


def build_k_quants(folder: Path) -> None:
    from tests.checkpoints.formats.gguf import written

    written.write(folder / "model.gguf", "qwen3_moe", num_hidden_layers=1)


def read_foreign(folder: Path) -> Read:
    model: Any = qcut.load(next(folder.glob("*.gguf"), folder), dtype=torch.float32, progress=False)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLayer)}
    rest = {name: p for name, p in model.named_parameters(remove_duplicate=False) if not isinstance(p, FrozenWeight)}
    return Read(
        {
            "layers": {n: (m.extra_repr(), *(tensor_state(b) for b in m.buffers())) for n, m in layers.items()},
            "rest": {name: tensor_state(p)[1:] for name, p in rest.items()},
            "config": json.loads(json.dumps(model.config.to_dict(), default=str)),
            "generation": model.generation_config.to_json_string(),
        }
    )


def foreign_agrees(folder: Path, state: State) -> bool:
    """Whether configuration and float tensors are as stated; the formats' own tests hold the layers."""
    if any(folder.glob("*.gguf")):
        return True
    stored = float_tensors(folder)
    tied = {"lm_head.weight"} if readers.document(folder / "config.json").get("tie_word_embeddings") else set()
    same = all(stored.get(name) == value for name, value in state["rest"].items() if name not in tied)
    return same and config_agrees(folder, state)


@dataclass(frozen=True)
class Checkpoint:
    """A right checkpoint of a reader of `qcut.load`, and which JSON files to break; see `Format`."""

    build: Callable[[Path], Any]
    read: Callable[[Path], Read] = read_foreign
    agrees: Callable[[Path, State], bool] | None = foreign_agrees
    folder_is_enough: bool = True
    json: str = "*.json"


MIXTURE, NVFP4, K_QUANTS = "mixture", "nvfp4", "k_quants"
CHECKPOINTS = {
    QCUT: Checkpoint(build_checkpoint, read_checkpoint, None, False, "qcut_config.json"),
    PRETRAINED: Checkpoint(build_pretrained),
    TURBOQUANT: Checkpoint(build_turboquant, read_turboquant, turboquant_agrees, False),
    **{name: Checkpoint(build) for name, build in samples.CHECKPOINTS.items()},
    MIXTURE: Checkpoint(
        lambda folder: samples.write_mixture(folder, "qwen3_moe", samples.AWQ, lambda _, w: samples.awq(w, 32))
    ),
    K_QUANTS: Checkpoint(build_k_quants),
}
"""By reader in `qcut.checkpoints.detect.READERS`, all of them, a mixture, NVFP4, and K-quants."""


def checkpoint_formats() -> Iterator[Format]:
    """Two formats for each reader, a mixture and NVFP4: its JSON files and its tensors; GGUF files are both in one."""
    for name in (*READERS, MIXTURE, NVFP4, K_QUANTS):
        one = CHECKPOINTS[name]
        kinds = {"json": {one.json: "json"}, "tensors": {"*.safetensors": "safetensors"}}
        for what, files in kinds.items() if name not in (GGUF, K_QUANTS) else [("file", {"*.gguf": "binary"})]:
            yield Format(
                f"{name}-{what}", files, one.build, one.read, one.agrees, folder_is_enough=one.folder_is_enough
            )


# ── a folder of Hugging Face ─────────────────────────────────────────────────────────────────────


def build_huggingface(folder: Path) -> None:
    _llama().save_pretrained(folder)
    _tokenizer(folder)


def read_huggingface(folder: Path) -> Read:
    model, tokenizer = load_pretrained(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    tokenizer("ab")
    named = {name: tensor_state(t)[1:] for name, t in model.named_parameters(remove_duplicate=False)}
    config = json.loads(json.dumps(model.config.to_dict(), default=str))
    return Read({"tensors": named, "config": config, "generation": model.generation_config.to_json_string()})


def huggingface_agrees(folder: Path, state: State) -> bool:
    stored = float_tensors(folder)
    held = dict(state["tensors"])
    if readers.document(folder / "config.json").get("tie_word_embeddings"):
        held.pop("lm_head.weight", None)
    return all(stored.get(name) == value for name, value in held.items()) and config_agrees(folder, state)


# ── llama2.c ─────────────────────────────────────────────────────────────────────────────────────

VOCABULARY = llama2c_oracle.vocabulary((b"ab", -1.0), (b" a", -2.0))[:64]
_LABELS = {
    "rms_att": "input_layernorm",
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "rms_ffn": "post_attention_layernorm",
    "w1": "mlp.gate_proj",
    "w2": "mlp.down_proj",
    "w3": "mlp.up_proj",
}


def build_llama2c(folder: Path) -> None:
    llama2c_oracle.make(folder / "model.bin", llama2c_oracle.Sizes(12, 10, 2, 3, 1, -17, 6))


def read_llama2c(folder: Path) -> Read:
    model: Any = load_llama2c(folder / "model.bin")
    config = model.config
    layers = config.num_hidden_layers
    heads = config.num_attention_heads, config.num_key_value_heads

    def bytes_of(weight: Tensor, turned: int = 0) -> str:
        values = weight.detach().numpy()
        if turned:
            values = values.reshape(turned, 2, -1, values.shape[1]).swapaxes(1, 2)
        return readers.digest(np.ascontiguousarray(values).tobytes())

    tensors = {
        "embedding.0": bytes_of(model.model.embed_tokens.weight),
        "rms_final.0": bytes_of(model.model.norm.weight),
    }
    for label, module in _LABELS.items():
        turned = {"wq": heads[0], "wk": heads[1]}.get(label, 0)
        for i in range(layers):
            weight = model.get_submodule(f"model.layers.{i}.{module}").weight
            tensors[f"{label}.{i}"] = bytes_of(weight, turned)
    if not config.tie_word_embeddings:
        tensors["wcls.0"] = bytes_of(model.lm_head.weight)
    vocabulary = config.vocab_size if config.tie_word_embeddings else -config.vocab_size
    header = (config.hidden_size, config.intermediate_size, layers, *heads, vocabulary, config.max_position_embeddings)
    finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    return Read({"header": header, "tensors": tensors} if finite else None)


def llama2c_agrees(folder: Path, state: State) -> bool:
    return bool(state == readers.llama2c(folder / "model.bin"))


def build_llama2c_tokens(folder: Path) -> None:
    (folder / "tokens.bin").write_bytes(llama2c_oracle.packed(VOCABULARY))


def read_llama2c_tokens(folder: Path) -> Read:
    tokenizer = Llama2cTokenizer.from_file(folder / "tokens.bin", len(VOCABULARY))
    with contextlib.suppress(QcutError):
        tokenizer.encode("ab a\0é")
    return Read([*zip(tokenizer._pieces, tokenizer._scores, strict=True)])


def llama2c_tokens_agree(folder: Path, state: State) -> bool:
    return bool(state == readers.llama2c_tokens(folder / "tokens.bin", len(VOCABULARY)))


# ── calibrations and plans ───────────────────────────────────────────────────────────────────────


def _lm() -> nn.Module:
    return tiny_lm(width=8, blocks=1, vocabulary=28)


def build_calibration(folder: Path) -> None:
    qcut.calibrate(_lm(), _batches(), sample_size=24, progress=False).save(folder)


def read_calibration(folder: Path) -> Read:
    calibration = Calibration.load(folder)
    layers = {
        name: (s.tokens, *(tensor_state(t) for t in (s.lo, s.hi, s.sample))) for name, s in calibration.layers.items()
    }
    ranges = {name: calibration.range(name) for name in layers}
    pairs = [pair.to_json() for pair in calibration.pairs]
    return Read([layers, ranges, calibration.method, calibration.quantile, pairs, calibration.refused])


def build_plan(folder: Path) -> None:
    layers = {
        "blocks.0.up": LayerPlan(
            "w8a8_static",
            8,
            16,
            qcut.StaticRange(-1.5, 2.25),
            "mse",
            {"w8a8": 0.001, "w8a16": float("inf")},
            {"w8a8": 4.5},
        ),
        "blocks.0.down": LayerPlan("codebook4", 16, 8, sensitivity={"codebook4": 0.5}, cost={"codebook4": 3.0}),
        "blocks.0.q": LayerPlan("fp16", 8, 8, reason="left alone"),
    }
    Plan(layers, 0.01, "perplexity", "time", 0.001, 0.002, float("inf"), 512).save(folder / "plan.json")


def read_plan(folder: Path) -> Read:
    plan = Plan.load(folder / "plan.json")
    str(plan), plan.counts, plan.cost, plan.off_int8
    return Read(plan.to_json())


def plan_agrees(folder: Path, state: State) -> bool:
    stated = readers.document(folder / "plan.json")
    return _same_plan(stated, state)


def _same_plan(stated: Any, found: Any) -> bool:
    """Every field of the file as it is there; null for infinity, absent for the default."""
    if isinstance(stated, dict) and isinstance(found, dict):
        return all(key in found and _same_plan(value, found[key]) for key, value in stated.items())
    if stated is None:
        return found is None or found == float("inf")
    if isinstance(found, qcut.StaticRange):
        return bool(found.to_json() == stated)
    return (type(stated) is type(found) and stated == found) or float(stated) == found


# ── what tuning and the kernel cache keep ────────────────────────────────────────────────────────

GPU = "NVIDIA Test 1"
TARGET = gpus.Target("sm_80", 108, GPU)


def build_journal(folder: Path) -> None:
    with Journal(folder / "journal.jsonl") as journal:
        for i in range(6):
            journal.add(f"gemm {i} int8_mma", kernel=f"kernel_{i}", us=1.5 * i + 1, runs=[1.0, 2.0])
        journal.add("left out", kernel="k", left_out="does not fit", wrong=False)


def read_journal(folder: Path) -> Read:
    with Journal(folder / "journal.jsonl") as journal:
        return Read({key: dict(fact) for key, fact in journal._facts.items()}, ignored=journal.skipped > 0)


def mend_journal(folder: Path) -> None:
    with Journal(folder / "journal.jsonl") as journal:
        before = len(journal)
        journal.add("one more", us=2.0)
    with Journal(folder / "journal.jsonl") as journal:
        assert journal.get("one more") == {"key": "one more", "us": 2.0}
        assert len(journal) == before + 1


def journal_agrees(folder: Path, state: State) -> bool:
    """Every fact is the last whole line of its key that has the checksum it states."""
    stated = {}
    for line in (folder / "journal.jsonl").read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError, AssertionError):
            fact = json.loads(line)
            assert isinstance(fact, dict)
            checksum = fact.pop("crc32", None)
            if checksum in (None, zlib.crc32(json.dumps(fact, sort_keys=True).encode())):
                stated[fact["key"]] = fact
    return all(repr(stated[key]) == repr(dict(fact)) for key, fact in state.items())


def build_table(folder: Path) -> None:
    tile = TileConfig((128, 128, 64), (64, 64, 64), 4)
    simt = tables.family("int8_dp4a").default_tiles(GemmProblem(), "sm_80")[0]
    rows = [tables.Row("int8_mma", "s8", "tnt", m, 1280, 1280, tile, 5.0 + m) for m in (1, 16, 64)]
    rows.append(tables.Row("int8_dp4a", "f16", "tnt", 1, 64, 64, simt, 2.0))
    path = tables.user_path(GPU)
    assert path is not None
    assert path.is_relative_to(folder)
    tables.write(path, tables.Table(GPU, tuple(rows), {"driver": "1"}))


def read_table(folder: Path) -> Read:
    """What the table says, after every use of it: choosing, explaining and writing the kernels of its sizes."""
    tables.forget()
    found = tables.table_for(GPU)
    for m, n, k, out in ((1, 1280, 1280, "s8"), (40, 1280, 1280, "s8"), (1, 64, 64, "f16")):
        for tensor_cores in (True, False):
            problem = gemm.problem_of(m, n, k, out=out)
            gemm.explain(problem, m, n, k, TARGET, cutlass=False, tensor_cores=tensor_cores)
            choice = gemm.select_gemm(problem, m, n, k, TARGET, cutlass=False, tensor_cores=tensor_cores)
            gemm.emit(choice, problem, TARGET.arch)
    return Read((found.gpu, dict(found.environment), {row.key: row for row in found.rows}), ignored=found.partial)


def table_agrees(folder: Path, state: State) -> bool:
    """Every row is one of the file's, number by number."""
    if not state[2]:
        return True
    (path,) = (folder / "tuned").glob("*.json")
    choices = readers.document(path)["choices"]

    def said(row: tables.Row, choice: dict[str, Any]) -> bool:
        if choice["family"] != row.family:
            return False
        facts = {key: getattr(row, key) for key in choice if key != "tile"}
        tile = {key: getattr(row.tile, key) for key in choice["tile"]}
        lists = {key: list(value) if isinstance(value, tuple) else value for key, value in tile.items()}
        return bool(facts | {"tile": lists} == choice)

    return all(any(said(row, choice) for choice in choices) for row in state[2].values())


def mend_table(folder: Path) -> None:
    path = tables.user_path(GPU)
    assert path is not None
    one = tables.Row("int8_mma", "s8", "tnt", 8, 64, 64, TileConfig((128, 128, 64), (64, 64, 64), 4), 1.0)
    tables.write(path, tables.Table(GPU, (one,)))
    assert tables.read(path).rows == (one,)


KERNEL = KernelSource("fuzzed", "// text", "fuzzed", (Param("n", "i32"),), "sm_80", block=32)
CUBIN = b"\x7fELF" + bytes(range(256)) * 32


@contextlib.contextmanager
def _compiler() -> Iterator[list[str]]:
    """A compiler that gives `CUBIN`, and what it was asked for."""
    asked = []

    def compile_text(source: KernelSource, *, device: bool = True) -> tuple[bytes, None, str]:
        asked.append(source.name)
        return CUBIN, None, "said nothing"

    builder._memory.clear()
    with mock.patch.object(builder, "compile_text", compile_text):
        yield asked
    builder._memory.clear()


def build_kernel(folder: Path) -> None:
    with _compiler():
        builder.build(KERNEL)


def read_kernel(folder: Path) -> Read:
    with _compiler() as asked:
        return Read(builder.build(KERNEL), ignored=bool(asked))


def kernel_agrees(folder: Path, state: State) -> bool:
    """An entry with a right digest is believed: the cache defends against disks, and by its owner, against users."""
    (path,) = (folder / "kernels").glob("*.qcut")
    data = path.read_bytes()
    magic, digest, body = (
        data[: data.index(b"\n") + 1],
        data[data.index(b"\n") + 1 :][:32],
        data[data.index(b"\n") + 33 :],
    )
    if hashlib.sha256(body).digest() != digest or not magic.startswith(b"qcut-kernel"):
        return False
    (length,) = struct.unpack_from("<Q", body)
    header = json.loads(body[8 : 8 + length])
    at, blobs = 8 + length, {}
    for name, size in header["blobs"]:
        blobs[name] = body[at : at + size]
        at += size
    return at == len(body) and bool(blobs["cubin"] == state.cubin)


def mend_kernel(folder: Path) -> None:
    """What was built anew is in the cache, unless something stands at its path that is no file."""
    path = cache.entry_path(KERNEL.name, builder.device_fingerprint(KERNEL))
    assert path is not None
    with _compiler() as asked:
        builder.build(KERNEL)
    assert not asked or path.is_dir(), "a broken entry was not replaced by a whole one"


FORMATS = {
    one.name: one
    for one in (
        *checkpoint_formats(),
        Format(
            "qcut-folder",
            {"**/config.json": "json", "**/generation_config.json": "json", "token*.json": "json"},
            build_with_tokenizer,
            read_pretrained,
            folder_is_enough=True,
        ),
        Format(
            "huggingface-json",
            {"*.json": "json"},
            build_huggingface,
            read_huggingface,
            huggingface_agrees,
            folder_is_enough=True,
        ),
        Format(
            "huggingface-tensors",
            {"*.safetensors": "safetensors"},
            build_huggingface,
            read_huggingface,
            huggingface_agrees,
            folder_is_enough=True,
        ),
        Format("llama2c-model", {"model.bin": "binary"}, build_llama2c, read_llama2c, llama2c_agrees),
        Format(
            "llama2c-tokenizer",
            {"tokens.bin": "binary"},
            build_llama2c_tokens,
            read_llama2c_tokens,
            llama2c_tokens_agree,
        ),
        Format("calibration-json", {"**/calibration.json": "json"}, build_calibration, read_calibration),
        Format("calibration-tensors", {"**/*.safetensors": "safetensors"}, build_calibration, read_calibration),
        Format("plan", {"plan.json": "json"}, build_plan, read_plan, plan_agrees),
        Format("journal", {"journal.jsonl": "lines"}, build_journal, read_journal, journal_agrees, mend_journal),
        Format("tuned-table", {"tuned/*.json": "json"}, build_table, read_table, table_agrees, mend_table),
        Format("kernel-entry", {"kernels/*.qcut": "entry"}, build_kernel, read_kernel, kernel_agrees, mend_kernel),
    )
}
