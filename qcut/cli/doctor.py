"""``qcut doctor``: GPUs, driver, compilers, headers and cache of this machine, and advice if one is missing."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Literal

from qcut.cli.command import Answer, Command
from qcut.common.versions import install
from qcut.dispatch import tables as tuned
from qcut.dispatch.gpus import Target, target_for
from qcut.dispatch.machines import Rates
from qcut.emitters.core.arch import ARCHITECTURES
from qcut.emitters.core.source import KernelSource, Param
from qcut.errors import BuildError, ConfigError, QcutError, UnsupportedError
from qcut.jit import cache, device, folders, launch, packs, toolchain
from qcut.jit.build import compile_source

State = Literal["ok", "warn", "missing"]

DRIVER_CUDA_MAJOR = 13
"""CUDA version of the compilers qcut installs."""

LOW_DISK_BYTES = 256 << 20
"""Free bytes below which the report warns."""

_PACKAGES = ("torch", "nvidia-cutlass", "cuda-core", "cuda-bindings", "safetensors", "transformers")


FIELDS = {
    "healthy": "true if nothing except a GPU is missing; with --selftest, if nothing differs",
    "findings": "list of {topic, state: ok, warn or missing, text, advice}; empty with --selftest",
    "verdict": "what this machine can do, in a sentence; empty with --selftest",
    "selftest": "list of {gpu, family, shape, kernels, problem, skipped}; empty without --selftest",
}


COMMAND = Command(
    "doctor",
    """\
--no-probe
    do not compile anything
--selftest
    instead, run every family of kernels once on each GPU, compare with the CPU's reference, and report differences;
    exit status 1 if there are any, or without a GPU
--device N: natural
    GPU that --selftest tests (default: all)
""",
    help="check GPUs, driver, compilers and cache of this machine",
    description="Reports GPUs, driver, compilers, headers and kernel cache of this machine, and how to install what\n"
    "is missing. Compiles one small kernel with each toolchain. The exit status is 1 if anything except a GPU\n"
    "is missing.",
    example="qcut doctor\nqcut doctor --selftest",
    fields=FIELDS,
)


def run(arguments: argparse.Namespace) -> Answer:
    """Run the command."""
    if arguments.selftest:
        from qcut.cli.selftest import selftest_gpus

        verdicts = selftest_gpus(arguments.device)
        healthy = not any(verdict["problem"] for verdict in verdicts)
        return Answer(
            {"healthy": healthy, "findings": [], "verdict": "", "selftest": verdicts}, status=0 if healthy else 1
        )
    if arguments.device is not None:
        raise ConfigError("doctor: --device goes with --selftest")
    findings = examine(compile_probe=not arguments.no_probe)
    text, healthy = report(findings), is_healthy(findings)
    data = {"findings": [asdict(finding) for finding in findings], "verdict": text.splitlines()[-1], "selftest": []}
    return Answer({"healthy": healthy, **data}, text, 0 if healthy else 1)


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        topic: what was examined, such as ``nvcc``.
        state: ``ok``; ``warn`` (works with a restriction); ``missing``.
        text: version, path or error.
        advice: how to solve the problem; empty if there is none.
    """

    topic: str
    state: State
    text: str
    advice: str = ""

    def __str__(self) -> str:
        mark = {"ok": "ok  ", "warn": "warn", "missing": "MISS"}[self.state]
        return f"[{mark}] {self.topic:<14} {self.text}" + (f"\n{'':7}-> {self.advice}" if self.advice else "")


