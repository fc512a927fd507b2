"""``python -m tests.digests FILE``: digests of what a change of names and places must not change.

Writes one JSON object: operators' schemas, every kernel's name and text on each architecture, dispatch's choices,
bytes of saved models, tokens and logits of small models on the CPU, and help texts. ``--against OTHER`` compares with
the file of an earlier commit and names what differs; the exit status is then 1. A name or an include line that a commit
changes on purpose is said in its body.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path

import torch
from torch import nn

import qcut
from qcut.dispatch import codebook, gemm
from qcut.dispatch.attention import select_attention, select_prompt_attention
from qcut.dispatch.gpus import GPUS
from qcut.dispatch.precompile import ahead_of_time_kernels
from qcut.emitters.codebook.problem import CodebookProblem
from qcut.emitters.core.arch import ARCHITECTURES
from qcut.emitters.core.epilogue import Epilogue
from qcut.emitters.core.source import DType, KernelSource
from qcut.emitters.gemm.problem import GemmProblem
from qcut.errors import QcutError
from qcut.schemes import SCHEME_NAMES, parse_scheme
from tests.architectures.kernels import cutlass, raw_kernels
from tests.support.decoders import KINDS, WIDE, prompts_of, small

SIZES = ((1280, 5120), (4096, 4096), (14336, 4096), (4096, 14336), (50257, 1280), (320, 192))
"""N and K of the products that kernels are chosen for."""
TOKENS = (1, 2, 5, 16, 33, 64, 65, 200, 512, 2048, 8192)
SCHEMES = ("w8a8", "w8a16", "int16x8", "codebook4", "codebook4_int8", "codebook3")
"""Those of the models that generate the compared tokens."""
WALK = ", swizzle=1, raster=0, splits=1, reason='model', tuned_us=None"
"""What a choice without a walk of tiles says of the walk."""
Facts = Iterator[tuple[str, object]]


def text_of(source: KernelSource) -> str:
    """A kernel's text without its include lines, which name files."""
    return "\n".join(line for line in source.text.splitlines() if not line.startswith("#include"))


def schemas() -> Facts:
    """Every operator's signature."""
    import_module("qcut.ops.registry").import_modules("qcut.ops")
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("qcut::"):
            yield str(schema), ""


def kernels() -> Facts:
    """Every ahead-of-time kernel, and those of ``tests.architectures``."""
    for arch in ARCHITECTURES:
        for kind, sources in (
            ("closed", ahead_of_time_kernels(arch)),
            ("raw", raw_kernels(arch)),
            ("cutlass", cutlass(arch)),
        ):
            for source in sources:
                yield f"{kind} {arch} {source.name} {source.entry}", text_of(source)


def _tried(choose: Callable[..., object], *args: object, **named: object) -> str:
    try:
        return repr(choose(*args, **named))
    except QcutError as error:
        return f"{type(error).__name__}: {error}"


