"""Fill memory in batches while receivers already read it. A batch becomes readable when the device has written it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch

from penstock.cuda.events import wait_events
from penstock.types import I64

Batch = tuple[I64, Callable[[], list[torch.cuda.Event]]]
"""The numbers of rows that are written together, and a function that queues the work.

The function returns events for the end of the work, one per device. On the host, the function does the work itself."""


def fill(
    batches: Iterable[Batch], ready: Callable[[I64], None], *, stall_s: float, work: str, num_ahead: int = 2
) -> None:
    """Queue batches in order, `num_ahead` in advance. Call `ready` with the rows that the devices have written."""
    queued: deque[tuple[I64, list[torch.cuda.Event]]] = deque()

    def finish() -> None:
        rows, events = queued.popleft()
        wait_events(events, stall_s, work=work)
        ready(rows)

    for rows, queue in batches:
        queued.append((rows, queue()))
        while queued and (len(queued) > num_ahead or not queued[-1][1]):
            finish()
    while queued:
        finish()
