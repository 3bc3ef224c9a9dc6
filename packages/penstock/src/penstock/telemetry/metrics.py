"""The metrics of a process that moves weights: their table and their values.

Chunks are never counted one by one. Sums come from the reports of finished journeys. All other metrics are read from
running journeys and live objects during a scrape. Only a process that serves metrics imports prometheus-client.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import msgspec

from penstock.entry_points import install_hint, own_version
from penstock.errors import MissingExtra
from penstock.report import TransferStats

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

JOURNEYS = ("load", "fetch", "publish", "update", "stage", "commit", "convert", "attach")
RESULTS = ("ok", "failed", "cancelled")
MAX_MODELS = 100
"""Maximum number of values of the label `model` in one process. Later models share the value `other`."""

# A small model from a process on the host takes 10 ms, and a large model from an object store takes 20 minutes.
_JOURNEY_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0)
# A staged update pauses the engine for milliseconds. A direct update pauses it until all bytes arrived.
_PAUSE_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class Metric(NamedTuple):
    """An entry in the table of metrics."""

    name: str
    """The metric's name without `_total`, which the text format adds to counters."""
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    about: str
    buckets: tuple[float, ...] = ()
    takes_least: bool = False
    """Whether the metric is the smallest value of all watched objects instead of their sum."""


def _counter(name: str, about: str, *labels: str) -> Metric:
    return Metric(name, "counter", labels, about)


def _gauge(name: str, about: str, *labels: str, takes_least: bool = False) -> Metric:
    return Metric(name, "gauge", labels, about, takes_least=takes_least)


def _histogram(name: str, about: str, *labels: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name, "histogram", labels, about, buckets)


METRICS = (
    _gauge("penstock_info", "1, for the version of Penstock.", "version"),
    _counter("penstock_journeys", "Journeys that ended.", "journey", "result"),
    _gauge("penstock_journeys_running", "Running journeys.", "journey"),
    _histogram("penstock_journey_seconds", "Wall time of successful journeys.", "journey", "model", buckets=_JOURNEY_S),
    _counter("penstock_phase_seconds", "Wall time of successful journeys, by phase.", "journey", "phase"),
    _counter("penstock_errors", "Failed journeys, by the class of the error.", "journey", "error"),
    _counter(
        "penstock_received_bytes",
        "Bytes received, by source (storage, cache or peer) and path. Includes running journeys.",
        "journey",
        "model",
        "source",
        "path",
    ),
    _counter(
        "penstock_served_bytes",
        "Bytes sent to peers over http. Peers that use shm, cuda_ipc or nixl read without this process.",
    ),
    _counter("penstock_verified_bytes", "Bytes that successful journeys compared with digests.", "journey", "model"),
    _counter(
        "penstock_verification_failures",
        "Digest mismatches: chunks of a fetch, journeys that failed with IntegrityError, "
        "and served weights that changed in memory (journey serve).",
        "journey",
    ),
    _counter("penstock_retries", "Replaced sources, repeated attempts of an update, and lost workers.", "journey"),
    _counter("penstock_storage_retries", "Failed requests to storage that were repeated."),
    _counter(
        "penstock_cache_chunks",
        "Chunks of remote objects: hit (on disk), miss, rotten (damaged or misplaced on disk).",
        "result",
    ),
    _counter("penstock_cache_missed_bytes", "Bytes that the local cache read from its sources, in whole chunks."),
    _histogram(
        "penstock_pause_seconds", "Time for which an engine was paused by an update.", "model", buckets=_PAUSE_S
    ),
    _counter(
        "penstock_publish_subscribers", "Subscribers to live publishes: committed, late or failed.", "model", "result"
    ),
    _gauge(
        "penstock_sync_version",
        "Version that a publisher offers or that is live in a subscriber, or -1.",
        "model",
        "side",
        takes_least=True,
    ),
    _gauge("penstock_sync_dirty", "Subscribers with mixed weights after an update failed halfway.", "model"),
    _gauge(
        "penstock_members",
        "Members in this process whose last heartbeat the hub answered (reachable) or not (away).",
        "hub",
    ),
    _gauge(
        "penstock_held_bytes",
        "Verified bytes of weights that members in this process hold, by tier: gpu, host, disk.",
        "model",
        "tier",
        "state",
    ),
    _gauge("penstock_readers", "Peers that are reading these weights.", "model"),
    _gauge("penstock_tier_used_bytes", "Memory that the models of a weight cache use.", "tier"),
    _gauge("penstock_tier_limit_bytes", "Limit of the tier's memory, if it has one.", "tier"),
    _gauge("penstock_tier_models", "Models of a weight cache in a tier.", "tier"),
    _counter(
        "penstock_tier_requests",
        "Requests for a weight cache's models: hit (in memory) or miss (had to be loaded back).",
        "result",
    ),
    _counter(
        "penstock_tier_moved_bytes",
        "Bytes that a weight cache moved between tiers, or read from their source.",
        "origin",
        "destination",
    ),
)

