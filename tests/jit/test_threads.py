"""Builds from many threads, many processes, and processes that were forked, or killed, in the middle of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

PRELUDE = """
import collections, json, os, signal, sys, threading, time, warnings
from importlib import import_module
from qcut.emitters.core.source import KernelSource
from qcut.jit import build, build_many, cache, toolchain
builder = import_module("qcut.jit.build")

def source(name):
    return KernelSource(name, f'extern "C" __global__ void {name}(int* p) {{ *p = 7; }}', name, (), "sm_80")

def counted(seconds=0.0, real=builder.compile_text):
    def compile_text(source, *, device=True):
        with open(sys.argv[1], "a") as log:
            log.write(source.name + "\\n")
        time.sleep(seconds)
        return real(source, device=device)
    builder.compile_text = compile_text

def compilations():
    return dict(collections.Counter(open(sys.argv[1]).read().split()))

def forked(run):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            run()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    return child

def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""


def result_of(script: str, tmp_path: Path) -> Any:
    """What a fresh process prints as JSON. Its warnings are errors."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "QCUT_CACHE_DIR": str(tmp_path / "cache")}
    (tmp_path / "log").touch()
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", PRELUDE + script]
    command += [str(tmp_path / "log"), str(tmp_path / "cache" / "kernels")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("attempt", range(3))
def test_first_build_of_a_process_by_eight_threads(tmp_path: Path, attempt: int) -> None:
    """Nothing is imported or found before: threads race for all of it."""
    script = """
together, failures, built = threading.Barrier(8), [], []
def run(i):
    together.wait()
    try:
        built.append(build(source(f"k{i % 4}")))
    except Exception as error:
        failures.append(repr(error))
counted()
threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps([failures, len({id(binary) for binary in built}), compilations()]))
"""
    assert result_of(script, tmp_path) == [[], 4, {f"k{i}": 1 for i in range(4)}]


def test_every_search_by_eight_threads_runs_once(tmp_path: Path) -> None:
    script = """
together, failures, runs = threading.Barrier(8), [], []
real = toolchain._run
toolchain._run = lambda command, *more: (runs.append(command[1]), real(command, *more))[1]
def run(i):
    together.wait()
    try:
        for find in (toolchain.find_nvcc, toolchain.find_gxx, toolchain.find_cutlass_include, toolchain.find_nvrtc):
            find()
    except Exception as error:
        failures.append(repr(error))
threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps([failures, sorted(runs)]))
"""
    assert result_of(script, tmp_path) == [[], ["--dryrun", "--version", "--version"]]


def test_eight_processes_build_ten_kernels_once(tmp_path: Path) -> None:
    script = """
counted(0.05)
sources = [source(f"k{i}") for i in range(10)]
def run():
    results = build_many(sources, jobs=2, progress=False)
    assert all(result.cubin for result in results.values()), results
children = [forked(run) for _ in range(8)]
print(json.dumps([[ended(child) for child in children], compilations()]))
"""
    assert result_of(script, tmp_path) == [[0] * 8, {f"k{i}": 1 for i in range(10)}]


def test_a_worker_killed_amid_a_build_stops_nobody(tmp_path: Path) -> None:
    """Siblings and the parent build the victim's kernel and others, with threads and with a bar, at once."""
    script = """
sources = [source(f"k{i}") for i in range(3)]
def die():
    counted(60.0)
    build_many(sources, jobs=3, progress=True)
victim = forked(die)
while len(compilations()) < 3:
    time.sleep(0.02)
counted()
waiting = forked(lambda: build(sources[0]))
time.sleep(0.1)
os.kill(victim, signal.SIGKILL)
start = time.monotonic()
sibling = forked(lambda: build_many(sources, progress=True))
codes = [ended(child) for child in (victim, waiting, sibling)]
build_many(sources, progress=True)
print(json.dumps([codes, time.monotonic() - start < 20, compilations()]))
"""
    codes, soon, compiled = result_of(script, tmp_path)
    assert codes == [-9, 0, 0]
    assert soon
    assert compiled == {f"k{i}": 2 for i in range(3)}  # by the victim, and once by the others


