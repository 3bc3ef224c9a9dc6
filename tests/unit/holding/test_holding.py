"""A fence invalidates descriptors and ends waits. A wait ends when its condition is true, or at its deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.unit.holding.test_regions import filled, read
from tests.unit.sync.parts import content

from penstock.errors import StaleDescriptor
from penstock.holding.holding import Holding
from penstock.holding.regions import Regions
from penstock.transport.choose import PeerLinks, open_links


@pytest.fixture
def links() -> Iterator[PeerLinks]:
    with open_links(only=["shm"]) as opened:
        yield opened


@pytest.fixture
def holding(links: PeerLinks) -> Iterator[Holding]:
    regions = Regions(filled(10))
    regions.register(links)
    with Holding(regions) as held:
        yield held


def wait_in_thread(holding: Holding, is_over: Callable[[], bool], wait_s: float = 30.0) -> Callable[[], bool]:
    """Wait in a thread, and return once it waits. The returned function joins the thread and returns the result."""
    found: list[bool] = []
    is_waiting = threading.Event()

    def looked() -> bool:
        is_waiting.set()
        return is_over()

    def wait() -> None:
        with holding.lock:
            found.append(holding.wait_until(looked, time.monotonic() + wait_s))

    def joined() -> bool:
        thread.join(60)
        return found[0]

    thread = threading.Thread(target=wait)
    thread.start()
    assert is_waiting.wait(30)
    return joined


def test_wake_ends_only_finished_waits(holding: Holding) -> None:
    done: set[int] = set()
    first = wait_in_thread(holding, lambda: 1 in done)
    second = wait_in_thread(holding, lambda: 2 in done, wait_s=0.2)
    with holding.lock:
        done.add(1)
        holding.wake()
    assert first() and not second()


def test_wait_for_true_condition_returns_immediately(holding: Holding) -> None:
    with holding.lock:
        assert holding.wait_until(lambda: True, time.monotonic() - 1)
        assert not holding.wait_until(lambda: False, time.monotonic() - 1)


@pytest.mark.parametrize("end", [Holding.fence, Holding.close])
def test_fence_and_close_end_waits(holding: Holding, end: Callable[[Holding], None]) -> None:
    generation = holding.generation
    joined = wait_in_thread(holding, lambda: holding.generation != generation)
    begun = time.monotonic()
    end(holding)
    assert joined() and time.monotonic() - begun < 20
    assert holding.generation == generation + 1


@pytest.mark.parametrize("end", [Holding.fence, Holding.close])
def test_read_after_fence_or_close_raises(links: PeerLinks, holding: Holding, end: Callable[[Holding], None]) -> None:
    with Regions(filled(1)) as into:
        into.register(links)
        offered = holding.regions.descriptors()
        assert (read(links, into, offered[0], 0) == 10).all()
        end(holding)
        with pytest.raises(StaleDescriptor):
            read(links, into, offered[0], 0)


def test_read_during_fence_never_mixes_generations(links: PeerLinks, holding: Holding) -> None:
    memory = holding.regions.memories[0]
    written = content(memory)
    offered = [holding.regions.descriptors()[0]]
    is_over = threading.Event()

    def write() -> None:
        for value in range(100):
            holding.fence()
            written[:] = value
            offered[0] = holding.regions.descriptors()[0]
            time.sleep(0.003)
        is_over.set()

    thread = threading.Thread(target=write)
    num_read = 0
    with Regions(filled(1)) as into:
        into.register(links)
        thread.start()
        while not is_over.is_set():
            try:
                got = read(links, into, offered[0], 0)
            except StaleDescriptor:
                continue
            num_read += 1
            assert len(np.unique(got)) == 1
        thread.join()
    assert num_read
