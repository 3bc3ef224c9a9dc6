"""The trace of a journey: spans per executor, saved as Chrome-trace JSON for Perfetto.

In: spans from any thread. Out: busy seconds per executor; a JSON file, also of several processes' spans.
Not here: counters and dashboards.
"""

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
"""Executor, name, thread, start, stop (`time.perf_counter()` seconds), bytes."""

STAGES = "stages"
"""Instead of an executor, for spans of the work that a process does before and after it moves bytes."""


class Trace:
    """Spans of one process; `enabled=False` keeps busy seconds only."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.origin = time.perf_counter()
        self._spans: list[Span] = []
        self._busy: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, executor: str, name: str, start: float, stop: float, nbytes: int) -> None:
        """Record one span; `start` and `stop` are `time.perf_counter()` seconds."""
        # The sum is read and written, so it needs the lock; appending to a list is one step of the interpreter.
        with self._lock:
            self._busy[executor] = self._busy.get(executor, 0.0) + stop - start
        if self.enabled:
            self._spans.append((executor, name, threading.get_native_id(), start, stop, nbytes))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record the time of this block as a stage of the process, outside of its executors."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self.enabled:
                self._spans.append((STAGES, name, threading.get_native_id(), start, time.perf_counter(), 0))

    def busy_s(self) -> dict[str, float]:
        """Return seconds spent inside steps, per executor, summed over its threads."""
        return dict(self._busy)

    def take(self) -> list[Span]:
        """Return the spans that were added since the last call. One thread calls it."""
        # Other threads append meanwhile: what is deleted is exactly what was copied.
        spans = self._spans[:]
        del self._spans[: len(spans)]
        return spans

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write Chrome-trace JSON, one process row per executor."""
        rows: dict[str, list[Span]] = {name: [] for name in sorted({span[0] for span in self._spans})}
        for span in self._spans:
            rows[span[0]].append(span)
        save_spans(path, rows, self.origin)


def open_trace(path: str | os.PathLike[str] | None) -> Trace:
    """Return a trace to be saved at `path`; None: busy seconds only.

    Raises:
        ConfigError: no file can be written there; raised here rather than after everything was moved.
    """
    if path is not None:
        path = text_of(path)
        # For appending: a trace of an earlier run stays until this one is saved.
        try:
            open(path, "ab").close()
        except OSError as error:
            raise ConfigError(f"the trace cannot be written: {error.strerror}", uri=os.fspath(path)) from error
    return Trace(enabled=path is not None)


def save_spans(path: str | os.PathLike[str], rows: Mapping[str, Sequence[Span]], origin: float) -> None:
    """Write Chrome-trace JSON: microseconds since `origin`, one process row for each of `rows`.

    Spans of executors are complete events (X), stages begin and end (B, E). `origin_s` in the file is the origin by a
    clock that all processes of the host share.

    Raises:
        DiskFull, DestinationError: it cannot be written.
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
