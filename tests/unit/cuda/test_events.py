"""Streams of a fake driver, and waits for events with a deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from penstock.cuda import events as cuda_events
from penstock.cuda.events import is_passed, make_stream, wait_events
from penstock.errors import DestinationError


class Event:
    """An event that a device passes after some queries or seconds. Infinity means never."""

    def __init__(self, *, queries: int = 0, seconds: float = 0.0) -> None:
        self.queries, self.seconds = queries, seconds
        self.begun: float | None = None

    def query(self) -> bool:
        self.queries -= 1
        self.begun = self.begun or time.monotonic()
        return self.queries < 0 and time.monotonic() - self.begun >= self.seconds


def test_event_wait_returns_after_event_completes() -> None:
    event = Event(queries=3)
    assert is_passed(event, 60.0)
    assert event.queries == -1, "the event is not queried after it has passed"


def test_event_wait_returns_false_at_deadline() -> None:
    begun = time.monotonic()
    assert not is_passed(Event(seconds=float("inf")), 0.05)
    assert 0.05 <= time.monotonic() - begun < 5.0


def test_each_event_has_a_separate_deadline() -> None:
    # The events need 1 s in total, with a deadline of 0.8 s for each.
    events = [Event(seconds=0.2) for _ in range(5)]
    wait_events(events, 0.8, work="copy")
    assert all(event.begun for event in events)


@pytest.mark.parametrize("mutated", [False, True])
def test_stalled_device_error_names_pending_work(mutated: bool) -> None:
    events = [Event(), Event(seconds=float("inf"))]
    with pytest.raises(DestinationError, match=r"the device finished no copy for 0\.05 s") as caught:
        wait_events(events, 0.05, work="copy", mutated=mutated)
    assert caught.value.mutated is mutated


class Driver:
    """A driver with numbered streams. `entered` is the device whose context is current."""

    def __init__(self) -> None:
        self.device: int | None = None
        self.alive: dict[int, int | None] = {}

    @contextmanager
    def entered(self, device: int) -> Iterator[None]:
        self.device = device
        yield
        self.device = None

    def make_stream(self) -> int:
        self.alive[len(self.alive) + 1] = self.device
        return len(self.alive)

    def free(self, streams: Sequence[int], events: Sequence[int]) -> None:
        for stream in streams:
            assert self.alive.pop(stream) == self.device


def test_stream_is_destroyed_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(cuda_events, "load_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: SimpleNamespace(handle=handle))

    class Owner:
        pass

    owner = Owner()
    stream = make_stream(torch.device("cuda", 3), owner=owner)
    make_stream(torch.device("cuda", 1))
    assert driver.alive == {1: 3, 2: 1}
    del owner
    assert driver.alive == {2: 1}, "the stream without an owner stays"
    assert stream.handle == 1  # type: ignore[attr-defined]
