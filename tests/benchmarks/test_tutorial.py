"""The tutorial without a GPU: its short kernels as binaries, its steps, its page."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.layers.tutorial import LIBRARY, PROBLEM, SHORT, STEPS, candidates, short_kernel
from qcut import jit
from qcut.dispatch.gpus import target_named
from tests.support import ROOT
from tests.support.binaries import instructions

H200, A100 = target_named("NVIDIA H200"), target_named("NVIDIA A100-SXM4-80GB")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_short_kernels_use_what_they_teach(arch: str):
    """The compiler makes dp4a of byte products where it can: these kernels must not be a step ahead."""
    found = []
    for tile in SHORT:
        source = short_kernel(tile, PROBLEM, arch)
        # With nvcc if NVRTC is not installed: the device text is the same.
        binary = jit.build(source if jit.is_toolchain_available("nvrtc") else replace(source, toolchain="nvcc"))
        resources = binary.resources
        assert resources is not None
        assert resources.stack_bytes == resources.spill_store_bytes == resources.spill_load_bytes == 0, binary.name
        found.append(instructions(binary.cubin))
    expected = (("LDG.E.S8", "IMAD"), ("LDG.E.U8", "LDS.S8", "BAR"), ("LDG.E.128", "LDS.64"))
    for names, wanted in zip(found, expected, strict=True):
        assert all(any(name.startswith(prefix) for name in names) for prefix in wanted)
        assert not any(name.startswith(("IDP", "IMMA")) for name in names)


@pytest.mark.parametrize("gpu", [H200, A100], ids=lambda gpu: gpu.arch)
def test_every_step_has_its_own_kernels(gpu):
    names = {step: [c.source.name for c in candidates(step, 4096, gpu)] for step in STEPS if step != LIBRARY}
    assert all(names[step] for step in names if step != "cutlass_sm90")
    assert bool(names["cutlass_sm90"]) is (gpu.arch == "sm_90a")
    assert max(Counter(name for group in names.values() for name in group).values()) == 1


def test_page_explains_every_step():
    page = (ROOT / "docs" / "kernel-notes" / "tutorial.md").read_text()
    assert re.findall(r"^### `(\w+)`", page, re.MULTILINE) == list(STEPS)
