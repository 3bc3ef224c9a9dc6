"""Runs rounds of faults with real processes, each reproducible by its number, and counts broken promises.

Each round returns an `Outcome`: faults, storage bytes, violations. The kinds are in `fleets`, `keepers`, `syncs`,
`conversions`, `strangers` and `downloads`, and the totals in `totals`.
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import random
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from tests.support.compare import by_safetensors
from tests.support.fleet import Worker, digests
from tests.support.fork_server import Forked, ForkServer
from tests.support.servers.http_server import RangeServer

from penstock.cli.checkpoints import manifest
from penstock.errors import PenstockError, SourceStalled
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB

STALL_S = 6.0
SMALL = {
    "penstock.holding.weight_layout.CHUNK_BYTES": 256 << 10,
    "penstock_hub.claims.MIN_PIECE_BYTES": MIB,
    "penstock_hub.claims.CLAIM_STALL_S": 5.0,
}
"""Settings for small weights. 8 MiB then have 32 chunks and are claimed in eight pieces, like 512 MiB by default."""
SHORT_TIMEOUTS = SMALL | {
    "penstock.hub.client.ATTEMPT_S": 1.0,
    "penstock.hub.client._MAX_PAUSE_S": 0.1,
    "penstock.hub.local_hub.BEAT_S": 0.25,
    "penstock.hub.local_hub.TTL_S": 2.0,
    "penstock_hub.store.ANSWER_S": 0.5,
}
"""Shorter heartbeats and timeouts for rounds of seconds."""
ROUND_S = 90.0
"""Time limit for a round in seconds. A round takes seconds, or some tens of seconds if members fall silent."""
END_S = 15.0
"""Seconds for processes to end after the processes that started them."""


class Hang(Exception):
    """Something missed its deadline. The stacks of all processes are in their files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A promise that did not hold in a round."""

    kind: str
    text: str


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The faults and findings of one round."""

    number: int
    kind: str
    seed: int
    description: str = ""
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    results: Counter[str] = field(default_factory=Counter)
    """Results of faults that allow two outcomes, such as a version that is committed or withdrawn."""
    violations: list[Violation] = field(default_factory=list)
    weight_bytes: int = 0
    """Bytes of a model that a fleet read from storage once. 0 means that storage is not counted in this round."""
    served_bytes: int = 0
    num_deaths: int = 0
    allowed_bytes: int = 0
    """Additional bytes allowed because dead members had read them and perhaps not passed them on."""
    settle_s: float = 0.0
    """Seconds for which the slowest process still held something after its work."""
    kept: str = ""
    """Directory with the output of its processes, if a promise did not hold."""


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk and its ground truth, read by the safetensors package."""

    directory: Path
    digests: str
    nbytes: int
    tensors: list[tuple[str, list[int], str]]
    starts: dict[str, int]
    """Offset of the tensors' bytes in each file."""

    @classmethod
    def of(cls, directory: Path) -> Checkpoint:
        truth = by_safetensors(directory)
        starts = {}
        for path in directory.glob("*.safetensors"):
            with path.open("rb") as file:
                starts[path.name] = 8 + struct.unpack("<Q", file.read(8))[0]
        return cls(
            directory=directory,
            digests=digests(truth),
            nbytes=sum(tensor.nbytes for tensor in truth.values()),
            tensors=[(name, list(one.shape), str(one.dtype).removeprefix("torch.")) for name, one in truth.items()],
            starts=starts,
        )

    def weight_bytes_of(self, server: RangeServer, clients: Collection[str] | None = None) -> int:
        """Return how many bytes of weights a server sent, to all clients or to these. Reads of headers do not count."""
        total = 0
        for sent in list(server.sent):
            first = self.starts.get(Path(sent.path).name)
            if first is not None and sent.start >= first and (clients is None or sent.client in clients):
                total += sent.stop - sent.start
        return total


