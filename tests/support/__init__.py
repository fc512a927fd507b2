"""What tests share: oracles, data, fakes. Folders of the checkout."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
