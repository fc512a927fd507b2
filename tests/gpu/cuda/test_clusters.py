"""The clusters' probe on a GPU: it passes where clusters work, and ends by itself where they would not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from qcut.cuda import clusters
from qcut.cuda.clusters import Outcome, probe
from qcut.cuda.plans import forget_plans, target
from qcut.numerics.int8 import sqnr_db
from tests.gpu.support.oracles import DEVICE, assert_same

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="clusters need sm_90 and later"
)


def here() -> tuple[int, str]:
    device = torch.cuda.current_device()
    return device, target(device).arch


@pytest.mark.parametrize("cluster", clusters.SIZES)
def test_clusters_exchange_their_parts(cluster: int) -> None:
    device, arch = here()
    for _ in range(20):
        assert probe(device, cluster, arch) == Outcome(True, f"a cluster of {cluster} CTAs exchanged its parts")


@pytest.mark.parametrize(("cluster", "silent"), [(2, 0), (8, 7)])
def test_a_cta_that_sends_nothing_ends_the_probe_in_time(cluster: int, silent: int) -> None:
    device, arch = here()
    assert probe(device, cluster, arch).works  # built and loaded
    start = time.monotonic()
    found = probe(device, cluster, arch, silent=silent)
    took = time.monotonic() - start
    assert found == Outcome(False, f"a cluster of {cluster} CTAs waited in vain for its parts")
    assert 0.9 < took < 2.0
    assert probe(device, cluster, arch).works
    assert torch.ones(1000, device=DEVICE).sum().item() == 1000


def attend() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    q, keys = torch.randn(1, 20, 64, generator=generator), torch.randn(1, 20, 1024, 64, generator=generator)
    q, keys = q.half().to(DEVICE), keys.half().to(DEVICE)
    positions = torch.tensor([1000], dtype=torch.int32, device=DEVICE)
    y: torch.Tensor = torch.ops.qcut.decode_attention(q, keys, keys.flip(2), None, None, positions, 0.125)
    return y


def test_attention_probes_where_nothing_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forget_plans()
    with_clusters = attend()
    monkeypatch.setenv("QCUT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(clusters, "MEASURED", ())
    monkeypatch.setattr(clusters, "_outcomes", {})
    forget_plans()
    assert_same(attend(), with_clusters)  # the probe ran, and let clusters pass
    assert [outcome.works for outcome in clusters._outcomes.values()] == [True]

    monkeypatch.setattr(clusters, "_outcomes", {})
    monkeypatch.setattr(clusters, "_remembered", lambda gpu, device, cluster: Outcome(False, "it waited in vain"))
    forget_plans()
    with pytest.warns(RuntimeWarning, match="attention does without clusters"):
        without = attend()
    forget_plans()
    assert sqnr_db(with_clusters.double().cpu(), without.double().cpu()) > 50
    assert clusters._outcomes
