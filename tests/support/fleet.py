"""Workers of a fleet as processes of their own, told what to do by lines of JSON, and killed at will.

In: a `Task` a worker. Out: what each says: that it joined, its report, digests of what it got, its error.
Not here: what is asserted of them (tests), what is shown of them (`scripts/demo.py`).

    worker = Worker(Task(model="m", fallback="/ckpt"));  worker.say_until("fetched");  worker.process.kill()
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
    """The task of a worker: join, fetch into a dict (or into zeroed tensors, `in_place`), serve until terminated."""

    model: str = "m"
    fallback: str | None = None
    storage_options: dict[str, str] = field(default_factory=dict)
    """Of the fallback."""
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
    """`module.NAME` -> value for this process: shorter deadlines, smaller chunks."""
    storage_pause_s: float = 0.0
    """Time that each chunk of storage takes on top."""
    digest_pause_s: float = 0.0
    """Time that each digesting of chunks takes on top: a member that gets on slowly."""
    data_bytes_per_s: float | None = None
    """What its data port gives over each connection: 0 is a port that accepts and says nothing; None: no bound."""
    wait_s: float | None = None
    alone: bool = False
    """Load all of `fallback` by itself, in no fleet: what a fetch is compared with."""
    is_held: bool = False
    """Import, say "ready", and begin at a line of input: so that several begin at once (`Worker.begin`)."""
    asks_before_fetch: bool = False
    """Once it has joined, fetch at a line of input."""
    corrupt_at: int = -1
    """Flip a bit of this byte of the first tensor after the fetch, unannounced: a holder whose memory is bad."""


class Worker:
    """A worker process. A context manager: leaving it kills the process, if it is still there.

    Args:
        task: what it does.
        fork_server: forks it; None: a process that imports everything itself.
        prefix: words before its command, of one that is not forked.
    """

    room = "tests.support.fleet"
    """The module that has its `work`."""

    def __init__(self, task: Any, fork_server: ForkServer | None = None, *, prefix: Sequence[str] = ()) -> None:
        self.task = task
        self.process: subprocess.Popen[bytes] | Forked
        if fork_server is not None:
            self.process = fork_server.fork(f"{self.room}:work", asdict(task), task.environ)
        else:
            changed = ["env", *(f"{name}={value}" for name, value in task.environ.items())]
            command = [
                *prefix,
                *changed,
                sys.executable,
                "-u",
                "-m",
                self.room,
                json.dumps(asdict(task)),
            ]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        self.said: dict[str, dict[str, Any]] = {}
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"{"):
                self._lines.put(json.loads(line))
        self._lines.put(None)

    def say_until(self, word: str, *, timeout_s: float = 60.0) -> dict[str, Any]:
        """Return what it said under this word, once it has.

        Raises:
            SourceStalled: not within `timeout_s`.
            PenstockError: it ended, or failed, without saying it.
        """
        deadline = time.monotonic() + timeout_s
        while word not in self.said:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise SourceStalled(f"the worker did not say {word!r} in {timeout_s} s: {self.said}") from None
            if line is None:
                self._lines.put(None)
                raise PenstockError(f"the worker ended with {self.process.wait()} and never said {word!r}: {self.said}")
            self.said[line.pop("say")] = line
            if "failed" in self.said and word != "failed":
                raise PenstockError(f"the worker failed: {self.said['failed']}")
        return self.said[word]

    def tell(self, word: str) -> None:
        """A line of input; after the fetch `fence`, `digests` and `corrupt` are understood."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n".encode())
        self.process.stdin.flush()

    def begin(self) -> None:
        """Let it go on, where its task has `is_held`."""
        self.tell("go")

    def leave(self, *, timeout_s: float = 30.0) -> int:
        """Have it leave its fleet; its exit code."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        return self.process.wait(timeout=timeout_s)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal."""
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


def say(word: str, **values: Any) -> None:
    """A line of output: a word, and values of JSON."""
    print(json.dumps({"say": word, **values}), flush=True)


def set_constants(constants: dict[str, float]) -> None:
    """Give module constants other values in this process."""
    for path, value in constants.items():
        module, _, name = path.rpartition(".")
        found = importlib.import_module(module)
        assert hasattr(found, name), path
        setattr(found, name, value)


