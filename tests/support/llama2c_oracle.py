"""Checkpoints as llama2.c writes them, and its forward pass in float64."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support import ROOT

transformers = pytest.importorskip("transformers")

DATA = ROOT.parent / "shared" / "data"
SAMPLE, SAMPLE_TOKENS, SAMPLE_TEXT = (
    DATA / name for name in ("stories260K.bin", "tok512.bin", "stories260K.greedy200.txt")
)
needs_sample = pytest.mark.skipif(not SAMPLE.is_file(), reason=f"no sample beside the project ({SAMPLE.name})")


class Sizes(NamedTuple):
    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int


CASES = {
    "the sample's sizes": Sizes(64, 172, 2, 8, 4, 512, 24),
    "untied": Sizes(64, 172, 1, 8, 4, -512, 9),
    "odd": Sizes(30, 17, 3, 3, 1, 37, 11),
    "odd, untied": Sizes(42, 5, 2, 3, 3, -41, 13),
    "heads of two": Sizes(6, 1, 1, 3, 3, 5, 4),
}


def in_file(sizes: Sizes) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes as `checkpoint_init_weights` of run.c steps over them."""
    dim, hidden, layers, heads, kv_heads, vocabulary, length = sizes
    kv, half = dim // heads * kv_heads, dim // heads // 2
    shapes = [("token_embedding", (abs(vocabulary), dim)), ("rms_att", (layers, dim)), ("wq", (layers, dim, dim))]
    shapes += [("wk", (layers, kv, dim)), ("wv", (layers, kv, dim)), ("wo", (layers, dim, dim))]
    shapes += [("rms_ffn", (layers, dim)), ("w1", (layers, hidden, dim)), ("w2", (layers, dim, hidden))]
    shapes += [("w3", (layers, hidden, dim)), ("rms_final", (dim,))]
    shapes += [("freq_cis_real", (length, half)), ("freq_cis_imag", (length, half))]
    return shapes + ([("wcls", (abs(vocabulary), dim))] if vocabulary < 0 else [])


def make(path: Path, sizes: Sizes, *, seed: int = 0) -> dict[str, np.ndarray]:
    """A checkpoint with random weights, written field by field."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in in_file(sizes):
        # The tables are noise: whoever reads them is found out.
        spread, middle = (0.4, 1.0) if name.startswith("rms") else (0.7 if "emb" in name else 0.3, 0.0)
        tensors[name] = (middle + spread * rng.standard_normal(shape)).astype("<f4")
    path.write_bytes(struct.pack("<7i", *sizes) + b"".join(t.tobytes() for t in tensors.values()))
    return tensors


def forward(sizes: Sizes, tensors: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """run.c's `forward` in float64, token after token, head after head."""
    w = {name: t.astype(np.float64) for name, t in tensors.items()}
    dim, heads = sizes.dim, sizes.n_heads
    size, shared = dim // heads, heads // sizes.n_kv_heads

    def norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return gain * x / np.sqrt((x * x).mean() + 1e-5)

    def rope(x: np.ndarray, position: int) -> np.ndarray:
        y = x.copy()
        for i in range(0, len(x), 2):
            angle = position / 10000.0 ** (i % size / size)
            y[i] = x[i] * np.cos(angle) - x[i + 1] * np.sin(angle)
            y[i + 1] = x[i] * np.sin(angle) + x[i + 1] * np.cos(angle)
        return y

    keys: list[list[np.ndarray]] = [[] for _ in range(sizes.n_layers)]
    values: list[list[np.ndarray]] = [[] for _ in range(sizes.n_layers)]
    logits = []
    for position, token in enumerate(ids):
        x = w["token_embedding"][token]
        for layer in range(sizes.n_layers):
            h = norm(x, w["rms_att"][layer])
            q = rope(w["wq"][layer] @ h, position)
            keys[layer].append(rope(w["wk"][layer] @ h, position))
            values[layer].append(w["wv"][layer] @ h)
            mixed = np.zeros(dim)
            for head in range(heads):
                own, kv = slice(head * size, (head + 1) * size), head // shared * size
                scores = np.array([q[own] @ k[kv : kv + size] for k in keys[layer]]) / np.sqrt(size)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                mixed[own] = sum(a * v[kv : kv + size] for a, v in zip(weights, values[layer], strict=True))
            x = x + w["wo"][layer] @ mixed
            h = norm(x, w["rms_ffn"][layer])
            gate = w["w1"][layer] @ h
            x = x + w["w2"][layer] @ (gate / (1 + np.exp(-gate)) * (w["w3"][layer] @ h))
        logits.append(w.get("wcls", w["token_embedding"]) @ norm(x, w["rms_final"]))
    return np.stack(logits)


def logits_of(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def llama(**changes: Any) -> Any:
    """A random Llama that the format can hold, but for the changes."""
    torch.manual_seed(5)
    settings = {
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings | changes)).eval()


IDS = [1, 5, 63, 0, 17, 17, 40, 2, 9, 33, 21, 8]
