"""Benchmarks by subject: `python benchmarks SUBJECT NAME [options]`; docs/measuring.md describes each."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
if __package__ in (None, ""):
    sys.path[0] = str(FOLDER.parent)  # not this folder: its modules belong to the package

SUBJECTS = {
    "layers": "gemm linear peers schemes codebook experts crossover zero_points triton epilogue capture "
    "overhead tutorial",
    "attention": "decode prompt",
    "engine": "steps families caches breakdown batching server compare vllm gpt2 allreduce speculation acceptance",
    "perplexity": "schemes codebooks divergence mixtures experts plans caches encoder shards",
    "load": "quantize memory first_use install",
    "publish": "tables scale",
}


def listing() -> str:
    """Every benchmark, with the first line of its docstring."""
    lines = ["usage: python benchmarks SUBJECT NAME [options]; --help after a NAME prints its options", ""]
    for subject, names in SUBJECTS.items():
        for name in names.split():
            text = (FOLDER / subject / f"{name}.py").read_text(encoding="utf-8")
            (first, *_) = (ast.get_docstring(ast.parse(text)) or "").splitlines()
            lines.append(f"{subject} {name:12} {first}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Run a benchmark; 2 if there is none of that name."""
    match arguments:
        case [subject, name, *rest] if name in SUBJECTS.get(subject, "").split():
            status: int = importlib.import_module(f"benchmarks.{subject}.{name}").main(rest)
            return status
        case ["-h" | "--help"]:
            print(listing())
            return 0
    print(listing(), file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
