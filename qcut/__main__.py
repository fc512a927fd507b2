"""``python -m qcut``, and the command ``qcut``."""

import sys


def main() -> int:
    """Run one command; see `qcut.cli.main.main`."""
    try:
        from qcut.cli.main import main as run
    except KeyboardInterrupt:  # that module takes a part of a second to import
        print("qcut: interrupted", file=sys.stderr)
        return 130
    return run()


if __name__ == "__main__":
    raise SystemExit(main())
