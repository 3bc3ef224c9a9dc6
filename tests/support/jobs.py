"""A conversion whose processes tests stop and kill. The coordinator reports its progress and forks its workers.

It prints JSON lines to stdout: started processes, progress, and the end.
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
from penstock.types import GIB
from penstock_convert.convert import Conversion, WorkerSettings, convert
from penstock_convert.operations.operation import report_progress
from penstock_convert.workers.fork_server import end_with_parent
from penstock_convert.workers.process import work


def _say(**words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


class ForkLauncher:
    """A launcher that forks workers from the coordinator, which saves them the import of torch."""

    listen: str | None = None

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._ends: dict[str, str] = {}

    def spawn(self, worker: str, device: str, address: str, secret: str) -> None:
        """Fork a worker. See `Launcher.spawn`."""
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
        """Return how a worker ended. See `Launcher.ended`."""
        if worker not in self._ends:
            pid, status = os.waitpid(self._pids[worker], os.WNOHANG)
            if pid:
                self._ends[worker] = f"it ended with {os.waitstatus_to_exitcode(status)}"
        return self._ends.get(worker)

    def kill(self, worker: str) -> None:
        """Kill a worker. See `Launcher.kill`."""
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
    """Convert with tasks of this size.

    The arguments are JSON values, so that a test can send them to another process.
    """
    settings = replace(WorkerSettings.of(workers), task_bytes=task_bytes)
    return convert(sources, destination, workers=settings, **options)


def coordinate(values: dict[str, Any]) -> int:
    """Run `convert` with these arguments. The exit code says whether it completed."""
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
    """Run `coordinate`, and kill it just before its nth change to the file system after all tasks are done.

    Args:
        values: the values for `coordinate`, and n as `step`. With fewer changes it ends as usual.
    """
    # The moments that tests need begin when the result is published.
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
    """Sleep, so that a test can kill the worker."""
    time.sleep(0.003)
    return tensor


slowly.rows = True  # type: ignore[attr-defined]


def waits(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Sleep, so that tasks of a small checkpoint take seconds in total."""
    time.sleep(0.15)
    return tensor


waits.rows = True  # type: ignore[attr-defined]


def pauses(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Sleep, so that a test can stop a worker before its last task, even on a busy machine."""
    time.sleep(0.04)
    return tensor


pauses.rows = True  # type: ignore[attr-defined]


def reports(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Take six seconds per tensor and report progress."""
    for _ in range(60):
        time.sleep(0.1)
        report_progress()
    return tensor


reports.names = "norm"  # type: ignore[attr-defined]


def says(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Print a line, as an operation may."""
    sys.stdout.write(f"saw {name}\n")
    return tensor


def raises(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Raise an error, as an operation may."""
    raise ValueError("on purpose")


def hangs(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Hang in a busy loop, which also blocks the other threads of its process."""
    while True:
        pass


def exits(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Exit the process, as a program does."""
    sys.exit(0)


def dies(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Die from SIGKILL, as in an out-of-memory kill."""
    os.kill(os.getpid(), signal.SIGKILL)
    return tensor


_kept: list[torch.Tensor] = []


def leaks(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Keep a GiB each time, while the process may use three and a half more."""
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    if not _kept:
        resource.setrlimit(resource.RLIMIT_AS, (used + 7 * GIB // 2, resource.RLIM_INFINITY))
    _kept.append(torch.empty(GIB, dtype=torch.uint8))
    return tensor


def of_another_shape(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return the same number of elements in a different shape."""
    return tensor.reshape(-1)


def of_another_dtype(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return the same number of bytes in a different dtype."""
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def no_tensor(tensor: torch.Tensor, name: str) -> Any:
    """Return nothing, as a function without a return statement."""
    return None


# The checkpoints have tensors in FP8 with scales. Only their bytes matter here.
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
