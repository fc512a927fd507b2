"""The cluster probe: what can be asked for, and the instructions that attention's cluster form relies on."""

from __future__ import annotations

import pytest

from qcut.emitters.core.arch import ARCHITECTURES, CLUSTER_ARCHITECTURES
from qcut.emitters.core.source import EmitError
from qcut.emitters.decoder.attention.cluster_probe import ClusterProbe, emit_cluster_probe
from qcut.emitters.decoder.attention.mma import CLUSTERS
from tests.support.compiled import build
from tests.support.sass import instructions


def test_the_probe_waits_for_bytes_as_attention_does_but_never_without_an_end() -> None:
    sources = [emit_cluster_probe(ClusterProbe(arch, 8)) for arch in CLUSTER_ARCHITECTURES]
    for source, binary in zip(sources, build(*sources), strict=True):
        names = instructions(binary.cubin)
        assert "SYNCS.ARRIVE.TRANS64" in names, source.name  # mbarrier.arrive.expect_tx
        assert any(name.startswith("SYNCS.PHASECHK.TRANS64") for name in names), source.name  # mbarrier.test_wait
        assert not any(name.endswith("TRYWAIT") for name in names), source.name
        assert any(name.startswith("UCGABAR") for name in names), source.name  # the cluster's barrier
        assert binary.resources is not None
        assert binary.resources.spill_store_bytes == 0


def test_probes_exist_for_clusters_alone() -> None:
    for arch in ARCHITECTURES:
        for cluster in (1, 2, 3, 4, 8, 16):
            if arch in CLUSTER_ARCHITECTURES and cluster in CLUSTERS[1:]:
                assert ClusterProbe(arch, cluster).grid == (cluster, 1, 1)
            else:
                with pytest.raises(EmitError, match="qcut_cluster_probe"):
                    ClusterProbe(arch, cluster)
