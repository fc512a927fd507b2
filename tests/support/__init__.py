"""Oracles, data and stand-ins that tests of several folders use, and folders of the checkout."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
