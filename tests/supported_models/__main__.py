"""Tries the architectures that users have, and writes ``docs/supported-models.md``.

``python -m tests.supported_models`` takes some minutes; with ``--only CLASS …`` it prints what it finds of these
classes, and writes nothing.
"""

from __future__ import annotations

import argparse
import sys
import warnings

import torch
import transformers

from qcut.common.progress import with_progress
from tests.supported_models.checking import Finding, examine
from tests.supported_models.page import CLASSES, PAGE, cells, page


def main(argv: list[str] | None = None) -> int:
    """Examine, and write or print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="CLASS", choices=CLASSES, help="classes of transformers")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    findings: list[Finding] = []
    for name in with_progress(options.only or CLASSES, "examine", "model", shown=sys.stderr.isatty()):
        findings.append(examine(name))
        if options.only:
            print("  ".join([*cells(findings[-1]), *findings[-1].notes]), flush=True)
    if not options.only:
        PAGE.write_text(page(findings), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
