"""``python -m tests.server``: see `tests.server.soak`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.server.serving import Process
from tests.server.soak import GROWTH, soak


def main() -> int:
    """Start a server and let clients loose on it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--clients", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Process(Path(folder) / "log")
        try:
            report = soak(server.port, server.process.pid, arguments.seconds, arguments.clients)
            server.process.terminate()
            status = server.ended()
        finally:
            server.process.kill()
        told = server.log.read_text()
    print("\n".join(report.lines))
    print(told if "Traceback" in told else f"the server ended with {status}")
    return int(bool(report.wrong) or status != 0 or report.growth > GROWTH or "Traceback" in told)


if __name__ == "__main__":
    raise SystemExit(main())
