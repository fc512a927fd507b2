"""Progress bars: silent ones touch nothing, shown ones depend on no other process."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from tqdm import tqdm

from qcut.process import progress
from tests.support import ROOT


def test_a_bar_that_is_not_shown_touches_no_tqdm():
    program = (
        "import sys\n"
        "from qcut.process.progress import with_progress\n"
        "assert list(with_progress(range(3), 'work', 'step', shown=False)) == [0, 1, 2]\n"
        "assert 'tqdm' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.parametrize("items", [[1, 2, 3], iter([1, 2, 3])], ids=["counted", "uncounted"])
def test_a_shown_bar_counts_and_leaves_nothing_behind(items: object, capsys: pytest.CaptureFixture[str]):
    assert list(progress.with_progress(items, "work", "step", shown=True)) == [1, 2, 3]  # type: ignore[arg-type]
    drawn = capsys.readouterr().err
    assert "work" in drawn
    assert not drawn.split("\r")[-1].strip()


def test_a_bar_names_what_is_worked_on(capsys: pytest.CaptureFixture[str]):
    for shown in (False, True):
        with progress.progress_bar(2, "work", "step", shown=shown) as advance:
            advance(0, now="the first")
            advance(1)
    drawn = capsys.readouterr().err
    assert "the first" in drawn


def test_a_bar_waits_for_nobody_who_holds_the_lock_that_forks_share():
    done = threading.Event()

    def work() -> None:
        with progress.progress_bar(1, "work", "step", shown=True) as advance:
            advance(1)
        done.set()

    with tqdm.get_lock():
        threading.Thread(target=work, daemon=True).start()
        assert done.wait(10)
