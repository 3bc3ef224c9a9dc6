"""The state of a conversion for display."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_WORKERS = 256
"""Maximum number of workers in one state. Late workers are listed first, and further workers are only counted."""
MAX_TEXT = 512
"""Maximum number of characters in a name, a path or a message in a state. Longer texts are truncated."""

JobPhase = Literal["starting", "running", "publishing", "done", "failed"]
_Text = Annotated[str, Meta(max_length=MAX_TEXT)]
_Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Seconds = Annotated[float, Meta(ge=-1, le=1e12)]


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of a conversion."""

    worker: _Text
    device: _Text
    num_tasks: _Count = 0
    """Number of finished tasks."""
    state: Literal["starting", "running", "idle", "lost"] = "starting"
    task: Annotated[int, Meta(ge=-1, le=1 << 62)] = -1
    """The worker's first unfinished task, or -1."""
    task_s: _Seconds = 0.0
    """Seconds since the worker last finished a task."""
    expected_s: _Seconds = 0.0
    """Seconds that the worker's unfinished tasks would take at the median pace of all workers."""
    end: _Text = ""
    """Why the worker was lost."""

    @property
    def is_late(self) -> bool:
        """Return whether the worker finished no task for two seconds and for twice the expected time.

        The first task may take ten seconds, because it also waits for libraries, kernels and a source's first bytes.
        """
        return self.state == "running" and self.task_s > max(2.0 if self.num_tasks else 10.0, 2 * self.expected_s)


class JobError(msgspec.Struct, frozen=True, kw_only=True):
    """The error that ended a conversion."""

    error: _Text
    message: _Text
    blame: _Text
    hint: _Text = ""


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """A conversion's complete state at one moment."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    """Name of the result: the last segment of the destination. Tokens may be limited to some names."""
    operation: _Text
    sources: Annotated[tuple[_Text, ...], Meta(max_length=64)]
    destination: _Text
    process: _Text
    """Host name and process id of the coordinator."""
    phase: JobPhase
    num_tasks: _Count
    num_done: _Count = 0
    num_resumed: _Count = 0
    """Number of the finished tasks that an earlier run finished."""
    total_bytes: _Count = 0
    """Bytes that all tasks read and write in total."""
    done_bytes: _Count = 0
    elapsed_s: _Seconds = 0.0
    gb_per_s: Annotated[float, Meta(ge=0)] = 0.0
    """Rate of reading and writing during the last seconds, or a finished conversion's average rate."""
    eta_s: _Seconds = -1.0
    """Remaining seconds at that rate, or -1 if unknown."""
    num_workers: _Count = 0
    num_late: _Count = 0
    """See `WorkerState.is_late`."""
    num_reassigned: _Count = 0
    num_duplicated: _Count = 0
    workers: Annotated[tuple[WorkerState, ...], Meta(max_length=MAX_WORKERS)] = ()
    """The workers, sorted with late workers first, then lost workers."""
    revision: _Text = ""
    """Revision of the result once it is published."""
    error: JobError | None = None

    @property
    def is_over(self) -> bool:
        """Return whether this is the last state."""
        return self.phase in {"done", "failed"}
