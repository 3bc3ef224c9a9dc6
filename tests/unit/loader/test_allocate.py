"""A load to a GPU, without one: which thread allocates the slabs."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.loader import load


class Place:
    """A CUDA place whose slab is allocated by the first thread that needs it."""

    def __init__(self) -> None:
        self.allocated_by: list[str] = []
        self._lock = threading.RLock()

    def allocating(self) -> Any:
        return self._lock

    def allocate(self) -> None:
        with self._lock:
            if not self.allocated_by:
                self.allocated_by.append(threading.current_thread().name)


def test_slabs_are_allocated_by_the_callers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place()
    ring = threading.Thread(target=place.allocate, name="ring")

    def begin(window_bytes: int) -> Any:
        ring.start()
        # Time for its first bytes to arrive.
        ring.join(0.05)
        return SimpleNamespace(ticket=None, is_under_way=lambda: True)

    monkeypatch.setattr(load, "_prepare", lambda session, **options: (SimpleNamespace(nbytes=1, table=()), place, begin))
    monkeypatch.setattr(load, "_views", lambda session, plan, place: {})
    session: Any = SimpleNamespace(
        phases=SimpleNamespace(enter=lambda name: None),
        settings=SimpleNamespace(stall_s=1.0),
        enter_move=lambda: None,
        progress=lambda: nullcontext(SimpleNamespace(follow=lambda ticket, **options: None)),
    )
    load._gather(session, None)
    ring.join(5)
    assert place.allocated_by == [threading.current_thread().name]
