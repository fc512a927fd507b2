"""Pages that are shown with results: what `docs/snippets.py` writes into them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

PAGE = """\
# A page

```python
shown = "```"
print(shown)
40 + 2
```

```sh
qcut doctor
```

```python
class Table:
    def _repr_html_(self):
        return "<table></table>"


Table()
```

```python
table = shown
None
```
"""


def execute(page: Path) -> subprocess.CompletedProcess[str]:
    script = ROOT / "docs" / "snippets.py"
    return subprocess.run([sys.executable, str(script), str(page)], capture_output=True, text=True, check=False)


def test_results_follow_the_snippets(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    done = execute(page)
    assert done.returncode == 0, done.stderr
    text = PAGE.replace("40 + 2\n```\n", "40 + 2\n```\n\n````````text\n```\n42\n````````\n")
    text = text.replace("\nTable()\n```\n", "\nTable()\n```\n\n````````{raw} html\n<table></table>\n````````\n")
    assert done.stdout == text


def test_failing_snippet_is_named_by_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE + "\n```python\nprint('before')\nshown.missing\n```\n")
    done = execute(page)
    assert done.returncode != 0
    line = page.read_text().splitlines().index("shown.missing") + 1
    assert f'{page}", line {line}' in done.stderr
    assert "AttributeError" in done.stderr
    assert done.stdout == ""
