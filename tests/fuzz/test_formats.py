"""Broken files: each ends in an error of qcut's own that names the file, or in the right result."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.fuzz.formats import FORMATS
from tests.fuzz.harness import GOOD, command, run

CASES, SEED = 100, 1


@pytest.mark.parametrize("name", FORMATS)
def test_broken_files_are_refused_or_right(name: str) -> None:
    outcomes = list(run([(name, range(CASES))], SEED))
    failures = [o for o in outcomes if o.result not in GOOD]
    shown = (f"{o.result}: {o.what}\n{command(o, SEED)}\n{o.message}" for o in failures[:5])
    assert not failures, f"{len(failures)} of {len(outcomes)}\n" + "\n".join(shown)
    assert [o.index for o in outcomes] == [*range(CASES)]
    # Mutations that break nothing would show nothing; most tokenizer settings are no part of what is compared.
    assert sum(o.result != "right" for o in outcomes) > CASES / 4
