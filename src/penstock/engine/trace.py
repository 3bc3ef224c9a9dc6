"""One trace for everything the engine does: spans per executor, saved as Chrome-trace JSON for Perfetto.

In: `span()` calls from any thread. Out: busy seconds per executor; a JSON file.
Not here: counters and dashboards.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import msgspec


class Trace:
    """Spans as (executor, name, thread, start, stop, bytes); `enabled=False` keeps busy seconds only."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.origin = time.perf_counter()
        self._spans: list[tuple[str, str, int, float, float, int]] = []
        self._busy: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, executor: str, name: str, start: float, stop: float, nbytes: int) -> None:
        """Record one span; `start` and `stop` are `time.perf_counter()` seconds."""
        with self._lock:
            self._busy[executor] = self._busy.get(executor, 0.0) + stop - start
        if self.enabled:
            self._spans.append((executor, name, threading.get_native_id(), start, stop, nbytes))

    def busy_s(self) -> dict[str, float]:
        """Seconds spent inside steps, per executor, summed over its threads."""
        return dict(self._busy)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write Chrome-trace JSON (complete events, microseconds), one process row per executor."""
        executors = sorted({span[0] for span in self._spans})
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": executor}}
            for pid, executor in enumerate(executors)
        ]
        events.extend(
            {
                "ph": "X",
                "name": name,
                "pid": executors.index(executor),
                "tid": thread,
                "ts": (start - self.origin) * 1e6,
                "dur": (stop - start) * 1e6,
                "args": {"bytes": nbytes},
            }
            for executor, name, thread, start, stop, nbytes in self._spans
        )
        Path(path).write_bytes(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))
