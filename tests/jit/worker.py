"""Builds one kernel with a stand-in compiler, in a process that a test can race, starve or kill.

Prints ``compiling`` when the compiler starts, then one line of JSON: the cubin's size and the warnings.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import time
import warnings
from importlib import import_module
from pathlib import Path

import tqdm  # noqa: F401  (imported while this process may still read every folder)

from qcut.emitters.core.source import KernelSource, Param

builder = import_module("qcut.jit.build")
toolchain = import_module("qcut.jit.toolchain")

NOBODY = 65534


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path, required=True, help="gets one line per compilation")
    parser.add_argument("--seconds", type=float, default=0.0, help="how long the compiler takes")
    parser.add_argument("--size", type=int, default=1000, help="bytes of cubin")
    parser.add_argument("--file-limit", type=int, help="largest file this process may write")
    parser.add_argument("--unprivileged", action="store_true", help="give up root, for whom nothing is read-only")
    parser.add_argument("--die-in-rename", action="store_true", help="be killed between writing and renaming")
    arguments = parser.parse_args()

    def compile_text(source: KernelSource, *, device: bool = True) -> tuple[bytes, None, str]:
        with arguments.log.open("a") as log:
            log.write(f"{os.getpid()}\n")
        print("compiling", flush=True)
        time.sleep(arguments.seconds)
        return b"\x7fELF" * (arguments.size // 4), None, "said nothing"

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    builder.compile_text = compile_text
    toolchain.find_nvrtc()  # found with full rights; what is tested is the cache
    arguments.log.touch()
    if arguments.die_in_rename:
        os.replace = die
    if arguments.file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (arguments.file_limit, arguments.file_limit))
    if arguments.unprivileged and os.geteuid() == 0:
        arguments.log.chmod(0o666)
        os.seteuid(NOBODY)
    source = KernelSource("worker", "// text", "worker", (Param("n", "i32"),), "sm_80", block=32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        binary = builder.build(source)
        builder.build(source)
        builder.build_many([source, KernelSource("second", "// 2", "worker", (), "sm_80")], jobs=1, progress=False)
    print(json.dumps({"bytes": len(binary.cubin), "warnings": [str(w.message) for w in caught]}))


if __name__ == "__main__":
    main()
