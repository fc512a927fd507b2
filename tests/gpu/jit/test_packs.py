"""Models only on the kernels of a pack: no compiler in reach, an empty cache, and the same bits."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qcut.backends.cuda.launch.plans import target
from tests.gpu.support.packed import SCHEMES, write_pack
from tests.support import ROOT


def run(mode: str, packs: Path, out: Path, models: list[str], **environment: str) -> tuple[dict[str, Any], list[Any]]:
    command = [sys.executable, "-m", "tests.gpu.support.packed", mode, str(packs), str(out), *models]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found, kernels = pickle.loads(out.read_bytes())
    return found, kernels


@pytest.mark.parametrize("scheme", SCHEMES)
def test_without_compilers_models_answer_the_same(scheme: str, tmp_path: Path) -> None:
    """GPT-2 and Llama quantize, prompt and decode; layers have every activation."""
    arch = target(torch.cuda.current_device()).arch
    # Short prompts spare the build of CUTLASS's kernels without a bias.
    models = [f"gpt2/{scheme}", f"llama/{scheme}@7" if scheme == "w8a8" else f"llama/{scheme}", f"layer/{scheme}"]
    models = [model for model in models if model != "llama/w8a8_static"]
    for name in ("empty", "full", "cache"):
        (tmp_path / name).mkdir()
    write_pack(tmp_path / "empty", arch, [])  # kernels are those built ahead of time, and are built
    want, kernels = run("build", tmp_path / "empty", tmp_path / "built", models)
    write_pack(tmp_path / "full", arch, kernels)
    cache = tmp_path / "cache"
    got, _ = run("hidden", tmp_path / "full", tmp_path / "found", models, QCUT_CACHE_DIR=str(cache))
    assert not [*cache.rglob("*.qcut")]
    for model in models:
        for name, value in want[model].items():
            assert torch.equal(got[model][name], value), f"{model}: {name}"
