"""Worker processes of a fleet. Tests send them lines of input, read their events as JSON, and kill them.

A `Task` describes a worker. The worker sends events such as `joined`, `fetched` with its report, `digests` of the
received tensors, and `failed` with its error.

    worker = Worker(Task(model="m", fallback="/ckpt"));  worker.wait_for("fetched");  worker.process.kill()
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from penstock.errors import PenstockError, SourceStalled

if TYPE_CHECKING:
    from tests.support.fork_server import Forked, ForkServer

    from penstock.fetcher.join import Fleet
    from penstock.types import I64, U64


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Task of a worker: join a fleet, fetch, and serve until SIGTERM.

    The worker fetches into an empty dict, or into zeroed tensors with `in_place`.
    """

    model: str = "m"
    fallback: str | None = None
    storage_options: dict[str, str] = field(default_factory=dict)
    """Storage options for the fallback."""
    hub: str | None = None
    connection: dict[str, Any] = field(default_factory=dict)
    """Further fields of `ConnectionSettings`."""
    device: str = "cpu"
    in_place: bool = False
    serve: bool = True
    join: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `join`."""
    environ: dict[str, str] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)
    """Module constants to overwrite in the process, as `module.NAME` -> value."""
    storage_pause_s: float = 0.0
    """Extra seconds for each chunk that is read from storage."""
    digest_pause_s: float = 0.0
    """Extra seconds for each digest of chunks. This makes a slow member."""
    data_bytes_per_s: float | None = None
    """Rate limit of the data port per connection. 0 accepts connections and sends nothing. None means no limit."""
    wait_s: float | None = None
    loads_alone: bool = False
    """Load `fallback` without joining a fleet, to compare with a fetch."""
    waits_for_input: bool = False
    """Import modules, send `ready`, and wait for `Worker.proceed`, so that several workers can start together."""
    waits_before_fetch: bool = False
    """After joining, wait for a line of input before the fetch."""
    corrupt_at: int = -1
    """Offset of a byte in the first tensor. The worker flips a bit of it after the fetch. -1 flips none."""


class Worker:
    """A worker process. Use it as a context manager, which kills the process at the end.

    Args:
        task: the task of the worker.
        fork_server: process to fork the worker from. If None, start a new interpreter.
        prefix: words before the command of a new interpreter.
    """

    module = "tests.support.fleet"
    """Module that defines `run_worker`."""

    def __init__(self, task: Any, fork_server: ForkServer | None = None, *, prefix: Sequence[str] = ()) -> None:
        self.task = task
        self.process: subprocess.Popen[bytes] | Forked
        if fork_server is not None:
            self.process = fork_server.fork(f"{self.module}:run_worker", asdict(task), task.environ)
        else:
            changed = ["env", *(f"{name}={value}" for name, value in task.environ.items())]
            command = [
                *prefix,
                *changed,
                sys.executable,
                "-u",
                "-m",
                self.module,
                json.dumps(asdict(task)),
            ]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        self.events: dict[str, dict[str, Any]] = {}
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"{"):
                self._lines.put(json.loads(line))
        self._lines.put(None)

    def wait_for(self, event: str, *, timeout_s: float = 60.0) -> dict[str, Any]:
        """Wait for an event of this name and return its values.

        Raises:
            SourceStalled: if the event does not arrive within `timeout_s`.
            PenstockError: if the worker ends or fails first.
        """
        deadline = time.monotonic() + timeout_s
        while event not in self.events:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise SourceStalled(f"the worker sent no {event!r} event in {timeout_s} s: {self.events}") from None
            if line is None:
                self._lines.put(None)
                raise PenstockError(
                    f"the worker ended with {self.process.wait()} before the {event!r} event: {self.events}"
                )
            self.events[line.pop("event")] = line
            if "failed" in self.events and event != "failed":
                raise PenstockError(f"the worker failed: {self.events['failed']}")
        return self.events[event]

    def send(self, line: str) -> None:
        """Send a line of input. After the fetch a worker accepts `fence`, `digests` and `corrupt OFFSET`."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def proceed(self) -> None:
        """Let a worker with `waits_for_input` continue."""
        self.send("go")

    def leave(self, *, timeout_s: float = 30.0) -> int:
        """Make the worker leave its fleet, and return its exit code."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        return self.process.wait(timeout=timeout_s)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the process."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(signal.SIGCONT)
        self.kill()
        self.process.wait()
        self._listener.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def send_event(event: str, **values: Any) -> None:
    """Write an event as a line of JSON."""
    print(json.dumps({"event": event, **values}), flush=True)


def set_constants(constants: dict[str, float]) -> None:
    """Overwrite module constants in this process."""
    for path, value in constants.items():
        module, _, name = path.rpartition(".")
        found = importlib.import_module(module)
        assert hasattr(found, name), path
        setattr(found, name, value)


def slow_storage(pause_s: float) -> None:
    """Add a pause to every chunk read from storage in this process."""
    from penstock.fetcher import join, storage_reader

    class SlowPart(storage_reader.StorageReader):
        def read(self, chunks: I64, near_end: Callable[[], None]) -> Iterator[I64]:
            left = len(chunks)
            for some in super().read(chunks, lambda: None):
                for chunk in some:
                    time.sleep(pause_s)
                    left -= 1
                    if left == int(storage_reader.LITTLE * len(chunks)):
                        near_end()
                    yield some[some == chunk]

    vars(join)["StorageReader"] = SlowPart


def slow_digests(pause_s: float) -> None:
    """Add a pause to every digest of chunks in this process."""
    from penstock.holding import placement

    digest = placement.PlacedChunks.digest

    def slow(self: placement.PlacedChunks, chunks: I64) -> U64:
        time.sleep(pause_s)
        return digest(self, chunks)

    vars(placement)["PlacedChunks"].digest = slow


def _work(task: Task) -> None:
    import torch
    from tests.support.data_port import throttle_data_port

    import penstock as ps

    torch.set_num_threads(1)
    set_constants(task.constants)
    if task.storage_pause_s:
        slow_storage(task.storage_pause_s)
    if task.digest_pause_s:
        slow_digests(task.digest_pause_s)
    if task.data_bytes_per_s is not None:
        throttle_data_port(task.data_bytes_per_s)
    if task.waits_for_input:
        if task.device.startswith("cuda"):
            torch.zeros(1, device=task.device)
        # The first use of a public name imports its modules.
        assert ps.join is not None
        assert ps.load is not None
        send_event("ready")
        sys.stdin.readline()
    if task.loads_alone:
        _load_alone(task)
        return
    begun = time.monotonic()
    connection = ps.ConnectionSettings(hub=task.hub, **task.connection)
    with ps.join(task.model, connection=connection, **task.join) as fleet:
        send_event("joined", member=fleet.member.id, seconds=time.monotonic() - begun)
        if task.waits_before_fetch:
            sys.stdin.readline()
        weights: dict[str, torch.Tensor] = {}
        if task.in_place:
            assert task.fallback is not None
            loaded = ps.load(task.fallback, device=task.device)
            weights = {name: torch.zeros_like(tensor) for name, tensor in loaded.items()}
        try:
            _fetch(fleet, task, weights)
        except PenstockError as error:
            send_event(
                "failed",
                error=type(error).__name__,
                message=str(error),
                mutated=error.mutated,
                num_tensors=len(weights),
            )
            raise SystemExit(3) from error
        if task.serve:
            threading.Thread(target=_run_commands, args=(fleet, weights), daemon=True).start()
            fleet.serve()
    send_event("left")


def _fetch(fleet: Fleet, task: Task, weights: dict[str, Any]) -> None:
    begun = time.monotonic()
    report = fleet.fetch(
        weights,
        fallback=task.fallback,
        device=task.device,
        storage_options=task.storage_options or None,
        timeout_s=task.wait_s,
    )
    send_event(
        "fetched",
        seconds=time.monotonic() - begun,
        nbytes=report.nbytes,
        storage_bytes=report.storage_bytes,
        header_bytes=report.header_bytes,
        paths=dict(report.nbytes_by_path),
        why=dict(report.why),
        phases=dict(report.phases),
        faults=list(report.faults),
        revision=report.revision,
        verified=report.verified,
        verified_against=report.verified_against,
    )
    if task.corrupt_at >= 0:
        _corrupt(weights, task.corrupt_at)
        send_event("corrupted")
    send_event("digests", digests=digests(weights))


def _corrupt(weights: dict[str, Any], at: int) -> None:
    """Flip a bit, as damaged memory would."""
    import torch

    weights[min(weights)].view(-1).view(torch.uint8)[at] ^= 1


def _load_alone(task: Task) -> None:
    """Load without a fleet. Touch every page within the measured time, because a mapping reads its bytes lazily."""
    import torch

    import penstock as ps

    assert task.fallback is not None
    begun = time.monotonic()
    weights = ps.load(task.fallback, device=task.device, progress=False)
    for tensor in weights.values():
        if tensor.device.type == "cpu" and tensor.numel():
            int(tensor.view(-1).view(torch.uint8)[::4096].max())
    send_event("loaded", seconds=time.monotonic() - begun, nbytes=weights.report.nbytes)
    send_event("digests", digests=digests(weights))


def _run_commands(fleet: Fleet, weights: dict[str, Any]) -> None:
    """Run commands from the input while the worker serves. At the end of the input, send SIGTERM to this process."""
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.001)  # serving has not started
    send_event("serving")
    for line in sys.stdin:
        command, _, number = line.strip().partition(" ")
        if command == "fence":
            fleet.fence()
        elif command == "corrupt":
            _corrupt(weights, int(number))
        send_event(f"done {command}", digests=digests(weights))
    os.kill(os.getpid(), signal.SIGTERM)


def digests(tensors: dict[str, Any], names: Iterable[str] | None = None) -> str:
    """Return one digest over all tensors, to compare two workers."""
    import torch
    from blake3 import blake3

    digest = blake3()
    # Sort the names, because workers receive tensors in different orders.
    for name in sorted(tensors if names is None else names):
        flat = tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(name.encode()).update(flat.numpy().data)
    return str(digest.hexdigest())


def run_worker(values: dict[str, Any]) -> int:
    """Run a worker in this process and return its exit code."""
    try:
        _work(Task(**values))
    except SystemExit as error:
        return int(str(error.code))
    except PenstockError as error:
        send_event("failed", error=type(error).__name__, message=str(error), mutated=error.mutated, num_tensors=0)
        return 3
    return 0


def run_hub_process(values: dict[str, Any]) -> int:
    """Run a hub in this process at the address `listen`. Keep its state in `redis` if given."""
    from penstock_hub.directory import Directory
    from penstock_hub.server import run_hub
    from penstock_hub.store import MemoryStore, Store

    set_constants(values.get("constants", {}))
    store: Store = MemoryStore()
    if values.get("redis"):
        from penstock_hub.store import RedisStore

        store = RedisStore(values["redis"])
    directory = Directory(store, fresh=values["fresh"], beat_s=values["beat_s"], ttl_s=values["ttl_s"])
    run_hub(directory, values["listen"], ready=lambda url: send_event("ready", url=url))
    return 0


def main() -> int:
    """Run the worker described by the first argument."""
    return run_worker(json.loads(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
