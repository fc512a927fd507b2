"""Every tensor that qcut makes has a dtype and a device of its own, not those that a program has set in torch."""

from __future__ import annotations

import ast

import pytest

from tests.support import ROOT

_VALUES = {
    *("tensor", "arange", "zeros", "ones", "empty", "full", "linspace", "logspace", "eye", "scalar_tensor"),
    *("rand", "randn", "randint", "randperm", "tril_indices", "triu_indices", "empty_strided"),
}


def implicit(source: str) -> list[tuple[int, str]]:
    """Line and call of each tensor of torch's default dtype or on its default device."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        given = {keyword.arg for keyword in node.keywords}
        if isinstance(owner, ast.Name) and owner.id == "torch" and node.func.attr in _VALUES and None not in given:
            found += [] if {"dtype", "device"} <= given else [(node.lineno, ast.unparse(node))]
    return found


def test_tensors_state_their_dtype_and_device() -> None:
    files = sorted((ROOT / "qcut").rglob("*.py"))
    wrong = {str(p.relative_to(ROOT)): found for p in files if (found := implicit(p.read_text()))}
    assert len(files) > 200
    assert not wrong


@pytest.mark.parametrize("call", ["torch.zeros(3)", "torch.tensor([1], dtype=torch.int64)", "torch.eye(2, device=d)"])
def test_a_default_is_found(call: str) -> None:
    assert implicit(f"x = f({call})") == [(1, call)]
