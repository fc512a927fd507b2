"""Directories as the turboquant-model package writes them, made from its description in numpy and float64."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.support import ROOT

THEIRS = ROOT.parent / "shared" / "data" / "turboquant-qr-4bit"
SAMPLES = ("ours", *(("the package's",) if THEIRS.is_dir() else ()))
"""`sample` makes one; the other, written by the package, is used where it lies next to the project."""

GROUP, SEED = 128, 42
CONFIG = {
    "bit_width": 4,
    "group_size": GROUP,
    "seed": SEED,
    "skip_embeddings": False,
    "skip_lm_head": False,
    "residual_bit_width": None,
    "residual_seed": 1042,
    "rotation": "qr",
    "rotation_strategy": "different",
    "norm_codec": "fp32",
    "entropy_coding": False,
    "cpu_offload_pass2": False,
    "embedding_quant": "none",
    "embedding_group_size": 32,
}


def codebook() -> list[float]:
    """200 steps of Lloyd's iteration from 16 equal intervals of [-3.5, 3.5]."""
    normal = NormalDist()
    edges = [-math.inf, *(-3.5 + 7 * i / 16 for i in range(1, 16)), math.inf]
    values: list[float] = []
    for _ in range(200):
        values = [(normal.pdf(a) - normal.pdf(b)) / (normal.cdf(b) - normal.cdf(a)) for a, b in pairwise(edges)]
        edges = [-math.inf, *((a + b) / 2 for a, b in pairwise(values)), math.inf]
    return values


def rotation(d: int, seed: int) -> np.ndarray:
    """Q of a seeded Gaussian matrix, R's diagonal made positive."""
    gaussian = torch.randn(d, d, generator=torch.Generator().manual_seed(seed)).double().numpy()
    q, r = np.linalg.qr(gaussian)
    return q * np.sign(np.diag(r))


def weight(indices: np.ndarray, norms: np.ndarray, values: np.ndarray) -> np.ndarray:
    """``norm / sqrt(d) * codebook[idx] Pi`` group by group, in float64."""
    parts = []
    for g, first in enumerate(range(0, indices.shape[1], GROUP)):
        rotated = values[indices[:, first : first + GROUP]]
        d = rotated.shape[1]
        parts.append(norms[:, g : g + 1] / math.sqrt(d) * (rotated @ rotation(d, SEED + first)))
    return np.concatenate(parts, 1)


def sample(name: str, folder: Path) -> Path:
    """One of `SAMPLES`; ours is written to the folder. ``expected.safetensors`` has tokens and their logits."""
    if name != "ours":
        return THEIRS
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 96}
    config = LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False
    )
    config.architectures = None
    torch.manual_seed(11)
    model: Any = LlamaForCausalLM(config).eval()
    rng = np.random.default_rng(12)
    values = np.array(codebook(), np.float32)
    quantized: dict[str, Tensor] = {"codebook": torch.from_numpy(values)}
    exact: dict[str, Tensor] = {}
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            n, k = module.weight.shape
            # As often as the intervals of the codebook hold a normal value.
            edges = (values[1:] + values[:-1]) / 2
            indices = np.searchsorted(edges, rng.standard_normal((n, k))).astype(np.uint8)
            norms = (0.7 * (1 + rng.random((n, -(-k // GROUP))))).astype(np.float32)
            stem = module_name.replace(".", "_")
            quantized[f"{stem}.indices"] = torch.from_numpy(indices[:, 0::2] | indices[:, 1::2] << 4)
            quantized[f"{stem}.norms"] = torch.from_numpy(norms if norms.shape[1] > 1 else norms[:, 0])
            exact[f"{module_name}.weight"] = torch.from_numpy(weight(indices, norms, values.astype(np.float64)))
    rest = {
        key: tensor.detach().clone()
        for key, tensor in (*model.named_parameters(), *model.named_buffers())
        if key not in exact
    }
    folder.mkdir(exist_ok=True)
    (folder / "turboquant_config.json").write_text(json.dumps(CONFIG, indent=2))
    (folder / "config.json").write_text(config.to_json_string(use_diff=True))
    save_file(quantized, folder / "model.safetensors")
    save_file(rest, folder / "non_quantized.safetensors")
    model.double().load_state_dict(exact, strict=False)
    ids = torch.from_numpy(rng.integers(0, 96, (2, 24)))
    with torch.no_grad():
        logits = model(ids).logits
    save_file({"input_ids": ids, "logits": logits.float()}, folder / "expected.safetensors")
    return folder
