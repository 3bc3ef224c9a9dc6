"""Memory that receivers read while it is filled: batch after batch, each readable once the device has written it.

In: batches in the order in which receivers read, each a set of rows and the work that writes them. Out: the rows, as
they become ready.
Not here: the work (`transformed`, `offer`), waiting for rows (`sync.local_version`).

    queue batches i, i + 1, ... --> wait for batch i --> its rows are ready --> queue another --> ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from penstock.cuda.events import wait_events
from penstock.types import I64


class Batch(Protocol):
    """Rows that are written at once."""

    @property
    def rows(self) -> I64:
        """Return the numbers of the rows that the batch completes."""
        ...

    def queue(self) -> list[torch.cuda.Event]:
        """Queue the work on the devices; return an event behind it for each device. On the host, do it."""
        ...


def fill(
    batches: Iterable[Batch], ready: Callable[[I64], None], *, stall_s: float, work: str, num_ahead: int = 2
) -> None:
    """Carry out the batches in order.

    Args:
        ready: called with the rows of each batch, once the devices have written them.
        stall_s: the deadline of each batch.
        work: what a batch is, for the error.
        num_ahead: batches queued behind the one that is waited for, so that the device has no gap between batches.

    Raises:
        DestinationError: the device finished no batch for `stall_s`.
    """
    queued: deque[tuple[Batch, list[torch.cuda.Event]]] = deque()

    def finish() -> None:
        batch, events = queued.popleft()
        wait_events(events, stall_s, work=work)
        ready(batch.rows)

    for batch in batches:
        queued.append((batch, batch.queue()))
        # A batch without events was done on the host.
        while queued and (len(queued) > num_ahead or not queued[-1][1]):
            finish()
    while queued:
        finish()