def examine(compile_probe: bool = True) -> list[Finding]:
    """Examine packages, GPUs, driver, compilers, headers and the cache.

    Args:
        compile_probe: also compile one small kernel with each toolchain, which takes a few seconds and finds
            compilers that are installed but do not work.

    Returns:
        The findings, in reading order. Missing things never raise.
    """
    gpus, findings = _gpus()
    findings.insert(0, _packages())
    for topic, find in (
        ("NVRTC", lambda: _tool(toolchain.find_nvrtc())),
        ("CUDA headers", lambda: _headers(toolchain.find_cuda_include())),
        ("nvcc", lambda: _tool(toolchain.find_nvcc())),
        ("g++", lambda: _tool(toolchain.find_gxx())),
        ("CUTLASS", lambda: _headers(toolchain.find_cutlass_include())),
    ):
        findings.append(_attempt(topic, find))
    if importlib.util.find_spec("torch") is not None:
        findings.append(_cpp_operators())
    if compile_probe:
        findings += _probe("raw kernels", "nvrtc", gpus) + _probe("CUTLASS route", "nvcc", gpus)
    findings += _packs(gpus)
    findings += [_table(gpu) for gpu in {gpu.name: gpu for gpu in gpus}.values()]
    findings.append(_cache())
    return findings


def is_healthy(findings: list[Finding]) -> bool:
    """Whether nothing is missing.

    A machine without a GPU or driver is healthy: it builds kernels for other machines. So is a machine without
    compilers if there are packs for its GPUs.
    """
    spared = {"driver", "GPU"} | (_COMPILERS if _is_packed(findings) else frozenset())
    return not any(finding.state == "missing" and finding.topic not in spared for finding in findings)


def _is_packed(findings: list[Finding]) -> bool:
    """Whether there are packs for all GPUs."""
    found = [finding for finding in findings if finding.topic.startswith("pack ")]
    return bool(found) and all(finding.state == "ok" and finding.text != _NO_PACK for finding in found)


def report(findings: list[Finding]) -> str:
    """The findings as text; the last line is a summary."""
    missing = {finding.topic for finding in findings if finding.state == "missing"}
    if missing & _COMPILERS and _is_packed(findings):
        verdict = "Packs bring the kernels of layers and engines; others cannot be built here."
    elif missing & {"NVRTC", "CUDA headers", "raw kernels"}:
        verdict = "CUDA kernels cannot be built here; on the CPU the reference arithmetic runs."
    elif missing & {"nvcc", "g++", "CUTLASS", "CUTLASS route"}:
        verdict = "Raw kernels can be built here, CUTLASS kernels cannot: large GEMMs will be slower."
    else:
        verdict = "Every kernel can be built here."
    if missing & {"driver", "GPU", "launch"}:
        verdict += " There is no usable GPU to run them on (`qcut precompile --arch` works without one)."
    return "\n".join([*map(str, findings), "", verdict])


def _packages() -> Finding:
    from qcut import __version__

    packages = []
    for package in _PACKAGES:
        try:
            packages.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            packages.append(f"{package} -")
    text = f"qcut {__version__}, Python {platform.python_version()}, {platform.machine()}; {', '.join(packages)}"
    if sys.platform != "linux":
        return Finding("packages", "warn", text, "CUDA kernels need Linux")
    if importlib.util.find_spec("torch") is None:
        return Finding("packages", "missing", text, "pip install torch")
    if importlib.util.find_spec("transformers") is None:
        return Finding(
            "packages", "warn", text, f"models of transformers, and commands that read them: {install('hf')}"
        )
    return Finding("packages", "ok", text)


def _gpus() -> tuple[list[device.Device], list[Finding]]:
    """The usable GPUs, and the findings about driver and GPUs."""
    try:
        version = device.driver_version()
        gpus = device.devices()
    except QcutError as error:
        advice = "to run kernels, install the NVIDIA driver, 580 or newer"
        return [], _amd() or [Finding("driver", "missing", str(error), advice)]
    findings = [Finding("driver", "ok", f"supports CUDA {version}")]
    if int(version.partition(".")[0]) < DRIVER_CUDA_MAJOR:
        advice = "install driver 580 or newer: an older one may refuse code of CUDA 13 compilers"
        findings = [Finding("driver", "warn", f"supports CUDA {version}", advice)]
    for gpu in gpus:
        text = f"{gpu}, {gpu.sm_count} SMs, {gpu.memory_bytes / 2**30:.0f} GiB"
        findings.append(Finding("GPU", "ok", text))
        findings.append(_path(str(gpu), _refusal(gpu)))
    if not gpus:
        findings.append(Finding("GPU", "missing", "the driver sees none", "check nvidia-smi and CUDA_VISIBLE_DEVICES"))
    return [gpu for gpu in gpus if _refusal(gpu) is None], findings


