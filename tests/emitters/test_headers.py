"""Device headers: which folder includes which, and barriers on every architecture that has clusters."""

from __future__ import annotations

import re

import pytest

from qcut.emitters.core.source import INCLUDE_DIR
from qcut.emitters.core.text import include, kernel_source
from qcut.errors import BuildError
from tests.support.binaries import build

BELOW = {
    "core": {"core"},
    "gemm": {"core", "gemm"},
    "codebook": {"core", "gemm", "codebook"},
    "stream": {"core", "codebook", "stream"},
    "experts": {"core", "codebook", "stream", "experts"},
    "decoder": {"core", "codebook", "decoder"},
    "attention": {"core", "codebook", "decoder", "attention"},
    "routing": {"core", "routing"},
    "cutlass": {"core", "cutlass"},
}
"""Folders that a folder's headers may include."""


def test_headers_include_their_own_folder_and_those_below() -> None:
    headers = {path.relative_to(INCLUDE_DIR).as_posix(): path.read_text() for path in INCLUDE_DIR.rglob("*.cuh")}
    assert {name.split("/")[1] for name in headers} == set(BELOW)
    for name, text in headers.items():
        for included in re.findall(r"#include <(qcut/[^>]+)>", text):
            assert included in headers, name
            assert included.split("/")[1] in BELOW[name.split("/")[1]], f"{name} includes {included}"


def test_no_function_is_empty_on_some_architectures() -> None:
    """Except the two of dependent launch, which older architectures do without; others have another way there."""
    guarded = []
    for path in INCLUDE_DIR.rglob("*.cuh"):
        text = path.read_text()
        assert "FEAT_SM" not in text, path.name
        found = re.findall(r"#if [^\n]*__CUDA_ARCH__ >= \d+[^\n]*\n(.*?)#endif", text, re.DOTALL)
        guarded += [body for body in found if "#else" not in body]
    assert [re.findall(r'"(.*?);"', body) for body in guarded] == [
        ["griddepcontrol.launch_dependents"],
        ["griddepcontrol.wait"],
    ]


@pytest.mark.parametrize(
    ("header", "call", "arch"),
    [
        ("core/barrier.cuh", "barrier_expect(0, 16)", "sm_89"),
        ("core/cluster.cuh", "cluster_arrive()", "sm_80"),
        ("core/wgmma.cuh", "wgmma_fence()", "sm_100"),
        ("core/wgmma.cuh", "take_registers<232>()", "sm_120"),
    ],
)
def test_functions_without_their_instruction_do_not_compile(header: str, call: str, arch: str) -> None:
    source = kernel_source(
        f"misplaced_{arch}", arch, (), f"qcut::{call};", device_code=include(header), block=128, waits=False
    )
    with pytest.raises(BuildError):
        build(source)
