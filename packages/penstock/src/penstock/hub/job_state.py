"""The state of a conversion as others see it, and the protocol of an object that is shown it.

In: what a coordinator knows at one moment. Out: frozen, bounded values that can be sent in JSON.
Not here: when they are made (`jobs.watch`), sending them to a hub (`job_reporter`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

from penstock.errors import sendable

MAX_WORKERS = 256
"""Workers in one state: those that are late come first. Others are only counted."""
MAX_TEXT = 512
"""Characters of a name, a path or a message in a state; longer ones are cut."""
SHOW_S = 1.0
"""Between two states of a running conversion. Reason: making one takes about a millisecond for 256 workers."""

JobPhase = Literal["starting", "running", "publishing", "done", "failed"]
_Text = Annotated[str, Meta(max_length=MAX_TEXT)]
_Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Seconds = Annotated[float, Meta(ge=-1, le=1e12)]


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of a conversion."""

    worker: _Text
    device: _Text
    num_tasks: _Count = 0
    """Tasks that it ended."""
    state: Literal["starting", "running", "idle", "lost"] = "starting"
    task: Annotated[int, Meta(ge=-1, le=1 << 62)] = -1
    """The first task that it has; -1: none."""
    task_s: _Seconds = 0.0
    """Since it last ended a task."""
    expected_s: _Seconds = 0.0
    """That all tasks which it has take at the median pace of the workers."""
    end: _Text = ""
    """Why it was lost."""

    @property
    def is_late(self) -> bool:
        """Return whether it ended no task for twice as long as all that it has should take, and for two seconds.

        A first task has ten: it also waits for libraries, kernels and the first bytes of a source.
        """
        return self.state == "running" and self.task_s > max(2.0 if self.num_tasks else 10.0, 2 * self.expected_s)


class JobError(msgspec.Struct, frozen=True, kw_only=True):
    """The error that ended a conversion."""

    error: _Text
    """Its class."""
    message: _Text
    blame: _Text
    hint: _Text = ""


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """A conversion at one moment; always complete, never a change to an earlier state."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    """Of the result, for people and for tokens that are limited to some models: the last part of the destination."""
    operation: _Text
    sources: Annotated[tuple[_Text, ...], Meta(max_length=64)]
    destination: _Text
    process: _Text
    """Host name and process id of the coordinator."""
    phase: JobPhase
    num_tasks: _Count
    num_done: _Count = 0
    num_resumed: _Count = 0
    """Of `num_done`: by an earlier run."""
    total_bytes: _Count = 0
    """That the tasks read and write, all together."""
    done_bytes: _Count = 0
    elapsed_s: _Seconds = 0.0
    gb_per_s: Annotated[float, Meta(ge=0)] = 0.0
    """Read and written, in the last seconds; of an ended conversion on average."""
    eta_s: _Seconds = -1.0
    """Seconds to the last task's end at that rate; -1: not known."""
    num_workers: _Count = 0
    num_late: _Count = 0
    """Workers that are late now; see `WorkerState.is_late`."""
    num_reassigned: _Count = 0
    num_duplicated: _Count = 0
    workers: Annotated[tuple[WorkerState, ...], Meta(max_length=MAX_WORKERS)] = ()
    """The late ones first, then those that were lost."""
    revision: _Text = ""
    """Of the result, once it is published."""
    error: JobError | None = None

    @property
    def is_over(self) -> bool:
        """Return whether this state is the last."""
        return self.phase in {"done", "failed"}


@runtime_checkable
class JobObserver(Protocol):
    """An object that is shown the states of conversions: `penstock.hub.HubReporter`, or the caller's own."""

    def begin(self) -> Callable[[JobState], None]:
        """Return a function for one conversion, which is called with its states in turn.

        The last one is `done` or `failed`. The function must return at once, since the coordinator calls it between
        messages of workers, and must not raise.
        """
        ...


def cut(text: str) -> str:
    """Return a text as a state may have it."""
    text = sendable(text, MAX_TEXT + 1)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"
