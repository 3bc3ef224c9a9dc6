"""The trace of a journey: spans of each executor, saved as Chrome-trace JSON for Perfetto."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from penstock.errors import ConfigError
from penstock.storage import text_of
from penstock.storage.write import typed

Span = tuple[str, str, int, float, float, int]
"""Executor, name, thread, start and stop in seconds of `time.perf_counter()`, and bytes."""

STAGES = "stages"
"""Name of the executor in spans for the work before and after bytes move."""


class Trace:
    """The spans of one process. With `enabled=False`, the trace records only busy seconds."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.origin = time.perf_counter()
        self._spans: list[Span] = []
        self._busy: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, executor: str, name: str, start: float, stop: float, nbytes: int) -> None:
        """Record a span. `start` and `stop` are seconds of `time.perf_counter()`."""
        # Updating the sum needs the lock. Appending to a list is atomic.
        with self._lock:
            self._busy[executor] = self._busy.get(executor, 0.0) + stop - start
        if self.enabled:
            self._spans.append((executor, name, threading.get_native_id(), start, stop, nbytes))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record the time of this block as a stage of the process, outside its executors."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.enabled:
                self._spans.append((STAGES, name, threading.get_native_id(), start, time.perf_counter(), 0))

    def busy_s(self) -> dict[str, float]:
        """Return the seconds that each executor spent in items, summed over its threads."""
        return dict(self._busy)

    def take(self) -> list[Span]:
        """Return the spans added since the last call. Only one thread may call this."""
        # Other threads may append during this call, so delete exactly the copied spans.
        spans = self._spans[:]
        del self._spans[: len(spans)]
        return spans

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write Chrome-trace JSON with one process row for each executor."""
        rows: dict[str, list[Span]] = {name: [] for name in sorted({span[0] for span in self._spans})}
        for span in self._spans:
            rows[span[0]].append(span)
        save_spans(path, rows, self.origin)


def open_trace(path: str | os.PathLike[str] | None) -> Trace:
    """Return a trace that is saved at `path`. Without `path` it only sums busy seconds. Raises ConfigError."""
    if path is not None:
        path = text_of(path)
        # Append, so that an earlier trace stays until this trace is saved.
        try:
            open(path, "ab").close()
        except OSError as error:
            raise ConfigError(f"cannot write the trace: {error.strerror}", uri=os.fspath(path)) from error
    return Trace(enabled=path is not None)


def save_spans(path: str | os.PathLike[str], rows: Mapping[str, Sequence[Span]], origin: float) -> None:
    """Write Chrome-trace JSON in microseconds since `origin`, with one process row for each entry in `rows`.

    Spans of executors are complete events (X), and stages have begin and end events (B, E). `origin_s` in the file
    is the origin on a clock that all processes of the host share.
    """
    events: list[dict[str, object]] = []
    for pid, (row, spans) in enumerate(rows.items()):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": row}})
        for executor, name, thread, start, stop, nbytes in spans:
            event = {"name": name, "pid": pid, "tid": thread, "ts": (start - origin) * 1e6}
            if executor == STAGES:
                events += [{**event, "ph": "B"}, {**event, "ph": "E", "ts": (stop - origin) * 1e6}]
            else:
                events.append({**event, "ph": "X", "dur": (stop - start) * 1e6, "args": {"bytes": nbytes}})
    path = text_of(path)
    with typed(Path(path)):
        document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"origin_s": origin}}
        Path(path).write_bytes(msgspec.json.encode(document))
