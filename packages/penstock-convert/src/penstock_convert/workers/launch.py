"""Launchers start and stop the workers of a job, as processes on this host or as actors in a Ray cluster.

A worker on the CPU is forked from a process that has imported torch. A CUDA driver does not work after a fork, so a
worker on a GPU imports torch and initialises the driver itself, both at the same time. Doing both in sequence would
take twice as long. Workers for GPUs start before their device is known ("prewarmed").

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
from penstock.lifecycle import Closeable
from penstock_convert.workers.fork_server import END_S, START_S, Forked, ForkServer

IMPORTS = (
    "penstock_convert.workers.process",
    "penstock_convert.operations.formats",
    "penstock_convert.operations.merge",
    "penstock.transform.fuse",
)
"""Modules that the fork server imports for all workers. None of them starts a thread or initialises a device."""

RESTARTS = 3
"""Number of times in a row that a lost fork server is restarted. A fork server that the kernel killed for memory, for
example, works again at once. One that cannot run at all is reported after some seconds."""
_T = TypeVar("_T")

_COUNTED = 16
"""Exit code for no GPU. Each GPU adds one. The code is above 1 and 2, which Python uses for its own failures."""

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Device files of the GPUs that torch supports: NVIDIA, WSL and AMD."""


@runtime_checkable
class Launcher(Protocol):
    """Starts and stops workers.

    Attributes:
        listen: name or address of this host at which workers reach the coordinator, or None if all workers are on this
            host.
    """

    listen: str | None

    def spawn(self, worker: str, device: str, address: str, secret: str) -> None:
        """Start a worker named `worker`, which connects to `address`. Raise PeerLost if the worker cannot start."""
        ...

    def ended(self, worker: str) -> str | None:
        """Return a text that says how a worker ended, or None if the worker may still connect or send messages."""
        ...

    def kill(self, worker: str) -> None:
        """End a worker immediately. Idempotent."""
        ...


class LocalLauncher(Closeable):
    """Starts workers as processes on this host, which end with the thread that started them. A context manager.

    Attributes:
        fork_server: the process that forks the workers. None before `begin`.

    Args:
        devices, workers: the expected arguments of `devices_of`, which determine how many processes are prewarmed.
    """

    listen: str | None = None

    def __init__(self, devices: str | Sequence[str] = "all", workers: int | None = None) -> None:
        self.fork_server: ForkServer | None = None
        self._processes: dict[str, Forked] = {}
        self._gpus: list[str] | None = None
        """Names of all GPUs, or None before the GPUs are counted."""
        self._num_prewarmed = num_prewarmed(devices, workers)
        self._prewarmed: list[tuple[Forked, int]] = []

    def begin(self) -> ForkServer:
        """Start the fork server without waiting for its imports, which take seconds. Idempotent.

        Raises:
            MissingExtra: torch is not installed, so no worker can run.
            PeerLost: the fork server did not start.
        """
        if self.fork_server is None or not self.fork_server.is_alive:
            require_package("torch")
            self.close()
            # Prewarmed processes import the modules themselves, so the fork server imports nothing.
            self.fork_server = ForkServer.start(() if self._num_prewarmed else IMPORTS)
            for _ in range(self._num_prewarmed):
                self._prewarmed.append(self._prewarm(self.fork_server))
        return self.fork_server

    def _prewarm(self, fork_server: ForkServer) -> tuple[Forked, int]:
        """Fork a process that waits for a worker's arguments. Return the process and a descriptor for the arguments."""
        reads, writes = descriptors.opened(os.pipe)
        try:
            return fork_server.fork("penstock_convert.workers.launch:work", [], (reads, 2)), writes
        except BaseException:
            os.close(writes)
            raise
        finally:
            # The child has its own copy of this descriptor.
            os.close(reads)

    def gpus(self) -> list[str]:
        """Count the GPUs in a new process, because this process must not import torch or initialise a device.

        Raise PeerLost.
        """
        if self._gpus is None:
            try:
                # Use the exit code, because a forked process returns nothing else without an additional channel.
                code = self._retried(_count_gpus) if has_driver() else _COUNTED
            except subprocess.TimeoutExpired as error:
                raise PeerLost(f"counting GPUs took longer than {START_S:g} s", hint="run nvidia-smi") from error
            if code < _COUNTED:
                message = f"the process that counts GPUs failed with exit code {code}"
                raise PeerLost(message, hint="run nvidia-smi, or use devices=cpu")
            self._gpus = [f"cuda:{i}" for i in range(code - _COUNTED)]
            if not self._gpus and self._num_prewarmed:
                self.close()
                # There are device files but no GPU. Fork the CPU workers from a new fork server with all imports.
                self._num_prewarmed = 0
        return self._gpus

    def spawn(self, worker: str, device: str, address: str, secret: str) -> None:
        """See `Launcher.spawn`. Output from a user's function goes to stderr, because stdout belongs to the caller.

        Raises:
            ConfigError: this host has no such device.
        """
        if device != "cpu" and device not in (devices := self.gpus()) and (device != "cuda" or not devices):
            message = f"there is no device {device}: this host has {len(devices)} CUDA devices"
            raise ConfigError(message, hint="list the devices with `penstock doctor`, and check CUDA_VISIBLE_DEVICES")
        self._processes[worker] = self._retried(partial(self._start, [address, worker, device, secret]))

    def _start(self, arguments: list[str], fork_server: ForkServer) -> Forked:
        # All prewarmed processes may be in use if there are more workers than GPUs, or if a lost worker is replaced.
        if not self._prewarmed:
            return fork_server.fork("penstock_convert.workers.process:work", arguments)
        process, line = self._prewarmed.pop()
        with contextlib.suppress(BrokenPipeError), open(line, "w", encoding="utf-8") as pipe:
            # If the process has already ended, `ended` reports this.
            pipe.write(json.dumps(arguments) + "\n")
        return process

    def _retried(self, ask: Callable[[ForkServer], _T]) -> _T:
        """Call a function with the fork server, and retry with a new fork server if the first one was lost.

        Raise PeerLost after `RESTARTS` restarts.

        The processes of a lost fork server ended with the fork server, and the coordinator replaces these workers.
        """
        for _ in range(RESTARTS):
            with contextlib.suppress(PeerLost):
                return ask(self.begin())
        # Make the last attempt outside the `suppress`, so that the caller gets its error.
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
        # Wait until the process has ended, because other workers run its tasks next. Stop waiting after `END_S` if the
        # kernel cannot end the process. If the fork server has exited, its processes have ended too.
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
            # A process that still waits for its arguments reaches the end of the pipe and exits.
            os.close(line)


