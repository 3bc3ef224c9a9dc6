"""Who starts a job's workers and ends them; and what a report says of each.

In: names, devices, the coordinator's address. Out: processes that connect to it.
Not here: workers elsewhere (`launch_ray`), what they are told (`jobs.coordinator`).
"""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from penstock.arguments import require_texts, require_type
from penstock.closing import Closing
from penstock.config import visible_devices
from penstock.cuda.driver import load_driver
from penstock.engine.trace import STAGES, Span
from penstock.errors import ConfigError, PeerLost, PenstockError
from penstock.jobs.workers.fork_server import END_S, START_S, Forked, ForkServer

IMPORTS = (
    "penstock.jobs.workers.process",
    "penstock.jobs.operations.formats",
    "penstock.jobs.operations.merge",
    "penstock.transform.fuse",
)
"""What workers share: all that is large, and nothing that starts a thread or looks for a device."""

RESTARTS = 3
"""Times in a row that the process which forks workers is started again where it was lost: one that was killed (by the
kernel for memory, say) is started again at once; one that cannot run at all is told after some seconds."""
_T = TypeVar("_T")

_COUNTED = 16
"""Exit code for no GPU; one more for each."""

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Of any GPU that torch knows: NVIDIA's, that of WSL, AMD's."""


class Launcher(Protocol):
    """Who starts workers and ends them.

    Attributes:
        listen: where they reach the coordinator: a name or address of this host; None: from this host alone.
    """

    listen: str | None

    def spawn(self, worker: str, device: str, address: str, secret: str) -> None:
        """Have a worker of this name connect to `address`. PeerLost where none can be started."""
        ...

    def ended(self, worker: str) -> str | None:
        """How it ended; None: it may still connect, or speak."""
        ...

    def kill(self, worker: str) -> None:
        """End it at once. Idempotent."""
        ...


class LocalLauncher(Closing):
    """Processes of this host, forked from one that imported torch for all; those for GPUs begin at once, and import it
    each beside its driver's start. They end with the thread that started them, whatever ends that. A context manager:
    leaving it ends them.

    Attributes:
        fork_server: what they are forked from; None: nobody was started yet.

    Args:
        devices, workers: see `devices_of`; what is likely to be asked for.
    """

    listen: str | None = None

    def __init__(self, devices: str | Sequence[str] = "all", workers: int | None = None) -> None:
        self.fork_server: ForkServer | None = None
        self._processes: dict[str, Forked] = {}
        self._gpus: list[str] | None = None
        self._num_early = num_prewarmed(devices, workers)
        self._early: list[tuple[Forked, int]] = []

    def begin(self) -> ForkServer:
        """Start what workers are forked from, which takes seconds, and go on meanwhile. Idempotent. PeerLost."""
        if self.fork_server is None or not self.fork_server.is_alive:
            self.close()
            self.fork_server = ForkServer(() if self._num_early else IMPORTS)
            for _ in range(self._num_early):
                self._early.append(self._begun(self.fork_server))
        return self.fork_server

    def _begun(self, fork_server: ForkServer) -> tuple[Forked, int]:
        """Return a process that waits for a worker's arguments, and where they are to be written."""
        reads, writes = os.pipe()
        try:
            return fork_server.fork("penstock.jobs.workers.prewarm:work", [], (reads, 2)), writes
        except BaseException:
            os.close(writes)
            raise
        finally:
            os.close(reads)

    def gpus(self) -> list[str]:
        """See `gpus`: asked in a process of its own, for this one neither has torch nor wants a device. PeerLost."""
        if self._gpus is None:
            try:
                code = self._retried(_count_gpus) if has_driver() else _COUNTED
            except subprocess.TimeoutExpired as error:
                raise PeerLost("nobody says how many GPUs there are", hint="look at nvidia-smi") from error
            if code < _COUNTED:
                raise PeerLost(f"who counted GPUs ended with {code}", hint="look at nvidia-smi, or say devices=cpu")
            self._gpus = [f"cuda:{i}" for i in range(code - _COUNTED)]
            if not self._gpus and self._num_early:
                self.close()
                self._num_early = 0  # workers are the host's then, forked from one that imported for all
        return self._gpus

    def spawn(self, worker: str, device: str, address: str, secret: str) -> None:
        """See `Launcher.spawn`. What a user's function prints goes to stderr: stdout is the caller's.

        Raises:
            ConfigError: this host has no such device.
        """
        if device != "cpu" and device not in (found := self.gpus()) and (device != "cuda" or not found):
            message = f"device {device} is not there: {len(found)} CUDA devices"
            raise ConfigError(message, hint="`penstock doctor` says which there are; look at CUDA_VISIBLE_DEVICES")
        self._processes[worker] = self._retried(partial(self._start, [address, worker, device, secret]))

    def _start(self, arguments: list[str], fork_server: ForkServer) -> Forked:
        if not self._early:
            return fork_server.fork("penstock.jobs.workers.process:work", arguments)
        process, line = self._early.pop()
        with contextlib.suppress(BrokenPipeError), open(line, "w", encoding="utf-8") as told:
            told.write(json.dumps(arguments) + "\n")  # if it has ended, `ended` says so
        return process

    def _retried(self, ask: Callable[[ForkServer], _T]) -> _T:
        """Ask the process that forks others; start it again where it was lost meanwhile. PeerLost after `RESTARTS`.

        What it had forked has ended with it: the coordinator sees those workers go, and replaces them.
        """
        for _ in range(RESTARTS):
            with contextlib.suppress(PeerLost):
                return ask(self.begin())
        return ask(self.begin())

    def ended(self, worker: str) -> str | None:
        """See `Launcher.ended`."""
        try:
            code = self._processes[worker].poll()
        except PeerLost as error:
            return error.message
        if code is None:
            return None
        return f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"

    def kill(self, worker: str) -> None:
        """See `Launcher.kill`."""
        process = self._processes[worker]
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired, PeerLost):
            process.send_signal(signal.SIGKILL)
            process.wait(END_S)

    def close(self) -> None:
        """End all. Idempotent."""
        if self.fork_server is not None:
            self.fork_server.close()
        self.fork_server = None
        while self._early:
            process, line = self._early.pop()
            process.forget()
            os.close(line)


