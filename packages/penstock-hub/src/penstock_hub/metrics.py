"""The hub's metrics for Prometheus."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec

from penstock.hub.auth import Caller
from penstock_hub.directory import Directory

# Importing prometheus-client takes 23 ms, and the first process of every host would wait for it. So a request for the
# metrics imports it, and so does `run_hub`.
if TYPE_CHECKING:
    from prometheus_client.core import Metric

# Most requests take a millisecond. After 5 s (`client.ATTEMPT_S`) every caller has given up.
_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_COUNTS = {
    "hellos": "Members that joined.",
    "leaves": "Members that left.",
    "grants": "Grants issued.",
    "claimed_chunks": "Chunks assigned to be read from storage.",
    "complaints": "Complaints about sources.",
}


class _Seconds(msgspec.Struct):
    """The durations of one operation's requests: their sum, and their number in each bucket and above the last."""

    total: float = 0.0
    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(_BUCKETS) + 1))


class Metrics:
    """The metrics of one hub process."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        # Several threads answer requests.
        self._lock = threading.Lock()
        self._seconds: defaultdict[str, _Seconds] = defaultdict(_Seconds)
        self._refusals: Counter[int] = Counter()

    @contextmanager
    def timed(self, operation: str) -> Iterator[None]:
        """Count a request and measure its time."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            with self._lock:
                known = self._seconds[operation]
                known.total += seconds
                known.counts[bisect_left(_BUCKETS, seconds)] += 1

    def refused(self, status: int) -> None:
        """Count a response with an error status."""
        with self._lock:
            self._refusals[status] += 1

    def page(self, caller: Caller | None = None) -> bytes:
        """Return the metrics in Prometheus' text format, limited to the caller's models."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        registry.register(_Fleet(self._directory, caller or Caller()))
        if caller is None or caller.models is None:
            registry.register(self)
        return bytes(generate_latest(registry))

    def describe(self) -> Iterator[Metric]:
        """Return no metrics, because their names need no check against other collectors."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the durations of requests by operation, and the number of refusals by status."""
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        about = "Time from the head of a request to its answer."
        durations = HistogramMetricFamily("penstock_hub_request_seconds", about, labels=["operation"])
        refusals = CounterMetricFamily("penstock_hub_refusals", "Answers with an error status.", labels=["status"])
        with self._lock:
            for operation, known in self._seconds.items():
                # The bucket of a limit also counts the shorter requests.
                limits = zip((*map(str, _BUCKETS), "+Inf"), accumulate(known.counts), strict=True)
                durations.add_metric([operation], list(limits), known.total)
            for status, count in self._refusals.items():
                refusals.add_metric([str(status)], count)
        yield durations
        yield refusals


class _Fleet:
    """A collector for the fleet's state, limited to models that the caller may access."""

    def __init__(self, directory: Directory, caller: Caller) -> None:
        self._directory = directory
        self._caller = caller

    def describe(self) -> Iterator[Metric]:
        """Return no metrics, so that registering this collector does not read the store."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield members, holdings by state, chunks being read from storage, and the directory's counts."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        sees_all = self._caller.models is None
        status = self._directory.status()
        num_members = 0
        # Count by model and state, because members come and go, and each would leave a time series behind.
        states: Counter[tuple[str, str]] = Counter()
        claims: Counter[str] = Counter()
        for member in status.members:
            visible = [h for h in member.holdings if sees_all or self._caller.may_ask((h.identity.model,))]
            num_members += sees_all or bool(visible) or any(self._caller.may_ask((s.name,)) for s in member.syncs)
            for holding in visible:
                states[holding.identity.model, holding.state] += 1
                claims[holding.identity.model] += sum(stop - start for start, stop in holding.claims)
        yield GaugeMetricFamily("penstock_hub_members", "Live members.", value=num_members)
        holdings = GaugeMetricFamily("penstock_hub_holdings", "Holdings.", labels=["model", "state"])
        for (model, state), count in states.items():
            holdings.add_metric([model, state], count)
        yield holdings
        reading = GaugeMetricFamily(
            "penstock_hub_claims", "Chunks that members read from storage now.", labels=["model"]
        )
        for model, count in claims.items():
            reading.add_metric([model], count)
        yield reading
        if not sees_all:
            return
        for name, about in _COUNTS.items():
            yield CounterMetricFamily(f"penstock_hub_{name}", about, value=self._directory.counts[name])
