"""Checks whether long-lived processes accumulate what short-lived processes leave behind.

    python -m tests.chaos.soak --minutes 30 --seed 1

The long-lived processes are a hub (`penstock hub`), a weight cache (`penstock cache`), a member that serves, a
publisher, a subscriber, and a client that joins, fetches, leaves, attaches and detaches in a loop. Short-lived members,
engines and subscribers start, use those, and leave or are killed, as a seed decides. Every few seconds, memory,
descriptors and threads of the long-lived processes are read from /proc.

Memory must be flat. A line fitted to the samples of the last two thirds must rise less than `RSS_PER_MINUTE`, after
subtracting two standard errors of the fit. Descriptors and threads must be flat by the same fit. At rest, without other
processes, there must be as many as at rest after the first third. Bytes are compared with the checkpoint at each step.
An error that no kill explains counts as a fault.

The samples and a page are written to `benchmarks/results/MACHINE/soak.*`. The exit code is 1 if something is not flat.
`tests.chaos` tests single faults.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.support import commands
from tests.support.compare import by_safetensors
from tests.support.fleet import Task, Worker, digests, send_event, set_constants
from tests.support.fork_server import ForkServer
from tests.support.keeper import KeeperProcess
from tests.support.sync import SyncTask, SyncWorker, expected_digest

import penstock as ps
from penstock.errors import PenstockError
from penstock.testing.checkpoints import write_llama

RESULTS = Path("benchmarks/results/cpu2_202611")
MODEL_BYTES = 16_000_000
RSS_PER_MINUTE = 0.5 * (1 << 20)
"""Allowed growth in bytes per minute, 30 MiB an hour. The allocator varies by some MiB within half an hour. Leaks by
members are still visible: 60 starts a minute that leak 10 KiB each exceed the limit."""
COUNT_PER_MINUTE = 0.2
"""Allowed growth of descriptors or threads per minute. A leak in every hundredth cycle exceeds it. Samples include
connections in use."""
REST_S = 25.0
"""Seconds for descriptors and threads to come to rest. The lease of a killed engine ends after 15 s."""
SPARE = 2
"""Descriptors or threads that a process at rest may have in addition, such as a later thread of a pool."""
SPARE_BYTES = 32 << 20
"""Bytes that a process at rest may have in addition."""
SMALL = {"penstock.holding.weight_layout.CHUNK_BYTES": 256 << 10, "penstock_hub.claims.MIN_PIECE_BYTES": 1 << 20}
"""Settings for more chunks in small weights, and so more rounds in a fetch."""
WATCHED = ("hub", "keeper", "member", "publisher", "subscriber", "client")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The state of a process at one time."""

    at_s: float
    process: str
    rss: int
    """Resident bytes, including shared memory."""
    private: int
    """Anonymous resident bytes, which are its heap."""
    pss: int
    """Resident bytes with shared pages divided by the number of processes that share them."""
    fds: int
    threads: int