class World:
    """Shared state of all rounds: checkpoints of 8 MiB, and a process that has imported everything. A context manager.

    Args:
        fork_server: that process. None means that this object starts it.
    """

    def __init__(self, fork_server: ForkServer | None = None) -> None:
        self._stack, self._given = ExitStack(), fork_server
        self.directory = Path(tempfile.mkdtemp(prefix="penstock-chaos-", dir="/tmp"))
        self._stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        self.directory.chmod(0o711)
        self.results: dict[str, Any] = {}
        """Reference results that a kind computes once."""

    def __enter__(self) -> World:
        self.fork_server = self._given or self._stack.enter_context(ForkServer())
        write_llama(self.directory / "plain", num_layers=1, hidden=512, vocab=2048, shards=2)
        write_llama(self.directory / "many", total_bytes=8 * MIB, shards=2)
        write_llama(self.directory / "other", num_layers=1, hidden=512, vocab=2048, shards=2, seed=3)
        shutil.copytree(self.directory / "plain", self.directory / "sealed")
        with contextlib.redirect_stdout(io.StringIO()):
            manifest(str(self.directory / "sealed"))
        self.checkpoints = {name: Checkpoint.of(self.directory / name) for name in ("plain", "sealed", "many", "other")}
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class Round:
    """A round. Each kind is a subclass with `run`.

    Args:
        number: determines the round, together with the seed.
        seed: seed of the whole run.
        world: shared state of the rounds.
        keep: directory for the output of processes if a promise does not hold.
    """

    kind: ClassVar[str]
    at_once: ClassVar[int] = 1
    """Number of the run's places that a round takes."""

    def __init__(self, number: int, seed: int, world: World, keep: Path) -> None:
        self.world, self._keep = world, keep
        self.rng, self.stack = random.Random(f"{seed}/{self.kind}/{number}"), ExitStack()
        self.outcome = Outcome(number=number, kind=self.kind, seed=seed)
        self.directory = Path(tempfile.mkdtemp(prefix=f"round-{number}-", dir=world.directory))
        self.directory.chmod(0o711)
        (self.directory / "tmp").mkdir()
        self.runtime = self.directory / "run"
        self.deadline = time.monotonic() + ROUND_S
        self.forked: list[Forked] = []
        self.is_rough = False
        """Whether a process that may leave files was killed although no member died."""

    def run(self) -> None:
        """Run the round. Raise an error or call `violate` if something goes wrong."""
        raise NotImplementedError

    # The kinds use the methods below.

    def fork(self, function: str, argument: object, environ: Mapping[str, str] | None = None) -> Forked:
        """Call a function in a process of this round, which is killed at its end. See `ForkServer.fork`."""
        told = {
            "function": function,
            "argument": argument,
            "directory": str(self.directory),
            "name": f"{len(self.forked):02}-{function.rpartition('.')[2].replace(':', '-')}",
        }
        forked = self.world.fork_server.fork("tests.chaos.processes:run", told, self.environ() | dict(environ or {}))
        self.forked.append(forked)
        return forked

    def environ(self) -> dict[str, str]:
        """Return the changes to the environment of this round's processes."""
        return {
            "PENSTOCK_RUNTIME_DIR": str(self.runtime),
            "PENSTOCK_STALL_S": str(STALL_S),
            "TMPDIR": str(self.directory / "tmp"),
        }

    def start(self, function: str, argument: object) -> Process:
        """Start a function from `processes`, or with its full path, that exchanges JSON lines."""
        return self.stack.enter_context(Process(function, argument, self))

    def serve(self, checkpoint: Checkpoint) -> RangeServer:
        """Start an HTTP server for a checkpoint, which stops at the end of the round."""
        return self.stack.enter_context(RangeServer(checkpoint.directory))

    def fault(self, kind: str, count: int = 1) -> None:
        """Count an injected fault."""
        self.outcome.faults[kind] += count

    def violate(self, kind: str, text: str) -> None:
        """Record that a promise did not hold."""
        self.outcome.violations.append(Violation(kind=kind, text=text))

    def left_s(self) -> float:
        """Return the seconds until the round's deadline."""
        return max(0.0, self.deadline - time.monotonic())

    def expect(self, worker: Worker, word: str) -> dict[str, Any]:
        """Return the values of a worker's event.

        Raises:
            Hang: the event did not arrive within the round's deadline.
            PenstockError: the worker failed or ended.
        """
        try:
            return worker.wait_for(word, timeout_s=self.left_s())
        except SourceStalled as error:
            self.hang(f"no {word!r}: {error.message}")

    def hang(self, text: str) -> NoReturn:
        """Make every process write the stacks of its threads, and end the round."""
        for forked in self.forked:
            with contextlib.suppress(ProcessLookupError):
                forked.send_signal(signal.SIGCONT)
                forked.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        raise Hang(text)

    def leave(self, workers: list[Worker]) -> None:
        """Make survivors end by themselves, and check for leaks."""
        for worker in workers:
            assert worker.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                worker.process.stdin.close()
        for worker in workers:
            self.ended(worker)

    def ended(self, worker: Worker, *, due: int = 0) -> None:
        """Check what an ended process left open, and whether its exit code is the expected one."""
        worker.events.pop("failed", None)
        self.check_census(self.expect(worker, "census"))
        if (code := worker.process.wait(timeout=END_S)) != due:
            self.violate("untyped error", f"a process ended with {code} instead of {due}")

    def check_census(self, found: dict[str, Any]) -> None:
        """Record what a process that ended by itself left open."""
        self.outcome.settle_s = max(self.outcome.settle_s, found["settle_s"])
        for kind, text in found["leaks"].items():
            self.violate(kind, text)

    # The runner calls the methods below.

    def execute(self) -> Outcome:
        """Run the round, end its processes, and check for leftovers."""
        begun = time.monotonic()
        try:
            with self.stack:
                self.run()
        except Hang as error:
            self.violate("hang", str(error))
        except PenstockError as error:
            self.violate("untyped error" if "ended with 1 " in str(error) else "unexpected error", str(error))
        except subprocess.TimeoutExpired as error:
            self.violate("hang", str(error))
        except (AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            self.violate("unexpected error", f"{type(error).__name__}: {error}")
        finally:
            self.outcome.description = str(self)
            self._after()
            self.outcome.seconds = time.monotonic() - begun
        return self.outcome

    def _after(self) -> None:
        deadline = time.monotonic() + END_S
        while (leaked := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid, command in leaked.items():
            self.violate("leaked processes", f"process {pid} outlived the round: {command}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not self.outcome.num_deaths and not self.is_rough:
            self._check_files()
        for path in sorted(self.directory.glob("*.err")):
            said = path.read_text(errors="replace")
            if "Traceback" in said or "Fatal Python error" in said:
                self.violate("untyped error", f"{path.name}: {said.strip().splitlines()[-1][:300]}")
        if self.outcome.violations:
            kept = self._keep / f"{self.outcome.seed}-{self.outcome.number}-{self.kind}"
            shutil.rmtree(kept, ignore_errors=True)
            kept.mkdir(parents=True)
            for path in self.directory.glob("*.err"):
                shutil.copy(path, kept)
            self.outcome.kept = str(kept)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _processes(self) -> dict[int, str]:
        """Return the processes whose working directory is in this round's, by pid."""
        found = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{entry}/cwd").startswith(str(self.directory)):
                        state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
                        if state != "Z":
                            found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_text().replace("\0", " ")[:100]
        return found

    def _check_files(self) -> None:
        """Check that only the intended files remain if no process was killed."""
        for path in (self.directory / "tmp").iterdir():
            self.violate("left files", f"in the temporary directory: {path.name}")
        if self.runtime.is_dir():
            for path in self.runtime.iterdir():
                if path.name not in KEPT_FILES and not path.name.startswith("host-") and path.suffix != ".lock":
                    self.violate("left files", f"in the runtime directory: {path.name}")


KEPT_FILES = frozenset({"generation", "grant.seed"})
"""Files that stay in the runtime directory. See `penstock.hub.local_hub`."""


class Process(Worker):
    """A process of a round that exchanges JSON lines."""

    def __init__(self, function: str, argument: object, round_: Round) -> None:
        path = function if ":" in function else f"tests.chaos.processes:{function}"

        class Forks:
            @staticmethod
            def fork(_: str, __: object, environ: Mapping[str, str]) -> Forked:
                return round_.fork(path, argument, environ)

        super().__init__(_Nothing(), Forks())  # type: ignore[arg-type]

    def next(self, timeout_s: float) -> dict[str, Any] | None:
        """Return its next line, `ended` at its end, or None if it sends nothing for this long."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if line is None:
            self._lines.put(None)
            return {"event": "ended"}
        return line


@dataclass(frozen=True, slots=True)
class _Nothing:
    """A task without values."""

    environ: dict[str, str] = field(default_factory=dict)