def _refusal(gpu: device.Device) -> str | None:
    """Reason why qcut's CUDA kernels do not run on a GPU, or None."""
    try:
        target_for(gpu.cc, gpu.sm_count, gpu.name)
    except UnsupportedError as error:
        return str(error)
    return None


def _path(gpu: str, refusal: str | None) -> Finding:
    """The back end of layers on a GPU."""
    if refusal is None:
        return Finding("layers", "ok", f"CUDA back end on {gpu}: qcut's kernels")
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        advice = "pip install triton, in the version that this build of torch names"
        return Finding("layers", "missing", f"none on {gpu}: {refusal}, and the Triton back end needs triton", advice)
    return Finding(
        "layers", "warn", f"Triton back end on {gpu}: triton {version} ({refusal})", "the engine needs CUDA kernels"
    )


def _amd() -> list[Finding]:
    """The GPUs of a ROCm build of torch."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    from qcut.ops import paths

    if torch.version.hip is None:
        return []
    return [_path(f"cuda:{ordinal}", reason) for ordinal, reason in paths.refusals().items()]


def _tool(tool: toolchain.Tool) -> str:
    return f"{tool.version}  {tool.path}"


def _headers(headers: toolchain.Headers) -> str:
    return f"{headers.version}  {headers.paths[0]}"


def _cpp_operators() -> Finding:
    from qcut.backends.cuda.launch import native as _native

    if (problem := _native.problem()) is None:
        return Finding("C++ operators", "ok", "g++ and torch's headers are there")
    return Finding("C++ operators", "warn", problem, "Python serves the layers' calls instead, at more CPU time each")


def _target(gpu: device.Device) -> Target:
    return target_for(gpu.cc, gpu.sm_count, gpu.name, lambda: Rates.of(**device.rates(gpu.ordinal)))


def _table(gpu: device.Device) -> Finding:
    try:
        target = _target(gpu)
        table, start = tuned.table_on(target), tuned.start_of(target)
    except QcutError as error:
        return Finding("tuned table", "missing", str(error))
    text = "; ".join(table.notes) or f"none for {gpu.name}: a cost model chooses its kernels, for {target.machine}"
    if table.partial:
        return Finding("tuned table", "warn", text, "`qcut tune` on this GPU measures what is ignored again")
    return Finding("tuned table", "ok", text, "" if table.rows and not start else "`qcut tune` measures this GPU's")


def _packs(gpus: list[device.Device]) -> list[Finding]:
    """The packs of the GPUs' architectures; without a GPU, all packs."""
    found = set()
    for gpu in gpus:
        with contextlib.suppress(QcutError):  # an unsupported GPU
            found.add(_target(gpu).arch)
    if gpus:
        return [_pack(arch) for arch in ARCHITECTURES if arch in found]
    return [finding for arch in ARCHITECTURES if (finding := _pack(arch)).text != _NO_PACK]


_COMPILERS = frozenset({"NVRTC", "CUDA headers", "raw kernels", "nvcc", "g++", "CUTLASS", "CUTLASS route"})
_NO_PACK = "none: kernels are built when they are first needed"


def _pack(arch: str) -> Finding:
    """The pack of an architecture; kernels in it are not built."""
    topic = f"pack {arch}"
    try:
        pack = packs.installed(arch)
    except (BuildError, ConfigError) as error:
        return Finding(topic, "missing", str(error))
    if pack is None:
        return Finding(topic, "ok", _NO_PACK, f"`qcut precompile --arch {arch}` builds all of them ahead of time")
    needs = f"; its CUTLASS kernels need {pack.facts['needs']}" if pack.facts.get("needs") else ""
    return Finding(topic, "ok", f"{len(pack)} kernels, {pack.path.stat().st_size / 1e6:.1f} MB, {pack.path}{needs}")


