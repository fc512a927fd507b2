"""Names of tests: what is tested, in at most eight words."""

from __future__ import annotations

import ast
from collections import Counter

from tests.support import ROOT

LONGER = {
    "common": 35,
    "engine": 17,
    "gpu": 25,
    "kills": 4,
}
"""How many names of a folder are longer: this may fall, and never rise."""


def test_names_have_at_most_eight_words() -> None:
    found: Counter[str] = Counter()
    names = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and node.name.count("_") > 8:
                found[path.relative_to(ROOT).parts[1]] += 1
                names.add(node.name)
    assert {folder: count for folder, count in found.items() if count > LONGER.get(folder, 0)} == {}, names
