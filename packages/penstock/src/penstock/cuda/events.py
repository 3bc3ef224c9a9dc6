"""CUDA streams and events as torch objects: streams that are created one by one, and waits with a deadline."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress

import torch

from penstock.cuda.driver import CudaDriver, load_driver
from penstock.errors import DestinationError, PenstockError

# A flip or a batch takes at most milliseconds, so a wait with longer sleeps would slow the flip or batch noticeably.
_NAP_S = 0.0001


def make_stream(device: torch.device, owner: object = None) -> torch.cuda.Stream:
    """Return a new stream that does not wait for the default stream. `device` must have an index.

    Torch would create a whole pool for the first stream, in 3 to 5 ms. Source:
    benchmarks/results/h200x1_202611/load-history.md. The stream is destroyed when `owner` is freed. If `owner` is None,
    the stream exists as long as the process. Raises ConfigError without a driver or device.
    """
    driver, index = load_driver(), device.index
    with driver.entered(index):
        handle = driver.make_stream()
    if owner is not None:
        weakref.finalize(owner, _destroy, driver, index, handle, os.getpid()).atexit = False
    return torch.cuda.ExternalStream(handle, device=device)


def _destroy(driver: CudaDriver, device: int, stream: int, pid: int) -> None:
    # A forked child inherits the finalizer but not the driver's state.
    if os.getpid() != pid:
        return
    # A finalizer has no caller to raise to. A failed device reports its error at the next call.
    with suppress(PenstockError), driver.entered(device):
        driver.free([stream], [])


def record_events(devices: Iterable[str | torch.device]) -> list[torch.cuda.Event]:
    """Record an event on each device's current stream, and return the events."""
    events = []
    for device in devices:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return events


def is_passed(event: torch.cuda.Event, timeout_s: float) -> bool:
    """Return whether the device has passed an event within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(_NAP_S)
    return True


def wait_events(events: Iterable[torch.cuda.Event], stall_s: float, *, work: str, mutated: bool = False) -> None:
    """Wait until the device has passed all events, in the order in which they were recorded.

    Raises DestinationError if the device passed no event for `stall_s`. In the error, `work` names the unfinished work,
    and `mutated` says whether the target is a mix of two versions.
    """
    for event in events:
        if not is_passed(event, stall_s):
            raise DestinationError(f"the device finished no {work} for {stall_s:g} s", mutated=mutated)
