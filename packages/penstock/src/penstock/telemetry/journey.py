"""Counting of calls such as `load` for Prometheus, and tracing with OpenTelemetry if a tracer is configured."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.config import asks_for_metrics
from penstock.errors import Cancelled, IntegrityError, PenstockError, sendable
from penstock.report import TransferStats
from penstock.telemetry.metrics import Attribute, Ended, Received, Registry, recording

if TYPE_CHECKING:
    from opentelemetry.trace import Span


_SPAN_FIELDS = {
    "load": ("uri", "device", "revision", "path"),
    "fetch": ("revision", "storage_bytes", "path"),
    "publish": ("version", "mode"),
    "update": ("version", "mode", "revision", "path"),
    "stage": ("version", "path"),
    "commit": ("version", "mode", "revision", "path"),
    "convert": ("uri", "revision", "operation", "read_bytes", "num_tasks", "num_resumed"),
    "attach": ("revision", "device", "path"),
}
"""For each kind of journey, the fields of its report that its span shows."""
MAX_FAILURES = 4
"""Number of recent failures that this process remembers. The number is small, because each heartbeat contains them."""


class JourneyFailure(NamedTuple):
    """A failed journey, to show to people who monitor the fleet."""

    at: float
    """Monotonic time of the failure in seconds."""
    kind: str
    model: str
    error: str
    """Class name of the error."""
    message: str
    blame: str
    hint: str


_failures: deque[JourneyFailure] = deque(maxlen=MAX_FAILURES)


def recent_failures() -> tuple[JourneyFailure, ...]:
    """Return the failures of this process's last journeys. The newest is last."""
    return tuple(_failures)


class Journey:
    """A call such as `load` or `fetch`, for metrics and tracing.

    Use it as a context manager, which makes its span the current span, or call `begin` and `end`.

    Args:
        kind: one of `metrics.JOURNEYS`.
        model: name of the model or the sync, or an empty string if there is no name, as for a load.
        attributes: initial attributes of the span.

    Attributes:
        received: function that returns the bytes received so far, which the scrape's thread also calls.
        num_wrong: number of digest mismatches.
        num_retries: number of replaced sources or repeated attempts.
        pause_s: seconds for which the journey paused an engine, or None if it paused none.
        subscribers: number of subscribers for each result of a publish.
        report: the journey's report, or None unless the journey succeeded.
        ended: how the journey ended, for the metrics, or None while the journey is running.
    """

    def __init__(self, kind: str, model: str = "", **attributes: Attribute) -> None:
        self.kind = kind
        self.model = model
        self.received: Callable[[], Received] = dict
        self.num_wrong = 0
        self.num_retries = 0
        self.pause_s: float | None = None
        self.subscribers: Mapping[str, int] = {}
        self.report: TransferStats | None = None
        self.ended: Ended | None = None
        self._attributes = attributes
        self._span: Span | None = None
        self._current: AbstractContextManager[Any] | None = None
        self._registry: Registry | None = None
        self._begun = 0.0
        self._is_over = False

    def begin(self) -> Journey:
        """Start the clock and the span.

        Raise ConfigError or MissingExtra if the configured metrics cannot be served.
        """
        if asks_for_metrics():
            # Import the HTTP server only for a process that serves metrics.
            from penstock.telemetry.endpoint import start_configured

            start_configured()
        self._begun = time.perf_counter()
        self._registry = recording()
        if self._registry is not None:
            self._registry.begin(self)
        # Do not import OpenTelemetry, which takes 60 ms. If no other code has imported it, no SDK can send spans.
        if (trace := sys.modules.get("opentelemetry.trace")) is not None:
            attributes = {f"penstock.{name}": _clean(value) for name, value in self._attributes.items()}
            if self.model:
                attributes["penstock.model"] = self.model
            self._span = trace.get_tracer("penstock").start_span(f"penstock {self.kind}", attributes=attributes)
        return self

    def end(self, error: BaseException | None = None) -> None:
        """Count the journey and end its span. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        seconds = time.perf_counter() - self._begun
        if error is not None:
            self.report = None
        # An iteration that the caller stopped early has neither an error nor a report.
        is_cancelled = not isinstance(error, Exception) or isinstance(error, Cancelled)
        result = "ok" if self.report is not None else "cancelled" if is_cancelled else "failed"
        self.num_wrong += isinstance(error, IntegrityError) and not self.num_wrong
        if isinstance(error, PenstockError) and result == "failed":
            model, message = sendable(self.model, 256), sendable(error.summary, 1024)
            name, hint = type(error).__name__, sendable(error.hint or "", 512)
            _failures.append(JourneyFailure(time.monotonic(), self.kind, model, name, message, error.blame, hint))
        if self._registry is not None:
            name = type(error).__name__ if result == "failed" else ""
            ended = Ended(result=result, error=name, seconds=seconds, received=dict(self.received()))
            self._registry.end(self, ended)
        if self._span is not None:
            self._end_span(self._span, error)
        # Drop the old function, which may hold the last reference to the journey's files and memory.
        self.received = dict

    def __enter__(self) -> Journey:
        self.begin()
        if self._span is not None:
            # `end` records the block's errors together with their blame.
            self._current = sys.modules["opentelemetry.trace"].use_span(
                self._span, end_on_exit=False, record_exception=False, set_status_on_exception=False
            )
            self._current.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._current is not None:
            self._current.__exit__(None, None, None)
        self.end(error)

    def _end_span(self, span: Span, error: BaseException | None) -> None:
        # The code that configured the span's provider has already imported this module.
        from opentelemetry.trace import Status, StatusCode

        if (report := self.report) is not None:
            attributes: dict[str, Attribute] = {"bytes": report.nbytes, "verified_bytes": report.verified_bytes}
            attributes |= {f"phase.{phase}_s": seconds for phase, seconds in report.phases.items()}
            attributes |= {name: value for name in _SPAN_FIELDS[self.kind] if (value := getattr(report, name)) != ""}
            attributes |= {} if self.pause_s is None else {"pause_s": self.pause_s}
            for name, value in attributes.items():
                span.set_attribute(f"penstock.{name}", _clean(value))
        if error is not None:
            span.record_exception(error)
            span.set_attribute("error.type", type(error).__name__)
            if isinstance(error, PenstockError):
                span.set_attribute("penstock.blame", error.blame)
                span.set_attribute("penstock.mutated", error.mutated)
            span.set_status(Status(StatusCode.ERROR, sendable(str(error), 1024)))
        span.end()


def _clean(value: Attribute) -> Attribute:
    # Limit the length, because a list of URIs, or the list of sources of a large sync, may be long.
    return sendable(value, 1024) if isinstance(value, str) else value
