"""The metrics of a process that moves weights: their table, and the objects that they are read from.

In: journeys as they end, members and weight caches while they live. Out: Prometheus' text format.
Not here: the endpoint (`endpoint`), what a journey counts (`journey`), the hub's metrics (`hub.metrics`).

Nothing is counted per chunk: sums come from the reports of finished journeys, and the rest is read from the objects of
running ones when Prometheus asks. prometheus-client is imported only by a process that serves metrics.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from penstock.entry_points import install_hint, own_version
from penstock.errors import MissingExtra
from penstock.http.range_request import retried_requests
from penstock.http.region_server import served_bytes
from penstock.storage.cache import cache_totals

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

JOURNEYS = ("load", "fetch", "publish", "update", "stage", "commit", "convert", "attach")
RESULTS = ("ok", "failed", "cancelled")
MAX_MODELS = 100
"""Different values of the label `model` in one process; later models share `other`. Names may be made by a program, and
each is a time series for ever."""

# From 10 ms, a small model that another process of the host has, to 20 minutes, a large one from an object store.
_JOURNEY_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0)
# A staged update pauses the engine for milliseconds, a direct one for as long as its bytes take.
_PAUSE_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric: a row of the table."""

    name: str
    """Without the `_total` that the text format adds to counters."""
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...] = ()
    about: str
    buckets: tuple[float, ...] = ()
    takes_least: bool = False
    """Where several objects of the process state a value, the least counts, and not the sum."""


METRICS = (
    Metric(name="penstock_info", kind="gauge", labels=("version",), about="1, for the version of Penstock."),
    Metric(name="penstock_journeys", kind="counter", labels=("journey", "result"), about="Journeys that ended."),
    Metric(name="penstock_journeys_running", kind="gauge", labels=("journey",), about="Journeys that run."),
    Metric(
        name="penstock_journey_seconds",
        kind="histogram",
        labels=("journey", "model"),
        about="Wall time of journeys that succeeded.",
        buckets=_JOURNEY_S,
    ),
    Metric(
        name="penstock_phase_seconds",
        kind="counter",
        labels=("journey", "phase"),
        about="Wall time of journeys that succeeded, by phase.",
    ),
    Metric(
        name="penstock_errors",
        kind="counter",
        labels=("journey", "error"),
        about="Journeys that failed, by the class of the error.",
    ),
    Metric(
        name="penstock_received_bytes",
        kind="counter",
        labels=("journey", "model", "source", "path"),
        about="Bytes that came, by source (storage, cache or peer) and path. Running journeys are included.",
    ),
    Metric(
        name="penstock_served_bytes",
        kind="counter",
        about="Bytes sent to peers over http. Peers read by shm, cuda_ipc and nixl without this process.",
    ),
    Metric(
        name="penstock_verified_bytes",
        kind="counter",
        labels=("journey", "model"),
        about="Bytes of journeys that succeeded that were compared with digests.",
    ),
    Metric(
        name="penstock_verification_failures",
        kind="counter",
        labels=("journey",),
        about="Bytes that differed from their digest: chunks of a fetch, journeys that failed with IntegrityError, "
        "and (journey serve) served weights that changed in memory.",
    ),
    Metric(
        name="penstock_retries",
        kind="counter",
        labels=("journey",),
        about="Sources that failed and were replaced, attempts of an update after the first, lost workers.",
    ),
    Metric(name="penstock_storage_retries", kind="counter", about="Requests to storage that failed and were repeated."),
    Metric(
        name="penstock_cache_chunks",
        kind="counter",
        labels=("result",),
        about="Chunks of remote objects: hit (on the disk), miss, rotten (on the disk, damaged or misplaced).",
    ),
    Metric(
        name="penstock_cache_missed_bytes",
        kind="counter",
        about="Bytes that the cache read from its sources, in whole chunks.",
    ),
    Metric(
        name="penstock_pause_seconds",
        kind="histogram",
        labels=("model",),
        about="Time that an engine was paused for an update.",
        buckets=_PAUSE_S,
    ),
    Metric(
        name="penstock_publish_subscribers",
        kind="counter",
        labels=("model", "result"),
        about="Subscribers of live publishes: committed, late or failed.",
    ),
    Metric(
        name="penstock_sync_version",
        kind="gauge",
        labels=("model", "side"),
        about="The version that a publisher shows, or a subscriber has live; -1: none yet.",
        takes_least=True,
    ),
    Metric(
        name="penstock_sync_dirty",
        kind="gauge",
        labels=("model",),
        about="Subscribers whose weights are of no version, because an update failed in the middle.",
    ),
    Metric(
        name="penstock_members",
        kind="gauge",
        labels=("hub",),
        about="Members in this process, by whether the hub answered their last heartbeat: reachable or away.",
    ),
    Metric(
        name="penstock_held_bytes",
        kind="gauge",
        labels=("model", "tier", "state"),
        about="Verified bytes of weights that members of this process hold, by tier: gpu, host, disk.",
    ),
    Metric(name="penstock_readers", kind="gauge", labels=("model",), about="Peers that read these weights now."),
    Metric(
        name="penstock_tier_used_bytes",
        kind="gauge",
        labels=("tier",),
        about="Memory that a weight cache's models take.",
    ),
    Metric(
        name="penstock_tier_limit_bytes",
        kind="gauge",
        labels=("tier",),
        about="Limit of that memory, where it has one.",
    ),
    Metric(name="penstock_tier_models", kind="gauge", labels=("tier",), about="Models of a weight cache in a tier."),
    Metric(
        name="penstock_tier_requests",
        kind="counter",
        labels=("result",),
        about="Requests for a weight cache's models: hit (they were in memory) or miss (they were brought back).",
    ),
    Metric(
        name="penstock_tier_moved_bytes",
        kind="counter",
        labels=("origin", "destination"),
        about="Bytes that a weight cache moved between tiers, or read from their source.",
    ),
)

