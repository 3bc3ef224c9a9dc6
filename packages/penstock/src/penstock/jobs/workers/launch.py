"""Launchers, which start a job's workers and end them: as processes of this host, or as actors of a Ray cluster.

In: names, devices, the coordinator's address. Out: processes that connect to it.
Not here: the messages to workers (`jobs.coordinator`), the worker itself (`process`), forking (`fork_server`).

A worker on the CPU is forked from a process that has imported torch. A CUDA driver does not survive a fork, so workers
for GPUs start before their device is known ("prewarmed"), and import torch while the driver starts. One after the other
takes twice as long.

    started --import torch and the rest----------------------> work(address, worker, device, secret)
            `--driver--> arguments arrive --> device's context --'
"""

from __future__ import annotations

import contextlib
import gc
import glob
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

from penstock import descriptors
from penstock.arguments import require_texts, require_type
from penstock.config import visible_devices
from penstock.entry_points import install_hint, require_package
from penstock.errors import ConfigError, MissingExtra, PeerLost, PenstockError
from penstock.jobs.workers.fork_server import END_S, START_S, Forked, ForkServer
from penstock.lifecycle import Closeable

IMPORTS = (
    "penstock.jobs.workers.process",
    "penstock.jobs.operations.formats",
    "penstock.jobs.operations.merge",
    "penstock.transform.fuse",
)
"""Modules that workers share: all large ones, and none that starts a thread or initialises a device."""

RESTARTS = 3
"""Times in a row that a lost fork server is started again: one that was killed (by the kernel for memory, say) works
again at once; one that cannot run at all is reported after some seconds."""
_T = TypeVar("_T")

_COUNTED = 16
"""Exit code for no GPU; one more for each GPU. Above 1 and 2, with which Python itself fails."""

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Device files of the GPUs that torch supports: NVIDIA's, those of WSL, AMD's."""


@runtime_checkable
class Launcher(Protocol):
    """A way to start workers and to end them.

    Attributes:
        listen: name or address of this host at which workers reach the coordinator; None: all are on this host.
    """

    listen: str | None

    def spawn(self, worker: str, device: str, address: str, secret: str) -> None:
        """Start a worker of this name, which connects to `address`. PeerLost if none can be started."""
        ...

    def ended(self, worker: str) -> str | None:
        """Return how a worker ended; None: it may still connect, or send."""
        ...

    def kill(self, worker: str) -> None:
        """End a worker at once. Idempotent."""
        ...


class LocalLauncher(Closeable):
    """A launcher of processes of this host, which end with the thread that started them. A context manager.

    Attributes:
        fork_server: the process that forks the workers; None: none was started yet.

    Args:
        devices, workers: see `devices_of`; those that will probably be requested.
    """

    listen: str | None = None

    def __init__(self, devices: str | Sequence[str] = "all", workers: int | None = None) -> None:
        self.fork_server: ForkServer | None = None
        self._processes: dict[str, Forked] = {}
        self._gpus: list[str] | None = None
        """Every GPU, once they were counted."""
        self._num_prewarmed = num_prewarmed(devices, workers)
        self._prewarmed: list[tuple[Forked, int]] = []

    def begin(self) -> ForkServer:
        """Start the fork server, whose imports take seconds; do not wait for them. Idempotent.

        Raises:
            MissingExtra: torch is not installed, so no worker could run. PeerLost: the fork server did not start.
        """
        if self.fork_server is None or not self.fork_server.is_alive:
            require_package("torch")
            self.close()
            # Without the imports where processes are prewarmed: those import for themselves, and it must not make them
            # wait until it has imported too.
            self.fork_server = ForkServer.start(() if self._num_prewarmed else IMPORTS)
            for _ in range(self._num_prewarmed):
                self._prewarmed.append(self._prewarm(self.fork_server))
        return self.fork_server

    def _prewarm(self, fork_server: ForkServer) -> tuple[Forked, int]:
        """Return a process that waits for a worker's arguments, and the descriptor to write them to."""
        reads, writes = descriptors.opened(os.pipe)
        try:
            return fork_server.fork("penstock.jobs.workers.launch:work", [], (reads, 2)), writes
        except BaseException:
            os.close(writes)
            raise
        finally:
            # The child has a copy: its input only ends once no other process has the pipe open.
            os.close(reads)

    def gpus(self) -> list[str]:
        """See `gpus`. Counts in a new process: this one must not import torch or initialise a device. PeerLost."""
        if self._gpus is None:
            try:
                # By an exit code: the one thing that comes back from a forked process without a channel of its own.
                code = self._retried(_count_gpus) if has_driver() else _COUNTED
            except subprocess.TimeoutExpired as error:
                raise PeerLost(f"GPUs were not counted within {START_S:g} s", hint="look at nvidia-smi") from error
            if code < _COUNTED:
                message = f"the process that counts GPUs ended with exit code {code}"
                raise PeerLost(message, hint="look at nvidia-smi, or use devices=cpu")
            self._gpus = [f"cuda:{i}" for i in range(code - _COUNTED)]
            if not self._gpus and self._num_prewarmed:
                self.close()
                # Device files without a GPU: workers run on the CPU, from a new fork server.
                self._num_prewarmed = 0
        return self._gpus

    def spawn(self, worker: str, device: str, address: str, secret: str) -> None:
        """See `Launcher.spawn`. Output of a user's function goes to stderr: stdout is the caller's.

        Raises:
            ConfigError: this host has no such device.
        """
        if device != "cpu" and device not in (devices := self.gpus()) and (device != "cuda" or not devices):
            message = f"there is no device {device}: this host has {len(devices)} CUDA devices"
            raise ConfigError(message, hint="`penstock doctor` lists them; look at CUDA_VISIBLE_DEVICES")
        self._processes[worker] = self._retried(partial(self._start, [address, worker, device, secret]))

    def _start(self, arguments: list[str], fork_server: ForkServer) -> Forked:
        # Also where the prewarmed are used up: by more workers than GPUs, or by replacements of lost ones.
        if not self._prewarmed:
            return fork_server.fork("penstock.jobs.workers.process:work", arguments)
        process, line = self._prewarmed.pop()
        with contextlib.suppress(BrokenPipeError), open(line, "w", encoding="utf-8") as pipe:
            # If it has ended, `ended` says so.
            pipe.write(json.dumps(arguments) + "\n")
        return process

    def _retried(self, ask: Callable[[ForkServer], _T]) -> _T:
        """Call a function with the fork server; start a new one if it was lost. PeerLost after `RESTARTS`.

        The processes that it had forked ended with it: the coordinator notices that, and replaces those workers.
        """
        for _ in range(RESTARTS):
            with contextlib.suppress(PeerLost):
                return ask(self.begin())
        # The last attempt outside of the `suppress`, so that the caller gets its error.
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
        # Waited for, since its tasks run elsewhere next: it must not write another byte. One that the kernel cannot end
        # is left after `END_S`, and a fork server that is gone has taken its processes with it.
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired, PeerLost):
            process.send_signal(signal.SIGKILL)
            process.wait(END_S)

    def close(self) -> None:
        """End all workers and the fork server. Idempotent."""
        if self.fork_server is not None:
            self.fork_server.close()
        self.fork_server = None
        while self._prewarmed:
            process, line = self._prewarmed.pop()
            process.forget()
            # A process that still waits for arguments reads the end, and exits.
            os.close(line)


