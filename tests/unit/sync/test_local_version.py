"""A rank's memory serves one version and its ready rows, and wakes the readers that wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from tests.unit.sync.parts import held, layout, whole

from penstock.digest.strip import Strips, strip_digests
from penstock.errors import PlanError, StaleDescriptor
from penstock.sync.local_version import LocalVersion, VersionMap
from penstock.transport.choose import open_links
from penstock.types import Box

BOX = Box(start=(0, 0), stop=(8, 8))


@pytest.fixture
def rank() -> Iterator[LocalVersion]:
    with open_links(only=["loopback"]) as links:
        yield held(layout("p0", [(f"t{i}", (8, 8), BOX) for i in range(4)], 2), links)


def strips(*rows: tuple[int, int, int, int]) -> Strips:
    at, run_bytes, num_rows, pitch = np.array(rows, np.int64).reshape(-1, 4).T
    return Strips(at=at, run_bytes=run_bytes, num_rows=num_rows, pitch=pitch)


def test_digests_cover_ready_rows_only(rank: LocalVersion) -> None:
    rank.begin(3)
    first, second = strips((0, 16, 4, 32)), strips((256, 256, 1, 0))
    where = rank.layout.offset.tolist()
    rank.ready([where.index(0)])
    reply = rank.digests(first, version=3, generation=rank.generation, wait_s=0)
    assert reply.digests is not None and reply.num_ready == 1
    assert (reply.digests == strip_digests(whole(rank), first)).all()
    assert rank.digests(second, version=3, generation=rank.generation, wait_s=0.01).digests is None
    late = threading.Timer(0.1, lambda: rank.ready())
    late.start()
    reply = rank.digests(second, version=3, generation=rank.generation, wait_s=10)
    assert reply.digests is not None and reply.num_ready == 4
    late.join()


def test_wrong_version_or_generation_raises_stale_descriptor(rank: LocalVersion) -> None:
    some = strips((0, 4, 1, 0))
    with pytest.raises(StaleDescriptor):
        rank.map()
    rank.begin(3)
    rank.ready()
    version_map = rank.map()
    assert (version_map.version, version_map.sizes, len(version_map.regions)) == (3, (512, 512), 2)
    for version, generation in ((2, version_map.generation), (3, version_map.generation + 1)):
        with pytest.raises(StaleDescriptor):
            rank.digests(some, version=version, generation=generation, wait_s=1)
    with pytest.raises(PlanError, match="memory still has version 3"):
        rank.begin(4)
    rank.fence()
    rank.begin(3)
    rank.ready()
    with pytest.raises(StaleDescriptor):
        rank.digests(some, version=3, generation=version_map.generation, wait_s=1)
    assert rank.map().regions != version_map.regions


def test_version_map_without_size_is_rejected(rank: LocalVersion) -> None:
    rank.begin(1)
    rank.ready()
    fields = msgspec.to_builtins(rank.map())
    fields["sizes"] = fields["sizes"][:1]
    with pytest.raises(msgspec.ValidationError, match="2 regions, but 1 sizes"):
        msgspec.convert(fields, VersionMap)


def test_fence_wakes_waiting_readers(rank: LocalVersion) -> None:
    rank.begin(1)
    threading.Timer(0.1, rank.fence).start()
    begun = time.monotonic()
    with pytest.raises(StaleDescriptor):
        rank.digests(strips((0, 4, 1, 0)), version=1, generation=0, wait_s=60)
    assert time.monotonic() - begun < 50


def test_waiting_reader_wakes_only_for_its_rows(rank: LocalVersion, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.begin(1)
    looks: list[str] = []
    look = LocalVersion._check

    def counted(self: LocalVersion, version: int, generation: int) -> None:
        looks.append(threading.current_thread().name)
        look(self, version, generation)

    monkeypatch.setattr(LocalVersion, "_check", counted)
    where = rank.layout.offset.tolist()
    offsets = sorted(where)
    found: dict[str, bool] = {}

    def wait_for(offset: int) -> None:
        reply = rank.digests(strips((offset, 4, 1, 0)), version=1, generation=rank.generation, wait_s=20)
        found[threading.current_thread().name] = reply.digests is not None

    threads = [threading.Thread(target=wait_for, args=(offset,), name=str(offset)) for offset in offsets]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 20
    while len(looks) < len(threads) and time.monotonic() < until:
        time.sleep(0.001)
    for offset, thread in zip(offsets, threads, strict=True):
        rank.ready([where.index(offset)])
        thread.join(20)
    assert found == {str(offset): True for offset in offsets}
    # One check before the wait, one after it, and one after the digest, but none for other rows.
    assert sorted(looks) == sorted(3 * [str(offset) for offset in offsets])


@pytest.mark.parametrize("row", [(1020, 8, 1, 0), (-4, 4, 1, 0), (500, 24, 1, 0), (0, 4, 1 << 40, 8)])
def test_strips_outside_or_across_regions_are_refused(rank: LocalVersion, row: tuple[int, int, int, int]) -> None:
    rank.begin(1)
    rank.ready()
    with pytest.raises(PlanError):
        rank.digests(strips(row), version=1, generation=0, wait_s=1)


def test_closed_version_raises_stale_descriptor(rank: LocalVersion) -> None:
    rank.begin(1)
    rank.close()
    with pytest.raises(StaleDescriptor):
        rank.map()
    with pytest.raises(StaleDescriptor):
        rank.ready()


def test_interleaved_rows_become_ready_together() -> None:
    from penstock.plan.layout import Form, Layout
    from penstock.types import DType

    form = Form(dtype=DType.F32, shape=(4, 2), box=Box(start=(0, 0), stop=(4, 2)), strides=(4, 1))
    both = Layout(
        member="p",
        regions=(64,),
        forms=(form,),
        names=("left", "right"),
        form=np.zeros(2, np.int64),
        offset=np.array([0, 8]),
    )
    with open_links(only=["loopback"]) as links:
        rank = held(both, links)
        rank.begin(1)
        rank.ready([1])
        ask = strips((0, 8, 4, 16))
        assert rank.digests(ask, version=1, generation=0, wait_s=0.01).digests is None
        rank.ready([0])
        assert rank.digests(ask, version=1, generation=0, wait_s=1).digests is not None
