"""Allocation of slabs in a load to a GPU, with a fake GPU: the allocating thread and the order of steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.loader import load


class Place:
    """A fake CUDA place whose slab is allocated by the first thread that needs it."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.allocated_by: list[str] = []
        self._note = note
        self._lock = threading.RLock()
        self.slab = None

    def allocating(self) -> Any:
        return self._lock

    def allocate(self) -> None:
        with self._lock:
            self._note("allocate")
            if not self.allocated_by:
                self.allocated_by.append(threading.current_thread().name)


class Load:
    """A fake session with a place and a run. `steps` records the order of calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_tensors: int = 1) -> None:
        self.steps: list[str] = []
        self.place = Place(self.steps.append)
        self.begun: Callable[[], None] = lambda: None
        plan = SimpleNamespace(nbytes=1, table=range(num_tensors), slab_nbytes=[1])
        monkeypatch.setattr(load, "_prepare", lambda *args, **options: (plan, self.place, self._begin))
        self.session: Any = SimpleNamespace(
            phases=SimpleNamespace(enter=lambda name: None),
            settings=SimpleNamespace(stall_s=1.0),
            table=lambda: None,
            wanted=lambda table: SimpleNamespace(table=table, boxes=(), of_several=dict),
            regions=lambda table, boxes: None,
            batches=lambda plan, slabs, memory: [(["views"], [self.steps.append("views")])],
            enter_move=lambda: None,
            progress=lambda: nullcontext(SimpleNamespace(follow=self._follow)),
        )

    def _begin(self, window_bytes: int) -> Any:
        self.begun()
        return SimpleNamespace(
            ticket=None, is_under_way=self._is_under_way, prepare_checker=lambda: self.steps.append("prepare")
        )

    def _is_under_way(self) -> bool:
        return True

    def _follow(self, ticket: None, *, stall_s: float, reached: Callable[[], bool] | None = None) -> None:
        self.steps.append("all bytes" if reached is None else "under way")
        assert reached in (None, self._is_under_way)


def test_load_allocates_memory_in_caller_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = Load(monkeypatch)
    ring = threading.Thread(target=loading.place.allocate, name="ring")

    def begun() -> None:
        ring.start()
        # Time for the first bytes to arrive.
        ring.join(0.05)

    loading.begun = begun
    load._gather(loading.session, None)
    ring.join(5)
    assert loading.place.allocated_by == [threading.current_thread().name]


def test_few_tensors_are_created_once_load_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = Load(monkeypatch)
    load._gather(loading.session, None)
    assert loading.steps == ["prepare", "allocate", "under way", "views", "all bytes"]


def test_many_tensors_are_created_before_load_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = Load(monkeypatch, num_tensors=load.MANY_TENSORS)
    load._gather(loading.session, None)
    assert loading.steps == ["prepare", "allocate", "views", "all bytes"]
