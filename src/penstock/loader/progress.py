"""Progress of a long call: a bar on stderr, a caller's function, or nothing.

In: how much is done, and of how much. Out: rich output on stderr, or calls.
Not here: the report at the end (`report`).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from penstock import interrupt
from penstock.arguments import wrong
from penstock.config import Settings

if TYPE_CHECKING:
    from penstock.engine.ticket import Ticket

ProgressOption = bool | Callable[[int, int], object] | None
"""True: a bar on stderr; False: nothing; None: as `PENSTOCK_PROGRESS` says, else a bar where stderr is a terminal; or a
function of what is done and of how much there is, in bytes (of a conversion: in tasks)."""

_REDRAW_S = 0.1
"""Seconds between redraws: what an eye still sees as moving."""


class Progress:
    """Draws how far a call is. A context manager.

    Args:
        wanted: see `ProgressOption`.
        label: what is being moved.
        unit: what is counted, `bytes` or a word of its own.
    """

    def __init__(self, wanted: ProgressOption, label: str, *, unit: str = "bytes") -> None:
        if wanted is not None and not isinstance(wanted, bool) and not callable(wanted):
            raise wrong("progress", wanted, "True, False, None or a function of (done, total)")
        self._call = wanted if callable(wanted) else None
        if wanted is None:
            wanted = Settings.read().progress
        self._draws = self._call is None and (sys.stderr.isatty() if wanted is None else bool(wanted))
        self._label, self._unit = label, unit
        self._bar: object = None

    @property
    def enabled(self) -> bool:
        """Return whether anything is drawn or called."""
        return self._draws or self._call is not None

    def __enter__(self) -> Progress:
        if self._draws:
            # Imported on first use: a load without a bar need not pay for it.
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            of_bytes = (DownloadColumn(), TransferSpeedColumn())
            counts = of_bytes if self._unit == "bytes" else (MofNCompleteColumn(), TextColumn(self._unit))
            self._bar = bar = Bar(TextColumn("{task.description}"), BarColumn(), *counts, console=Console(stderr=True))
            self._task = bar.add_task(self._label, total=None)
            bar.start()
        return self

    def __call__(self, done: int, total: int) -> None:
        """Draw that so much of `total` is done, or call the caller's function with both."""
        if self._call is not None:
            self._call(done, total)
        elif self._draws:
            self._bar.update(self._task, completed=done, total=total)  # type: ignore[attr-defined]

    def show(self, ticket: Ticket) -> None:
        """Draw how far the ticket is."""
        if self.enabled:
            self(ticket.moved_bytes, ticket.nbytes)

    def follow(self, ticket: Ticket, *, stall_s: float) -> None:
        """Wait for the ticket, drawing as it moves."""
        while self.enabled and not ticket.done and ticket.look() <= stall_s:
            self.show(ticket)
            time.sleep(_REDRAW_S)
            interrupt.raise_if_noted()
        ticket.wait(stall_s=stall_s)
        self.show(ticket)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._draws:
            self._bar.stop()  # type: ignore[attr-defined]


@contextmanager
def looked_at(wanted: ProgressOption, label: str, look: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """Draw what `look` says is done, and of how much, from a thread while the block runs; at its end once more.

    Raises: what the caller's function raises, at the end of the block. Cost: no thread without progress.
    """
    with Progress(wanted, label) as progress:
        if not progress.enabled:
            yield
            return
        over = threading.Event()

        def draw() -> None:
            while not over.wait(_REDRAW_S):
                progress(*look())

        with ThreadPoolExecutor(1, thread_name_prefix="penstock-progress") as pool:
            drawing = pool.submit(draw)
            try:
                yield
            finally:
                over.set()
        drawing.result()
        progress(*look())


class Counter:
    """Bytes that are done; threads add to it, one at a time."""

    def __init__(self, total: int = 0) -> None:
        self.done = 0
        self.total = total

    def add(self, nbytes: int) -> None:
        """Count bytes."""
        self.done += nbytes

    def look(self) -> tuple[int, int]:
        """Return the bytes that are done, and all."""
        return self.done, self.total