def look(process: str, pid: int, at_s: float) -> Sample:
    """Read one process from /proc."""
    status = dict(re.findall(r"^(\w+):\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    pss = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert pss is not None
    return Sample(
        at_s=round(at_s, 3),
        process=process,
        rss=int(status["VmRSS"]) << 10,
        private=int(status["RssAnon"]) << 10,
        pss=int(pss[1]) << 10,
        fds=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(status["Threads"]),
    )


@dataclass(slots=True)
class Counts:
    """Counts of actions so far. Any thread may add."""

    done: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, what: str, number: int = 1) -> None:
        with self.lock:
            self.done[what] += number

    def fault(self, what: str, text: object) -> None:
        with self.lock:
            self.done[what] += 1
            self.faults.append(f"{what}: {text}")


class Soak:
    """The long-lived processes and the activity around them. A context manager, which kills all processes on exit."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.seed, self.directory, self.counts = seed, directory, Counts()
        self._stack = ExitStack()
        self._going, self._ended = threading.Event(), threading.Event()
        self._idle = threading.Barrier(4)
        self.begun = time.monotonic()

    def __enter__(self) -> Soak:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _start(self) -> None:
        enter = self._stack.enter_context
        self.fork_server = enter(ForkServer())
        self.checkpoint = self.directory / "m"
        write_llama(self.checkpoint, total_bytes=MODEL_BYTES)
        self.wanted = digests(by_safetensors(self.checkpoint))
        self.hub = f"unix://{self.directory}/hub.sock"
        self._environ = {"PENSTOCK_RUNTIME_DIR": str(self.directory), "PENSTOCK_STALL_S": "30"}
        hub = enter(commands.start(self.fork_server, ["hub", "--listen", self.hub], self._environ))
        self._drain(hub.stdout)
        deadline = time.monotonic() + 30
        while not (self.directory / "hub.sock").exists():
            assert time.monotonic() < deadline, "the hub does not listen"
            time.sleep(0.02)
        arguments = [str(self.checkpoint), "--model", "kept", "--hub", self.hub, "--drain-s", "1"]
        self.keeper = enter(KeeperProcess(arguments, environ=self._environ, fork_server=self.fork_server))
        self.member = self._worker("m")
        self.member.wait_for("serving")
        self.publisher = self._rank("publisher", mode="snapshot")
        self.subscriber = self._rank("subscriber")
        for rank in (self.publisher, self.subscriber):
            rank.wait_for("joined")
        told = {"hub": self.hub, "checkpoint": str(self.checkpoint), "wanted": self.wanted}
        self.client = enter(self.fork_server.fork("tests.chaos.soak:client", told, self._environ))
        self.pids = {
            "hub": hub.pid,
            "keeper": self.keeper.process.pid,
            "member": self.member.process.pid,
            "publisher": self.publisher.process.pid,
            "subscriber": self.subscriber.process.pid,
            "client": self.client.pid,
        }
        threading.Thread(target=self._hear, daemon=True).start()
        for number, turn in enumerate((self._fetches, self._attaches, self._syncs)):
            chance = random.Random(self.seed * 1000 + number)
            thread = threading.Thread(target=self._repeat, args=(turn, chance), daemon=True)
            thread.start()

    def _drain(self, pipe: Any) -> None:
        """Read the output of a process, so that it never blocks. Keep the last lines for errors."""
        self.said: deque[bytes] = deque(maxlen=50)
        threading.Thread(target=lambda: self.said.extend(pipe), daemon=True).start()

    def _worker(self, model: str, **more: Any) -> Worker:
        constants = SMALL if model == "m" else {}
        task = Task(model=model, hub=self.hub, fallback=str(self.checkpoint), constants=constants, **more)
        worker = Worker(task, self.fork_server)
        if model == "m" and not more:
            self._stack.enter_context(worker)
        return worker

    def _rank(self, side: str, **more: Any) -> SyncWorker:
        task = SyncTask(side=side, hub=self.hub, environ=self._environ, options={"arena": True}, **more)
        return self._stack.enter_context(SyncWorker(task, self.fork_server))

    # -- Activity.

    def _repeat(self, turn: Callable[[random.Random], None], chance: random.Random) -> None:
        """Repeat an activity while the soak runs. The barrier marks the moments without activity."""
        while not self._ended.is_set():
            if not self._going.wait(0.2):
                continue
            try:
                while self._going.is_set():
                    turn(chance)
            except PenstockError as error:
                self.counts.fault(f"errors of {turn.__name__[1:]}", error)
            except BaseException as error:
                self.counts.fault("faults of the soak itself", repr(error))
                raise
            finally:
                if not self._going.is_set():
                    with contextlib.suppress(threading.BrokenBarrierError):
                        self._idle.wait()

    def _compare(self, found: str, what: str) -> None:
        if found != self.wanted:
            self.counts.fault("wrong bytes", what)

    def _fetches(self, chance: random.Random) -> None:
        """Start a member, which fetches from the others, serves for a moment, and leaves or is killed."""
        model = chance.choice(("m", "m", "kept"))
        with self._worker(model, serve=True) as worker:
            self.counts.add("members born")
            if chance.random() < 0.4:
                worker.wait_for("joined")
                time.sleep(chance.random() * 0.3)
                worker.kill()
                self.counts.add("members killed")
                return
            self._compare(worker.wait_for("digests")["digests"], f"a fetch of {model}")
            self.counts.add("fetches")
            time.sleep(chance.random() * 0.3)
            if worker.leave() == 0:
                self.counts.add("members that left")
            else:
                self.counts.fault("errors of leaving", worker.events)

    def _attaches(self, chance: random.Random) -> None:
        """Start an engine, which attaches, and detaches or is killed."""
        told = {"hub": self.hub, "hold_s": chance.random() * 0.3}
        with self.fork_server.fork("tests.chaos.soak:engine", told, self._environ) as engine:
            self.counts.add("engines born")
            if chance.random() < 0.4:
                time.sleep(chance.random() * 0.5)
                self.counts.add("engines killed")
                return
            line = engine.stdout.readline()
            if not line:
                raise PenstockError("an engine ended without a result")
            self._compare(json.loads(line)["digests"], "an attachment")
            self.counts.add("attachments")
            engine.wait(30)

    def _syncs(self, chance: random.Random) -> None:
        """Publish a version, which the permanent subscriber and sometimes a new one receive."""
        version = self.counts.done["versions"] + 1
        self.counts.add("versions")
        told = self.publisher.call(f"publish {version}")
        told = self.subscriber.call("update") if "error" not in told else told
        wanted = expected_digest(SyncTask(side="subscriber"), version)
        if "error" in told:
            self.counts.fault("errors of syncs", told)
        elif told["digests"] != wanted:
            self.counts.fault("wrong bytes", f"version {version}")
        else:
            self.counts.add("updates")
        if chance.random() < 0.3:
            task = SyncTask(side="subscriber", hub=self.hub, environ=self._environ, options={"arena": True})
            with SyncWorker(task, self.fork_server) as born:
                self.counts.add("subscribers born")
                born.wait_for("joined")
                if chance.random() < 0.5:
                    self.counts.add("subscribers killed")
                    return
                told = born.call("update")
                if told.get("digests") != wanted:
                    self.counts.fault("wrong bytes" if "error" not in told else "errors of syncs", told)
                born.leave()
        time.sleep(chance.random() * 0.2)

    def _hear(self) -> None:
        """Count the events from the client's loop."""
        for line in self.client.stdout:
            if not line.startswith(b"{"):
                continue
            told = json.loads(line)
            if told["event"] == "paused":
                with contextlib.suppress(threading.BrokenBarrierError):
                    self._idle_client.set()
            elif told["event"] == "fault":
                self.counts.fault(told["what"], told["text"])
            else:
                self.counts.add("client's turns")

    _idle_client: threading.Event

    def go(self) -> None:
        """Start the activity."""
        self._idle_client = threading.Event()
        self._going.set()
        self._tell(b"go\n")

    def rest(self) -> None:
        """Stop the activity, and wait until running actions are done."""
        self._going.clear()
        self._tell(b"pause\n")
        self._idle.wait(timeout=90)
        if not self._idle_client.wait(90):
            self.counts.fault("errors of the client", "it does not come to rest")

    def _tell(self, line: bytes) -> None:
        self.client.stdin.write(line)
        self.client.stdin.flush()

    # -- Samples.

    def sample(self) -> list[Sample]:
        """Sample every long-lived process. An ended process is a fault."""
        at_s, found = time.monotonic() - self.begun, []
        for name, pid in self.pids.items():
            try:
                found.append(look(name, pid, at_s))
            except OSError as error:
                raise PenstockError(f"the {name} has ended: {error}; {list(self.said)}") from error
        return found

    def at_rest(self, before: Sequence[Sample] = ()) -> list[Sample]:
        """Return samples once they no longer change, or are as before, or after `REST_S`."""
        deadline, last, same = time.monotonic() + REST_S, [(0, 0)], 0
        while True:
            found = self.sample()
            counts = [(one.fds, one.threads) for one in found]
            same = same + 1 if counts == last else 0
            was = [(one.fds, one.threads) for one in before]
            is_settled = counts == was if was else same >= 6
            if is_settled or time.monotonic() > deadline:
                return found
            last = counts
            time.sleep(0.5)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._idle.abort()
        self._stack.close()


# -- Functions that run in separate processes.


def engine(told: dict[str, Any]) -> int:
    """Attach to the cached model, send the digest of its bytes, hold it for a moment and detach."""
    with ps.cache.attach("kept", connection=told["hub"], timeout_s=20.0) as attached:
        send_event("attached", digests=digests(dict(attached)))
        time.sleep(told["hold_s"])
    return 0


def client(told: dict[str, Any]) -> int:
    """Join, fetch, leave, attach and detach repeatedly in one process, between the lines `go` and `pause`."""
    import torch

    torch.set_num_threads(1)
    set_constants(SMALL)
    going, idle = threading.Event(), threading.Event()
    idle.set()

    def listen() -> None:
        for line in sys.stdin:
            if line.startswith("go"):
                going.set()
            else:
                going.clear()
                idle.wait()
                send_event("paused")
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        going.wait()
        idle.clear()
        try:
            _turn(told)
        except PenstockError as error:
            send_event("fault", what="errors of the client", text=str(error))
        if not going.is_set():
            idle.set()


def _turn(told: dict[str, Any]) -> None:
    with ps.join("m", connection=told["hub"]) as fleet:
        weights: dict[str, Any] = {}
        fleet.fetch(weights, fallback=told["checkpoint"])
        found = digests(weights)
        fleet.serve(timeout_s=0.1)
    if found != told["wanted"]:
        send_event("fault", what="wrong bytes", text="the client's fetch")
    with ps.cache.attach("kept", connection=told["hub"], timeout_s=20.0) as attached:
        if digests(dict(attached)) != told["wanted"]:
            send_event("fault", what="wrong bytes", text="the client's attachment")
        attached.check()
    send_event("turn")


# -- Results.


def slope_per_minute(samples: Sequence[Sample], of: str) -> tuple[float, float]:
    """Return the slope of a line fitted to these samples, and its standard error. NaN for fewer than two samples.

    On a busy machine a short soak may have no sample after its warm-up, so the slope is unknown.
    """
    if len(samples) < 2:
        return float("nan"), float("nan")
    minutes = np.array([one.at_s for one in samples]) / 60
    values = np.array([getattr(one, of) for one in samples], float)
    slope, start = np.polyfit(minutes, values, 1)
    spread = minutes - minutes.mean()
    error = np.sqrt(((values - start - slope * minutes) ** 2).sum() / max(1, len(minutes) - 2) / (spread**2).sum())
    return float(slope), float(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result for one process over the whole soak."""

    process: str
    rss_mib: tuple[float, float]
    """Resident memory at rest after the first third, and at the end."""
    private_mib: tuple[float, float]
    fds: tuple[int, int]
    threads: tuple[int, int]
    rss_slope_mib: float
    """Slope per minute, like all slopes."""
    private_slope_mib: float
    pss_slope_mib: float
    fds_slope: float
    threads_slope: float
    faults: tuple[str, ...]


def check_outcome(name: str, samples: Sequence[Sample], before: Sample, after: Sample, *, is_fitted: bool) -> Row:
    """Compare one process with the limits. `is_fitted` says whether there are enough samples for slopes."""
    mib = float(1 << 20)
    fits = {of: slope_per_minute(samples, of) for of in ("rss", "private", "pss", "fds", "threads")}
    slopes = {of: slope for of, (slope, _) in fits.items()}
    # Activity during a sample varies, so a rise counts from two standard errors below it.
    least = {of: slope - 2 * error for of, (slope, error) in fits.items()}
    faults = []
    if is_fitted and len(samples) < 3:
        faults.append(f"{len(samples)} samples are too few to tell whether it grows")
    if is_fitted:
        faults += [
            f"{of} grows by {slopes[of] / mib:.2f} MiB a minute"
            for of in ("rss", "private")
            if least[of] > RSS_PER_MINUTE
        ]
        faults += [
            f"{of} grow by {slopes[of]:.2f} a minute" for of in ("fds", "threads") if least[of] > COUNT_PER_MINUTE
        ]
    faults += [
        f"{getattr(after, of)} {of} at rest, {getattr(before, of)} before"
        for of in ("fds", "threads")
        if getattr(after, of) > getattr(before, of) + SPARE
    ]
    if after.private > before.private + SPARE_BYTES:
        faults.append(f"{after.private / mib:.0f} MiB private at rest, {before.private / mib:.0f} before")
    return Row(
        process=name,
        rss_mib=(before.rss / mib, after.rss / mib),
        private_mib=(before.private / mib, after.private / mib),
        fds=(before.fds, after.fds),
        threads=(before.threads, after.threads),
        rss_slope_mib=slopes["rss"] / mib,
        private_slope_mib=slopes["private"] / mib,
        pss_slope_mib=slopes["pss"] / mib,
        fds_slope=slopes["fds"],
        threads_slope=slopes["threads"],
        faults=tuple(faults),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a soak."""

    seed: int
    seconds: float
    counts: dict[str, int]
    faults: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def holds(self) -> bool:
        """Return whether all values are flat and every byte was right."""
        return not self.faults and not any(row.faults for row in self.rows)

    def lines(self) -> list[str]:
        """Return the page as lines of text."""
        said = [
            f"{self.seconds / 60:.1f} minutes, seed {self.seed}: "
            + ", ".join(f"{number:,} {what}" for what, number in sorted(self.counts.items())),
            "",
            "Slopes are of a line fitted to the last two thirds, a minute. Bounds: "
            f"{RSS_PER_MINUTE / (1 << 20):.1f} MiB, {COUNT_PER_MINUTE} descriptors or threads, above two standard "
            f"errors of the fit; at rest {SPARE} descriptors or threads more.",
            "",
            "| process | RSS, MiB | slope | private, MiB | slope | PSS slope | descriptors | slope | threads | slope |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            ends = [f"{a:.1f} to {b:.1f}" for a, b in (row.rss_mib, row.private_mib)]
            counts = [f"{a} to {b}" for a, b in (row.fds, row.threads)]
            said.append(
                f"| {row.process} | {ends[0]} | {row.rss_slope_mib:+.3f} | {ends[1]} | {row.private_slope_mib:+.3f} | "
                f"{row.pss_slope_mib:+.3f} | {counts[0]} | {row.fds_slope:+.3f} | {counts[1]} | "
                f"{row.threads_slope:+.3f} |"
            )
        faults = [*self.faults[:20], *(f"{row.process}: {fault}" for row in self.rows for fault in row.faults)]
        return [*said, "", "Flat." if self.holds else "Not flat:", *(f"* {one}" for one in faults)]


def run(
    seconds: float,
    seed: int,
    *,
    show: Callable[[str], None] = lambda line: None,
    write: Callable[[Sequence[Sample]], None] = lambda samples: None,
) -> Outcome:
    """Soak for the given time.

    Args:
        seconds: total time. Under five minutes only the state at rest is judged, and not the slopes.
        seed: seed for the activity.
        show: receives a line from time to time.
        write: receives samples as they are taken.
    """
    directory = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))
    samples: list[Sample] = []
    try:
        with Soak(seed, directory) as soak:
            begun = soak.begun = time.monotonic()
            every_s = min(10.0, max(0.5, seconds / 180))

            def until(share: float) -> None:
                soak.go()
                while time.monotonic() < begun + seconds * share:
                    time.sleep(every_s)
                    taken = soak.sample()
                    samples.extend(taken)
                    write(taken)
                    if len(samples) % (len(WATCHED) * 30) == 0:
                        show(f"{time.monotonic() - begun:.0f} s: {dict(soak.counts.done)}")
                soak.rest()

            until(1 / 3)
            before = soak.at_rest()
            first = len(samples)
            until(1.0)
            after = soak.at_rest(before)
            rows = [
                check_outcome(
                    name,
                    [one for one in samples[first:] if one.process == name],
                    before[number],
                    after[number],
                    is_fitted=seconds >= 300,
                )
                for number, name in enumerate(WATCHED)
            ]
            counts = soak.counts
            return Outcome(
                seed=seed,
                seconds=time.monotonic() - begun,
                counts=dict(counts.done),
                faults=tuple(counts.faults),
                rows=tuple(rows),
            )
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main() -> int:
    """Parse arguments, run, print, write, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="duration (default: 30)")
    parser.add_argument("--seed", type=int, default=1, help="seed for the activity (default: 1)")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"directory for soak.jsonl and soak.md ({RESULTS})")
    told = parser.parse_args()

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    told.out.mkdir(parents=True, exist_ok=True)
    with open(told.out / "soak.jsonl", "w", encoding="utf-8", buffering=1) as file:

        def write(samples: Sequence[Sample]) -> None:
            file.writelines(json.dumps(asdict(one)) + "\n" for one in samples)

        outcome = run(told.minutes * 60, told.seed, show=lambda line: print(line, flush=True), write=write)
    lines = outcome.lines()
    print("\n".join(lines))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    head = [
        "# Soak",
        "",
        f"`make soak ARGS='--minutes {told.minutes:g} --seed {told.seed}'` at {commit.strip()}; samples: soak.jsonl. "
        "What it does: tests/chaos/soak.py.",
        "",
    ]
    (told.out / "soak.md").write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    sys.exit(main())