def test_stopped_builder_is_passed_over_and_harms_nobody(tmp_path: Path) -> None:
    script = """
keylocks = import_module("qcut.jit.keylocks")
keylocks.PATIENCE_S = 0.5
warnings.simplefilter("ignore")  # the waiter's own; its text is tested with the locks
def slowly():
    counted(0.5)
    build(source("a"))
builder_ = forked(slowly)
while not compilations():
    time.sleep(0.02)
os.kill(builder_, signal.SIGSTOP)
counted()
waiter = ended(forked(lambda: build(source("a"))))
first = cache.read("a", builder.device_fingerprint(source("a")))
os.kill(builder_, signal.SIGCONT)
codes = [waiter, ended(builder_)]
second = cache.read("a", builder.device_fingerprint(source("a")))
print(json.dumps([codes, compilations(), first.blobs == second.blobs, len(os.listdir(sys.argv[2]))]))
"""
    assert result_of(script, tmp_path) == [[0, 0], {"a": 2}, True, 1]


def test_a_child_forked_while_threads_build_can_build(tmp_path: Path) -> None:
    """Its parent's threads hold the locks of keys, of searches and of loading, and end after the fork."""
    script = """
toolchain.find_nvrtc()
counted(1.5)
loading = import_module("qcut.jit.launch")._lock
def hold():
    with loading, toolchain.find_nvrtc._lock, toolchain.find_gxx._lock:
        build(source("a"))
import qcut.common.locks as locks
locks.FORK_TIMEOUT_S = 0.1
threads = [threading.Thread(target=hold), threading.Thread(target=lambda: build(source("b")))]
[thread.start() for thread in threads]
while len(compilations()) < 2:
    time.sleep(0.02)
def run():
    builder._memory.clear()
    for name in "cab":
        build(source(name))
    toolchain.reset()
    toolchain.find_gxx()
    with loading:
        pass
start = time.monotonic()
child = forked(run)
code = ended(child)
soon = time.monotonic() - start < 25
[thread.join() for thread in threads]
print(json.dumps([code, soon, compilations()]))
"""
    assert result_of(script, tmp_path) == [0, True, {"a": 1, "b": 1, "c": 1}]


def test_a_fork_waits_for_an_import_to_end(tmp_path: Path) -> None:
    """In the child, a half imported package would stay so for ever."""
    script = """
import importlib.abc
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "cuda.core":
            begun.set()
            time.sleep(0.3)
sys.meta_path.insert(0, Slow())
begun = threading.Event()
thread = threading.Thread(target=lambda: build(source("a")))
thread.start()
begun.wait()
children = [forked(lambda: build(source("b"))) for _ in range(3)]
codes = [ended(child) for child in children]
thread.join()
print(json.dumps(codes))
"""
    assert result_of(script, tmp_path) == [0, 0, 0]


def test_a_fork_waits_for_nvrtc_to_end(tmp_path: Path) -> None:
    """In the child, NVRTC's own locks would stay held for ever; here a lock stands for them."""
    script = """
toolchain.find_nvrtc()
real, options = toolchain.program_class()
inside, begun = threading.Lock(), threading.Event()
class Program(real):
    def compile(self, *args, **kwargs):
        with inside:
            begun.set()
            time.sleep(0.3)
            return super().compile(*args, **kwargs)
toolchain.program_class = lambda: (Program, options)
thread = threading.Thread(target=lambda: build(source("a")))
thread.start()
begun.wait()
children = [forked(lambda: build(source("b"))) for _ in range(3)]
codes = [ended(child) for child in children]
thread.join()
print(json.dumps(codes))
"""
    assert result_of(script, tmp_path) == [0, 0, 0]


def test_a_fault_in_a_package_is_named(tmp_path: Path) -> None:
    """It is neither taken for an older package nor remembered."""
    script = """
import cuda.core
real, problems = cuda.core.__dict__.pop("Program"), []
try:
    build(source("a"))
except Exception as error:
    problems += [type(error).__name__, "has no attribute 'Program'" in str(error)]
cuda.core.Program = real
problems.append(len(build(source("a")).cubin) > 0)
print(json.dumps(problems))
"""
    assert result_of(script, tmp_path) == ["ToolchainError", True, True]
