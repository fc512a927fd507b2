"""Perplexity by the KV cache of an engine: the cost of rounding keys and values.

    python benchmarks perplexity caches --models-dir DIR --text FILE

The model is float16 (float32 without a GPU) and reads each window through `qcut.Engine`, with every cache that it has,
and with 4-bit keys rounded to the nearest code. Next to these, transformers' own attention reads rows that the same 4
bits hold without rotation. A change is against the same path with keys and values as they are; its error is the
standard error over windows of the paired difference.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qcut
from benchmarks import harness
from benchmarks.harness import Results, environment, list_of, model_options, script, table
from benchmarks.perplexity.models import Evaluated
from qcut.common.progress import with_progress
from qcut.models.evaluation import token_nll
from qcut.numerics import int4

BATCH = 8
KEY = ("model", "cache")
ENGINES: dict[str, dict[str, Any]] = {
    "float": {},
    "int8": {"kv_cache": "int8"},
    "int8/int4": {"kv_cache": "int8/int4"},
    "int4": {"kv_cache": "int4"},
    "int4, nearest codes": {"kv_cache": "int4", "calibration_prompts": []},
}
"""Arguments of engines, by the cache's name in rows."""
UNTURNED = "int4, not rotated"
CACHES = (*ENGINES, UNTURNED)
ATTENTION = "qcut_unturned"
"""A cache of transformers that rounds keys and values without the rotation."""


def unturned(rows: Tensor) -> Tensor:
    """Rows ``[..., D]`` as 4-bit codes hold them that are not rotated first."""
    stored = int4.quantize_rows_ref(rows.reshape(-1, rows.shape[-1]).float())
    return int4.dequantize_rows_ref(*stored).view(rows.shape).to(rows.dtype)


def rounded_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention of whole windows to rounded keys and values, as transformers calls it."""
    y = F.scaled_dot_product_attention(
        query, unturned(key), unturned(value), is_causal=True, scale=scaling, enable_gqa=True
    )
    return y.transpose(1, 2).contiguous(), None


@contextmanager
def attending(model: Any, name: str) -> Iterator[None]:
    """Let transformers' attention of that name compute a model's."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def by_transformers(model: Any, windows: Tensor, attention: str) -> Tensor:
    """Mean negative log-likelihood of each window, float64, without an engine."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, rounded_attention)  # type: ignore[arg-type]
    device = next(model.parameters()).device
    found = []
    with attending(model, attention):
        for batch in windows.split(BATCH):
            ids = batch.to(device)
            found.append(token_nll(model(ids, use_cache=False).logits, ids).double().mean(1).cpu())
    return torch.cat(found)


def by_engine(engine: qcut.Engine, windows: Tensor, bar: bool) -> Tensor:
    """The same by an engine, each window by itself."""
    batches = with_progress(windows.split(BATCH), "windows", "batch", shown=bar)
    return torch.tensor([float(nll.double().mean()) for batch in batches for nll in engine.score(batch)]).double()


def measure(path: Path, args: argparse.Namespace, results: Results) -> None:
    """One model: a row for each cache."""
    text = Evaluated(path, args, dtype := harness.served_dtype(args.device))
    model, windows = text.model, text.windows

    def add(cache: str, losses: Callable[[], Tensor], exact: Tensor | None, size: float) -> Tensor:
        start = time.perf_counter()
        found = losses()
        change = found - (found if exact is None else exact)
        results.rows.append(
            {
                "bench": results.bench,
                "model": path.name,
                "cache": cache,
                "perplexity": round(math.exp(found.mean()), 4),
                "change_percent": round(100 * math.expm1(change.mean()), 4),
                "error_percent": round(100 * float(change.std()) / len(change) ** 0.5, 4),
                "bytes_token": round(size, 1) if size else "",
                **text.columns(),
                "dtype": str(dtype).removeprefix("torch."),
                "seconds": round(time.perf_counter() - start, 1),
            }
        )
        print(f"{path.name} {cache}: {results.rows[-1]['perplexity']}", file=sys.stderr, flush=True)
        return found

    exact = None
    for cache in args.caches:
        if cache == UNTURNED:
            own = by_transformers(model, windows, "sdpa")
            add(cache, lambda: by_transformers(model, windows, ATTENTION), own, 0.0)
            continue
        engine = qcut.Engine(model, batch=BATCH, context=args.window, **ENGINES[cache])
        size = engine.cache.nbytes / (BATCH * (args.window + 1))
        found = add(cache, partial(by_engine, engine, windows, sys.stderr.isatty()), exact, size)
        exact = found if exact is None else exact


def add_options(options: argparse.ArgumentParser) -> None:
    caches = "; ".join(CACHES[1:])
    options.add_argument("--caches", type=list_of(CACHES, ";"), default=caches, help=f"of {caches}, semicolons between")


@script(model_options, add_options)
def main(args: argparse.Namespace) -> int:
    """Measure, print a table and write rows; 1 if the engine refuses a model."""
    args.caches = list(dict.fromkeys(("float", *args.caches)))
    results = Results("cache_quality", environment())
    for path in args.models:
        measure(path, args, results)
        results.write_csv(args.out, KEY)  # an interrupted run keeps its rows
    columns = ("model", "cache", "perplexity", "change_percent", "error_percent", "bytes_token")
    print(table(list(columns), [[row[c] for c in columns] for row in results.rows]))
    print(f"rows in {results.write_csv(args.out, KEY)}")
    return 0
