"""A progress bar on stderr while bytes move, or nothing.

In: a ticket. Out: rich output on stderr, off when stderr is no terminal.
Not here: the report at the end (`report`).
"""

from __future__ import annotations

import sys
import time
from types import TracebackType

from penstock import interrupt
from penstock.engine.ticket import Ticket

_REDRAW_S = 0.1
"""Seconds between redraws: what an eye still sees as moving."""


class Progress:
    """Context manager; `show` draws the ticket's state (cheap to call often).

    Args:
        enabled: None means only when stderr is a terminal.
        label: what is being moved.
    """

    def __init__(self, enabled: bool | None, label: str) -> None:
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._label = label
        self._bar: object = None

    def __enter__(self) -> Progress:
        if self._enabled:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = bar = Bar(*columns, console=Console(stderr=True))
            self._task = bar.add_task(self._label, total=None)
            bar.start()
        return self

    def show(self, ticket: Ticket) -> None:
        """Draw how far the ticket is."""
        if self._enabled:
            self._bar.update(self._task, completed=ticket.moved_bytes, total=ticket.nbytes)  # type: ignore[attr-defined]

    def follow(self, ticket: Ticket, *, stall_s: float) -> None:
        """Wait for the ticket, drawing as it moves."""
        while self._enabled and not ticket.done and ticket.look() <= stall_s:
            self.show(ticket)
            time.sleep(_REDRAW_S)
            interrupt.raise_if_noted()
        ticket.wait(stall_s=stall_s)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled:
            self._bar.stop()  # type: ignore[attr-defined]
