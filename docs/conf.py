"""How the site is built: ``make docs``. Pages are Markdown; the reference is made from docstrings."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from sphinx.errors import ExtensionError

import qcut

project = "qcut"
author = copyright = "the qcut authors"
version = release = qcut.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = f"qcut {release}"
exclude_patterns = ["conf.py"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]  # formulas that look like Python

# `name` in a docstring is a link where the reference has the name, and code where it has not.
default_role = "py:obj"
autodoc_member_order = "bysource"
autosummary_generate = False  # the pages of the reference have the entries
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Exactness", "Notes"), ("Source", "Notes")]


def skip_tuple_fields(app: Any, what: str, name: str, member: Any, skip: bool, options: Any) -> bool | None:
    """Fields of a `typing.NamedTuple` are explained by its class."""
    return True if (getattr(member, "__doc__", None) or "").startswith("Alias for field number") else None


def modules() -> str:
    """A table for each folder: its modules, and the first line of each one's docstring."""
    root, lines = Path(__file__).resolve().parents[1], list[str]()
    for folder in ("qcut", "emitters"):
        for package in sorted(path.parent for path in (root / folder).rglob("__init__.py")):
            if package.is_relative_to(root / "qcut" / "emitters"):  # a link to emitters
                continue
            lines += [f"### `{package.relative_to(root)}`", "", "| module | what it is |", "|---|---|"]
            for path in sorted(package.glob("*.py")):
                first = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
                lines.append(f"| `{path.stem}` | {first.replace('|', chr(92) + '|')} |")
            lines.append("")
    return "\n".join(lines)


def add_modules(app: Any, page: str, text: list[str]) -> None:
    """Write the tables of modules into the page that asks for them."""
    text[0] = text[0].replace("<!-- modules -->", modules())


EXECUTED = ("walkthrough", "recipes/own-module", "recipes/mixture", "recipes/adapters")
"""Pages that are shown with results: their snippets run while the site is built, on the CPU and without a network."""


def add_results(app: Any, page: str, text: list[str]) -> None:
    """Write what snippets show into a page, or fail with the snippet that raised."""
    if page not in EXECUTED:
        return
    root = Path(__file__).resolve().parents[1]
    quiet = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, "docs/snippets.py", f"docs/{page}.md"],
        cwd=root,
        # Threads that wait sleep: the site is built next to other work.
        env={**os.environ, **quiet, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise ExtensionError(f"docs/{page}.md: {done.stderr}")
    text[0] = done.stdout


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_modules)
    app.connect("source-read", add_results)
    app.connect("autodoc-skip-member", skip_tuple_fields)