def has_driver() -> bool:
    """Return whether the device files of a GPU driver exist."""
    return any(os.path.exists(path) for path in _DRIVERS)


def num_prewarmed(devices: str | Sequence[str], workers: int | None) -> int:
    """Return the number of processes to start before GPUs are counted, for workers that may use a GPU."""
    named = [devices] if isinstance(devices, str) else list(devices)
    # Use device files and CUDA_VISIBLE_DEVICES, because initialising the driver would take as long as prewarming saves.
    if named == ["all"]:
        there, shown = glob.glob("/dev/nvidia[0-9]*"), visible_devices()
        named = ["cuda"] * (len(there) if shown is None else min(len(there), len(shown)))
    if not named or not has_driver():
        return 0
    # Start no more processes than there are cores or devices, whichever is larger, because each process imports torch.
    count = min(workers or len(named), max(len(named), len(os.sched_getaffinity(0))))
    return sum(named[i % len(named)] != "cpu" for i in range(count))


def _count_gpus(fork_server: ForkServer) -> int:
    """Return `_COUNTED` plus the number of GPUs, which a separate process counts."""
    return fork_server.fork("penstock_convert.workers.launch:exit_with_gpu_count", []).wait(START_S)


def exit_with_gpu_count() -> int:
    """Return `_COUNTED` plus the number of GPUs as the exit code, which differs from the exit code of any failure."""
    return _COUNTED + num_gpus()


def num_gpus() -> int:
    """Return the number of GPUs from the NVIDIA driver, or from torch if that driver is missing or fails."""
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
    """Return one device for each worker. Raise ConfigError if `workers` is below 1 or a device name is invalid."""
    require_type("workers", workers, (int, type(None)), "a number of workers, or None")
    require_texts("devices", [devices] if isinstance(devices, str) else devices, '"all", "cpu" or a list of names')
    if workers is not None and workers < 1:
        raise ConfigError(f"workers={workers} must be at least 1")
    named = [devices] if isinstance(devices, str) else list(devices)
    if named == ["all"]:
        named = gpus() or ["cpu"]
    if wrong := [name for name in named if not _DEVICE.fullmatch(name)]:
        raise ConfigError(f"no such device: {', '.join(wrong)}", hint="use devices=all, cpu or cuda:0,cuda:1")
    # Run one worker for each core, with one torch thread. More threads would compete with the other workers.
    if named == ["cpu"] and workers is None:
        workers = len(os.sched_getaffinity(0))
    return [named[i % len(named)] for i in range(workers or len(named))]


