"""Snapshots: rows are readable while others are copied, every byte is copied, and a failed copy is not readable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.sync.parts import held, sharded, whole

import penstock as ps
from penstock.digest.strip import Strips, strip_digests
from penstock.errors import DestinationError, VersionRefused
from penstock.sync.copy_plan import MemoryCopy
from penstock.sync.publish import offer
from penstock.sync.publish.fill import Batch, fill
from penstock.sync.publish.offer import VersionSnapshot
from penstock.transport.choose import PeerLinks, open_links
from penstock.types import I64

SHAPES = [(64, 64)] * 6
ROW_BYTES = 64 * 64 * 4


@pytest.fixture
def links() -> Iterator[PeerLinks]:
    with open_links(only=["shm"]) as opened:
        yield opened


def strips_at(at: int, nbytes: int) -> Strips:
    size = np.array([nbytes])
    return Strips(at=np.array([at]), run_bytes=size, num_rows=np.array([1]), pitch=size)


def call_before_copy(monkeypatch: pytest.MonkeyPatch, before: int, then: Callable[[], None]) -> None:
    """Call a function before the copy of this number begins."""
    queue, count = MemoryCopy.queue, [0]

    def queue_after(self: MemoryCopy) -> list[torch.cuda.Event]:
        count[0] += 1
        if count[0] == before:
            then()
        return queue(self)

    monkeypatch.setattr(MemoryCopy, "queue", queue_after)


@pytest.mark.parametrize("num_regions", [1, 2])
def test_rows_are_readable_before_copy_completes(
    links: PeerLinks, num_regions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offer, "COPY_BYTES", ROW_BYTES)
    monkeypatch.setattr(offer, "GAP_BYTES", 0)
    live = held(sharded("p", SHAPES, 0, 1, num_regions)[0], links)
    layout = live.layout
    announced: list[int] = []
    with VersionSnapshot(layout, live.regions.memories, links) as snapshot:
        served = snapshot.local_version

        def look() -> None:
            # Only layers 0 to 2 are copied so far.
            assert announced == [7]
            version_map = served.map()
            assert not version_map.is_ready
            replies = [
                served.digests(
                    strips_at(int(at), ROW_BYTES), version=7, generation=version_map.generation, wait_s=0.0
                ).digests
                for at in layout.offset
            ]
            assert [reply is not None for reply in replies] == [True] * 3 + [False] * 3
            wanted = strip_digests(whole(live), strips_at(int(layout.offset[1]), ROW_BYTES))
            assert np.array_equal(replies[1], wanted)

        call_before_copy(monkeypatch, 4, look)
        snapshot.snapshot(7, announce=lambda: announced.append(7))
        assert np.array_equal(whole(served), whole(live))
        assert served.map().is_ready


def test_host_copy_is_announced_after_completion(links: PeerLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    live = held(sharded("p", SHAPES, 0, 1, 1)[0], links)
    announced: list[bool] = []
    with VersionSnapshot(live.layout, live.regions.memories, links, on_host=True) as snapshot:
        snapshot.snapshot(1, announce=lambda: announced.append(snapshot.local_version.map().is_ready))
    assert announced == [True]


@given(
    rows=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 900), st.integers(0, 300)), max_size=20),
    gap=st.sampled_from([0, 10, 1000]),
)
def test_each_row_byte_is_in_one_strip(rows: list[tuple[int, int, int]], gap: int) -> None:
    size = 1200
    first: I64 = np.cumsum([0, size, size, size])
    at = np.array([region * size + start for region, start, _ in rows], np.int64)
    nbytes = np.array([length for _, _, length in rows], np.int64)
    before = offer.GAP_BYTES
    offer.GAP_BYTES = gap
    try:
        strips = offer._spans(at, nbytes, first)
    finally:
        offer.GAP_BYTES = before
    covered = np.zeros(3 * size, bool)
    for start, stop in zip(strips.at.tolist(), strips.stop.tolist(), strict=True):
        assert start // size == (stop - 1) // size and not covered[start:stop].any()
        covered[start:stop] = True
    wanted = np.zeros(3 * size, bool)
    for start, length in zip(at.tolist(), nbytes.tolist(), strict=True):
        wanted[start : start + length] = True
    assert not (wanted & ~covered).any()
    assert gap or covered.sum() == wanted.sum()


def logged_batch(number: int, log: list[str], *, on_device: bool) -> Batch:
    """Return a batch on a device or on the host that logs when it is queued."""

    def queue() -> list[torch.cuda.Event]:
        log.append(f"queue {number}")
        return [CompletedEvent()] if on_device else []  # type: ignore[list-item]

    return np.array([number]), queue


class CompletedEvent:
    """A completed event of a device."""

    def query(self) -> bool:
        return True


def test_device_batches_are_queued_ahead_of_completion() -> None:
    log: list[str] = []
    batches = [logged_batch(i, log, on_device=True) for i in range(4)]
    fill(batches, lambda rows: log.append(f"ready {rows[0]}"), stall_s=1.0, work="test", num_ahead=2)
    assert log == [*("queue 0", "queue 1", "queue 2", "ready 0", "queue 3", "ready 1"), *("ready 2", "ready 3")]
    log.clear()
    batches = [logged_batch(i, log, on_device=False) for i in range(2)]
    fill(batches, lambda rows: log.append(f"ready {rows[0]}"), stall_s=1.0, work="test", num_ahead=2)
    assert log == ["queue 0", "ready 0", "queue 1", "ready 1"]


Tensors = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


@pytest.fixture
def tensors(monkeypatch: pytest.MonkeyPatch) -> Tensors:
    """Return trained tensors, which are copied in several batches, and zeros for a receiver."""
    monkeypatch.setattr(offer, "COPY_BYTES", 1024)
    trained = {f"layers.{i}.w": torch.full((64, 64), float(i)) for i in range(4)}
    return trained, {name: torch.zeros_like(value) for name, value in trained.items()}


def fail() -> None:
    raise DestinationError("the device failed")


def test_failed_copy_leaves_no_readable_version(tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, served = tensors
    with ps.publisher("failing", trained, mode="snapshot") as publisher, ps.subscriber("failing", served) as subscriber:
        publisher.publish(1)
        assert subscriber.update(1).version == 1
        before = {name: value.clone() for name, value in served.items()}
        for value in trained.values():
            value += 1

        with monkeypatch.context() as patched:
            call_before_copy(patched, 3, fail)
            with pytest.raises(DestinationError):
                publisher.publish(2)
        assert all(torch.equal(served[name], value) for name, value in before.items())
        publisher.publish(3)
        assert subscriber.update(3).version == 3
        assert all(torch.equal(served[name], value) for name, value in trained.items())


def test_failed_copy_withdraws_fleet_version(tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, served = tensors
    with ps.publisher("fleet", trained, mode="snapshot") as publisher, ps.subscriber("fleet", served) as subscriber:
        publisher.wait_subscribers(1)
        publisher.publish(1)
        assert subscriber.update(1).version == 1

        with monkeypatch.context() as patched:
            call_before_copy(patched, 3, fail)
            with pytest.raises(DestinationError):
                publisher.publish(2, commit="all")
        with pytest.raises(VersionRefused):
            subscriber.wait(2, timeout_s=10.0)
        publisher.publish(3)
        assert subscriber.update(3).version == 3
        assert all(torch.equal(served[name], value) for name, value in trained.items())


def test_receiver_reads_during_snapshot_copy(tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, served = tensors
    with ps.publisher("early", trained, mode="snapshot") as publisher, ps.subscriber("early", served) as subscriber:
        versions: list[int] = []
        reader = threading.Thread(target=lambda: versions.append(subscriber.update(1, timeout_s=30.0).version))

        def begin() -> None:
            reader.start()
            # The version is announced, but most of its rows are not copied yet.
            assert subscriber.wait(1, timeout_s=10.0) == 1

        call_before_copy(monkeypatch, 2, begin)
        publisher.publish(1)
        reader.join(30.0)
        assert versions == [1]
        assert all(torch.equal(served[name], value) for name, value in trained.items())