Attribute = str | bool | int | float
Received = Mapping[tuple[str, str], int]
"""Maps (source, path) to bytes. The source is `storage`, `cache` or `peer`. The path names a transport or a read
method."""


def received_by(nbytes_by_path: Mapping[str, int]) -> dict[tuple[str, str], int]:
    """Return the bytes by source and path, from the bytes for each path of a report. Thread-safe."""
    received: dict[tuple[str, str], int] = {}
    # Copy the items, because a running fetch adds paths at the same time.
    for path, nbytes in list(nbytes_by_path.items()):
        name = path.partition(" ")[0]
        key = ("storage", "fallback") if name == "storage" else ("peer", name)
        received[key] = received.get(key, 0) + nbytes
    return received


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The result and the totals of a finished journey."""

    result: str
    """One of `RESULTS`."""
    error: str
    """Class name of the error of a failed journey. Empty for other journeys."""
    seconds: float
    received: Received


class Running(Protocol):
    """A journey from its start to its end. See `journey.Journey`."""

    kind: str
    model: str
    received: Callable[[], Received]
    num_wrong: int
    num_retries: int
    pause_s: float | None
    subscribers: Mapping[str, int]
    report: TransferStats | None
    ended: Ended | None


Sample = tuple[str, tuple[str, ...], float]
"""Name of a metric, the values of its labels, and its value."""


class Watched(Protocol):
    """An object that provides values for metrics."""

    def samples(self) -> Iterable[Sample]:
        """Return the current values. The scrape's thread calls this method."""
        ...


# References are weak, so that the metrics of a collected object disappear. A WeakSet is not safe here, because other
# threads add objects during a scrape. Copying a dict's values is atomic.
_watched: dict[int, weakref.ref[Watched]] = {}


def watch(living: Watched) -> None:
    """Include an object's values in the metrics of this process while the object is alive."""
    number = id(living)
    _watched[number] = weakref.ref(living, lambda _: _watched.pop(number, None))


