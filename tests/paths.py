"""``python -m tests.paths``: the files of qcut and emitters that each usual job enters, on the CPU.

A file is entered when one of its functions runs or when it is imported. Each job runs in a process of its own, after
``import qcut`` and what it works on. ``--files`` lists them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tests.support import ROOT
from tests.support.processes import run_each

MOST = {"import": 15, "quantize": 50, "load": 17, "save": 20, "call": 9, "step": 14}
"""Files that a job may enter."""


@contextmanager
def entered() -> Iterator[set[str]]:
    """Collects the files of qcut and emitters that run in this thread."""
    roots = (str(ROOT / "qcut"), str(ROOT / "emitters"))
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(roots):
            files.add(str(Path(frame.f_code.co_filename).relative_to(ROOT)))

    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)


def job(name: str) -> set[str]:
    """Run one job in this process and return the files it entered."""
    import torch

    if name == "import":
        with entered() as files:
            import qcut
        return files
    import qcut

    def floats() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))

    model = floats()
    x = torch.randn(4, 256)
    if name == "quantize":
        with entered() as files:
            qcut.quantize(model, "w8a8")
        return files
    if name == "step":
        return _step()
    qcut.quantize(model, "w8a8")
    with tempfile.TemporaryDirectory() as folder:
        jobs: dict[str, Callable[[], object]] = {
            "save": lambda: qcut.save(model, folder),
            "load": lambda: qcut.load(folder, model=floats),
            "call": lambda: model(x),
        }
        if name == "load":
            qcut.save(model, folder)
        if name == "call":
            model(x)
        with entered() as files:
            jobs[name]()
    return files


def _step() -> set[str]:
    """One step of decoding of a small Llama, without a graph."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import qcut

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 100}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))
    qcut.quantize(model, "w8a8")
    engine = qcut.Engine(model, graphs=False)
    tokens = engine.stream(torch.arange(5)[None], max_new_tokens=5)
    for _ in range(3):
        next(tokens)
    with entered() as files:
        next(tokens)
    return files


def files_of(names: Collection[str]) -> dict[str, set[str]]:
    """The files that each job enters in a process of its own: a fork of one that has imported torch."""
    found: dict[str, set[str]] = {}
    codes = [f"import json; from tests.paths import job; print(json.dumps(sorted(job({name!r}))))" for name in names]
    for name, printed in zip(names, run_each("import torch", codes), strict=True):
        found[name] = set(json.loads(printed.splitlines()[-1]))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.paths", description=__doc__)
    parser.add_argument("--files", action="store_true", help="list the files of each job")
    options = parser.parse_args()
    over = 0
    for name, files in files_of(MOST).items():
        most = MOST[name]
        over += len(files) > most
        print(f"{name:10} {len(files):4} of at most {most}", *(sorted(files) if options.files else []), sep="\n    ")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
