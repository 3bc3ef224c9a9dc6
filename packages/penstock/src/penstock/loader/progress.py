"""Progress of a long call, shown as a bar on stderr or passed to the user's function."""

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
"""True shows a bar on stderr, and False shows nothing. None follows `PENSTOCK_PROGRESS`, or shows a bar if stderr is a
terminal. A function is called with the finished and the total number of bytes, or of tasks for a conversion."""

_REDRAW_S = 0.1
"""Seconds between redraws."""
_RATE_S = 10.0
"""Seconds over which the rate is averaged."""
_LEAST_S = 0.02
"""Minimum duration in seconds for which a rate is shown."""
_BAR_COLUMNS = 72
"""Minimum terminal width for the bar. Narrower terminals show only the numbers and a shortened label."""


class Progress:
    """A context manager for the progress of one call, which is shown as a bar or passed to the user's function.

    Args:
        wanted: see `ProgressOption`.
        label: name next to the bar. A path or URI is shortened to its last component.
        unit: `bytes`, or the noun for the counted things.
        is_live: if False, redraw only when called, so that no thread runs during a measurement.
    """

    def __init__(self, wanted: ProgressOption, label: str, *, unit: str = "bytes", is_live: bool = True) -> None:
        if wanted is not None and not isinstance(wanted, bool) and not callable(wanted):
            raise wrong("progress", wanted, "True, False, None or a function of (done, total)")
        self._call = wanted if callable(wanted) else None
        if wanted is None:
            wanted = Settings.read().progress
        # In a log file every redraw would add a line, so by default only a terminal shows a bar.
        self._draws = self._call is None and (sys.stderr.isatty() if wanted is None else bool(wanted))
        self._label = printable(label.rstrip("/").rpartition("/")[2] or label)
        self._unit = unit
        self._is_live = is_live
        self._bar: Bar | None = None
        self._begun = (0.0, 0)
        self._recent: deque[tuple[float, int]] = deque()
        self._count = (0, 0)

    @property
    def enabled(self) -> bool:
        """Return whether the progress is drawn or passed to a function."""
        return self._draws or self._call is not None

    def __enter__(self) -> Progress:
        if self._draws:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar
            from rich.table import Column

            def cut(format: str) -> TextColumn:
                return TextColumn(format, markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))

            console = Console(stderr=True)
            wide = (cut("{task.description}"), BarColumn(), cut("{task.fields[text]}"))
            narrow = (cut("{task.fields[text]}  {task.description}"),)
            columns = wide if console.width >= _BAR_COLUMNS else narrow
            self._bar = Bar(*columns, console=console, redirect_stdout=False, auto_refresh=self._is_live)
            self._bar.add_task(self._label, total=None, text="")
            self._bar.start()
        self._begun = (time.monotonic(), 0)
        self._recent.append(self._begun)
        return self

    def __call__(self, done: int, total: int) -> None:
        """Draw the progress, or pass both numbers to the user's function."""
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
        """Show a text instead of the numbers. `done` and `total` from an earlier run do not affect the rate."""
        if self._bar is not None:
            if total:
                self._count = (done, total)
                self._begun = (time.monotonic(), done)
                self._recent = deque([self._begun])
            self._draw(text, *self._count)

    def _draw(self, text: str, done: int, total: int) -> None:
        assert self._bar is not None
        self._bar.update(self._bar.task_ids[0], completed=done, total=total or None, text=printable(text))
        if not self._is_live:
            self._bar.refresh()

    def _numbers(self, now: float) -> str:
        """Return the percentage, total, rate and remaining time. At the end, return the mean rate and elapsed time."""
        done, total = self._count
        is_over = done >= total
        since, before = self._begun if is_over else self._recent[0]
        per_s = (done - before) / (now - since) if now > since else 0.0
        in_bytes = self._unit == "bytes"
        # Round down, so that 100 % means complete.
        text = f"{100 * done // max(1, total)} % of {bytes_text(total) if in_bytes else f'{total} {self._unit}'}"
        # A rate over a very short time is meaningless, for example for a mapped file in the page cache.
        if per_s > 0 and now - since > _LEAST_S:
            text += f", {bytes_text(per_s)}/s" if in_bytes else f", {per_s:.1f} {self._unit}/s"
            text += f", in {_clock(now - since)}" if is_over else f", {_clock((total - done) / per_s)} left"
        return text

    def show(self, ticket: RunState) -> None:
        """Show the progress of a run."""
        if self.enabled:
            self(ticket.moved_bytes, ticket.nbytes)

    def follow(self, ticket: RunState, *, stall_s: float, reached: Callable[[], bool] | None = None) -> None:
        """Show the progress of a run until it finishes or `reached()` is true. Raise like `RunState.wait_until`."""
        is_over = reached or (lambda: ticket.is_finished)
        # The loop also ends when the run has stalled. In this case the wait below raises the error.
        while self.enabled and not ticket.done and not is_over() and ticket.look() <= stall_s:
            self.show(ticket)
            # Wait on the condition, because a load may take only a few milliseconds.
            with ticket.changed:
                ticket.changed.wait_for(lambda: ticket.done or is_over(), _REDRAW_S)
            # Inside a load Ctrl-C is only noted. Without this check it would take effect after the last byte.
            interrupts.raise_if_noted()
        ticket.wait_until(is_over, stall_s=stall_s)
        if reached is None:
            # Show the final count, so that the bar reaches 100 % and the function receives the total.
            self.show(ticket)

    @contextmanager
    def watching(self, look: Callable[[], tuple[int, int]]) -> Iterator[None]:
        """Show the numbers from `look` until the block ends, and then raise any error from the user's function."""
        if not self.enabled:
            yield
            return
        over = threading.Event()

        def draw() -> None:
            while not over.wait(_REDRAW_S):
                self(*look())

        # The pool's future stores an error from the user's function until the end of the block.
        with Threads(1, "penstock-progress") as pool:
            drawing = pool.submit(draw)
            try:
                yield
            finally:
                over.set()
        drawing.result()
        self(*look())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # At interpreter shutdown the drawing thread has stopped, perhaps while holding its lock.
        if self._bar is None or lifecycle.is_ending():
            return
        done, total = self._count
        is_over = kind is None and done >= total > 0
        if is_over:
            # Replace a text that was shown after the last count.
            self._draw(self._numbers(self._recent[-1][0]), done, total)
        # Erase an incomplete bar, because it would look as if the call were still running.
        self._bar.live.transient = not is_over
        # Rich's `stop` also ends the line, which must not happen for an erased bar.
        (self._bar if is_over else self._bar.live).stop()


def _clock(seconds: float) -> str:
    """Format a duration, such as `0.25 s`, `4.2 s`, `0:42` or `1:02:03`."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Counter:
    """A count of finished bytes for `Progress.watching`, which one thread increments."""

    def __init__(self, total: int = 0) -> None:
        self.done = 0
        self.total = total

    def add(self, nbytes: int) -> None:
        """Add to the count."""
        self.done += nbytes

    def look(self) -> tuple[int, int]:
        """Return the count and the total."""
        return self.done, self.total
