"""The phases of this process's start: the stopwatch of each load, fetch and attach, and one record of all of them.

In: journeys as they begin, change phase and end; steps of the engine, by `phase`. Out: seconds by phase, for reports;
the record as a `Boot`, for health checks, probes and `penstock status`.
Not here: serving the record (`http.phases`), reporting it to a hub (`peer.member`).

    Phases("discover", journey="fetch") --enter, stop, fail--> record of the process --snapshot--> Boot
    phase("warm up") -----------------------------------------'

There is one record in a process: an engine that loads a model and a draft of it is ready when both are there. The
record holds the last start only: the first journey after `NEW_BOOT_S` without any begins another one.
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
"""Phases in one record; a start has about ten. The oldest are dropped, so that a beat stays below 16 KiB."""
NEW_BOOT_S = 60.0
"""Quiet time after which the next journey is another start; between two models of one start there are seconds."""
MAX_NAME = 64
_Text = Annotated[str, Meta(max_length=1024)]

PhaseStanding = Literal["running", "done", "failed", "cancelled"]
Standing = Literal["starting", "ready", "failed"]
Look = Callable[[], tuple[int, int]]
"""Returns the bytes that are done, and the bytes in all."""


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """A phase of a start."""

    name: Annotated[str, Meta(max_length=MAX_NAME)]
    """As in the report of its journey: `discover`, `move`; of an engine: `warm up`."""
    journey: Annotated[str, Meta(max_length=16)] = ""
    """`fetch`, `load`, `attach`; `engine`: reported by the engine or by `penstock.telemetry.phase`."""
    model: Annotated[str, Meta(max_length=256)] = ""
    """The model's name, or the URI of a load; empty for an engine's own phases."""
    start_s: float = 0.0
    """Seconds from the start of the boot."""
    seconds: float = 0.0
    """Its length, so far if it runs."""
    state: PhaseStanding = "done"
    done_bytes: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    nbytes: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    """Bytes in all; 0 for phases that move none."""


class BootError(msgspec.Struct, frozen=True, kw_only=True):
    """The error that ended a start."""

    error: _Text
    blame: Annotated[str, Meta(max_length=16)] = ""
    """`source`, `destination`, `plan` or `config`; empty: not an error of Penstock."""
    hint: _Text = ""
    model: Annotated[str, Meta(max_length=256)] = ""
    """Of the phase that failed."""


class Boot(msgspec.Struct, frozen=True, kw_only=True):
    """The start of one process: its phases, and whether it is ready."""

    started_at: float
    """When its first phase began, in seconds of Unix time by the process's clock."""
    process_s: float = 0.0
    """How long the process had run by then: imports, and whatever else comes before the first phase."""
    seconds: float = 0.0
    """From `started_at` until now, or until the last phase ended."""
    ready: bool = False
    state: Standing = "starting"
    phase: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    """The phase that began last of those that run, or that failed; empty: none."""
    models: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=MAX_PHASES)] = ()
    phases: Annotated[tuple[Phase, ...], Meta(max_length=MAX_PHASES)] = ()
    error: BootError | None = None


