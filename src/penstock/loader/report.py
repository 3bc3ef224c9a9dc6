"""Progress of a long call while it runs, and the report of a load at its end.

In: counts of bytes, tickets of the engine; measurements of a session. Out: a bar on stderr, or calls of the user's
function; frozen reports with a few lines for people.
Not here: the measuring (`session`, `phases`), the reports of other calls (`verify`, `sync.report`, `fetch.report`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from penstock import lifecycle
from penstock.arguments import wrong
from penstock.config import Settings
from penstock.report import Summarised
from penstock.telemetry.metrics import Outcome
from penstock.types import GB, MIB

if TYPE_CHECKING:
    from penstock.engine.run import Ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePath:
    """The path a file's bytes took. A file read by two paths has two of these."""

    uri: str
    nbytes: int
    """Bytes read by this path, with gaps that were read rather than skipped."""
    path: str
    """`mmap`, `page-cache`, `direct`, `buffered`, `http`, `obstore`, `cache`, `memory`, `group` (another rank)."""
    why: str
    """The reason why no faster path was taken; empty for the fastest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport(Summarised):
    """The result of one load."""

    uri: str
    device: str
    num_tensors: int
    nbytes: int
    """Bytes at the destination."""
    read_bytes: int
    """Bytes that this process read from storage."""
    wall_s: float
    phases: Mapping[str, float]
    """Seconds of `open`, `plan`, `allocate`, `move`, `finish`; they sum to `wall_s`."""
    busy_s: Mapping[str, float]
    """Seconds inside steps per executor, summed over its threads; overlapping."""
    peak_staging_bytes: int
    peak_rss_bytes: int
    """Largest resident set of the process so far, before the load too: the system keeps no other maximum."""
    peak_device_bytes: int
    """Most that torch's allocator ever had in use on the device; 0 on the CPU."""
    files: tuple[FilePath, ...]
    verified: bool
    why: str
    """How the tensors were verified, or the reason why they were not."""
    revision: str

    @property
    def gb_per_s(self) -> float:
        """Return decimal GB at the destination per second of wall time."""
        # An empty weight set takes no measurable time.
        return self.nbytes / GB / self.wall_s if self.wall_s else 0.0

    def paths(self) -> str:
        """Return the paths with their bytes, and why no faster one was taken."""
        # By path and not by file: a model has hundreds of files, which took one or two paths.
        by_path: dict[str, int] = {}
        for file in self.files:
            key = f"{file.path} ({file.why})" if file.why else file.path
            by_path[key] = by_path.get(key, 0) + file.nbytes
        return ", ".join(f"{nbytes / GB:.2f} GB by {path}" for path, nbytes in by_path.items())

    def summary(self) -> str:
        """Return three lines for people."""
        phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.phases.items())
        return (
            f"{self.num_tensors} tensors, {self.nbytes / GB:.2f} GB -> {self.device} in {self.wall_s:.3f} s "
            f"({self.gb_per_s:.2f} GB/s): {phases}\n"
            f"paths: {self.paths() or 'none'}; staging peak {self.peak_staging_bytes / MIB:.0f} MiB\n"
            f"{'verified' if self.verified else 'not verified'}: {self.why}; revision {self.revision[:19]}"
        )


def outcome_of(report: LoadReport) -> Outcome:
    """Return what metrics and spans show of a load."""
    return Outcome(
        nbytes=report.nbytes,
        phases=report.phases,
        verified_bytes=report.nbytes if report.verified else 0,
        path=report.paths(),
        attributes={"uri": report.uri, "device": report.device, "revision": report.revision},
    )


ProgressOption = bool | Callable[[int, int], object] | None
"""True: a bar on stderr; False: nothing; None: as `PENSTOCK_PROGRESS` says, else a bar where stderr is a terminal; or a
function that is called with the bytes done and the bytes in all (by a conversion: with tasks)."""

_REDRAW_S = 0.1
"""Seconds between redraws: often enough to look continuous, and no load on the interpreter."""


