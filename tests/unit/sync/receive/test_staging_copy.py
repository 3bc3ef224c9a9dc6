"""Received strips go live in place, and a snapshot keeps the bytes from its creation."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.sync.parts import content, held, naive, parts, sharded, whole

from penstock.digest.strip import Strips
from penstock.errors import PlanError, StaleDescriptor
from penstock.sync.copy_plan import MemoryCopy, StagingCopy
from penstock.sync.publish.offer import VersionSnapshot
from penstock.sync.receive.sources import LocalLink
from penstock.sync.receive.transfer import Transfer
from penstock.transport.choose import open_links
from penstock.transport.protocol import Memory

SHAPES = [(64, 48), (32, 96), (300, 4000)]


def memory(nbytes: int, seed: int) -> tuple[Memory, np.ndarray]:
    data = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return Memory(address=data.ctypes.data, nbytes=nbytes, owner=data), data


def test_only_planned_strips_are_copied() -> None:
    pairs = [(memory(n, n), memory(n, n + 1)) for n in (3_000_000, 0, 5000)]
    rows = [(0, 300_000, 3, 400_000), (1_200_000, 500, 40, 1000), (1_300_000, 400_000, 1, 0), (3_000_100, 7, 30, 9)]
    at, run_bytes, num_rows, pitch = np.array(rows, np.int64).T
    expected = np.concatenate([dst[1] for dst, _ in pairs])
    source_bytes = np.concatenate([src[1] for _, src in pairs])
    for start, run, count, apart in rows:
        for i in range(count):
            expected[start + i * apart :][:run] = source_bytes[start + i * apart :][:run]
    strips = Strips(at=at, run_bytes=run_bytes, num_rows=num_rows, pitch=pitch)
    copy = MemoryCopy([dst[0] for dst, _ in pairs], [src[0] for _, src in pairs], strips)
    assert copy.run() > 0 and copy.nbytes == sum(run * count for _, run, count, _ in rows)
    assert np.array_equal(np.concatenate([dst[1] for dst, _ in pairs]), expected)


def test_copy_between_memories_of_unequal_size_raises() -> None:
    with pytest.raises(PlanError):
        MemoryCopy([memory(10, 0)[0]], [memory(11, 0)[0]])


def test_staged_version_is_received_and_flipped() -> None:
    with open_links(only=["shm"]) as links:
        holdings, wants = sharded("p", SHAPES, 0, 2, 2), sharded("s", SHAPES, 1, 2, 2)
        sources = [held(one, links) for one in holdings]
        for one in sources:
            one.begin(1)
            one.ready()
        live = held(wants[0], links, seed=1)
        part = parts(holdings, wants, 4096)[0]
        before, expected = whole(live), naive(part, [whole(one) for one in sources], whole(live))
        with StagingCopy(live.regions.memories, links) as staging_copy:
            source_links = {one.layout.member: LocalLink(one, same_process=False) for one in sources}
            Transfer(part, staging_copy.regions).run(source_links)
            assert np.array_equal(whole(live), before)
            assert not staging_copy.flip(part)
        assert np.array_equal(whole(live), expected)


@pytest.mark.parametrize("on_host", [False, True])
def test_snapshot_is_unaffected_by_later_change(on_host: bool) -> None:
    with open_links(only=["shm"]) as links:
        holdings, wants = sharded("p", SHAPES, 0, 1, 2), sharded("s", SHAPES, 1, 2, 1)
        live, receiver = held(holdings[0], links), held(wants[1], links, seed=1)
        part = parts(holdings, wants, 1 << 20)[1]
        with VersionSnapshot(live.layout, live.regions.memories, links, on_host=on_host) as replica:
            with pytest.raises(StaleDescriptor):
                replica.local_version.map()
            replica.snapshot(4)
            expected = naive(part, [whole(live)], whole(receiver))
            for one in live.regions.memories:
                content(one)[:] = 0
            link = LocalLink(replica.local_version, same_process=False)
            assert link.map.version == 4
            Transfer(part, receiver.regions).run({"p0": link})
            assert np.array_equal(whole(receiver), expected)
            replica.snapshot(5)
            with pytest.raises(StaleDescriptor):
                Transfer(part, receiver.regions).run({"p0": link})
