"""The second table of `make demo`: processes that fetch from each other, compared with separate loads.

All read one storage, an HTTP server whose bandwidth they share, as processes share a cloud volume. The table shows that
every bit is equal, and that the fleet reads storage once. Only the processes themselves run, and the first to join
hosts the hub. Times are measured inside each process, after its imports, from a common start: first separate loads at
the same time, then `join` and `fetch` at the same time. The late process starts when the others are whole and cannot
read storage. Its separate load had the storage for itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.support.fleet import Task, Worker
from tests.support.servers.http_server import RangeServer

GB, MB = 10**9, 10**6
STARTED_S = 120.0
DONE_S = 600.0
MOST_READ = 1.01
"""Limit as a fraction of the model's bytes. Storage was read once, except for rounding of reads to pages."""
progress = Console(stderr=True)


@dataclass(slots=True)
class Outcome:
    """The results of separate loads and of the fleet."""

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


def served_bytes(server: RangeServer, start: int) -> int:
    """Return the bytes of weights that `server` was asked for since its request number `start`."""
    ranges = [one.range for one in server.requests[start:] if one.method == "GET" and one.range]
    # Reads that begin at 0 are headers, which every process reads.
    return sum(stop - begin for begin, stop in ranges if begin > 0)


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


def load_alone(server: RangeServer, tasks: Sequence[Task], outcome: Outcome) -> None:
    """Let each worker load everything separately, all at once."""
    with ready_workers([replace(task, loads_alone=True) for task in tasks]) as workers:
        start = len(server.requests)
        for worker in workers:
            worker.proceed()
        for worker in workers:
            outcome.alone.append(worker.wait_for("loaded", timeout_s=DONE_S))
        outcome.alone_bytes += served_bytes(server, start)
        for worker in workers:
            outcome.digests.add(worker.wait_for("digests", timeout_s=DONE_S)["digests"])


def fetch_together(server: RangeServer, tasks: Sequence[Task], outcome: Outcome) -> None:
    """Let all but the last worker fetch at once as a fleet, then the last one from the others."""
    *together, late = tasks
    with ready_workers([*together, replace(late, fallback=None)]) as workers:
        start = len(server.requests)
        for group in (workers[:-1], workers[-1:]):
            for worker in group:
                worker.proceed()
            for worker in group:
                outcome.fetched.append(worker.wait_for("fetched", timeout_s=DONE_S))
                outcome.joined.append(worker.events["joined"])
        reported = sum(int(one["storage_bytes"]) for one in outcome.fetched)
        outcome.storage_bytes = max(reported, served_bytes(server, start))
        for worker in workers:
            outcome.digests.add(worker.wait_for("digests", timeout_s=DONE_S)["digests"])


def measure(server: RangeServer, index: str, devices: Sequence[str]) -> Outcome:
    """Measure separate loads, then the fleet, in new processes, one for each of `devices`."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="penstock-") as runtime:
        # Use a separate hub and not the one for other processes of this user.
        environ = {"PENSTOCK_RUNTIME_DIR": runtime}
        uri = f"{server.url}/{index}"
        tasks = [Task(model="demo", fallback=uri, device=device, environ=environ) for device in devices]
        progress.print("  own loads")
        load_alone(server, tasks[:-1], outcome)
        load_alone(server, tasks[-1:], outcome)
        progress.print("  a fleet")
        fetch_together(server, tasks, outcome)
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
            f"{number}, later" if number == last else str(number),
            f"{alone['seconds']:.2f}",
            f"{joined['seconds']:.2f}",
            f"{fetched['seconds']:.2f}",
            f"{fetched['storage_bytes'] / GB:.2f}",
            paths_of(fetched, names),
            bits,
        )
    own, fleet = (nbytes / outcome.nbytes for nbytes in (outcome.alone_bytes, outcome.storage_bytes))
    ratio = f"storage sent: own loads {own:.2f}x, fleet {fleet:.2f}x"
    table.add_row("", "", "", "", f"{outcome.storage_bytes / GB:.2f}", ratio, "")


def comparison(outcome: Outcome) -> str:
    """Return the time until the last of the processes that start at once has its weights, by itself and as a fleet."""
    together = slice(len(outcome.fetched) - 1)
    alone_s = max(one["seconds"] for one in outcome.alone[together])
    begun = zip(outcome.joined[together], outcome.fetched[together], strict=True)
    fleet_s = max(joined["seconds"] + fetched["seconds"] for joined, fetched in begun)
    sent = f"{outcome.alone_bytes / GB:.2f} GB to own loads, {outcome.storage_bytes / GB:.2f} to the fleet"
    return (
        f"all weights after: {alone_s:.2f} s by own loads, {fleet_s:.2f} s as a fleet, with joining\n"
        f"sent by storage: {sent}"
    )


def reasons(outcome: Outcome) -> list[str]:
    """Return a line with the reason for each transport."""
    found: dict[str, None] = {}
    for fetched in outcome.fetched:
        for path, why in fetched["why"].items():
            found[f"{path.partition(' ')[0]}, because {why}"] = None
    return list(found)


def fleet_demo(server: RangeServer, index: str, device: str, workers: int) -> bool:
    """Print the table for the checkpoint on `server`. Return False if a bit differs or storage was read repeatedly."""
    devices = [device] * (workers + 1)
    if device == "cuda":
        import torch

        devices = [f"cuda:{number % torch.cuda.device_count()}" for number in range(workers + 1)]
    outcome = measure(server, index, devices)
    limit = server.faults.total_bytes_per_s
    table = Table(
        title=f"{workers} processes that start at once and one later, {outcome.nbytes / GB:.2f} GB to {device}, "
        f"one run; storage sends {f'{limit / MB:.0f} MB/s to all together' if limit else 'without a limit'}",
        caption="own load: of all at once, the later one's by itself; fetch: until every byte was compared with its\n"
        "digest, from when it serves the others; all share one host, its cores and its page cache;\n"
        "storage: of weights; everybody reads the headers",
    )
    for column in ("process", "own load s", "join s", "fetch s", "storage GB", "from peers, GB", "bits"):
        table.add_column(column, justify="right" if column.endswith((" s", "storage GB")) else "left", overflow="fold")
    add_rows(table, outcome)
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table)
    for line in (comparison(outcome), *reasons(outcome)):
        console.print(line, highlight=False)
    return outcome.storage_bytes <= MOST_READ * outcome.nbytes and len(outcome.digests) == 1
