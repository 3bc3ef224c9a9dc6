"""The hub's metrics for Prometheus."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from penstock.hub.auth import Caller
from penstock_hub.directory import Directory

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


class Metrics:
    """The metrics of one hub process."""

    def __init__(self, directory: Directory) -> None:
        # Tests and local hubs create several `Metrics` objects in one process, so each has its own registry.
        self._registry = CollectorRegistry()
        self._seconds = Histogram(
            "penstock_hub_request_seconds",
            "Time from the head of a request to its answer.",
            ["operation"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._refusals = Counter(
            "penstock_hub_refusals", "Answers with an error status.", ["status"], registry=self._registry
        )
        self._directory = directory
        self._registry.register(_Fleet(directory, Caller()))

    @contextmanager
    def timed(self, operation: str) -> Iterator[None]:
        """Count a request and measure its time."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds.labels(operation).observe(time.perf_counter() - start)

    def refused(self, status: int) -> None:
        """Count a response with an error status."""
        self._refusals.labels(str(status)).inc()

    def page(self, caller: Caller | None = None) -> bytes:
        """Return the metrics in Prometheus' text format, limited to the caller's models."""
        if caller is None or caller.models is None:
            return bytes(generate_latest(self._registry))
        registry = CollectorRegistry()
        registry.register(_Fleet(self._directory, caller))
        return bytes(generate_latest(registry))


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
        sees_all = self._caller.models is None
        status = self._directory.status()
        num_members = 0
        # Count by model and state, because members come and go, and each would leave a time series behind.
        states: Tally[tuple[str, str]] = Tally()
        claims: Tally[str] = Tally()
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