_SPAWN_S = 60.0
"""Seconds that an actor has to reach the coordinator after Ray has started it."""


class RayLauncher:
    """Starts workers as Ray actors, with one GPU for a worker on `cuda` and one core for each other worker.

    If the cluster has no free resources for an actor, for example because a node was lost, the actor starts later.

    Args:
        address: address of the cluster, as for `ray.init`. If this process is already connected to a cluster, the
            address is ignored.

    Raises:
        MissingExtra: Ray is not installed.
        PeerLost: there is no cluster at this address.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingExtra("Ray workers require the package ray", hint=install_hint("ray")) from error
        self._ray: Any = ray
        # If the program is already connected to Ray, use that connection and never close it.
        self._connected = not ray.is_initialized()
        if self._connected:
            try:
                ray.init(address=address, log_to_driver=False, include_dashboard=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise PeerLost(f"no Ray cluster was found at {address}: {error}") from error
        self.listen: str | None = ray.util.get_node_ip_address()
        self._actors: dict[str, tuple[Any, Any]] = {}

    def spawn(self, worker: str, device: str, address: str, secret: str) -> None:
        """See `Launcher.spawn`."""
        # Ray must not restart actors, because the coordinator replaces lost workers under new names and counts them.
        on_gpu = device.startswith("cuda")
        kind = self._ray.remote(num_cpus=0 if on_gpu else 1, num_gpus=1 if on_gpu else 0, max_restarts=0)(_Actor)
        actor = kind.remote()
        # Ray sets CUDA_VISIBLE_DEVICES to the actor's GPU, so this GPU is always device 0 inside the actor.
        self._actors[worker] = actor, actor.work.remote(address, worker, "cuda:0" if on_gpu else device, secret)

    def ended(self, worker: str) -> str | None:
        """See `Launcher.ended`. Before the actor's call returns, the actor may still be waiting for a node."""
        _, call = self._actors[worker]
        done, _ = self._ray.wait([call], timeout=0)
        return "its actor or its node has ended" if done else None

    def kill(self, worker: str) -> None:
        """See `Launcher.kill`."""
        # Do not restart the actor. The coordinator starts a worker with a different name instead.
        actor, _ = self._actors[worker]
        self._ray.kill(actor, no_restart=True)

    def close(self) -> None:
        """Disconnect from the cluster if this object connected to it. Idempotent."""
        if self._connected:
            self._ray.shutdown()
        self._connected = False


class _Actor:
    """A worker's process on any node in the cluster."""

    def work(self, address: str, worker: str, device: str, secret: str) -> None:
        import torch

        from penstock_convert.workers.process import ALONE, connect, serve

        where = torch.device(device)
        # Ray assigned one core, but by default torch would use all cores of the host.
        if where.type == "cpu":
            torch.set_num_threads(1)
        try:
            serve(connect(address, timeout_s=_SPAWN_S), worker, secret, where)
        except PeerLost:
            # Exit here, because the coordinator is gone and cannot stop this process.
            os._exit(ALONE)


def work() -> int:
    """Run a prewarmed worker after its arguments have arrived on stdin. Return 0 if stdin closes without arguments."""
    # Initialise the driver in a separate thread. Its C call releases the GIL, so this thread can import modules.
    with ThreadPoolExecutor(1, thread_name_prefix="penstock-early") as driver_thread:
        waking = driver_thread.submit(_wake)
        # Imports create many objects that are never freed. Garbage collections would take a tenth of the import time.
        gc.disable()
        for name in IMPORTS:
            # If the worker needs this module, the worker imports it again and reports the error.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        gc.enable()
        arguments = waking.result()
    if not arguments:
        return 0
    from penstock_convert.workers import process

    return process.work(*arguments)


def _wake() -> list[str]:
    """Initialise the driver, wait for the arguments, create the device's context, and return the arguments.

    Ignore errors of the driver, because they occur again in the worker, which reports them to the coordinator.
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
