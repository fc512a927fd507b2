"""``python docs/snippets.py PAGE``: a page of Markdown, with what each of its Python snippets shows after it.

Snippets run one after another, as the cells of a notebook do: what they print, then their last expression, as HTML
where it has a form in HTML. A snippet that raises ends this with its traceback.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

_FENCE = "`" * 8  # texts of models may hold fences too


def executed(page: Path) -> str:
    """The text of a page with its results."""
    names: dict[str, Any] = {}

    def with_result(found: re.Match[str]) -> str:
        line = found.string.count("\n", 0, found.start(1))
        return found[0] + _shown("\n" * line + found[1], str(page), names)

    return re.sub(r"^```python\n(.*?)^```\n", with_result, page.read_text(), flags=re.MULTILINE | re.DOTALL)


def _shown(snippet: str, page: str, names: dict[str, Any]) -> str:
    """Run a snippet, and return what it shows as Markdown."""
    tree = ast.parse(snippet, page)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value = None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, page, "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), page, "eval"), names)
    text, element = printed.getvalue(), ""
    if hasattr(value, "_repr_html_"):
        element = f"\n{_FENCE}{{raw}} html\n{value._repr_html_()}\n{_FENCE}\n"
    elif value is not None:
        text += f"{value!r}\n"
    return (f"\n{_FENCE}text\n{text.rstrip()}\n{_FENCE}\n" if text.strip() else "") + element


if __name__ == "__main__":
    sys.stdout.write(executed(Path(sys.argv[1])))