def has_driver() -> bool:
    """Return whether a GPU driver is loaded; without one, no process is started to count GPUs."""
    return any(os.path.exists(path) for path in _DRIVERS)


def num_prewarmed(devices: str | Sequence[str], workers: int | None) -> int:
    """Return the number of processes to start before GPUs are counted: one for each worker that may be on a GPU."""
    named = [devices] if isinstance(devices, str) else list(devices)
    # By device files and CUDA_VISIBLE_DEVICES: asking the driver takes the time that this is to save.
    if named == ["all"]:
        there, shown = glob.glob("/dev/nvidia[0-9]*"), visible_devices()
        named = ["cuda"] * (len(there) if shown is None else min(len(there), len(shown)))
    if not named or not has_driver():
        return 0
    # Beyond one for each device no more than cores: `workers` may be any number, and each of them imports torch.
    count = min(workers or len(named), max(len(named), len(os.sched_getaffinity(0))))
    return sum(named[i % len(named)] != "cpu" for i in range(count))


def _count_gpus(fork_server: ForkServer) -> int:
    """Return `_COUNTED` and one for each GPU, by a process that ends afterwards."""
    return fork_server.fork("penstock.jobs.workers.launch:exit_with_gpu_count", []).wait(START_S)


def exit_with_gpu_count() -> int:
    """Return the number of GPUs as an exit code that no failure has."""
    return _COUNTED + num_gpus()


def num_gpus() -> int:
    """Return the number of GPUs by the driver; by torch if the driver is not NVIDIA's, or fails."""
    from penstock.cuda.driver import load_driver

    try:
        return load_driver().num_devices()
    except PenstockError:
        import torch

        return torch.cuda.device_count()


def gpus() -> list[str]:
    """Return every GPU."""
    return [f"cuda:{i}" for i in range(num_gpus() if has_driver() else 0)]