@dataclass(slots=True)
class WorkerStats:
    """One worker of a run, for the report."""

    worker: str
    device: str
    num_tasks: int = 0
    moved_bytes: int = 0
    fetched_bytes: int = 0
    """Read from the sources, as it last said; through a cache whole chunks, headers too."""
    asked_bytes: int = 0
    """Read, from there or from a cache."""
    busy_s: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    end: str = "finished"

    def came(self, fetched_bytes: int, asked_bytes: int) -> None:
        """It has read so much, or, where it says so later than it counted, more."""
        self.fetched_bytes = max(self.fetched_bytes, fetched_bytes)
        self.asked_bytes = max(self.asked_bytes, asked_bytes)


@dataclass(slots=True)
class WorkerTrace:
    """One worker's spans, by its own clock."""

    row: str
    spans: list[Span] = field(default_factory=list)
    behind_s: float = math.inf
    """What is to be added to its clock to have this process's."""


def rows_of(traces: Sequence[WorkerTrace], executors: Sequence[str]) -> dict[str, list[Span]]:
    """All spans by the clock of this process, for one trace: a row of each worker's stages, and of each executor."""
    rows: dict[str, list[Span]] = {f"{one.row} {name}": [] for one in traces for name in (STAGES, *executors)}
    for one in traces:
        for name, what, thread, start, stop, nbytes in one.spans:
            rows[f"{one.row} {name}"].append((name, what, thread, start + one.behind_s, stop + one.behind_s, nbytes))
    return rows


def has_driver() -> bool:
    """Return whether there is a driver of GPUs; where not, torch need not be asked."""
    return any(os.path.exists(one) for one in _DRIVERS)


def num_prewarmed(devices: str | Sequence[str], workers: int | None) -> int:
    """How many processes to begin before devices are counted: at most one for each GPU that the host may have."""
    named = [devices] if isinstance(devices, str) else list(devices)
    if named == ["all"]:
        there, shown = glob.glob("/dev/nvidia[0-9]*"), visible_devices()
        count = len(there) if shown is None else min(len(there), len(shown))
    else:
        count = len({one for one in named if one != "cpu"}) if has_driver() else 0
    return count if workers is None else min(count, workers)


def _count_gpus(fork_server: ForkServer) -> int:
    return fork_server.fork("penstock.jobs.workers.launch:exit_with_gpu_count", []).wait(START_S)


def exit_with_gpu_count() -> int:
    """Return how many GPUs, as an exit code that no failure has."""
    return _COUNTED + num_gpus()


def num_gpus() -> int:
    """As the driver counts them; where it is not NVIDIA's, or fails, as torch does."""
    try:
        return load_driver().num_devices()
    except PenstockError:
        import torch

        return torch.cuda.device_count()


def gpus() -> list[str]:
    """Return every GPU."""
    return [f"cuda:{i}" for i in range(num_gpus() if has_driver() else 0)]


def devices_of(devices: str | Sequence[str], workers: int | None, gpus: Callable[[], list[str]] = gpus) -> list[str]:
    """One device for each worker. ConfigError: no worker, or a name that is no device's."""
    require_type("workers", workers, (int, type(None)), "a number of workers, or None")
    require_texts("devices", [devices] if isinstance(devices, str) else devices, '"all", "cpu" or a list of names')
    if workers is not None and workers < 1:
        raise ConfigError(f"{workers} workers")
    named = [devices] if isinstance(devices, str) else list(devices)
    if named == ["all"]:
        named = gpus() or ["cpu"]
    if wrong := [one for one in named if not _DEVICE.fullmatch(one)]:
        raise ConfigError(f"{', '.join(wrong)}: no device", hint="write all, cpu, or names: cuda:0,cuda:1")
    if named == ["cpu"] and workers is None:
        workers = len(os.sched_getaffinity(0))
    return [named[i % len(named)] for i in range(workers or len(named))]
