"""How near a quantized sentence encoder's embeddings stay to the float model's: their cosine, in the mean and at least.

    python benchmarks perplexity encoder --model DIR --text FILE

``DIR`` is a folder as sentence-transformers writes it, or any encoder that transformers loads: a model, its tokenizer,
and, where it says how tokens are pooled, ``1_Pooling/config.json``. The linear layers of the encoder are quantized;
tables of tokens and positions stay in float. Judged are sentences of the text; codebooks are fitted to, and refined on,
sentences of the Python language reference or of ``--calibration FILE``. Sentences of one length make a batch, so that
nothing is padded.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qcut
from benchmarks.harness import REFERENCE, RESULTS, Results, device_option, environment, existing, read_rows, script
from benchmarks.perplexity.models import text_of
from benchmarks.publish.markdown import markdown
from qcut.schemes import parse_scheme

SCHEMES = ("codebook4", "codebook3", "codebook2", "w8a8")
WEIGHTS = ("rounded", "inputs", "curvature", "refined")
"""How codebooks are made: rounded; fitted to inputs; fitted to the curvature; the last, then refined."""
SKIP = ("*pooler*",)
"""Layers that embeddings do not depend on."""
BATCH = 32
WORDS = 6, 60
"""The least and the largest number of words in a sentence."""
KEY = ("model", "scheme", "weights")


class SentenceEncoder(nn.Module):
    """Token ids to embeddings of length 1.

    Args:
        path: folder of the model.
    """

    def __init__(self, path: Path) -> None:
        from transformers import AutoModel

        super().__init__()
        self.encoder = AutoModel.from_pretrained(path, dtype=torch.float32, local_files_only=True)
        pooling = path / "1_Pooling" / "config.json"
        asked = json.loads(pooling.read_text(encoding="utf-8")) if pooling.is_file() else {}
        self.first = bool(asked.get("pooling_mode_cls_token"))

    def forward(self, ids: Tensor) -> Tensor:
        """Embeddings ``[B, D]`` of ids ``[B, T]``, without padding."""
        tokens = self.encoder(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        return F.normalize(tokens[:, 0] if self.first else tokens.mean(1), dim=-1)


def sentences_of(text: str, count: int) -> list[str]:
    """Different sentences of a text, evenly spaced, at most so many."""
    paragraphs = (re.sub(r"\s+", " ", part).strip() for part in re.split(r"\n\s*\n", text))
    prose = (part for part in paragraphs if not part.startswith("="))  # a heading of WikiText
    pieces = (piece for part in prose for piece in re.split(r"(?<=[.!?])\s+", part))
    found = list(dict.fromkeys(piece for piece in pieces if WORDS[0] <= len(piece.split()) <= WORDS[1]))
    return [found[i * len(found) // count] for i in range(count)] if len(found) > count else found


def batches_of(tokenizer: Any, sentences: Sequence[str], longest: int) -> list[Tensor]:
    """Token ids ``[B, T]`` of sentences, those of one length together."""
    by_length: dict[int, list[list[int]]] = {}
    for ids in tokenizer(list(sentences), truncation=True, max_length=longest)["input_ids"]:
        by_length.setdefault(len(ids), []).append(ids)
    return [part for _, ids in sorted(by_length.items()) for part in torch.tensor(ids).split(BATCH)]


@torch.no_grad()
def embeddings(model: nn.Module, batches: Sequence[Tensor]) -> Tensor:
    """Embeddings of all sentences, in the order of the batches."""
    return torch.cat([model(ids) for ids in batches])


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--model", type=existing, required=True, help="folder of a sentence encoder")
    options.add_argument("--name", help="the model's name in the rows [that of its folder]")
    options.add_argument("--text", type=existing, required=True, help="UTF-8 text with the sentences to compare")
    options.add_argument(
        "--calibration", type=existing, default=REFERENCE, help="UTF-8 text [the Python language reference]"
    )
    options.add_argument("--schemes", nargs="+", default=SCHEMES)
    options.add_argument("--weights", nargs="+", choices=WEIGHTS, default=WEIGHTS, help="how codebooks are made [all]")
    options.add_argument("--sentences", type=int, default=1000, help="that are judged [1000]")
    options.add_argument("--calibration-sentences", type=int, default=2048, help="at most [2048]")
    options.add_argument("--refine-steps", type=int, default=300)
    options.add_argument("--longest", type=int, default=128, help="tokens of a sentence [128]")
    device_option(options)
    options.add_argument("--out", type=Path, default=RESULTS, help="folder for results")


def measure(args: argparse.Namespace, results: Results) -> None:
    """A row for every scheme and every way to make its weights."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    model = SentenceEncoder(args.model).to(args.device).eval().requires_grad_(False)
    judged = sentences_of(text_of(args.text), args.sentences)
    known = set(judged)
    text = text_of(args.calibration)
    read = [s for s in sentences_of(text, args.calibration_sentences) if s not in known]
    test, given = ([ids.to(args.device) for ids in batches_of(tokenizer, s, args.longest)] for s in (judged, read))
    wanted, bar = embeddings(model, test), sys.stderr.isatty()
    moments: dict[str, Any] = {}
    if "inputs" in args.weights:
        moments["inputs"] = qcut.collect_second_moments(model, given, skip=SKIP, progress=bar)
    if {"curvature", "refined"} & set(args.weights):
        moments["curvature"] = moments["refined"] = qcut.collect_curvature(model, given, skip=SKIP, progress=bar)
    for scheme in args.schemes:
        fitted = ""
        for weights in args.weights if parse_scheme(scheme).takes_second_moments else ("rounded",):
            start = time.perf_counter()
            if weights != "refined" or fitted != "curvature":  # the last fit is refined
                quantized = copy.deepcopy(model)
                made = qcut.quantize(quantized, scheme, second_moments=moments.get(weights), skip=SKIP, progress=bar)
            fitted = weights
            if weights == "refined":
                print(qcut.refine(quantized, model, given, steps=args.refine_steps, progress=bar), file=sys.stderr)
            seconds = time.perf_counter() - start
            cosines = F.cosine_similarity(embeddings(quantized, test), wanted)
            stored = sum(layer.bytes_after for layer in made.layers)
            row = {
                "bench": results.bench,
                "model": args.name or args.model.resolve().name,
                "scheme": scheme,
                "weights": weights,
                "mean_cosine": round(float(cosines.mean()), 5),
                "least_cosine": round(float(cosines.min()), 5),
                "million_parameters": round(sum(p.numel() for p in model.parameters()) / 1e6, 1),
                "bits": round(8 * stored / sum(layer.in_features * layer.out_features for layer in made.layers), 3),
                "sentences": len(judged),
                "text": args.text.name,
                "calibration": args.calibration.name,
                "calibration_sentences": len(read) if weights != "rounded" else "",
                "refine_steps": args.refine_steps if weights == "refined" else "",
                "quantize_seconds": round(seconds, 1),
            }
            results.rows.append(row)
            results.write_csv(args.out, KEY)  # an interrupted run keeps its rows
            print(f"{scheme} {weights}: {row['mean_cosine']:.4f}, least {row['least_cosine']:.4f}", file=sys.stderr)


def report(rows: Sequence[Any]) -> str:
    """Rows as Markdown: a line for each scheme, a column for each way to make its weights."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        cosine = f"{float(row['mean_cosine']):.4f} ({float(row['least_cosine']):.4f})"
        cells.setdefault((str(row["model"]), str(row["scheme"])), {})[str(row["weights"])] = cosine
    columns = [weights for weights in WEIGHTS if any(weights in found for found in cells.values())]
    lines = [[*at, *(found.get(weights, "–") for weights in columns)] for at, found in cells.items()]
    return markdown(["model", "scheme", *columns], lines)


@script(add_options)
def main(args: argparse.Namespace) -> int:
    """Evaluate an encoder under every scheme, and write rows and a table."""
    results = Results("encoder_quality", environment())
    measure(args, results)
    rows = read_rows(args.out / f"{results.bench}.csv")
    print(f"Mean cosine (least one) with the float model's embeddings\n\n{report(rows)}\n{results.env}; {args.out}")
    return 0
