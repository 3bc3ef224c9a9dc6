"""Progress of a long call while it runs: a bar on stderr, or calls of the user's function.

In: counts of bytes or tasks, tickets of the engine, waits. Out: one line with rate, total and time left, which ends at
100 % or is cleared; or calls of (done, total).
Not here: reports at the end (`report` and its kin), progress shown to other members (`penstock status`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from penstock import interrupts, lifecycle
from penstock.arguments import wrong
from penstock.config import Settings
from penstock.errors import printable
from penstock.report import bytes_text
from penstock.waits import Threads

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from penstock.engine.run import RunState

ProgressOption = bool | Callable[[int, int], object] | None
"""True: a bar on stderr; False: nothing; None: as `PENSTOCK_PROGRESS` says, else a bar where stderr is a terminal; or a
function that is called with the bytes done and the bytes in all (by a conversion: with tasks)."""

_REDRAW_S = 0.1
"""Seconds between redraws: often enough to look continuous, and no load on the interpreter."""
_RATE_S = 10.0
"""The rate is that of so many last seconds: long enough to be steady, short enough to follow a link that slows down."""
_LEAST_S = 0.02
"""Shortest time that a rate is taken of."""
_BAR_COLUMNS = 72
"""A narrower terminal gets the numbers and what is left of the label, without the bar."""


class Progress:
    """The progress of one call, as a bar or as calls of the user's function. A context manager.

    Args:
        wanted: see `ProgressOption`.
        label: the name next to the bar; of a path or URI, the last part.
        unit: `bytes`, or the noun of what is counted.
        is_live: False: redraw only when called, so that nothing runs beside what a benchmark measures.
    """

    def __init__(self, wanted: ProgressOption, label: str, *, unit: str = "bytes", is_live: bool = True) -> None:
        if wanted is not None and not isinstance(wanted, bool) and not callable(wanted):
            raise wrong("progress", wanted, "True, False, None or a function of (done, total)")
        self._call = wanted if callable(wanted) else None
        if wanted is None:
            wanted = Settings.read().progress
        # In a log file every redraw would be a line of its own, so without a setting only a terminal gets a bar.
        self._draws = self._call is None and (sys.stderr.isatty() if wanted is None else bool(wanted))
        # The whole URI would leave no room for the numbers.
        self._label = printable(label.rstrip("/").rpartition("/")[2] or label)
        self._unit = unit
        self._is_live = is_live
        self._bar: Bar | None = None
        self._begun = (0.0, 0)
        """Time and count of the begin."""
        self._recent: deque[tuple[float, int]] = deque()
        self._count = (0, 0)

    @property
    def enabled(self) -> bool:
        """Return whether anything is drawn or called."""
        return self._draws or self._call is not None

    def __enter__(self) -> Progress:
        if self._draws:
            # Imported on first use: a load without a bar need not pay for the import.
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar
            from rich.table import Column

            def cut(format: str) -> TextColumn:
                """Return a column of text that ends in an ellipsis where it is too long, and has no markup."""
                return TextColumn(format, markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))

            # On stderr: stdout carries the data of commands.
            console = Console(stderr=True)
            wide = (cut("{task.description}"), BarColumn(), cut("{task.fields[text]}"))
            narrow = (cut("{task.fields[text]}  {task.description}"),)
            columns = wide if console.width >= _BAR_COLUMNS else narrow
            # Without redirection of stdout, which rich would send to this console: what the program prints is data.
            self._bar = Bar(*columns, console=console, redirect_stdout=False, auto_refresh=self._is_live)
            # The total comes with the first call: the bar starts while headers are still being read.
            self._bar.add_task(self._label, total=None, text="")
            self._bar.start()
        self._begun = (time.monotonic(), 0)
        self._recent.append(self._begun)
        return self

    def __call__(self, done: int, total: int) -> None:
        """Show `done` of `total`: draw it, or pass both to the user's function."""
        if self._call is not None:
            self._call(done, total)
        elif self._bar is not None:
            now = time.monotonic()
            self._count = (done, total)
            self._recent.append((now, done))
            while now - self._recent[0][0] > _RATE_S and len(self._recent) > 2:
                self._recent.popleft()
            self._draw(self._numbers(now), done, total)

    def state(self, text: str, done: int = 0, total: int = 0) -> None:
        """Show in place of the numbers what the call waits for, until the next count.

        Args:
            done, total: what an earlier run has done, which does not count for the rate.
        """
        if self._bar is not None:
            if total:
                self._count = (done, total)
                self._begun = (time.monotonic(), done)
                self._recent = deque([self._begun])
            self._draw(text, *self._count)

    def _draw(self, text: str, done: int, total: int) -> None:
        assert self._bar is not None
        # Rich takes a total of None as "as before": the bar moves to and fro until there is one.
        self._bar.update(self._bar.task_ids[0], completed=done, total=total or None, text=printable(text))
        if not self._is_live:
            self._bar.refresh()

    def _numbers(self, now: float) -> str:
        """Return the share that is done, the total, the rate, and the time left or, at the end, taken."""
        done, total = self._count
        is_over = done >= total
        # At the end the mean rate.
        since, before = self._begun if is_over else self._recent[0]
        per_s = (done - before) / (now - since) if now > since else 0.0
        in_bytes = self._unit == "bytes"
        # Rounded down: 100 % is said of what is complete.
        text = f"{100 * done // max(1, total)} % of {bytes_text(total) if in_bytes else f'{total} {self._unit}'}"
        # Not of an instant: a mapped file that is in memory already has no rate.
        if per_s > 0 and now - since > _LEAST_S:
            text += f", {bytes_text(per_s)}/s" if in_bytes else f", {per_s:.1f} {self._unit}/s"
            text += f", in {_clock(now - since)}" if is_over else f", {_clock((total - done) / per_s)} left"
        return text

    def show(self, ticket: RunState) -> None:
        """Show the ticket's bytes."""
        if self.enabled:
            self(ticket.moved_bytes, ticket.nbytes)

    def follow(self, ticket: RunState, *, stall_s: float, reached: Callable[[], bool] | None = None) -> None:
        """Wait for the ticket, or until `reached()` is true, and show the ticket's bytes meanwhile.

        Raises:
            As `RunState.wait_until`.
        """
        is_over = reached or (lambda: ticket.is_finished)
        # `look` is the seconds since the last progress: once they reach the deadline, the wait below raises the error.
        while self.enabled and not ticket.done and not is_over() and ticket.look() <= stall_s:
            self.show(ticket)
            # Not a sleep: a load of a few milliseconds would take all of it.
            with ticket.changed:
                ticket.changed.wait_for(lambda: ticket.done or is_over(), _REDRAW_S)
            # Ctrl-C is only noted inside a load: without this look it would have to wait for the last byte.
            interrupts.raise_if_noted()
        ticket.wait_until(is_over, stall_s=stall_s)
        if reached is None:
            # Once more, so that the bar ends at 100 % and the function sees the total.
            self.show(ticket)

    @contextmanager
    def watching(self, look: Callable[[], tuple[int, int]]) -> Iterator[None]:
        """Show the result of `look`, which returns what is done and the total, until the block ends.

        Raises:
            Exception: from the user's function, at the end of the block.

        Cost: one thread that sleeps; none where nothing is shown.
        """
        if not self.enabled:
            yield
            return
        over = threading.Event()

        def draw() -> None:
            while not over.wait(_REDRAW_S):
                self(*look())

        # A pool of one instead of a thread: its future keeps an error of the user's function until the block has ended.
        with Threads(1, "penstock-progress") as pool:
            drawing = pool.submit(draw)
            try:
                yield
            finally:
                over.set()
        drawing.result()
        # Once more, so that the bar ends at 100 % and the function sees the total. Not after an error in the block.
        self(*look())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # While the interpreter ends, the thread that draws the bar is gone, perhaps with its lock.
        if self._bar is None or lifecycle.is_ending():
            return
        done, total = self._count
        is_over = kind is None and done >= total > 0
        if is_over:
            # In place of a state that was shown after the last count.
            self._draw(self._numbers(self._recent[-1][0]), done, total)
        # A bar that stops halfway would look like one that is still moving.
        self._bar.live.transient = not is_over
        # Rich's own `stop` ends the line; where nothing is left of the bar, there is no line to end.
        (self._bar if is_over else self._bar.live).stop()


def _clock(seconds: float) -> str:
    """Return a duration: `0.25 s`, `4.2 s`, `0:42`, `1:02:03`."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Counter:
    """A count of bytes that are done, for `Progress.watching`. One thread adds, others look."""

    def __init__(self, total: int = 0) -> None:
        self.done = 0
        self.total = total

    def add(self, nbytes: int) -> None:
        """Count bytes as done."""
        self.done += nbytes

    def look(self) -> tuple[int, int]:
        """Return the bytes that are done, and the bytes in all."""
        return self.done, self.total