Attribute = str | bool | int | float
Received = Mapping[tuple[str, str], int]
"""(source, path) -> bytes; the source is `storage`, `cache` or `peer`, the path is a transport or a way to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The part of a journey's report that metrics and its span show."""

    nbytes: int
    phases: Mapping[str, float] = field(default_factory=dict)
    verified_bytes: int = 0
    path: str = ""
    """The paths with their bytes, for people."""
    pause_s: float | None = None
    subscribers: Mapping[str, int] = field(default_factory=dict)
    """Of a publish: result -> number of subscribers."""
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    """More attributes of the span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a journey."""

    result: str
    """One of `RESULTS`."""
    error: str
    """The class of the error of one that failed; else empty."""
    seconds: float
    received: Received


class Running(Protocol):
    """A journey from its start to its end; see `journey.Journey`."""

    kind: str
    model: str
    received: Callable[[], Received]
    num_wrong: int
    num_retries: int
    outcome: Outcome | None
    ended: Ended | None


Sample = tuple[str, tuple[str, ...], float]
"""Name of a metric, values of its labels, value."""


class Watched(Protocol):
    """A living object with values for metrics."""

    def samples(self) -> Iterable[Sample]:
        """Return its values now; called by the thread of a scrape."""
        ...


# By id and weak: an object that its owner drops has no metrics any more. Not a WeakSet: a scrape's thread goes through
# it while others add to it, and a copy of a dict's values is one step.
_watched: dict[int, weakref.ref[Watched]] = {}


def watch(living: Watched) -> None:
    """Include an object's values in the metrics of this process while it lives."""
    number = id(living)
    _watched[number] = weakref.ref(living, lambda _: _watched.pop(number, None))


