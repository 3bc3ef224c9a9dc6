"""Fill memory in batches while receivers already read it. A batch becomes readable when the device has written it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from penstock.cuda.events import wait_events
from penstock.types import I64


class Batch(Protocol):
    """Rows that are written together."""

    @property
    def rows(self) -> I64:
        """Return the numbers of the rows in the batch."""
        ...

    def queue(self) -> list[torch.cuda.Event]:
        """Queue the work, and return events for the end of the work, one per device. On the host, work immediately."""
        ...


def fill(
    batches: Iterable[Batch], ready: Callable[[I64], None], *, stall_s: float, work: str, num_ahead: int = 2
) -> None:
    """Queue batches in order, `num_ahead` in advance. Call `ready` with the rows that the devices have written."""
    queued: deque[tuple[Batch, list[torch.cuda.Event]]] = deque()

    def finish() -> None:
        batch, events = queued.popleft()
        wait_events(events, stall_s, work=work)
        ready(batch.rows)

    for batch in batches:
        queued.append((batch, batch.queue()))
        while queued and (len(queued) > num_ahead or not queued[-1][1]):
            finish()
    while queued:
        finish()
