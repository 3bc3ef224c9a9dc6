"""Reports the state of a conversion to an observer, at most once a second and whenever its phase changes."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Protocol, runtime_checkable
from urllib.parse import urlsplit

import msgspec

from penstock.errors import PenstockError, sendable
from penstock.hub.job_state import JobError, JobPhase, JobState
from penstock.types import GB
from penstock_convert.coordinator import Coordinator, cut
from penstock_convert.job import ConversionJob

RATE_S = 10.0
"""Length in seconds of the window for the rate. One finished task more or less hardly changes a rate over this
window."""
SHOW_S = 1.0
"""Seconds between two states of a running conversion. Creating a state for 256 workers takes about a millisecond."""


@runtime_checkable
class JobObserver(Protocol):
    """Receives the states of conversions. `HubReporter` implements it."""

    def begin(self) -> Callable[[JobState], None]:
        """Return a function that is called with the successive states of one conversion.

        The last state is `done` or `failed`. The function must return immediately, because the coordinator calls it
        between messages from the workers. It must not raise.
        """
        ...


class JobWatch:
    """Reports the states of one conversion to an observer.

    Args:
        observer: object that receives the states, or None to report nothing.
        job: the planned job.
        sources, into: URIs.
    """

    def __init__(self, observer: JobObserver | None, job: ConversionJob, sources: Sequence[str], into: str) -> None:
        self._show = None if observer is None else observer.begin()
        self._began = time.monotonic()
        self._shown = float("-inf")
        self._samples: deque[tuple[float, int]] = deque()
        if self._show is None:
            return
        total_bytes = int(job.tasks.cost.sum())
        self._state = JobState(
            name=sendable(PurePosixPath(urlsplit(into).path).name or "conversion", 256),
            operation=cut(job.operation.name),
            sources=tuple(map(cut, sources[:64])),
            destination=cut(into),
            process=cut(f"{os.uname().nodename}:{os.getpid()}"),
            phase="starting",
            num_tasks=len(job.tasks),
            total_bytes=total_bytes,
        )
        self._show(self._state)

    def turn(self, coordinator: Coordinator) -> None:
        """Report the state of a running conversion, unless the last report is less than `SHOW_S` old."""
        if self._show is None or time.monotonic() - self._shown < SHOW_S:
            return
        self._note(coordinator, "running")

    def publishing(self, coordinator: Coordinator) -> None:
        """Report that every task is done and the result is being published."""
        if self._show is not None:
            self._note(coordinator, "publishing")

    def done(self, revision: str, num_resumed: int) -> None:
        """Report that the result is published."""
        if self._show is None:
            return
        state = self._state
        # If there is no sample, no task ran, because an earlier call had finished every task.
        since, before = self._samples[0] if self._samples else (0.0, state.total_bytes)
        self._end(
            phase="done",
            revision=revision,
            num_done=state.num_tasks,
            num_resumed=num_resumed,
            done_bytes=state.total_bytes,
            gb_per_s=(state.total_bytes - before) / GB / max(time.monotonic() - since, 1e-9),
            eta_s=0.0,
        )

    def failed(self, error: BaseException) -> None:
        """Report the error that ended the conversion."""
        if self._show is None:
            return
        if isinstance(error, PenstockError):
            message, blame, hint = error.summary, error.blame, error.hint or ""
        else:
            message, blame, hint = str(error) or "it was interrupted", "config", "run it again: finished tasks are kept"
        shown = JobError(error=type(error).__name__, message=cut(message), blame=blame, hint=cut(hint))
        self._end(phase="failed", gb_per_s=0.0, eta_s=-1.0, error=shown)

    def _note(self, coordinator: Coordinator, phase: JobPhase) -> None:
        assert self._show is not None
        self._shown = now = time.monotonic()
        placement, done_bytes = coordinator.placement, coordinator.done_bytes
        if not self._samples:
            # The first sample describes the start of this run, when only the tasks of earlier runs are done.
            self._samples.append((min(coordinator.began, now), coordinator.resumed_bytes))
        self._samples.append((now, done_bytes))
        # Keep the first sample, because the average over the whole run uses it.
        while len(self._samples) > 2 and now - self._samples[1][0] > RATE_S:
            del self._samples[1]
        since, before = self._samples[1 if len(self._samples) > 2 else 0]
        rate = (done_bytes - before) / (now - since) if now > since else 0.0
        workers, num_late = coordinator.workers()
        self._state = msgspec.structs.replace(
            self._state,
            phase=phase,
            num_done=self._state.num_tasks - placement.num_left,
            num_resumed=coordinator.num_resumed,
            done_bytes=done_bytes,
            elapsed_s=now - self._began,
            gb_per_s=rate / GB,
            eta_s=(self._state.total_bytes - done_bytes) / rate if rate > 0 else -1.0,
            num_workers=coordinator.num_workers,
            num_late=num_late,
            num_reassigned=placement.num_stolen,
            num_duplicated=placement.num_twice,
            workers=workers,
        )
        self._show(self._state)

    def _end(self, **fields: object) -> None:
        assert self._show is not None
        elapsed_s = time.monotonic() - self._began
        self._show(msgspec.structs.replace(self._state, elapsed_s=elapsed_s, num_late=0, **fields))
