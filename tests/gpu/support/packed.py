"""What small models of every scheme answer, in a process that builds its kernels, and in one that has only a pack.

Both choose from the ahead-of-time kernels, so that their answers are the same bits.
"""

from __future__ import annotations

import argparse
import pickle
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import qcut
from qcut import jit
from qcut.backends.cuda.launch.plans import target
from qcut.emitters.core.source import KernelSource
from qcut.engine.engine import Engine
from qcut.jit import packs, waiting
from qcut.jit.packs import Packed, key_of, pack_bytes
from qcut.schemes import ACTIVATIONS
from tests.gpu.support.decoders import llama
from tests.gpu.support.oracles import DEVICE
from tests.support.decoders import VOCABULARY, prompts_of
from tests.support.environments import hide_compilers

SCHEMES = ("w8a8", "w8a8_static", "w8a16", "codebook4", "codebook4_int8", "codebook3_g64", "int4")


def gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 300, "n_embd": 384, "n_layer": 1, "n_head": 6}
    return GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=None, bos_token_id=None)).to(DEVICE, torch.float16).eval()


def answers(kind: str, scheme: str, length: int = 70) -> dict[str, Tensor]:
    """Logits of a prompt and of two steps, and tokens, of a model that is quantized first."""
    model = gpt2() if kind == "gpt2" else llama()
    prompt = prompts_of(VOCABULARY, length)
    ids = torch.tensor(prompt, device=DEVICE)
    want = model(ids).logits
    calibration = qcut.calibrate(model, [ids], progress=False) if scheme == "w8a8_static" else None
    qcut.quantize(model, scheme, calibration=calibration, prebuild=(length,), progress=False)
    engine = Engine(model, batch=1)
    found = {"prompt": engine.prefill(prompt)}
    found |= {f"step {i}": engine.decode([token]) for i, token in enumerate((5, 7))}
    found["tokens"] = torch.tensor([each.tokens for each in engine.generate(prompt, 12)])
    found["eager"] = model(ids).logits
    error = (found["eager"].float() - want.float()).pow(2).mean() / want.float().pow(2).mean()
    assert error < 0.5, f"{kind} {scheme}: relative error {error}"
    return {name: value.cpu() for name, value in found.items()}


def layer_answers(scheme: str) -> dict[str, Tensor]:
    """Results of a layer with each activation, at several numbers of tokens, which are near the CPU's."""
    torch.manual_seed(1)
    module = nn.Linear(384, 320)
    static_range = qcut.StaticRange.including_zero(-4.0, 4.0) if scheme == "w8a8_static" else None
    found = {}
    for activation in ACTIVATIONS:
        layer = qcut.Linear.from_float(module, scheme, activation=activation, static_range=static_range)
        for rows in (1, 7, 64):
            x = torch.randn(rows, 384)
            want = layer.to("cpu", torch.float16)(x.half()).float()
            got = layer.to(DEVICE)(x.half().to(DEVICE)).cpu()
            error = float(((got.float() - want).abs() / (want.abs() + 0.1)).max())
            assert error < 0.02, f"{scheme} {activation} {rows}: {error}"
            found[f"{activation} {rows}"] = got
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("build", "hidden"))
    parser.add_argument("folder", type=Path, help="of packs")
    parser.add_argument("out", type=Path, help="gets the answers, and the kernels that were built")
    parser.add_argument("models", nargs="+", help="gpt2/w8a8, llama/w8a8@7 (with prompts of 7 tokens), or layer/w8a8")
    arguments = parser.parse_args()
    packs.FOLDER = arguments.folder
    assert target(torch.cuda.current_device()).ahead_of_time, "there is no pack"
    built: dict[str, Kernel] = {}
    if arguments.mode == "hidden":
        torch.zeros(1, device=DEVICE)
        hide_compilers()
    else:
        note_builds(built)
    found: dict[str, Any] = {}
    for model in arguments.models:
        kind, scheme, length = re.fullmatch(r"(\w+)/(\w+?)(?:@(\d+))?", model).groups()  # type: ignore[union-attr]
        found[model] = layer_answers(scheme) if kind == "layer" else answers(kind, scheme, int(length or 70))
        arguments.out.write_bytes(pickle.dumps((found, [*built.values()])))
        print(model, "done", len(built), flush=True)


Kernel = tuple[str, bytes, Packed]


def note_builds(built: dict[str, Kernel]) -> None:
    """Note every kernel that is built or found from now on."""
    build, build_many = jit.build, waiting.build_many

    def note(source: KernelSource, binary: jit.Binary) -> None:
        built[source.name] = source.name, key_of(source), Packed(binary.cubin, binary.host_so, binary.resources)

    def noting_build(source: KernelSource) -> jit.Binary:
        binary = build(source)
        note(source, binary)
        return binary

    def noting_build_many(sources: Iterable[KernelSource], **options: Any) -> dict[str, Any]:
        sources = list(sources)
        results = build_many(sources, **options)
        for source in sources:
            if isinstance(binary := results[source.name], jit.Binary):
                note(source, binary)
        return results

    jit.build, waiting.build_many = noting_build, noting_build_many


def write_pack(folder: Path, arch: str, kernels: list[Kernel]) -> None:
    """Put a pack into a folder; with no kernels, only ahead-of-time kernels are chosen, and all are built."""
    facts = {"arch": arch, "sources": packs.sources_digest()}
    (folder / f"{arch}.qpack").write_bytes(pack_bytes(kernels, facts, jobs=8))


if __name__ == "__main__":
    sys.exit(main())