class Progress:
    """The progress of one call, as a bar or as calls of the user's function. A context manager.

    Args:
        wanted: see `ProgressOption`.
        label: the name next to the bar.
        unit: `bytes`, or the noun of what is counted.
    """

    def __init__(self, wanted: ProgressOption, label: str, *, unit: str = "bytes") -> None:
        if wanted is not None and not isinstance(wanted, bool) and not callable(wanted):
            raise wrong("progress", wanted, "True, False, None or a function of (done, total)")
        self._call = wanted if callable(wanted) else None
        if wanted is None:
            wanted = Settings.read().progress
        # In a log file every redraw would be a line of its own, so without a setting only a terminal gets a bar.
        self._draws = self._call is None and (sys.stderr.isatty() if wanted is None else bool(wanted))
        self._label = label
        self._unit = unit
        self._bar: object = None

    @property
    def enabled(self) -> bool:
        """Return whether anything is drawn or called."""
        return self._draws or self._call is not None

    def __enter__(self) -> Progress:
        if self._draws:
            # Imported on first use: a load without a bar need not pay for the import.
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            of_bytes = (DownloadColumn(), TransferSpeedColumn())
            counts = of_bytes if self._unit == "bytes" else (MofNCompleteColumn(), TextColumn(self._unit))
            # On stderr: stdout carries the data of commands.
            self._bar = bar = Bar(TextColumn("{task.description}"), BarColumn(), *counts, console=Console(stderr=True))
            # The total comes with the first call: the bar starts while headers are still being read.
            self._task = bar.add_task(self._label, total=None)
            bar.start()
        return self

    def __call__(self, done: int, total: int) -> None:
        """Show `done` of `total`: draw it, or pass both to the user's function."""
        if self._call is not None:
            self._call(done, total)
        elif self._draws:
            self._bar.update(self._task, completed=done, total=total)  # type: ignore[attr-defined]

    def show(self, ticket: Ticket) -> None:
        """Show the ticket's bytes."""
        if self.enabled:
            self(ticket.moved_bytes, ticket.nbytes)

    def follow(self, ticket: Ticket, *, stall_s: float) -> None:
        """Wait for the ticket, and show its bytes meanwhile.

        Raises:
            As `Ticket.wait`.
        """
        # `look` is the seconds since the last progress: once they reach the deadline, `wait` below raises the error.
        while self.enabled and not ticket.done and ticket.look() <= stall_s:
            self.show(ticket)
            time.sleep(_REDRAW_S)
            # Ctrl-C is only noted inside a load: without this look it would have to wait for the last byte.
            lifecycle.raise_if_noted()
        ticket.wait(stall_s=stall_s)
        # Once more, so that the bar ends at 100 % and the function sees the total.
        self.show(ticket)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._draws:
            self._bar.stop()  # type: ignore[attr-defined]


@contextmanager
def showing_progress(wanted: ProgressOption, label: str, look: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """Show the result of `look`, which returns the bytes done and the bytes in all, until the block ends.

    Raises:
        Exception: from the user's function, at the end of the block.

    Cost: one thread that sleeps; none where nothing is shown.
    """
    with Progress(wanted, label) as progress:
        if not progress.enabled:
            yield
            return
        over = threading.Event()

        def draw() -> None:
            while not over.wait(_REDRAW_S):
                progress(*look())

        # A pool of one instead of a thread: its future keeps an error of the user's function until the block has ended.
        with ThreadPoolExecutor(1, thread_name_prefix="penstock-progress") as pool:
            drawing = pool.submit(draw)
            try:
                yield
            finally:
                over.set()
        drawing.result()
        # Once more, so that the bar ends at 100 % and the function sees the total. Not after an error in the block.
        progress(*look())


class Counter:
    """A count of bytes that are done, for `showing_progress`. One thread adds, others look."""

    def __init__(self, total: int = 0) -> None:
        self.done = 0
        self.total = total

    def add(self, nbytes: int) -> None:
        """Count bytes as done."""
        self.done += nbytes

    def look(self) -> tuple[int, int]:
        """Return the bytes that are done, and the bytes in all."""
        return self.done, self.total
