"""The phases of this process's start, as seconds for reports and as a record for health checks and `penstock status`.

Each load, fetch and attach has a stopwatch, `Phases`. A process has one record, because an engine that loads a model
and its draft model is ready when both are loaded. The first phase after a pause of `NEW_BOOT_S` begins a new record.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.arguments import require_name
from penstock.errors import Cancelled, ConfigError, PenstockError, sendable

MAX_PHASES = 64
"""Maximum number of phases in a record, so that a heartbeat stays below 16 KiB. The oldest phases are dropped."""
NEW_BOOT_S = 60.0
"""Seconds without a phase after which the next phase counts as a new start."""
MAX_NAME = 64
_Text = Annotated[str, Meta(max_length=1024)]

PhaseStanding = Literal["running", "done", "failed", "cancelled"]
Standing = Literal["starting", "ready", "failed"]
Look = Callable[[], tuple[int, int]]
"""A function that returns the number of bytes moved so far and the total."""


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """A phase in the start of a process."""

    name: Annotated[str, Meta(max_length=MAX_NAME)]
    """Name as in the journey's report, such as `discover` or `move`, or an engine's name such as `warm up`."""
    journey: Annotated[str, Meta(max_length=16)] = ""
    """`fetch`, `load` or `attach`, or `engine` for phases that the engine or `penstock.telemetry.phase` reports."""
    model: Annotated[str, Meta(max_length=256)] = ""
    """The model's name, or the URI of a load. Empty for the phases of an engine."""
    start_s: float = 0.0
    """Seconds between the start of the boot and the start of this phase."""
    seconds: float = 0.0
    """Duration in seconds, or the time so far if the phase is running."""
    state: PhaseStanding = "done"
    done_bytes: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    nbytes: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    """Total number of bytes, or 0 for phases that move no bytes."""


class BootError(msgspec.Struct, frozen=True, kw_only=True):
    """The error that ended a start."""

    error: _Text
    blame: Annotated[str, Meta(max_length=16)] = ""
    """`source`, `destination`, `plan` or `config`. Empty if Penstock did not raise the error."""
    hint: _Text = ""
    model: Annotated[str, Meta(max_length=256)] = ""
    """The model of the phase that failed."""


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """The start of one process."""

    started_at: float
    """Unix time in seconds at which the first phase began, on the process's clock."""
    process_s: float = 0.0
    """Seconds between the start of the process and its first phase, including imports."""
    seconds: float = 0.0
    """Seconds from `started_at` until now, or until the last phase ended."""
    ready: bool = False
    state: Standing = "starting"
    phase: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    """The failed phase, or the running phase that began last. Empty if there is neither."""
    models: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=MAX_PHASES)] = ()
    phases: Annotated[tuple[Phase, ...], Meta(max_length=MAX_PHASES)] = ()
    error: BootError | None = None


class _PhaseSpan(msgspec.Struct, eq=False):
    name: str
    journey: str
    model: str
    start: float
    began: float
    """When the phase's journey began."""
    look: Look | None
    moved: tuple[int, int] = (0, 0)
    stop: float | None = None
    state: PhaseStanding = "running"
    is_last: bool = False
    """Whether the journey ended with this phase."""
    error: BootError | None = None

    def end(self, now: float, state: PhaseStanding) -> None:
        """End the phase. Drop `look`, because it may refer to weights."""
        if self.look is not None:
            self.moved, self.look = self.look(), None
        self.stop, self.state = now, state

    def value(self, zero: float, now: float) -> Phase:
        # Read the attribute once, because the journey's thread may end the phase between the check and the call.
        look = self.look
        done, total = self.moved if look is None else look()
        return Phase(
            name=self.name,
            journey=self.journey,
            model=self.model,
            start_s=round(self.start - zero, 4),
            seconds=round((now if self.stop is None else self.stop) - self.start, 4),
            state=self.state,
            done_bytes=done,
            nbytes=total,
        )


