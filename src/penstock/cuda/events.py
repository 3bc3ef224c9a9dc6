"""Waits for CUDA events that end at a deadline, which torch's `synchronize` does not have.

In: devices, or events of torch that were recorded. Out: events; whether the device has passed them.
Not here: streams and events of the driver (`driver`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch

from penstock.errors import DestinationError

# A flip or a batch takes milliseconds or less, while the engine is paused or the device has nothing else queued: a
# longer sleep would be a measurable part of it.
_NAP_S = 0.0001


def record_events(devices: Iterable[str | torch.device]) -> list[torch.cuda.Event]:
    """Return an event for each device, recorded on its current stream: passed after the work queued there so far."""
    events = []
    for device in devices:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return events


def is_passed(event: torch.cuda.Event, timeout_s: float) -> bool:
    """Wait until the device has passed an event; return False if it has not within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(_NAP_S)
    return True


def wait_events(events: Iterable[torch.cuda.Event], stall_s: float, *, work: str, mutated: bool = False) -> None:
    """Wait until the device has passed all events.

    Args:
        events: in the order in which they were recorded.
        stall_s: the deadline for progress: for each event after the one before.
        work: what the device does before an event, for the error.
        mutated: whether the target is a mix of two versions when this fails.

    Raises:
        DestinationError: the device passed no event for `stall_s`.
    """
    for event in events:
        if not is_passed(event, stall_s):
            raise DestinationError(f"the device finished no {work} for {stall_s:g} s", mutated=mutated)