def choices() -> Facts:
    """What dispatch chooses for sizes, types and GPUs."""
    f16, s8 = DType.F16, DType.S8
    scaled = Epilogue(f16, col_scale="per_channel", bias=True)
    tokens = replace(scaled, row_scale="per_token")
    grid = product(GPUS, (False, True), SIZES, TOKENS)
    for gpu, is_closed, (n, k), m in grid:
        target, where = replace(gpu, ahead_of_time=is_closed), f"{gpu.name} {is_closed} {m}x{n}x{k}"
        for epilogue in (tokens, replace(tokens, halves=True), replace(tokens, out=DType.S8)):
            problem = GemmProblem(epilogue=epilogue)
            yield f"int8 {where} {problem.name}", _tried(gemm.select_gemm, problem, m, n, k, target)
        half = GemmProblem(f16, epilogue=scaled, alignment_k=8)
        yield f"w8a16 {where}", _tried(gemm.select_w8a16, half, m, n, k, target)
        for x, bits, slots, cutlass_too in ((f16, 4, 1, False), (f16, 3, 4, True), (s8, 4, 1, True), (s8, 2, 2, False)):
            codes = CodebookProblem(x, bits, slots, tokens if x is s8 else scaled)
            chosen = _tried(codebook.select, codes, m, n, -(-k // 128), target, cutlass=cutlass_too)
            chosen = chosen.replace("Choice(", "CodebookChoice(").replace(WALK, "")  # as earlier digests say
            yield f"codebook {where} {codes.name}", chosen
        yield f"rotation {where}", _tried(codebook.select_rotation, "hadamard", f16, s8, m, k, 128, 1, target)
    for gpu, cache, head, (batch, context) in product(
        GPUS, (f16, s8), (64, 80, 128), ((1, 512), (1, 8192), (16, 2048), (64, 4096))
    ):
        sizes = {"kv_heads": 8, "context": context}
        where = f"{gpu.name} {cache.value} {head} {batch} {context}"
        yield f"attention {where}", _tried(select_attention, f16, cache, head, 4, gpu, batch=batch, **sizes)
        for length in (1, 8, 64, 512, 4096):
            shape = {"sequences": batch, "length": length, "group": 4, **sizes}
            yield (
                f"prefill {where} {length}",
                _tried(select_prompt_attention, f16, cache, head, gpu, **shape),
            )


def saved() -> Facts:
    """Files that each scheme writes."""
    for scheme in (name for name in SCHEME_NAMES if not parse_scheme(name).is_float):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 256), nn.Linear(256, 320), nn.ReLU(), nn.Linear(320, 256, bias=False))
        calibration = qcut.calibrate(model, [torch.arange(50)[None]]) if "static" in scheme else None
        qcut.quantize(model, scheme, calibration=calibration)
        with tempfile.TemporaryDirectory() as folder:
            qcut.save(model, folder)
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    # A save draws its name, and the index digests that name.
                    drawn = rb"(?<=model-)\w{8}(?=-)|[0-9a-f]{64}"
                    name, content = (re.sub(drawn, b"", b) for b in (path.name.encode(), path.read_bytes()))
                    yield f"{scheme} {name.decode()}", content


def tokens() -> Facts:
    """Greedy tokens and logits of a small model of each kind, engine and scheduler included."""
    for kind in KINDS:
        for scheme in SCHEMES if kind in ("gpt2", "llama") else SCHEMES[:1]:
            model = small(kind, **({} if scheme in ("w8a8", "w8a16", "int16x8") else WIDE))
            qcut.quantize(model, scheme)
            with torch.no_grad():
                logits = model(torch.tensor(prompts_of(96, 9))).logits
            engine = qcut.Engine(model, batch=3, context=48)
            found = engine.generate(prompts_of(96, 3, 9, 17), max_new_tokens=20)
            yield f"{kind} {scheme} logits", logits.numpy().tobytes()
            yield f"{kind} {scheme} tokens", repr(found)


def helps() -> Facts:
    """What the command line says of itself."""

    def help_of(*words: str) -> str:
        command = [sys.executable, "-m", "qcut", *words, "--help"]
        run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "100"}, check=True)
        return run.stdout

    whole = help_of()
    yield "qcut", whole
    for command in re.findall(r"^    (\w+)(?:  |$)", whole, re.MULTILINE):
        if command != "COMMAND":
            yield f"qcut {command}", help_of(command)


SECTIONS = (schemas, kernels, choices, saved, tokens, helps)


def digests(names: list[str]) -> dict[str, dict[str, str]]:
    """By section and fact, the first 16 digits of its SHA-256."""

    def digest(value: object) -> str:
        return hashlib.sha256(value if isinstance(value, bytes) else str(value).encode()).hexdigest()[:16]

    return {s.__name__: {k: digest(v) for k, v in s()} for s in SECTIONS if s.__name__ in names}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.digests", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--against", type=Path, help="file of an earlier commit")
    parser.add_argument("--sections", nargs="+", default=[s.__name__ for s in SECTIONS])
    options = parser.parse_args()
    now = digests(options.sections)
    options.file.write_text(json.dumps(now, indent=0, sort_keys=True))
    print({name: len(facts) for name, facts in now.items()})
    if options.against is None:
        return 0
    differing = 0
    for section, before in json.loads(options.against.read_text()).items():
        after = now.get(section, before)
        for word, keys in (
            ("gone", before.keys() - after.keys()),
            ("new", after.keys() - before.keys()),
            ("changed", {key for key in before.keys() & after.keys() if before[key] != after[key]}),
        ):
            differing += len(keys)
            if keys:
                print(f"{section}: {len(keys)} {word}", *sorted(keys)[:20], sep="\n    ")
    print(f"{differing} facts differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
