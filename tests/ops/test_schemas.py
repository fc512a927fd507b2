"""The schema of every operator, character by character: saved graphs and callers in other languages rely on them."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import qcut.ops  # noqa: F401  (registers torch.ops.qcut)


def test_schemas_are_the_committed_ones() -> None:
    committed = json.loads(Path(__file__).with_name("schemas.json").read_text())
    schemas = torch._C._jit_get_all_schemas()
    assert {s.name: str(s) for s in schemas if s.name.startswith("qcut::")} == committed


def test_every_operator_runs_on_both_devices_and_is_traced() -> None:
    for name in json.loads(Path(__file__).with_name("schemas.json").read_text()):
        if name.startswith("qcut::_"):  # behind C++, on CUDA alone
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
            continue
        for key in ("CPU", "CUDA", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key), (name, key)
        operator = getattr(torch.ops.qcut, name.removeprefix("qcut::")).default
        assert torch.Tag.pt2_compliant_tag in operator.tags, name