class _Span:
    """A phase in the record; times are those of `time.perf_counter`."""

    __slots__ = ("began", "error", "is_last", "journey", "look", "model", "moved", "name", "start", "state", "stop")

    def __init__(self, name: str, journey: str, model: str, start: float, began: float, look: Look | None) -> None:
        self.name = name
        self.journey = journey
        self.model = model
        self.start = start
        self.began = began
        """When its journey began."""
        self.look = look
        self.moved = (0, 0)
        self.stop: float | None = None
        self.state: PhaseStanding = "running"
        self.is_last = False
        """Whether its journey ended with it."""
        self.error: BootError | None = None

    def end(self, now: float, state: PhaseStanding) -> None:
        """End the phase; drop the function that counts its bytes, which may refer to weights."""
        if self.look is not None:
            self.moved, self.look = self.look(), None
        self.stop, self.state = now, state

    def resume(self, look: Look | None) -> None:
        """Go on with a phase that had ended."""
        self.stop, self.state, self.look = None, "running", look

    def value(self, zero: float, now: float) -> Phase:
        """Return the current state of the phase; `zero` is the start of the boot."""
        # Read once: the thread of the journey may end the phase between a check and a call.
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
        # Re-entrant: the garbage collector may close a stream, and so end its phase, inside any of these blocks.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._spans: deque[_Span] = deque(maxlen=MAX_PHASES)
        self._serial = 0
        self._zero = 0.0
        self._started_at = 0.0
        self._process_s = 0.0

    def add(self, span: _Span) -> None:
        """Begin a phase. The first one of a journey begins a new record if the process had been quiet for long."""
        with self._lock:
            running = any(old.stop is None for old in self._spans)
            last = max((old.stop for old in self._spans if old.stop is not None), default=float("-inf"))
            if not running and span.start - last > NEW_BOOT_S:
                self._spans.clear()
                self._zero = span.start
                # Backdated: the phase may have begun a moment ago.
                self._started_at = time.time() - (time.perf_counter() - span.start)
                self._process_s = _process_age_s()
            self._spans.append(span)
        self.changed()

    def changed(self) -> None:
        """Wake those that wait for a change."""
        with self._lock:
            self._serial += 1
            self._changed.notify_all()

    @property
    def serial(self) -> int:
        """Return the number of changes so far."""
        return self._serial

    def wait(self, serial: int, timeout_s: float) -> None:
        """Wait until the number of changes is not `serial` any more, at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._serial != serial, timeout_s)

    def snapshot(self) -> Boot | None:
        """Return the current state of the boot; None: this process has loaded nothing, and reported no phase."""
        with self._lock:
            spans = list(self._spans)
            if not spans:
                return None
            now = time.perf_counter()
            phases = tuple(span.value(self._zero, now) for span in spans)
            running = [span for span in spans if span.stop is None]
            failed = [span for span in spans if span.state == "failed"]
            # A journey that begins after a failure is another attempt.
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
    """A stopwatch whose phases sum to the whole; with a `journey`, they are in the record of the process, too.

    A context manager: its exit ends the running phase, as failed if the block raised.

    Args:
        first: the phase that begins now.
        journey: `fetch`, `load`, `attach`, `engine`; empty: not recorded.
        model: see `Phase`.
    """

    __slots__ = ("_began", "_is_over", "_journey", "_model", "_name", "_since", "_span", "_spans", "seconds")

    def __init__(self, first: str, *, journey: str = "", model: str = "") -> None:
        self.seconds: dict[str, float] = {}
        self._journey = journey
        self._model = sendable(model, 256)
        self._is_over = False
        self._span: _Span | None = None
        self._spans: dict[str, _Span] = {}
        self._began = time.perf_counter()
        self._begin(first, self._began, None)

    def _begin(self, name: str, now: float, look: Look | None) -> None:
        self._name, self._since = name, now
        if not self._journey:
            return
        # A phase that is entered again is shown as one, from its first begin: a search for a keeper tries 20 times a
        # second, and each attempt would be two phases.
        self._span = self._spans.get(name)
        if self._span is not None:
            self._span.resume(look)
            return
        self._span = self._spans[name] = _Span(name, self._journey, self._model, now, self._began, look)
        _record.add(self._span)

    def _end(self, now: float, state: PhaseStanding) -> None:
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._since
        if self._span is not None:
            self._span.end(now, state)

    def enter(self, name: str, look: Look | None = None) -> None:
        """End the running phase and begin `name`; `look` counts its bytes while it runs."""
        now = time.perf_counter()
        self._end(now, "done")
        self._begin(name, now, look)

    def stop(self) -> dict[str, float]:
        """End the running phase and the journey; return the seconds of all phases by name."""
        if not self._is_over:
            self._finish("done", None)
        return dict(self.seconds)

    def fail(self, error: BaseException) -> None:
        """End the journey with an error, if it has not ended yet. Not a failure: the caller cancelled it."""
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
        """End the journey as cancelled, if it has not ended yet."""
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
    """Report a phase of this process's start that Penstock does not see: `with penstock.telemetry.phase("warm up"):`.

    The process is not ready while the block runs, and has failed if it raises. Blocks may be nested: put one around all
    of the start, and the process is ready at its end and not before.

    Args:
        name: at most 64 characters, for people and for autoscalers.

    Raises:
        ConfigError: the name is empty or too long.
    """
    require_name("name", name)
    if len(name) > MAX_NAME:
        raise ConfigError(f"the name of a phase has {len(name)} characters; at most {MAX_NAME}")
    return Phases(name, journey="engine")


def boot_record() -> BootRecord:
    """Return the record of this process; a forked child has one of its own."""
    return _record


def _process_age_s() -> float:
    """Return how long this process has run; 0 where the system does not say."""
    try:
        # Behind the name in parentheses, which may have spaces; field 22 is the start, in ticks since the host's boot.
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


_record = BootRecord()


def _forked() -> None:
    """Begin a record in a forked child: its parent's phases are not its own."""
    global _record
    _record = BootRecord()


os.register_at_fork(after_in_child=_forked)
