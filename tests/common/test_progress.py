"""Progress bars: silent ones touch nothing, shown ones depend on no other process."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
import threading

import pytest
from tqdm import tqdm

from qcut.common import progress
from tests.support import ROOT
from tests.support.environments import Terminal


def test_hidden_bar_imports_no_tqdm():
    program = (
        "import sys\n"
        "from qcut.common.progress import with_progress\n"
        "assert list(with_progress(range(3), 'work', 'step', shown=False)) == [0, 1, 2]\n"
        "assert 'tqdm' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.parametrize("items", [[1, 2, 3], iter([1, 2, 3])], ids=["counted", "uncounted"])
def test_a_shown_bar_counts_and_leaves_nothing_behind(items: object):
    with contextlib.redirect_stderr(Terminal()) as terminal:
        assert list(progress.with_progress(items, "work", "step", shown=True)) == [1, 2, 3]  # type: ignore[arg-type]
    drawn = terminal.getvalue()
    assert "work" in drawn
    assert not drawn.split("\r")[-1].strip()


def test_a_bar_names_what_is_worked_on():
    with contextlib.redirect_stderr(Terminal()) as terminal:
        for shown in (False, True):
            with progress.progress_bar(2, "work", "step", shown=shown) as advance:
                advance(0, now="the first")
                advance(1)
    assert "the first" in terminal.getvalue()


def test_bar_never_waits_for_tqdms_shared_lock():
    done = threading.Event()

    def work() -> None:
        with progress.progress_bar(1, "work", "step", shown=True) as advance:
            advance(1)
        done.set()

    with tqdm.get_lock(), contextlib.redirect_stderr(Terminal()):
        threading.Thread(target=work, daemon=True).start()
        assert done.wait(10)


_IN_A_FILE = """
import sys
from qcut.common import progress
progress.FIRST_LINE_S = {first}
with progress.progress_bar(100, "work", "step", shown=True) as advance:
    for i in range(100):
        advance(1, now=f"number {{i}}")
        progress.time.sleep(0.003)
progress.print_above("a note")
assert "tqdm" not in sys.modules
"""


def test_short_work_writes_nothing_into_a_file():
    done = subprocess.run([sys.executable, "-c", _IN_A_FILE.format(first=60)], capture_output=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, b"a note\n")


def test_long_work_writes_few_lines_to_a_file():
    done = subprocess.run([sys.executable, "-c", _IN_A_FILE.format(first=0.02)], capture_output=True, cwd=ROOT)
    *lines, last = done.stderr.decode().splitlines()
    assert (done.returncode, last) == (0, "a note")
    assert 2 <= len(lines) <= 12  # times double, of 100 steps
    assert all(re.fullmatch(r"work: step \d+ of 100, \d+ s", line) for line in lines)
    assert not set(done.stderr) & set(range(32)) - {10}


def test_a_closed_standard_error_gets_no_bar():
    closed = Terminal()
    closed.close()
    for stream in (closed, None):
        with contextlib.redirect_stderr(stream):
            assert list(progress.with_progress(range(3), "work", "step", shown=True)) == [0, 1, 2]


def test_a_notebook_gets_a_bar():
    """A notebook's standard error is no terminal; it draws what carriage returns overwrite, without widgets."""
    notebook = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    with contextlib.redirect_stderr(notebook):
        assert list(progress.with_progress([1, 2], "work", "step", shown=True)) == [1, 2]
    assert re.search(r"\rwork.*0/2", notebook.getvalue())