class BootRecord:
    """The record of one process. Thread-safe."""

    def __init__(self) -> None:
        # The lock is re-entrant, because the garbage collector may close a stream, which ends a phase, while this
        # thread holds the lock.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._spans: deque[_PhaseSpan] = deque(maxlen=MAX_PHASES)
        self._serial = 0
        self._zero = 0.0
        self._started_at = 0.0
        self._process_s = 0.0

    def add(self, span: _PhaseSpan) -> None:
        """Begin a phase, in a new record if no phase ran during the last `NEW_BOOT_S`."""
        with self._lock:
            running = any(old.stop is None for old in self._spans)
            last = max((old.stop for old in self._spans if old.stop is not None), default=float("-inf"))
            if not running and span.start - last > NEW_BOOT_S:
                self._spans.clear()
                self._zero = span.start
                # Subtract the time since the phase began, which may be a moment ago.
                self._started_at = time.time() - (time.perf_counter() - span.start)
                self._process_s = _process_age_s()
            self._spans.append(span)
        self.changed()

    def changed(self) -> None:
        """Wake the threads that wait for a change."""
        with self._lock:
            self._serial += 1
            self._changed.notify_all()

    @property
    def serial(self) -> int:
        """Return the number of changes so far."""
        return self._serial

    def wait(self, serial: int, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds until the number of changes differs from `serial`."""
        with self._changed:
            self._changed.wait_for(lambda: self._serial != serial, timeout_s)

    def snapshot(self) -> Boot | None:
        """Return the current state of the boot, or None if this process has no phase yet."""
        with self._lock:
            spans = list(self._spans)
            if not spans:
                return None
            now = time.perf_counter()
            phases = tuple(span.value(self._zero, now) for span in spans)
            running = [span for span in spans if span.stop is None]
            failed = [span for span in spans if span.state == "failed"]
            # A journey that begins after a failure is a new attempt, so do not report the failure.
            fault = next(
                (span for span in reversed(failed) if not any(other.began > (span.stop or now) for other in spans)),
                None,
            )
            is_done = any(span.is_last and span.state == "done" for span in spans)
            state: Standing = "failed" if fault else "starting" if running or not is_done else "ready"
            shown = fault or max(running, key=lambda span: span.start, default=None)
            end = now if running else max(span.stop or now for span in spans)
            return Boot(
                started_at=round(self._started_at, 3),
                process_s=round(self._process_s, 3),
                seconds=round(end - self._zero, 4),
                ready=state == "ready",
                state=state,
                phase="" if shown is None else shown.name,
                models=tuple(dict.fromkeys(span.model for span in spans if span.model)),
                phases=phases,
                error=None if fault is None else fault.error,
            )


class Phases:
    """A stopwatch for the phases of one journey.

    As a context manager, `Phases` ends the running phase at the end of the block, as failed if the block raised.

    Args:
        first: name of the phase that begins now.
        journey: `fetch`, `load`, `attach` or `engine`. With an empty `journey`, the record omits the phases.
        model: see `Phase.model`.
    """

    __slots__ = ("_began", "_is_over", "_journey", "_model", "_name", "_since", "_span", "_spans", "seconds")

    def __init__(self, first: str, *, journey: str = "", model: str = "") -> None:
        self.seconds: dict[str, float] = {}
        self._journey = journey
        self._model = sendable(model, 256)
        self._is_over = False
        self._span: _PhaseSpan | None = None
        self._spans: dict[str, _PhaseSpan] = {}
        self._began = time.perf_counter()
        self._begin(first, self._began, None)

    def _begin(self, name: str, now: float, look: Look | None) -> None:
        self._name, self._since = name, now
        if not self._journey:
            return
        # A phase that is entered again continues, because a search for a weight cache retries 20 times a second.
        self._span = self._spans.get(name)
        if self._span is not None:
            self._span.stop, self._span.state, self._span.look = None, "running", look
            return
        self._span = self._spans[name] = _PhaseSpan(name, self._journey, self._model, now, self._began, look)
        _record.add(self._span)

    def _end(self, now: float, state: PhaseStanding) -> None:
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._since
        if self._span is not None:
            self._span.end(now, state)

    def enter(self, name: str, look: Look | None = None) -> None:
        """End the running phase and begin phase `name`. While the phase runs, `look` returns its byte counts."""
        now = time.perf_counter()
        self._end(now, "done")
        self._begin(name, now, look)

    def stop(self) -> dict[str, float]:
        """End the running phase and the journey. Return the seconds of each phase by name."""
        if not self._is_over:
            self._finish("done", None)
        return dict(self.seconds)

    def fail(self, error: BaseException) -> None:
        """End the journey with an error, if it is still running. Cancellation does not count as a failure."""
        if self._is_over:
            return
        if isinstance(error, Cancelled) or not isinstance(error, Exception):
            self._finish("cancelled", None)
        elif isinstance(error, PenstockError):
            text, hint = sendable(error.summary, 1024), sendable(error.hint or "", 1024)
            self._finish("failed", BootError(error=text, blame=error.blame, hint=hint, model=self._model))
        else:
            text = sendable(f"{type(error).__name__}: {error}", 1024)
            self._finish("failed", BootError(error=text, model=self._model))

    def close(self) -> None:
        """End the journey as cancelled, if it is still running."""
        if not self._is_over:
            self._finish("cancelled", None)

    def _finish(self, state: PhaseStanding, fault: BootError | None) -> None:
        self._is_over = True
        self._end(time.perf_counter(), state)
        if self._span is not None:
            self._span.is_last, self._span.error = True, fault
            _record.changed()

    def __enter__(self) -> Phases:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
        else:
            self.stop()


def phase(name: str) -> Phases:
    """Report a phase of this process's start that Penstock cannot see: `with penstock.telemetry.phase("warm up"):`.

    The process is not ready while the block runs, and its start has failed if the block raises. Blocks may be nested.

    Args:
        name: name of the phase, at most 64 characters. An invalid name raises ConfigError.
    """
    require_name("name", name)
    if len(name) > MAX_NAME:
        raise ConfigError(f"the name of a phase has {len(name)} characters, but at most {MAX_NAME} are allowed")
    return Phases(name, journey="engine")


def boot_record() -> BootRecord:
    """Return the record of this process."""
    return _record


def _process_age_s() -> float:
    try:
        # The process name in parentheses may contain spaces, so split the line after it. Field 22 is the start time in
        # clock ticks since the host booted.
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


_record = BootRecord()


def _forked() -> None:
    global _record
    _record = BootRecord()


os.register_at_fork(after_in_child=_forked)