def _attempt(topic: str, find: Callable[[], str]) -> Finding:
    try:
        return Finding(topic, "ok", find())
    except (BuildError, ConfigError) as error:
        return Finding(topic, "missing", str(error))


def _probe(topic: str, kind: Literal["nvrtc", "nvcc"], gpus: list[device.Device]) -> list[Finding]:
    """Compile an empty kernel, and launch it if there is a GPU."""
    source = probe_source(kind, gpus[0].cc if gpus else None)
    start = time.perf_counter()
    try:
        binary = compile_source(source)
    except (BuildError, ConfigError) as error:
        return [Finding(topic, "missing", f"a probe does not compile: {error}")]
    text = f"compiled a probe for {source.arch} in {time.perf_counter() - start:.1f} s"
    findings = [Finding(topic, "ok", text)]
    if gpus and kind == "nvrtc":
        try:
            launch.load(binary, source, gpus[0].ordinal).launch((1, 1, 1), (0,), 0)
            findings.append(Finding("launch", "ok", f"a probe runs on {gpus[0]}"))
        except QcutError as error:
            findings.append(Finding("launch", "missing", str(error), "the driver may be older than the compiler"))
    return findings


def probe_source(kind: Literal["nvrtc", "nvcc"], cc: tuple[int, int] | None) -> KernelSource:
    """An empty kernel with the headers of real kernels.

    Args:
        kind: toolchain to exercise.
        cc: compute capability to compile for; None takes sm_90a.
    """
    number = "90" if cc is None else f"{cc[0]}{cc[1]}"
    # sm_80 code runs on every GPU of its major version that has no entry of its own.
    arch = next((a for a in ARCHITECTURES if a.removeprefix("sm_").rstrip("a") == number), "sm_80")
    text = "#include <cuda_fp16.h>\n#include <cuda_bf16.h>\n"
    host = None
    if kind == "nvcc":
        text += "#include <cutlass/cutlass.h>\n"
        host = (
            "#include <cutlass/cutlass.h>\n#include <cuda.h>\n"
            'extern "C" int qcut_launch(void const*, void*, void*, int) { return CUDA_SUCCESS; }\n'
            'extern "C" long qcut_query(int, void const*) { return 0; }\n'
        )
    return KernelSource(
        name=f"qcut_probe_{kind}",
        text=text + 'extern "C" __global__ void qcut_probe(int) {}\n',
        entry="qcut_probe",
        params=(Param("unused", "i32"),),
        arch=arch,
        toolchain=kind,
        block=32,
        host_text=host,
        includes=("qcut", "cutlass") if kind == "nvcc" else ("qcut",),
    )


def _cache() -> Finding:
    try:
        base = cache.directory()
    except ConfigError as error:
        return Finding("cache", "missing", str(error), "no kernel is built before this is mended")
    if base is None:
        return Finding("cache", "warn", "no home directory", "set QCUT_CACHE_DIR to a writable directory")
    try:
        with folders.opened(base, "kernels", make=True), tempfile.TemporaryFile(dir=base) as file:
            file.write(b"qcut")
        free = shutil.disk_usage(base).free
    except folders.DistrustedError as error:
        return Finding("cache", "warn", f"{error}; kernels are built again by every process")
    except OSError as error:
        text = f"{base} cannot be written ({error.strerror}); kernels are built again by every process"
        return Finding("cache", "warn", text, "set QCUT_CACHE_DIR to a writable directory")
    sizes = [path.stat().st_size for path in (base / "kernels").glob("*.qcut")]
    text = f"{base}: {len(sizes)} kernels, {sum(sizes) / 2**20:.1f} MiB, {free / 2**30:.1f} GiB free"
    if free < LOW_DISK_BYTES:
        return Finding("cache", "warn", text, "make room: a CUTLASS kernel needs some MiB while it is built")
    return Finding("cache", "ok", text)
