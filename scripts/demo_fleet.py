"""The second table of `make demo`: processes on this host that fetch from each other, compared with separate loads.

It reads a checkpoint from disk and over HTTP, and checks that every bit is equal and that storage was read once. Only
the processes themselves run, and the first to join hosts the hub. Times are measured inside each process, after its
imports, from a common start: first separate loads at the same time, then `join` and `fetch` at the same time. The late
process starts when the others are whole and cannot read storage. Its separate load had the machine for itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.support.fleet import Task, Worker

from penstock.testing.http_server import RangeServer

GB = 10**9
STARTED_S = 120.0
DONE_S = 600.0
MOST_READ = 1.01
"""Limit as a fraction of the model's bytes. Storage was read once, except for rounding of reads to pages."""
progress = Console(stderr=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A storage from which the checkpoint is read."""

    what: str
    uri: str
    forget: Callable[[], None]
    """Called before a measurement to drop caches of an earlier one."""
    served_bytes: Callable[[], int] | None = None
    """Bytes that the storage itself has sent since `forget`. None means that only the workers' reports are known."""


@dataclass(slots=True)
class Outcome:
    """The result of one storage."""

    place: Place
    alone: list[dict[str, Any]] = field(default_factory=list)
    fetched: list[dict[str, Any]] = field(default_factory=list)
    joined: list[dict[str, Any]] = field(default_factory=list)
    alone_bytes: int = 0
    storage_bytes: int = 0
    digests: set[str] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the model."""
        return int(self.fetched[0]["nbytes"])


def http_place(server: RangeServer, index: str) -> Place:
    """Return the checkpoint behind `server`, which counts the bytes that it sends."""
    start = [0]

    def forget() -> None:
        start[0] = len(server.requests)

    def served() -> int:
        asked = [one for one in server.requests[start[0] :] if one.method == "GET" and one.range]
        # Reads that begin at 0 are headers, which every process reads.
        return sum(stop - begin for begin, stop in (one.range for one in asked if one.range) if begin > 0)

    return Place(what="HTTP", uri=f"{server.url}/{index}", forget=forget, served_bytes=served)


@contextmanager
def ready_workers(tasks: Sequence[Task]) -> Iterator[list[Worker]]:
    """Yield workers that have imported everything and wait for input. At the end they leave together."""
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(replace(task, waits_for_input=True))) for task in tasks]
        for worker in workers:
            worker.wait_for("ready", timeout_s=STARTED_S)
        yield workers
        for worker in workers:
            assert worker.process.stdin is not None
            worker.process.stdin.close()
        for worker in workers:
            worker.process.wait(timeout=STARTED_S)


def load_alone(tasks: Sequence[Task], outcome: Outcome) -> None:
    """Let each worker load everything separately, all at once."""
    with ready_workers([replace(task, loads_alone=True) for task in tasks]) as workers:
        outcome.place.forget()
        for worker in workers:
            worker.proceed()
        for worker in workers:
            outcome.alone.append(worker.wait_for("loaded", timeout_s=DONE_S))
        if outcome.place.served_bytes is not None:
            outcome.alone_bytes += outcome.place.served_bytes()
        for worker in workers:
            outcome.digests.add(worker.wait_for("digests", timeout_s=DONE_S)["digests"])


def fetch_together(tasks: Sequence[Task], outcome: Outcome) -> None:
    """Let all but the last worker fetch at once as a fleet, then the last one from the others."""
    *together, late = tasks
    with ready_workers([*together, replace(late, fallback=None)]) as workers:
        outcome.place.forget()
        for group in (workers[:-1], workers[-1:]):
            for worker in group:
                worker.proceed()
            for worker in group:
                outcome.fetched.append(worker.wait_for("fetched", timeout_s=DONE_S))
                outcome.joined.append(worker.events["joined"])
        reported = sum(int(one["storage_bytes"]) for one in outcome.fetched)
        served = outcome.place.served_bytes
        outcome.storage_bytes = reported if served is None else max(reported, served())
        for worker in workers:
            outcome.digests.add(worker.wait_for("digests", timeout_s=DONE_S)["digests"])


def measure(place: Place, devices: Sequence[str]) -> Outcome:
    """Measure separate loads, then the fleet, in new processes, one for each of `devices`."""
    outcome = Outcome(place)
    with tempfile.TemporaryDirectory(prefix="penstock-") as runtime:
        # Use a separate hub and not the one for other processes of this user.
        environ = {"PENSTOCK_RUNTIME_DIR": runtime}
        tasks = [Task(model="demo", fallback=place.uri, device=device, environ=environ) for device in devices]
        progress.print(f"  {place.what}: own loads")
        load_alone(tasks[:-1], outcome)
        load_alone(tasks[-1:], outcome)
        progress.print(f"  {place.what}: a fleet")
        fetch_together(tasks, outcome)
    return outcome


def paths_of(fetched: dict[str, Any], names: dict[str, str]) -> str:
    """Return the bytes by path. Members are shown by their number."""
    found = []
    for path, nbytes in fetched["paths"].items():
        if path.startswith("storage "):
            continue
        transport, _, member = path.partition(" <- ")
        found.append(f"{nbytes / GB:.2f} {transport} <- {names.get(member, member)}")
    return ", ".join(found) or "-"


def add_rows(table: Table, outcome: Outcome) -> None:
    """Add a row for each worker, and their sum."""
    names = {one["member"][:8]: str(number) for number, one in enumerate(outcome.joined, 1)}
    last = len(outcome.fetched)
    bits = "equal" if len(outcome.digests) == 1 else "[red]DIFFERENT[/red]"
    for number, (alone, joined, fetched) in enumerate(
        zip(outcome.alone, outcome.joined, outcome.fetched, strict=True), 1
    ):
        table.add_row(
            outcome.place.what if number == 1 else "",
            f"{number}, later" if number == last else str(number),
            f"{alone['seconds']:.2f}",
            f"{joined['seconds']:.2f}",
            f"{fetched['seconds']:.2f}",
            f"{fetched['storage_bytes'] / GB:.2f}",
            paths_of(fetched, names),
            bits,
        )
    own = f"own loads {outcome.alone_bytes / outcome.nbytes:.2f}x, " if outcome.alone_bytes else ""
    witness = "the server counted" if outcome.place.served_bytes is not None else "by their reports"
    ratio = f"storage read {own}fleet {outcome.storage_bytes / outcome.nbytes:.2f}x ({witness})"
    table.add_row("", "", "", "", "", f"{outcome.storage_bytes / GB:.2f}", ratio, "")
    table.add_section()


def reasons(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a line with the reason for each transport."""
    found: dict[str, None] = {}
    for outcome in outcomes:
        for fetched in outcome.fetched:
            for path, why in fetched["why"].items():
                found[f"{path.partition(' ')[0]}, because {why}"] = None
    return list(found)


def fleet_demo(places: Sequence[Place], device: str, workers: int) -> bool:
    """Print the table. Return False if a bit differs or storage was read more than once."""
    devices = [device] * (workers + 1)
    if device == "cuda":
        import torch

        devices = [f"cuda:{number % torch.cuda.device_count()}" for number in range(workers + 1)]
    outcomes = [measure(place, devices) for place in places]
    table = Table(
        title=f"{workers} processes that start at once and one later, {outcomes[0].nbytes / GB:.2f} GB to {device}, "
        "one run",
        caption="own load: of all at once, the later one's by itself; fetch: until every byte was compared with its\n"
        "digest, from when it serves the others; all share one host, its cores and its page cache;\n"
        "storage: of weights; everybody reads the headers",
    )
    for column in ("from", "process", "own load s", "join s", "fetch s", "storage GB", "from peers, GB", "bits"):
        table.add_column(column, justify="right" if column.endswith((" s", "storage GB")) else "left", overflow="fold")
    for outcome in outcomes:
        add_rows(table, outcome)
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table)
    for line in reasons(outcomes):
        console.print(line, highlight=False)
    return all(one.storage_bytes <= MOST_READ * one.nbytes and len(one.digests) == 1 for one in outcomes)


def disk_place(directory: Path, forget: Callable[[], None]) -> Place:
    """Return the checkpoint on disk."""
    return Place(what="disk, cold", uri=str(directory), forget=forget)