class Registry:
    """The metrics of this process since it was made. Any thread."""

    def __init__(self) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise MissingExtra("metrics need prometheus-client", hint=install_hint("metrics")) from error
        self.pid = os.getpid()
        # Not the library's own registry, which belongs to the application: engines serve theirs.
        self._registry = prometheus_client.CollectorRegistry()
        self._lock = threading.Lock()
        # Those that run, and those that ended and are not counted yet.
        self._journeys: set[Running] = set()
        self._models: set[str] = set()
        self._sums: dict[tuple[str, tuple[str, ...]], float] = {("penstock_info", (own_version(),)): 1}
        self._histograms = {
            metric.name: prometheus_client.Histogram(
                metric.name, metric.about, metric.labels, buckets=metric.buckets, registry=self._registry
            )
            for metric in METRICS
            if metric.kind == "histogram"
        }
        # From the start and not from the first event: Prometheus takes a counter that appears with 1 for no increase.
        for journey in JOURNEYS:
            for result in RESULTS:
                self._sums["penstock_journeys", (journey, result)] = 0
            self._sums["penstock_retries", (journey,)] = 0
            self._sums["penstock_verification_failures", (journey,)] = 0
        self._sums["penstock_verification_failures", ("serve",)] = 0
        prometheus_client.ProcessCollector(registry=self._registry)
        self._registry.register(_Collector(self))

    def page(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        from prometheus_client import generate_latest

        # Around all of it: a journey that ends in a finalizer, which may run here, must not take the library's locks.
        with self._lock:
            return bytes(generate_latest(self._registry))

    def add(self, name: str, labels: tuple[str, ...], amount: float = 1) -> None:
        """Add to a counter. Not for finalizers."""
        with self._lock:
            self._add(name, labels, amount)

    def _add(self, name: str, labels: tuple[str, ...], amount: float) -> None:
        self._sums[name, labels] = self._sums.get((name, labels), 0) + amount

    def begin(self, journey: Running) -> None:
        """Count a journey as running."""
        self._journeys.add(journey)

    def end(self, journey: Running, ended: Ended) -> None:
        """Count a journey that ended, and what it moved until then."""
        # One step, after which no scrape asks the journey for its bytes: they are counted once.
        journey.ended = ended
        # Without waiting: the garbage collector may drop a stream, and so end it, in a thread that has the lock.
        # The thread that has it, or the next one, counts this journey too.
        if self._lock.acquire(blocking=False):
            try:
                self._count_ended()
            finally:
                self._lock.release()

    def _count_ended(self) -> None:
        """Move journeys that ended to the sums. The caller holds the lock."""
        for journey in list(self._journeys):
            if journey.ended is not None:
                self._journeys.discard(journey)
                self._count(journey, journey.ended)

    def _count(self, journey: Running, ended: Ended) -> None:
        kind, outcome, model = journey.kind, journey.outcome, self._model(journey.model)
        self._add("penstock_journeys", (kind, ended.result), 1)
        for labels, nbytes in self._received(journey, ended.received):
            self._add("penstock_received_bytes", labels, nbytes)
        if ended.error:
            self._add("penstock_errors", (kind, ended.error), 1)
        if journey.num_wrong:
            self._add("penstock_verification_failures", (kind,), journey.num_wrong)
        if journey.num_retries:
            self._add("penstock_retries", (kind,), journey.num_retries)
        if outcome is None:
            return
        self._add_outcome(kind, model, outcome)
        self._histograms["penstock_journey_seconds"].labels(kind, model).observe(ended.seconds)
        if outcome.pause_s is not None:
            self._histograms["penstock_pause_seconds"].labels(model).observe(outcome.pause_s)

    def _add_outcome(self, kind: str, model: str, outcome: Outcome) -> None:
        """Count what the report of a journey that succeeded says."""
        for phase, phase_s in outcome.phases.items():
            self._add("penstock_phase_seconds", (kind, phase), phase_s)
        if outcome.verified_bytes:
            self._add("penstock_verified_bytes", (kind, model), outcome.verified_bytes)
        for result, count in outcome.subscribers.items():
            self._add("penstock_publish_subscribers", (model, result), count)

    def _model(self, name: str) -> str:
        """Return the value of the label for a model."""
        if name not in self._models and len(self._models) >= MAX_MODELS:
            return "other"
        self._models.add(name)
        return name

    def _received(
        self, journey: Running, received: Mapping[tuple[str, str], int]
    ) -> Iterator[tuple[tuple[str, ...], int]]:
        for (source, path), nbytes in received.items():
            yield (journey.kind, self._model(journey.model), source, path), nbytes

    def values(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Return the values of all metrics but histograms now, by name and labels. The caller holds the lock."""
        values: dict[str, dict[tuple[str, ...], float]] = {metric.name: {} for metric in METRICS}

        def count(name: str, labels: tuple[str, ...], value: float) -> None:
            values[name][labels] = values[name].get(labels, 0) + value

        self._count_ended()
        for (name, labels), value in self._sums.items():
            count(name, labels, value)
        for kind in JOURNEYS:
            count("penstock_journeys_running", (kind,), 0)
        for journey in list(self._journeys):
            # One that ends meanwhile shows what it has by now; it is in the sums of the next scrape.
            received = journey.received() if journey.ended is None else journey.ended.received
            count("penstock_journeys_running", (journey.kind,), 1)
            for labels, nbytes in self._received(journey, received):
                count("penstock_received_bytes", labels, nbytes)
        for name, labels, value in _process_samples():
            count(name, labels, value)
        least = {metric.name for metric in METRICS if metric.takes_least}
        for reference in list(_watched.values()):
            if (living := reference()) is None:
                continue
            for name, labels, value in living.samples():
                if name in least:
                    values[name][labels] = min(value, values[name].get(labels, value))
                else:
                    count(name, labels, value)
        return values


def _process_samples() -> Iterator[Sample]:
    """Yield the counts that storage and transports keep of this process."""
    yield "penstock_served_bytes", (), served_bytes.value
    yield "penstock_storage_retries", (), retried_requests.value
    totals = cache_totals()
    yield "penstock_cache_chunks", ("hit",), totals.hits
    yield "penstock_cache_chunks", ("miss",), totals.misses
    yield "penstock_cache_chunks", ("rotten",), totals.rotten
    yield "penstock_cache_missed_bytes", (), totals.miss_bytes


class _Collector:
    """The values of a registry as families of prometheus-client."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def describe(self) -> Iterator[Family]:
        """Return no families, so that registering this collector reads nothing."""
        return iter(())

    def collect(self) -> Iterator[Family]:
        """Yield a family for each metric but histograms."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        values = self._registry.values()
        for metric in METRICS:
            if metric.kind == "histogram":
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.about, labels=metric.labels)
            for labels, value in values[metric.name].items():
                family.add_metric(labels, value)
            yield family


_starting = threading.Lock()
_registry: Registry | None = None


def start_recording() -> Registry:
    """Return the registry of this process. The first call creates it. Raises MissingExtra without prometheus-client."""
    global _registry
    with _starting:
        # In a forked child a new one: the lock of the parent's may have been held by a thread that is not here.
        if _registry is None or _registry.pid != os.getpid():
            _registry = Registry()
        return _registry


def recording() -> Registry | None:
    """Return the registry of this process; None: it serves no metrics, so nothing is counted."""
    registry = _registry
    return registry if registry is not None and registry.pid == os.getpid() else None
