"""Whether thread-block clusters of a GPU do what attention's cluster form relies on.

The cluster form was run on `MEASURED` architectures. On others a probe kernel, which ends within `LIMIT_NS`, tries the
exchange once for each device and cluster size, before attention first chooses a cluster. Where the probe fails,
attention divides the context among CTAs that meet in a workspace, and a warning says so once.
"""

from __future__ import annotations

import hashlib
import threading
import time
import warnings
from dataclasses import dataclass

import torch

from qcut.cuda.plans import load
from qcut.dispatch.gpus import Target
from qcut.emitters.decoder.attention.cluster_probe import EXCHANGED, OUTCOMES, ClusterProbe, emit_cluster_probe
from qcut.emitters.decoder.attention.mma import CLUSTERS
from qcut.errors import QcutError
from qcut.jit import build, cache
from qcut.jit.device import driver_version

MEASURED = ("sm_90a",)
"""Architectures on which attention's cluster form has been run and compared."""
LIMIT_NS = 1_000_000_000
"""Time after which the probe gives up by itself."""
_PATIENCE_S = 5.0
SIZES = tuple(size for size in CLUSTERS if size > 1)
"""CTAs of the clusters that attention may use."""


@dataclass(frozen=True)
class Outcome:
    """What a probe found.

    Attributes:
        works: whether every CTA of the cluster received the right parts.
        text: what happened, for messages.
    """

    works: bool
    text: str


def probe_all(device: int, arch: str) -> list[Outcome]:
    """Run the probe kernel for every size of clusters that attention may use."""
    return [probe(device, size, arch) for size in SIZES]


def probe(device: int, cluster: int, arch: str, *, silent: int = -1, limit_ns: int = LIMIT_NS) -> Outcome:
    """Run the probe kernel, and wait for it.

    Args:
        device: CUDA ordinal.
        cluster: CTAs of the cluster: 2, 4 or 8.
        arch: architecture of the device.
        silent: rank of a CTA that sends nothing, so that the probe must fail; -1: none.
        limit_ns: time after which the kernel gives up.

    Returns:
        The outcome. A kernel that cannot be built or launched, or that does not end, is one that failed.
    """
    desc = ClusterProbe(arch, cluster)
    source = emit_cluster_probe(desc)
    try:
        kernel = load(source, device)
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                outcomes, meeting = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (cluster, 2))
                args = (outcomes.data_ptr(), meeting.data_ptr(), limit_ns, silent)
                torch.cuda.synchronize()  # work that was queued before does not count as the probe's
                kernel.launch(desc.grid, args, stream.cuda_stream)
                ended = torch.cuda.Event()
                ended.record()
                until = time.monotonic() + _PATIENCE_S + limit_ns * 1e-9
                while not ended.query():
                    if time.monotonic() > until:
                        return Outcome(False, "the probe kernel did not end")
                    time.sleep(1e-4)
                found = outcomes.tolist()
    except (QcutError, RuntimeError) as error:
        return Outcome(False, str(error).splitlines()[0])
    worst = max(found, key=lambda code: (code != EXCHANGED, code))
    return Outcome(worst == EXCHANGED, f"a cluster of {cluster} CTAs {OUTCOMES.get(worst, f'reported {worst}')}")


def are_usable(gpu: Target, device: int, cluster: int) -> bool:
    """Whether attention may use clusters of a size on a device. Probes where nothing is known, and warns of a failure.

    During the capture of a CUDA graph nothing can be probed, and clusters count as unusable where nothing is known.

    Args:
        gpu: dispatch's description of the device.
        device: CUDA ordinal.
        cluster: CTAs of the cluster.
    """
    if gpu.arch in MEASURED:
        return True
    with _lock:
        found = _outcomes.get((device, cluster))
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                return False
            found = _outcomes[device, cluster] = _remembered(gpu, device, cluster)
            if not found.works:
                warnings.warn(
                    f"qcut: on {gpu.name or gpu.arch}, {found.text}; attention does without clusters, which takes "
                    "longer at long contexts (`qcut doctor` tries clusters again)",
                    RuntimeWarning,
                    stacklevel=2,
                )
    return found.works


_outcomes: dict[tuple[int, int], Outcome] = {}
_lock = threading.Lock()


def _remembered(gpu: Target, device: int, cluster: int) -> Outcome:
    """The outcome of a probe; one that worked is remembered on disk for the same GPU, driver and kernel."""
    source = emit_cluster_probe(ClusterProbe(gpu.arch, cluster))
    try:
        facts = (source.name, gpu.name, driver_version(), build(source).key)
    except QcutError as error:  # no compiler, or no driver
        return Outcome(False, str(error).splitlines()[0])
    name, key = f"{source.name}_outcome", hashlib.sha256(repr(facts).encode()).hexdigest()
    stored = cache.read(name, key)
    if stored is not None:
        if isinstance(text := stored.meta.get("text"), str):
            return Outcome(True, text)
        cache.refuse(name, key, "holds no outcome")
    found = probe(device, cluster, gpu.arch)
    if found.works:
        with cache.locked(key):
            cache.write(name, key, cache.Entry({"text": found.text}, {}))
    return found
