"""The server's metrics in Prometheus' format."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from qcut.engine.scheduler import Scheduler
from qcut.engine.sequence import Event

_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """Counters of one server.

    Args:
        scheduler: its load is exported, too.

    Attributes:
        connections: gauge of open connections.
        body_bytes: gauge of the bytes of bodies in memory.
        most_connections: gauge of the limit on connections.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Load(scheduler))
        ProcessCollector(registry=registry)
        self._ends = Counter("qcut_requests", "Sequences that have ended, by reason", ["reason"], registry=registry)
        self._refused = Counter("qcut_refused", "Requests refused, by status", ["status"], registry=registry)

        self._closed = Counter(
            "qcut_connections_closed",
            "Connections that the server has closed, by reason",
            ["reason"],
            registry=registry,
        )
        self.connections = Gauge("qcut_connections", "Connections that are open", registry=registry)
        self.body_bytes = Gauge("qcut_body_bytes", "Bytes of the bodies that are held", registry=registry)
        self.most_connections = Gauge("qcut_connections_most", "Connections that may be open", registry=registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"qcut_{name}_seconds", text, buckets=_SECONDS, registry=registry)

        self._first = histogram("time_to_first_token", "From a request to its first token")
        self._between = histogram("time_between_tokens", "From a sequence's token to its next")
        self._whole = histogram("sequence", "From a request to the end of its sequence")

    @property
    def text(self) -> bytes:
        """All metrics as text."""
        return generate_latest(self._registry)

    def refused(self, status: int) -> None:
        """Count a refused request."""
        self._refused.labels(str(status)).inc()

    def closed(self, reason: str) -> None:
        """Count a connection closed by the server's limits."""
        self._closed.labels(reason).inc()

    def watch(self) -> Watch:
        """Start measuring a request."""
        return Watch(self._ends, self._first, self._between, self._whole)


class Watch:
    """Measures the sequences of one request."""

    def __init__(self, ends: Counter, first: Histogram, between: Histogram, whole: Histogram) -> None:
        self._ends, self._first, self._between, self._whole = ends, first, between, whole
        self._start = perf_counter()
        self._last: dict[int, float] = {}

    def take(self, choice: int, event: Event, now: float) -> None:
        """Measure an event at a time of ``perf_counter``."""
        if event.token is not None:
            last = self._last.get(choice)
            if last is None:
                self._first.observe(now - self._start)
            else:
                self._between.observe(now - last)
            self._last[choice] = now
        if event.reason is not None:
            self._ends.labels(event.reason).inc()
            self._whole.observe(now - self._start)


class _Load(Collector):
    """Collector of the scheduler's load."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """The metrics at this time."""
        load, engine = self._scheduler.load, self._scheduler.engine
        for name, text, value in (
            ("qcut_requests_waiting", "Prompts that wait", load.waiting),
            ("qcut_prompts_reading", "Prompts that are being read", load.prefilling),
            ("qcut_sequences_running", "Sequences that are being continued", load.running),
            ("qcut_sequences_most", "Sequences that may run at once", engine.batch),
            ("qcut_context_tokens", "Most tokens of a sequence", engine.context),
            ("qcut_kept_tokens", "Tokens in the prefix cache", load.prefix_cache_tokens),
        ):
            yield GaugeMetricFamily(name, text, value)
        yield GaugeMetricFamily("qcut_cache_bytes", "Memory for keys and values", self._scheduler.cache_bytes)
        if (device := engine.decoder.device).type == "cuda":
            taken = torch.cuda.memory_allocated(device)
            yield GaugeMetricFamily("qcut_gpu_bytes", "Memory of the GPU that is taken, weights and all", taken)
        for name, text, value in (
            ("qcut_prompt_tokens", "Tokens of prompts", load.prompt_tokens),
            ("qcut_prompt_tokens_found", "Of these, tokens found in the prefix cache", load.reused_tokens),
            ("qcut_new_tokens", "New tokens", load.new_tokens),
            ("qcut_steps", "Steps of the batch", load.steps),
            ("qcut_drafted_tokens", "Drafted tokens that steps have verified", load.drafted_tokens),
            ("qcut_accepted_tokens", "Of these, tokens that were right, which are new tokens", load.accepted_tokens),
        ):
            yield CounterMetricFamily(name, text, value)
