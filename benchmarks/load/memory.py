"""Memory of loading a model through each door: the most bytes that the process has at a time, beyond those before.

A Llama with random weights is written as a float folder, as GPTQ's tensors, and as qcut's own folder. Each is loaded
by a process of its own, on the CPU; the process that started it reads its memory from ``/proc`` every millisecond.
*Anonymous* memory is what cannot be dropped. Pages of the files, which transformers maps, are counted apart: the system
drops them when memory runs short.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import Timing

SIZES = {"small": (768, 2048, 16), "tiny": (512, 1024, 12)}
"""Width, MLP width, blocks."""
VOCABULARY, GROUP = 1024, 128
DOORS = {
    "float, quantized by from_pretrained": ("float", "quantize"),
    "gptq, from_pretrained": ("gptq", "foreign"),
    "gptq, qcut.load": ("gptq", "load"),
    "qcut's own, from_pretrained": ("own", "plain"),
    "qcut's own, qcut.load": ("own", "load"),
}
"""Folder and way of loading, by name."""
_THRESHOLD = 1 << 16
"""Larger blocks return to the system when they are freed, so that resident memory is memory in use."""


@dataclass(frozen=True)
class Loaded:
    """What loading one folder took.

    Attributes:
        model: bytes of the tensors of the loaded model.
        anonymous: most bytes of anonymous memory at a time, beyond those before.
        mapped: most bytes of pages of files at a time, beyond those before.
        float_layer: bytes of the largest layer's weight in float32.
        seconds: of loading.
    """

    model: int
    anonymous: int
    mapped: int
    float_layer: int
    seconds: float


# ── the process that is measured ─────────────────────────────────────────────────────────────────


def loads(way: str, scheme: str) -> Callable[[Path], Any]:
    """What loads a folder."""
    import transformers

    import qcut

    transformers.utils.logging.disable_progress_bar()
    read = transformers.AutoModelForCausalLM.from_pretrained
    ways: dict[str, Callable[[Path], Any]] = {
        "quantize": lambda folder: read(folder, quantization_config=qcut.QcutConfig(scheme)),
        "foreign": lambda folder: read(folder, config=qcut.foreign_config(folder)),
        "plain": read,
        "load": lambda folder: qcut.load(folder, progress=False),
    }
    return ways[way]


def child(folder: Path, small: Path, way: str, scheme: str) -> None:
    """Load a small folder, so that everything is imported, wait for a line, load the folder, and print its memory."""
    load = loads(way, scheme)
    load(small)
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    model = load(folder)
    seconds = time.perf_counter() - start
    print(json.dumps({"model": tensor_bytes(model), "seconds": seconds}), flush=True)


def tensor_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's parameters and buffers, each storage once."""
    tensors = (*model.parameters(), *model.buffers())
    return sum({t.untyped_storage().data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


# ── the one that measures ────────────────────────────────────────────────────────────────────────


def measure(folder: Path, small: Path, way: str, scheme: str, float_layer: int) -> Loaded:
    """Load a folder in a process of its own."""
    command = harness.command(__name__, "--child", str(folder), str(small), way, scheme)
    root = str(harness.ROOT)
    settings = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(_THRESHOLD), "MALLOC_TRIM_THRESHOLD_": "0"}
    settings["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=settings) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if (line := process.stdout.readline()) != "ready\n":
            raise RuntimeError(f"{way}: the process said {line!r}")
        before = resident(process.pid)
        process.stdin.write("go\n")
        process.stdin.flush()
        most = list(before)
        while not select.select([process.stdout], [], [], 0.001)[0]:
            most = [max(pair) for pair in zip(most, resident(process.pid), strict=True)]
        found = json.loads(process.stdout.readline())
    anonymous, mapped = (int(high - low) for high, low in zip(most, before, strict=True))
    return Loaded(found["model"], anonymous, mapped, float_layer, found["seconds"])


def resident(pid: int) -> tuple[int, int]:
    """Bytes of anonymous memory and of pages of files that a process has; 0 once it has ended."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    anonymous, mapped = (int(fields.get(key, "0 kB").split()[0]) << 10 for key in ("RssAnon", "RssFile"))
    return anonymous, mapped


# ── folders ──────────────────────────────────────────────────────────────────────────────────────


def write_folders(root: Path, size: tuple[int, int, int], scheme: str, kinds: set[str]) -> int:
    """Write a model in each way, in float16; returns the bytes of the largest layer's weight in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import qcut

    width, hidden, blocks = size
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=blocks,
        num_attention_heads=width // 64,
        dtype="float16",
    )
    model = LlamaForCausalLM(config).half()
    largest = 4 * max(m.weight.numel() for n, m in model.named_modules() if n.endswith("_proj"))
    if "float" in kinds:
        model.save_pretrained(root / "float")
    if "gptq" in kinds:
        write_gptq(model, root / "gptq")
    if "own" in kinds:
        qcut.quantize(model, scheme, progress=False)
        model.save_pretrained(root / "own")
    return int(largest)


def write_gptq(model: Any, folder: Path) -> None:
    """Write a model of random 4-bit integers with zero points, as GPTQ stores them."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not name.endswith("_proj.weight"):
            tensors[name] = parameter.detach()
            continue
        n, k = parameter.shape
        layer = name.removesuffix("weight")
        tensors[f"{layer}qweight"] = words((k // 8, n))
        tensors[f"{layer}qzeros"] = words((k // GROUP, n // 8))
        tensors[f"{layer}scales"] = torch.rand(k // GROUP, n).half() / 64
        tensors[f"{layer}g_idx"] = (torch.arange(k) // GROUP).int()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    described = json.loads(model.config.to_json_string(use_diff=False)) | {
        "architectures": [type(model).__name__],
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False},
    }
    (folder / "config.json").write_text(json.dumps(described))


def words(shape: tuple[int, int]) -> Tensor:
    """Random words of 32 bits."""
    return torch.randint(-(1 << 31), 1 << 31, shape).int()


def measured(size: str, scheme: str, doors: list[str]) -> Iterator[tuple[str, Loaded]]:
    """Write the folders, and load each through its doors."""
    kinds = {DOORS[door][0] for door in doors}
    with tempfile.TemporaryDirectory() as folder:
        full, small = Path(folder, "full"), Path(folder, "small")
        float_layer = write_folders(full, SIZES[size], scheme, kinds)
        write_folders(small, (128, 128, 1), scheme, kinds)
        for door in doors:
            kind, way = DOORS[door]
            yield door, measure(full / kind, small / kind, way, scheme, float_layer)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--scheme", default="codebook4")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)


@harness.script(harness.timing_options, add_options)
def main(options: argparse.Namespace) -> int:
    """Run the benchmark, on a CPU."""
    if options.child:
        folder, small, way, scheme = options.child
        child(Path(folder), Path(small), way, scheme)
        return 0
    results = harness.Results("bench_loading", harness.environment())
    rows = []
    for door, one in measured(options.size, options.scheme, list(DOORS)):
        columns = {
            f"{name}_mb": round(getattr(one, name) / 1e6, 1) for name in ("model", "anonymous", "mapped", "float_layer")
        }
        timing = Timing.of([one.seconds * 1e6], "wall")
        results.add(timing, door=door, size=options.size, scheme=options.scheme, **columns)
        rows.append([door, *columns.values(), one.seconds])
    path = results.write_csv(options.out)
    header = ["door", "model MB", "anonymous MB", "mapped MB", "a layer in float32, MB", "seconds"]
    print(harness.table(header, rows))
    print(f"rows in {path}")
    return 0
