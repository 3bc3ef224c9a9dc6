"""Workers of a fleet as processes of their own, told what to do by lines of JSON, and killed at will.

In: a `Task` a worker. Out: what each says: that it joined, its report, digests of what it got, its error.
Not here: what is asserted of them (tests), what is shown of them (`scripts/demo.py`).

    worker = Worker(Task(model="m", fallback="/ckpt"));  worker.say_until("fetched");  worker.process.kill()
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.errors import PenstockError, SourceStalled


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a worker does: join, fetch into a dict (or into zeroed tensors, `in_place`), serve until told to leave."""

    model: str = "m"
    fallback: str | None = None
    hub: str | None = None
    device: str = "cpu"
    in_place: bool = False
    serve: bool = True
    join: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `join`."""
    environ: dict[str, str] = field(default_factory=dict)
    wait_s: float | None = None
    alone: bool = False
    """Load all of `fallback` by itself, in no fleet: what a fetch is compared with."""
    is_held: bool = False
    """Import, say "ready", and begin at a line of input: so that several begin at once (`Worker.begin`)."""
    corrupt_at: int = -1
    """Flip a bit of this byte of the first tensor after the fetch, unannounced: a holder whose memory is bad."""


class Worker:
    """One process. A context manager: leaving it kills the process, if it is still there."""

    def __init__(self, task: Task) -> None:
        self.task = task
        environ = {**os.environ, **task.environ}
        command = [sys.executable, "-u", "-m", "penstock.testing.fleet", json.dumps(asdict(task))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, start_new_session=True
        )
        self.said: dict[str, dict[str, Any]] = {}
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"{"):
                self._lines.put(json.loads(line))
        self._lines.put(None)

    def say_until(self, word: str, *, timeout_s: float = 60.0) -> dict[str, Any]:
        """What it said under this word, once it has.

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
                raise PenstockError(f"the worker ended with {self.process.wait()} and never said {word!r}: {self.said}")
            self.said[line.pop("say")] = line
            if "failed" in self.said and word != "failed":
                raise PenstockError(f"the worker failed: {self.said['failed']}")
        return self.said[word]

    def begin(self) -> None:
        """Let it go on, where its task has `is_held`."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()

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

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(signal.SIGCONT)
        self.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _say(word: str, **values: Any) -> None:
    print(json.dumps({"say": word, **values}), flush=True)  # noqa: T201


def _work(task: Task) -> None:
    import torch

    import penstock as ps

    torch.set_num_threads(1)
    if task.is_held:
        if task.device.startswith("cuda"):
            torch.zeros(1, device=task.device)
        _say("ready")
        sys.stdin.readline()
    if task.alone:
        _load_alone(task)
        return
    begun = time.monotonic()
    with ps.join(task.model, hub=task.hub, **task.join) as fleet:
        _say("joined", member=fleet.member.id, seconds=time.monotonic() - begun)
        weights: dict[str, torch.Tensor] = {}
        if task.in_place:
            assert task.fallback is not None
            weights = {name: torch.zeros_like(one) for name, one in ps.load(task.fallback, device=task.device).items()}
        begun = time.monotonic()
        report = fleet.fetch(weights, fallback=task.fallback, device=task.device, wait_s=task.wait_s)
        _say(
            "fetched",
            seconds=time.monotonic() - begun,
            nbytes=report.nbytes,
            storage_bytes=report.storage_bytes,
            paths=dict(report.nbytes_by_path),
            why=dict(report.why),
            phases=dict(report.phases),
            faults=list(report.faults),
            revision=report.revision,
        )
        if task.corrupt_at >= 0:
            first = weights[sorted(weights)[0]].view(-1).view(torch.uint8)
            first[task.corrupt_at] ^= 1
            _say("corrupted")
        _say("digests", digests=digests(weights))
        if task.serve:
            threading.Thread(target=_leave_at_end_of_input, args=(fleet,), daemon=True).start()
            fleet.serve()
    _say("left")


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
    _say("loaded", seconds=time.monotonic() - begun, nbytes=weights.report.nbytes)
    _say("digests", digests=digests(weights))


def _leave_at_end_of_input(fleet: Any) -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


def digests(tensors: dict[str, Any]) -> str:
    """One digest over all tensors, by name: what two workers compare."""
    import torch
    from blake3 import blake3

    digest = blake3()
    for name in sorted(tensors):
        flat = tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(name.encode()).update(flat.numpy().data)
    return str(digest.hexdigest())


def main() -> int:
    """The worker's process."""
    task = Task(**json.loads(sys.argv[1]))
    try:
        _work(task)
    except PenstockError as error:
        _say("failed", error=type(error).__name__, message=str(error), mutated=error.mutated)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