def slow_storage(pause_s: float) -> None:
    """Have every chunk of storage take this long, on top, in this process."""
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
    """Have every digesting of chunks take this long, on top, in this process."""
    from penstock.peer import local_weights

    digest = local_weights.LocalWeights.digest

    def slow(self: local_weights.LocalWeights, chunks: I64) -> U64:
        time.sleep(pause_s)
        return digest(self, chunks)

    vars(local_weights)["LocalWeights"].digest = slow


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
    if task.is_held:
        if task.device.startswith("cuda"):
            torch.zeros(1, device=task.device)
        say("ready")
        sys.stdin.readline()
    if task.alone:
        _load_alone(task)
        return
    begun = time.monotonic()
    connection = ps.ConnectionSettings(hub=task.hub, **task.connection)
    with ps.join(task.model, connection=connection, **task.join) as fleet:
        say("joined", member=fleet.member.id, seconds=time.monotonic() - begun)
        if task.asks_before_fetch:
            sys.stdin.readline()
        weights: dict[str, torch.Tensor] = {}
        if task.in_place:
            assert task.fallback is not None
            loaded = ps.load(task.fallback, device=task.device)
            weights = {name: torch.zeros_like(tensor) for name, tensor in loaded.items()}
        try:
            _fetch(fleet, task, weights)
        except PenstockError as error:
            say(
                "failed",
                error=type(error).__name__,
                message=str(error),
                mutated=error.mutated,
                num_tensors=len(weights),
            )
            raise SystemExit(3) from error
        if task.serve:
            threading.Thread(target=_obey, args=(fleet, weights), daemon=True).start()
            fleet.serve()
    say("left")


def _fetch(fleet: Fleet, task: Task, weights: dict[str, Any]) -> None:
    begun = time.monotonic()
    report = fleet.fetch(
        weights,
        fallback=task.fallback,
        device=task.device,
        storage_options=task.storage_options or None,
        timeout_s=task.wait_s,
    )
    say(
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
        say("corrupted")
    say("digests", digests=digests(weights))


def _corrupt(weights: dict[str, Any], at: int) -> None:
    """Flip a bit, unannounced: memory that is bad."""
    import torch

    weights[min(weights)].view(-1).view(torch.uint8)[at] ^= 1


def _load_alone(task: Task) -> None:
    """Every page is touched within the time: a mapping counts only once its bytes are there."""
    import torch

    import penstock as ps

    assert task.fallback is not None
    begun = time.monotonic()
    weights = ps.load(task.fallback, device=task.device, progress=False)
    for tensor in weights.values():
        if tensor.device.type == "cpu" and tensor.numel():
            int(tensor.view(-1).view(torch.uint8)[::4096].max())
    say("loaded", seconds=time.monotonic() - begun, nbytes=weights.report.nbytes)
    say("digests", digests=digests(weights))


def _obey(fleet: Fleet, weights: dict[str, Any]) -> None:
    """Carry out words of input while it serves; at their end terminate as by SIGTERM."""
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.001)  # it does not serve yet
    say("serving")
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        if word == "fence":
            fleet.fence()
        elif word == "corrupt":
            _corrupt(weights, int(number))
        say(f"done {word}", digests=digests(weights))
    os.kill(os.getpid(), signal.SIGTERM)


def digests(tensors: dict[str, Any], names: Iterable[str] | None = None) -> str:
    """Return one digest over all tensors, by name, to compare two workers."""
    import torch
    from blake3 import blake3

    digest = blake3()
    # Sorted: a fetch gives tensors in the order of their arrival, which differs between workers.
    for name in sorted(tensors if names is None else names):
        flat = tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(name.encode()).update(flat.numpy().data)
    return str(digest.hexdigest())


def work(values: dict[str, Any]) -> int:
    """Run a worker in this process; return its exit code."""
    try:
        _work(Task(**values))
    except SystemExit as error:
        return int(str(error.code))
    except PenstockError as error:
        say("failed", error=type(error).__name__, message=str(error), mutated=error.mutated, num_tensors=0)
        return 3
    return 0


def hub(values: dict[str, Any]) -> int:
    """Run a hub in this process: it listens on `listen`; its state is in `redis` where that is given."""
    from penstock.hub.directory import Directory
    from penstock.hub.server import run_hub
    from penstock.hub.store import MemoryStore, Store

    set_constants(values.get("constants", {}))
    store: Store = MemoryStore()
    if values.get("redis"):
        from penstock.hub.store import RedisStore

        store = RedisStore(values["redis"])
    directory = Directory(store, fresh=values["fresh"], beat_s=values["beat_s"], ttl_s=values["ttl_s"])
    run_hub(directory, values["listen"], ready=lambda url: say("ready", url=url))
    return 0


def main() -> int:
    """Return the worker's process."""
    return work(json.loads(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