class Registry:
    """The metrics of this process since this object was created. Thread-safe."""

    def __init__(self) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise MissingExtra("metrics require the package prometheus-client", hint=install_hint("metrics")) from error
        self.pid = os.getpid()
        # Do not use the library's default registry, which belongs to the application and is served by engines.
        self._registry = prometheus_client.CollectorRegistry()
        self._lock = threading.Lock()
        # Running journeys, and finished journeys that are not counted yet.
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
        # Create the counters now, because Prometheus sees no increase when a counter first appears with the value 1.
        for journey in JOURNEYS:
            for result in RESULTS:
                self._sums["penstock_journeys", (journey, result)] = 0
            self._sums["penstock_retries", (journey,)] = 0
            self._sums["penstock_verification_failures", (journey,)] = 0
        self._sums["penstock_verification_failures", ("serve",)] = 0
        prometheus_client.ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def page(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        from prometheus_client import generate_latest

        # Hold the lock during the scrape. A journey that a finalizer ends in this thread must not acquire the library's
        # locks.
        with self._lock:
            return bytes(generate_latest(self._registry))

    def add(self, name: str, labels: tuple[str, ...], amount: float = 1) -> None:
        """Add to a counter. Finalizers must not call this method."""
        with self._lock:
            self._add(name, labels, amount)

    def _add(self, name: str, labels: tuple[str, ...], amount: float) -> None:
        self._sums[name, labels] = self._sums.get((name, labels), 0) + amount

    def begin(self, journey: Running) -> None:
        """Count a journey as running."""
        self._journeys.add(journey)

    def end(self, journey: Running, ended: Ended) -> None:
        """Count a finished journey and the bytes that it moved."""
        # The assignment is atomic. Later scrapes do not read the journey's bytes, so they are counted once.
        journey.ended = ended
        # Do not wait for the lock, because the garbage collector may end a stream in the thread that holds the lock.
        # The journey is then counted at the next end of a journey or the next scrape.
        if self._lock.acquire(blocking=False):
            try:
                self._count_ended()
            finally:
                self._lock.release()

    def _count_ended(self) -> None:
        """Add finished journeys to the sums. The caller holds the lock."""
        for journey in list(self._journeys):
            if journey.ended is not None:
                self._journeys.discard(journey)
                self._count(journey, journey.ended)

    def _count(self, journey: Running, ended: Ended) -> None:
        kind, report, model = journey.kind, journey.report, self._model(journey.model)
        self._add("penstock_journeys", (kind, ended.result), 1)
        for labels, nbytes in self._received(journey, ended.received):
            self._add("penstock_received_bytes", labels, nbytes)
        if ended.error:
            self._add("penstock_errors", (kind, ended.error), 1)
        if journey.num_wrong:
            self._add("penstock_verification_failures", (kind,), journey.num_wrong)
        if journey.num_retries:
            self._add("penstock_retries", (kind,), journey.num_retries)
        if report is None:
            return
        self._histograms["penstock_journey_seconds"].labels(kind, model).observe(ended.seconds)
        if journey.pause_s is not None:
            self._histograms["penstock_pause_seconds"].labels(model).observe(journey.pause_s)
        for phase, phase_s in report.phases.items():
            self._add("penstock_phase_seconds", (kind, phase), phase_s)
        if report.verified_bytes:
            self._add("penstock_verified_bytes", (kind, model), report.verified_bytes)
        for result, count in journey.subscribers.items():
            self._add("penstock_publish_subscribers", (model, result), count)

    def _model(self, name: str) -> str:
        if name not in self._models and len(self._models) >= MAX_MODELS:
            return "other"
        self._models.add(name)
        return name

    def _received(self, journey: Running, received: Received) -> Iterator[tuple[tuple[str, ...], int]]:
        for (source, path), nbytes in received.items():
            yield (journey.kind, self._model(journey.model), source, path), nbytes

    def values(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Return the current values of all metrics except histograms, by name and labels. The caller holds the lock."""
        values: dict[str, dict[tuple[str, ...], float]] = {metric.name: {} for metric in METRICS}

        def count(name: str, labels: tuple[str, ...], value: float) -> None:
            values[name][labels] = values[name].get(labels, 0) + value

        self._count_ended()
        for (name, labels), value in self._sums.items():
            count(name, labels, value)
        for kind in JOURNEYS:
            count("penstock_journeys_running", (kind,), 0)
        for journey in list(self._journeys):
            # For a journey that ends during this loop, show its current bytes. The next scrape adds them to the sums.
            received = journey.received() if journey.ended is None else journey.ended.received
            count("penstock_journeys_running", (journey.kind,), 1)
            for labels, nbytes in self._received(journey, received):
                count("penstock_received_bytes", labels, nbytes)
        for name, labels, value in _process_samples():
            count(name, labels, value)
        least = {metric.name for metric in METRICS if metric.takes_least}
        for reference in list(_watched.values()):
            living = reference()
            for name, labels, value in () if living is None else living.samples():
                if name in least:
                    values[name][labels] = min(value, values[name].get(labels, value))
                else:
                    count(name, labels, value)
        return values

    def describe(self) -> Iterator[Family]:
        """Return no families, so that registering this collector reads nothing."""
        return iter(())

    def collect(self) -> Iterator[Family]:
        """Yield a family for each metric except histograms."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        values = self.values()
        for metric in METRICS:
            if metric.kind == "histogram":
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.about, labels=metric.labels)
            for labels, value in values[metric.name].items():
                family.add_metric(labels, value)
            yield family


def _process_samples() -> Iterator[Sample]:
    """Yield the counters of storage and transports, which are global in a process."""
    # Import these modules at a scrape, because a process without metrics may need no HTTP client, server or cache.
    from penstock.http.range_request import retried_requests
    from penstock.http.region_server import served_bytes
    from penstock.storage.cache import cache_totals

    yield "penstock_served_bytes", (), served_bytes.value
    yield "penstock_storage_retries", (), retried_requests.value
    totals = cache_totals()
    yield "penstock_cache_chunks", ("hit",), totals.hits
    yield "penstock_cache_chunks", ("miss",), totals.misses
    yield "penstock_cache_chunks", ("rotten",), totals.rotten
    yield "penstock_cache_missed_bytes", (), totals.miss_bytes


_starting = threading.Lock()
_registry: Registry | None = None


def start_recording() -> Registry:
    """Return the registry of this process, and create it at the first call.

    Raise MissingExtra without prometheus-client.
    """
    global _registry
    with _starting:
        # A forked child needs a new registry, because a thread that exists only in the parent may hold the inherited
        # lock.
        if _registry is None or _registry.pid != os.getpid():
            _registry = Registry()
        return _registry


def recording() -> Registry | None:
    """Return the registry of this process, or None if it serves no metrics and counts nothing."""
    registry = _registry
    return registry if registry is not None and registry.pid == os.getpid() else None
