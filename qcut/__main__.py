"""``python -m qcut``."""

from qcut.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