def devices_of(devices: str | Sequence[str], workers: int | None, gpus: Callable[[], list[str]] = gpus) -> list[str]:
    """Return one device for each worker. ConfigError: no worker, or a name that is not a device."""
    require_type("workers", workers, (int, type(None)), "a number of workers, or None")
    require_texts("devices", [devices] if isinstance(devices, str) else devices, '"all", "cpu" or a list of names')
    if workers is not None and workers < 1:
        raise ConfigError(f"workers={workers}: at least one is needed")
    named = [devices] if isinstance(devices, str) else list(devices)
    if named == ["all"]:
        named = gpus() or ["cpu"]
    if wrong := [name for name in named if not _DEVICE.fullmatch(name)]:
        raise ConfigError(f"{', '.join(wrong)}: no such device", hint="write all, cpu, or names: cuda:0,cuda:1")
    # One worker a core: an operation runs on one thread, and torch's own threads would compete with other workers.
    if named == ["cpu"] and workers is None:
        workers = len(os.sched_getaffinity(0))
    return [named[i % len(named)] for i in range(workers or len(named))]


_SPAWN_S = 60.0
"""Time that an actor has to reach the coordinator, once Ray has found room for it."""


class RayLauncher:
    """A launcher of Ray actors, one for each worker: with a GPU for workers on `cuda`, with a core for the others.

    An actor for which there is no room (a node was lost, say) begins once there is.

    Args:
        address: of the cluster, as `ray.init` takes it; ignored if this process is connected to one already.

    Raises:
        MissingExtra: Ray is not installed. PeerLost: no cluster is there.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingExtra("workers on Ray need Ray", hint=install_hint("ray")) from error
        self._ray: Any = ray
        # A program that uses Ray itself keeps its connection; only one that was made here is closed at the end.
        self._connected = not ray.is_initialized()
        if self._connected:
            try:
                ray.init(address=address, log_to_driver=False, include_dashboard=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise PeerLost(f"no Ray cluster is at {address}: {error}") from error
        self.listen: str | None = ray.util.get_node_ip_address()
        self._actors: dict[str, tuple[Any, Any]] = {}

    def spawn(self, worker: str, device: str, address: str, secret: str) -> None:
        """See `Launcher.spawn`."""
        # No restarts by Ray: the coordinator replaces lost workers itself, under new names, and counts how often.
        on_gpu = device.startswith("cuda")
        kind = self._ray.remote(num_cpus=0 if on_gpu else 1, num_gpus=1 if on_gpu else 0, max_restarts=0)(_Actor)
        actor = kind.remote()
        # Ray sets CUDA_VISIBLE_DEVICES to the actor's own GPU, so inside it that GPU is always the first.
        self._actors[worker] = actor, actor.work.remote(address, worker, "cuda:0" if on_gpu else device, secret)

    def ended(self, worker: str) -> str | None:
        """See `Launcher.ended`. While the call has not returned, it may still be on its way to a node."""
        _, call = self._actors[worker]
        done, _ = self._ray.wait([call], timeout=0)
        return "its actor or its node has ended" if done else None

    def kill(self, worker: str) -> None:
        """See `Launcher.kill`."""
        # No restart: the coordinator starts a worker of another name instead.
        actor, _ = self._actors[worker]
        self._ray.kill(actor, no_restart=True)

    def close(self) -> None:
        """Leave the cluster if this object connected to it. Idempotent."""
        if self._connected:
            self._ray.shutdown()
        self._connected = False


class _Actor:
    """A worker's process on any node of the cluster."""

    def work(self, address: str, worker: str, device: str, secret: str) -> None:
        """See `process.serve`."""
        import torch

        from penstock.jobs.workers.process import ALONE, connect, serve

        where = torch.device(device)
        # Ray gave it one core; torch would take all that the host has.
        if where.type == "cpu":
            torch.set_num_threads(1)
        try:
            serve(connect(address, timeout_s=_SPAWN_S), worker, secret, where)
        except PeerLost:
            # The actor's process must not outlive the coordinator that would end it.
            os._exit(ALONE)


def work() -> int:
    """Run a prewarmed worker once its arguments arrive on stdin; return 0 if none arrive."""
    # The driver on a thread of its own: its C call releases the interpreter's lock, so modules are imported meanwhile.
    with ThreadPoolExecutor(1, thread_name_prefix="penstock-early") as driver_thread:
        waking = driver_thread.submit(_wake)
        # Imports make objects that stay: collecting among them would take a tenth of the time.
        gc.disable()
        for name in IMPORTS:
            # Fails again, with a message, in the worker if it needs the module.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        gc.enable()
        arguments = waking.result()
    if not arguments:
        return 0
    from penstock.jobs.workers import process

    return process.work(*arguments)


def _wake() -> list[str]:
    """Initialise the driver, wait for the arguments, create the device's context; return the arguments.

    An error here occurs again in the worker, which has a connection to report it.
    """
    from penstock.cuda.driver import load_driver, ordinal

    with contextlib.suppress(PenstockError):
        load_driver()
    line = sys.stdin.buffer.readline()
    arguments: list[str] = json.loads(line) if line else []
    with contextlib.suppress(PenstockError):
        if arguments and arguments[2] != "cpu":
            with load_driver().entered(ordinal(arguments[2])):
                pass
    return arguments
