"""The tables of docs/serving.md: steps and prompts inside vLLM, and their time by kind of kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from benchmarks.publish.markdown import MISSING, figures, markdown
from benchmarks.publish.rows import Row, Rows, missing

CELLS = (("step", "1"), ("step", "8"), ("step", "64"), ("prompt", "1"))
_HEADER = ("step of 1", "of 8", "of 64", "prompt")
SHAPE = "llama-3-8b"
MIXTURE = "qwen3-30b-a3b"
TWO_GPUS = "two_h100s"
"""The folder, in that of results, with rows of two GPUs and of one of them."""
FOUR_GPUS = "four_h200s"
"""The folder with rows of two and of four GPUs of one host."""
HOSTS = (TWO_GPUS, FOUR_GPUS)
"""Folders with rows of several GPUs of one host."""
ATTENTION = "attention and its cache"
EXCHANGES = "all-reduces"
_KINDS: Mapping[str, tuple[str, ...]] = {
    "norms, activations, the rest": ("triton_",),
    ATTENTION: ("attention", "reduce_segments", "reshape_and_cache"),
    EXCHANGES: ("cross_device_reduce", "nccl"),
    "quantizing or rotating tokens": ("quantize_per", "quant_kernel", "rotate"),
    "linear layers": (
        *("gemm", "nvjet", "splitK", "int8_stream", "int8_cutlass", "codebook_", "w8a16_", "machete", "marlin"),
    ),
}
"""Parts of kernels' names, the first that fits."""
HEAD = "classifier"
Kernels = dict[tuple[str, ...], dict[tuple[str, str], float]]
"""Columns that name kernels, and their kind → work and batch → milliseconds."""
_HEAD_LAUNCHES = 2
"""A product that a step launches less often is the classifier's."""


def kind_of(kernel: str, count: float) -> str:
    """The kind of a kernel."""
    found = next((kind for kind, parts in _KINDS.items() if any(part in kernel for part in parts)), next(iter(_KINDS)))
    return HEAD if found == "linear layers" and count < _HEAD_LAUNCHES else found


def serving(rows: Rows, shape: str = SHAPE) -> str:
    """Milliseconds by method, and tokens a second of the largest batch, of a shape on one GPU."""
    measured = _cells(rows.of("bench_vllm", shape=shape, gpus="1"), "method")
    if not measured:
        return missing("bench_vllm")
    lines = []
    for (method,), here in measured.items():
        rate = here.get(CELLS[2])
        lines.append([method, *_milliseconds(here), f"{float(rate['tokens_s']):,.0f}" if rate else MISSING])
    return markdown(["ms", *_HEADER, "tokens/s of 64"], lines)


def serving_split(rows: Rows) -> str:
    """Milliseconds on one GPU and on several of a host, by GPU, shape and method."""
    measured = _cells(_of_hosts(rows, "bench_vllm"), "gpu", "shape", "method", "gpus")
    if not measured:
        return missing(f"{TWO_GPUS}/bench_vllm")
    order = list(dict.fromkeys(key[:3] for key in measured))
    lines = [
        [*key[1:3], f"{key[3]} {short_name(key[0])}", *_milliseconds(here)]
        for key, here in sorted(measured.items(), key=lambda item: (order.index(item[0][:3]), int(item[0][3])))
    ]
    return markdown(["model", "method, ms", "GPUs", *_HEADER], lines)


def serving_answers(rows: Rows) -> str:
    """The number of answers on several GPUs that equal those of one, and how near a tie the others differ."""
    found = _of_hosts(rows, "vllm_parallel")
    if not found:
        return missing(f"{TWO_GPUS}/vllm_parallel")
    columns = ("same", "of", "gap")
    lines = [
        [r["shape"], r["method"] + r["what"].removeprefix("answers"), f"{r['gpus']} {short_name(r['gpu'])}"]
        + [r[c] for c in columns]
        for r in found
    ]
    return markdown(["model", "method", "GPUs", "same answers", "of", "largest gap"], lines)


def serving_parts(rows: Rows) -> str:
    """The number of equal answers when int8 tokens are quantized in shards on the CPU."""
    found = rows.of("split_answers")
    if not found:
        return missing("split_answers")
    columns = ("model", "scheme", "beside", "same", "of", "gap")
    return markdown(
        ["model", "scheme", "other", "same answers", "of", "largest gap"], [[r[c] for c in columns] for r in found]
    )


def serving_kernels(rows: Rows) -> str:
    """Milliseconds of kernels by kind."""
    found = kernel_ms(rows)
    if not found:
        return missing("vllm_kernels")
    return _kernels(found, ["method"], CELLS, _HEADER)


def serving_split_kernels(rows: Rows) -> str:
    """The same on several GPUs: of the first of them, a step of one sequence and a prompt."""
    measured = Rows(rows.folder / FOUR_GPUS).of("vllm_kernels")
    if not measured:
        return missing(f"{FOUR_GPUS}/vllm_kernels")
    found = _by_kind(measured, "shape", "method", "gpus")
    return _kernels(found, ["model", "method", "GPUs"], (CELLS[0], CELLS[-1]), (_HEADER[0], _HEADER[-1]))


def kernel_ms(rows: Rows) -> Kernels:
    """Method and kind of kernel → work and batch → milliseconds, of `SHAPE` on one GPU."""
    return _by_kind(rows.of("vllm_kernels", shape=SHAPE, gpus="1"), "method")


def _by_kind(measured: list[Row], *columns: str) -> Kernels:
    found: Kernels = {}
    for row in measured:
        key = *(row[c] for c in columns), kind_of(row["kernel"], float(row["count"]))
        line, cell = found.setdefault(key, {}), (row["what"], row["batch"])
        line[cell] = line.get(cell, 0.0) + float(row["us"]) / 1000
    return found


def _kernels(found: Kernels, names: list[str], cells: Sequence[tuple[str, str]], header: Sequence[str]) -> str:
    order = [*_KINDS, HEAD]
    lines = [
        [*key, *(figures(line[cell]) if cell in line else MISSING for cell in cells)]
        for key, line in sorted(found.items(), key=lambda item: (item[0][:-1], -order.index(item[0][-1])))
    ]
    return markdown([*names, "kernels, ms", *header], lines)


def _of_hosts(rows: Rows, bench: str) -> list[Row]:
    return [row for host in HOSTS for row in Rows(rows.folder / host).of(bench)]


def short_name(gpu: str) -> str:
    """``H100`` of ``NVIDIA H100 80GB HBM3``."""
    return gpu.removeprefix("NVIDIA ").partition(" ")[0]


def _cells(measured: list[Row], *columns: str) -> dict[tuple[str, ...], dict[tuple[str, str], Row]]:
    found: dict[tuple[str, ...], dict[tuple[str, str], Row]] = {}
    for row in measured:
        found.setdefault(tuple(row[c] for c in columns), {})[row["what"], row["batch"]] = row
    return found


def _milliseconds(here: Mapping[tuple[str, str], Row]) -> list[str]:
    return [figures(float(here[cell]["median_us"]) / 1000) if cell in here else MISSING for cell in CELLS]


TABLES: Mapping[str, Callable[[Rows], str]] = {
    "serving": serving,
    "serving mixture": partial(serving, shape=MIXTURE),
    "serving split": serving_split,
    "serving answers": serving_answers,
    "serving parts": serving_parts,
    "serving kernels": serving_kernels,
    "serving split kernels": serving_split_kernels,
}
