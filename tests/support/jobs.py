"""A conversion whose processes tests stop and kill: a coordinator that says how far it is, workers forked from it.

In: plain values, for `tests.support.fork_server`. Out: lines of JSON on stdout: processes started, progress, the end.
Not here: what is done to them (`tests`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock import ConvertReport
from penstock.errors import PenstockError
from penstock.jobs.convert import Conversion, WorkerSettings, convert
from penstock.jobs.operations.operation import report_progress
from penstock.jobs.workers.fork_server import end_with_parent
from penstock.jobs.workers.process import work
from penstock.types import GIB


def _say(**words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


class ForkLauncher:
    """A launcher that forks workers from the coordinator in tens of milliseconds: it need not import torch first."""

    listen: str | None = None

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._ends: dict[str, str] = {}

    def spawn(self, worker: str, device: str, address: str, secret: str) -> None:
        """See `Launcher.spawn`."""
        me, pid = os.getpid(), os.fork()
        if not pid:
            end_with_parent(me)
            os.closerange(3, 1 << 16)  # the journal's lock and the others' connections are the coordinator's
            try:
                os._exit(work(address, worker, device, secret))
            finally:
                os._exit(1)
        self._pids[worker] = pid
        _say(event="spawned", worker=worker, pid=pid)

    def ended(self, worker: str) -> str | None:
        """See `Launcher.ended`."""
        if worker not in self._ends:
            pid, status = os.waitpid(self._pids[worker], os.WNOHANG)
            if pid:
                self._ends[worker] = f"it ended with {os.waitstatus_to_exitcode(status)}"
        return self._ends.get(worker)

    def kill(self, worker: str) -> None:
        """See `Launcher.kill`."""
        if self.ended(worker) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[worker], signal.SIGKILL)
            _, status = os.waitpid(self._pids[worker], 0)
            self._ends[worker] = f"it ended with {os.waitstatus_to_exitcode(status)}"


def convert_as(
    sources: Any,
    destination: Any,
    *,
    workers: WorkerSettings | int | None = None,
    task_bytes: int | str | None = None,
    **options: Any,
) -> ConvertReport:
    """Convert with tasks of this size. The arguments of a test can then be sent to another process as JSON."""
    settings = replace(WorkerSettings.of(workers), task_bytes=task_bytes)
    return convert(sources, destination, workers=settings, **options)


def coordinate(values: dict[str, Any]) -> int:
    """`convert` with these arguments; the exit code says whether it came to its end."""
    torch.set_num_threads(1)

    def done(num_done: int, total: int) -> None:
        _say(event="done", num_done=num_done, total=total)

    try:
        workers = WorkerSettings(num_workers=values.pop("workers", None), launcher=ForkLauncher())
        report = convert_as(workers=workers, progress=done, **values)
    except PenstockError as error:
        _say(event="failed", kind=type(error).__name__, message=str(error))
        return 1
    _say(event="converted", revision=report.revision, num_tasks=report.num_tasks, num_resumed=report.num_resumed)
    return 0


def coordinate_until(values: dict[str, Any]) -> int:
    """Run `coordinate`, killed just before its nth change to the file system after all tasks are done.

    Args:
        values: those of `coordinate`, and `step`: n; it ends as usual where fewer changes are made.
    """
    # The moments that tests are about begin when the result is published.
    step, publish = int(values.pop("step")), Conversion.publish
    left = itertools.count(step, -1)
    is_armed: list[bool] = []

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def change(*given: Any, **named: Any) -> Any:
            if is_armed and next(left) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*given, **named)

        return change

    def armed(conversion: Conversion) -> None:
        is_armed.append(True)
        publish(conversion)

    setattr(Conversion, "publish", armed)  # noqa: B010 - the method is replaced in this process alone
    for name in ("open", "fsync", "rename", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    return coordinate(values)


def slowly(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """An operation that leaves time to be killed in."""
    time.sleep(0.003)
    return tensor


slowly.rows = True  # type: ignore[attr-defined]


def waits(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """An operation that leaves time to look at: tasks of a small checkpoint take seconds, all together."""
    time.sleep(0.15)
    return tensor


waits.rows = True  # type: ignore[attr-defined]


def pauses(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """An operation that leaves time to strike a worker before its last task, on a busy machine too."""
    time.sleep(0.04)
    return tensor


pauses.rows = True  # type: ignore[attr-defined]


def reports(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """An operation that takes six seconds a tensor, and says that it gets on."""
    for _ in range(60):
        time.sleep(0.1)
        report_progress()
    return tensor


reports.names = "norm"  # type: ignore[attr-defined]


def says(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Print, as an operation may."""
    sys.stdout.write(f"saw {name}\n")
    return tensor


def raises(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Raise, as an operation may."""
    raise ValueError("on purpose")


def hangs(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Hang in a busy loop, which holds up the other threads of its process too."""
    while True:
        pass


def exits(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Exit, as an operation may that takes itself for a program."""
    sys.exit(0)


def dies(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Die by SIGKILL, as an operation may that the kernel ends for its memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    return tensor


_kept: list[torch.Tensor] = []


def leaks(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Keep a GiB each time, where the process may have three and a half more."""
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    if not _kept:
        resource.setrlimit(resource.RLIMIT_AS, (used + 7 * GIB // 2, resource.RLIM_INFINITY))
    _kept.append(torch.empty(GIB, dtype=torch.uint8))
    return tensor


def of_another_shape(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return as many elements in another shape."""
    return tensor.reshape(-1)


def of_another_dtype(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return as many bytes in another dtype."""
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def no_tensor(tensor: torch.Tensor, name: str) -> Any:
    """Return nothing, as a function that forgets to return."""
    return None


# The checkpoints that they run on have tensors in FP8 with scales, of which only the bytes matter here.
for _function in (
    slowly,
    waits,
    pauses,
    reports,
    says,
    raises,
    hangs,
    exits,
    dies,
    leaks,
    of_another_shape,
    of_another_dtype,
    no_tensor,
):
    _function.raw = True  # type: ignore[attr-defined]
