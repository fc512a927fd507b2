"""Checkpoints and tokenizers as llama2.c writes them, and its program in numpy: float64 steps, printed text."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.support import ROOT


class Sample(NamedTuple):
    """A checkpoint, its tokenizer, and the text that run.c prints at temperature 0."""

    model: Path
    tokens: Path
    text: Path
    steps: int
    vocab_size: int
    prompted: str
    """A text that begins with `PROMPT` and goes on as run.c does."""


PROMPT = "Once upon a time"
DATA = ROOT.parent / "shared" / "data"
SAMPLES = ("ours", *(("llama2.c's",) if (DATA / "stories260K.bin").is_file() else ()))
"""`sample` makes one; the other, written by llama2.c, is used where it lies next to the project."""


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


def make(path: Path, sizes: Sizes, *, seed: int = 0, noisy_tables: bool = True) -> dict[str, np.ndarray]:
    """A checkpoint with random weights, written field by field; tables of noise find out whoever reads them."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in in_file(sizes):
        spread, middle = (0.4, 1.0) if name.startswith("rms") else (0.7 if "emb" in name else 0.3, 0.0)
        tensors[name] = (middle + spread * rng.standard_normal(shape)).astype("<f4")
    if not noisy_tables:
        # `precompute_freqs_cis` of llama2.c's model.py
        size = sizes.dim // sizes.n_heads
        frequencies = 1.0 / (10000.0 ** (torch.arange(0, size, 2)[: size // 2].float() / size))
        angles = torch.outer(torch.arange(sizes.seq_len), frequencies).float()
        tensors["freq_cis_real"], tensors["freq_cis_imag"] = angles.cos().numpy(), angles.sin().numpy()
    path.write_bytes(struct.pack("<7i", *sizes) + b"".join(t.tobytes() for t in tensors.values()))
    return tensors


def forward(sizes: Sizes, tensors: dict[str, np.ndarray], ids: list[int], greedy_steps: int = 0) -> np.ndarray:
    """run.c's `forward` in float64, token after token, head after head; then on with the likeliest tokens."""
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
    logits: list[np.ndarray] = []
    for position in range(len(ids) + greedy_steps):
        token = ids[position] if position < len(ids) else int(logits[-1].argmax())
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


Vocabulary = list[tuple[bytes, float]]


def vocabulary(*merges: tuple[bytes, float], letters: str = " abcé") -> Vocabulary:
    """Three special tokens, the bytes, some letters, and the merges."""
    special = [(b"<unk>", 0.0), (b"\n<s>\n", 0.0), (b"\n</s>\n", 0.0)]
    single = [(letter.encode(), -900.0) for letter in letters]
    return [*special, *((b"<0x%02X>" % i, 0.0) for i in range(256)), *single, *merges]


def packed(tokens: Vocabulary, longest: int | None = None) -> bytes:
    """A tokenizer file."""
    longest = max(len(piece) for piece, _ in tokens) if longest is None else longest
    body = (struct.pack("<fi", score, len(piece)) + piece for piece, score in tokens)
    return struct.pack("<i", longest) + b"".join(body)


def naive_encode(tokens: Vocabulary, text: str, bos: bool, eos: bool) -> list[int]:
    """run.c's `encode`, byte by byte, every pair looked at before every merge."""

    def look_up(string: bytes) -> int:
        return next((i for i, (piece, _) in enumerate(tokens) if piece == string), -1)

    data = text.encode() + b"\0"
    ids = [1] if bos else []
    if data[0] != 0:
        ids.append(look_up(b" "))
    buffer = b""
    for i, byte in enumerate(data[:-1]):
        if byte & 0xC0 != 0x80:
            buffer = b""
        buffer += data[i : i + 1]
        if data[i + 1] & 0xC0 == 0x80 and len(buffer) < 4:
            continue
        found = look_up(buffer)
        ids += [found] if found != -1 else [b + 3 for b in buffer]
        buffer = b""
    while True:
        best_score, best_id, best_at = -1e10, -1, -1
        for i in range(len(ids) - 1):
            found = look_up(tokens[ids[i]][0] + tokens[ids[i + 1]][0])
            if found != -1 and tokens[found][1] > best_score:
                best_score, best_id, best_at = tokens[found][1], found, i
        if best_at == -1:
            return ids + ([2] if eos else [])
        ids[best_at : best_at + 2] = [best_id]


def printed(tokens: Vocabulary, ids: list[int]) -> bytes:
    """What run.c prints of tokens, each after the one before it, from token 1 to the next."""
    out = b""
    for before, token in pairwise([1, *ids]):
        if token == 1:
            break
        piece = tokens[token][0]
        if before == 1 and piece[:1] == b" ":
            piece = piece[1:]
        if 3 <= token < 259:
            piece = bytes([token - 3])
        if len(piece) > 1 or piece.isspace() or b" " <= piece <= b"~":
            out += piece
    return out + b"\n"


def sample(name: str, folder: Path) -> Sample:
    """The files of one of `SAMPLES`; ours is written to the folder."""
    if name != "ours":
        model, tokenizer, text = (DATA / n for n in ("stories260K.bin", "tok512.bin", "stories260K.greedy200.txt"))
        return Sample(model, tokenizer, text, 200, 512, prompted=text.read_text())  # its stories begin like this
    pieces = ("th", "he", " t", " the", "in", "er", "an", "on", " a", "re", "ed", "Lily", "ou", "to", "it", "'s")
    tokens = vocabulary(
        *((piece.encode(), -float(i)) for i, piece in enumerate(pieces)),
        letters=" abcdefghijklmnopqrstuvwxyzLO.,!:'\"\n",
    )
    files = model, tokenizer, text = folder / "m.bin", folder / "t.bin", folder / "text"
    sizes, steps = Sizes(64, 172, 2, 8, 4, len(tokens), 64), 48
    tensors = make(model, sizes, seed=2, noisy_tables=False)
    tokenizer.write_bytes(packed(tokens))

    def told(ids: list[int]) -> bytes:
        likeliest = forward(sizes, tensors, ids, steps - len(ids)).argmax(1).tolist()
        return printed(tokens, ids[1:] + likeliest[len(ids) - 1 :])

    text.write_bytes(told([1]))
    return Sample(*files, steps, len(tokens), told(naive_encode(tokens, PROMPT, True, False)).decode())


def logits_of(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def llama(**changes: Any) -> Any:
    """A random Llama that the format can hold, except for the changes."""
    import transformers

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
