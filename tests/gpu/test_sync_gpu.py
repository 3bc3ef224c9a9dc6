"""The data plane of a sync on devices: digests, reads from other processes, flips and snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import msgspec
import numpy as np
import pytest
import torch
from tests.gpu.sync_holder import SHAPES, Holder, bytes_of, on_device
from tests.unit.sync.parts import naive, parts, sharded

from penstock.cuda import pack as pack_cuda
from penstock.digest.cuda import plan_strips
from penstock.digest.strip import Strips, pack_strips, strip_digests
from penstock.errors import IntegrityError, PeerLost, StaleDescriptor
from penstock.memory.arena import Arena
from penstock.sync import packer
from penstock.sync.copy_plan import MemoryCopy, StagingCopy
from penstock.sync.local_version import LocalVersion
from penstock.sync.publish.offer import VersionSnapshot
from penstock.sync.receive.sources import LocalLink
from penstock.sync.receive.transfer import Transfer
from penstock.transport.choose import PeerLinks, open_links
from penstock.transport.protocol import Memory
from penstock.types import MIB

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
HOLDER_DEVICE = ["cuda:0", pytest.param("cuda:1", marks=pytest.mark.gpus(2))]


@pytest.fixture
def links() -> Iterator[PeerLinks]:
    with open_links(only=["cuda_ipc"]) as opened:
        yield opened


def content(memory: Memory) -> torch.Tensor:
    assert isinstance(memory.owner, Arena)
    return memory.owner.bytes_at(0, memory.nbytes)


def whole(memories) -> np.ndarray:
    torch.cuda.synchronize()
    return np.concatenate([content(memory).cpu().numpy() for memory in memories])


def random_strips(nbytes: int, num: int, seed: int) -> Strips:
    """Return strips of every kind of length and alignment."""
    chance = np.random.default_rng(seed)
    run = chance.choice([1, 2, 3, 16, 100, 256, 4096, 4100, 16384, 300_000], num)
    rows = np.minimum(chance.integers(1, 200, num), 2_000_000 // run + 1)
    pitch = run + chance.choice([0, 1, 2, 16, 4096, 5000], num)
    at = chance.integers(0, nbytes - (rows - 1) * pitch - run) // chance.choice([1, 2, 16, 16], num) * 16
    at = np.minimum(at, nbytes - (rows - 1) * pitch - run)
    return Strips(at=at, run_bytes=run, num_rows=rows, pitch=pitch)


@pytest.mark.parametrize("seed", range(4))
def test_strip_digests_match_cpu(seed: int) -> None:
    data = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, 40_000_000, np.uint8))
    there = data.to(DEVICE)
    strips = random_strips(data.numel(), 300, seed)
    strips.check(data.numel())
    scratch = torch.empty(3 * MIB, dtype=torch.uint8, device=DEVICE)
    table = plan_strips(there.data_ptr(), strips, torch.device(DEVICE), scratch)
    for change in (0, 1):
        there.bitwise_xor_(change)
        data.bitwise_xor_(change)
        assert np.array_equal(table.digest().cpu().numpy().view(np.uint64), strip_digests(data.numpy(), strips))


def test_only_selected_rectangles_are_copied() -> None:
    chance = np.random.default_rng(5)
    src = torch.from_numpy(chance.integers(0, 256, 20_000_000, np.uint8)).to(DEVICE)
    dst, at, rows = torch.zeros(60_000_000, dtype=torch.uint8, device=DEVICE), 3, []
    for strip in range(200):
        run = int(chance.choice([1, 5, 16, 64, 4096, 16384, 70_000]))
        num = int(min(chance.integers(1, 50), 200_000 // run + 1))
        pitch, to_pitch = run + int(chance.choice([0, 16, 48, 1000])), run + int(chance.choice([0, 16, 7]))
        at += -at % 16 if strip % 4 else 0
        rows.append((at, int(chance.integers(0, 1_000_000)) * 16 % 15_000_000, run, num, to_pitch, pitch))
        at += num * to_pitch + 5
    expected, given = np.zeros(60_000_000, np.uint8), src.cpu().numpy()
    for to, of, run, num, to_pitch, pitch in rows:
        for i in range(num):
            expected[to + i * to_pitch :][:run] = given[of + i * pitch :][:run]
    to, of, run, num, to_pitch, pitch = np.array(rows, np.int64).T
    columns = (to + dst.data_ptr(), of + src.data_ptr(), run, num, to_pitch, pitch)
    pack_cuda.plan_copy(*columns, torch.device(DEVICE)).run()
    assert np.array_equal(dst.cpu().numpy(), expected)


@pytest.mark.parametrize("device", HOLDER_DEVICE)
def test_slices_are_read_from_other_processes(links: PeerLinks, device: str) -> None:
    holdings, wants = sharded("p", SHAPES, 0, 2, 2), sharded("s", SHAPES, 1, 2, 2)
    part = parts(holdings, wants, MIB)[1]
    into = LocalVersion(wants[1], on_device(wants[1], DEVICE), links)
    given = [np.concatenate([one.cpu().numpy() for one in bytes_of(layout, "cpu")]) for layout in holdings]
    expected = naive(part, given, whole(into.regions.memories))
    holders = [Holder("p", rank, 2, device) for rank in range(2)]
    try:
        take = Transfer(part, into.regions, stall_s=20.0)
        report = take.run({one.member: one for one in holders})
        assert np.array_equal(whole(into.regions.memories), expected)
        assert {read.path for read in report.reads} == {"cuda_ipc"}
        holders[1].call("fence")
        with pytest.raises(StaleDescriptor):
            take.run({one.member: one for one in holders})
        assert take.lost == "p1"
        holders[0].process.kill()
        holders[0].process.wait()
        with pytest.raises((PeerLost, StaleDescriptor)):
            take.run({one.member: one for one in holders})
    finally:
        for one in holders:
            one.close()


def test_unfenced_change_is_detected(links: PeerLinks) -> None:
    holdings, wants = sharded("p", SHAPES, 0, 1, 2), sharded("s", SHAPES, 1, 2, 2)
    part = parts(holdings, wants, 1 << 30)[0]
    source = LocalVersion(holdings[0], on_device(holdings[0], DEVICE), links)
    source.begin(1)
    source.ready()

    class Changing(LocalLink):
        def __init__(self, held: LocalVersion) -> None:
            super().__init__(held)
            self.map = msgspec.structs.replace(self.map, is_ready=False)  # requested before it is read

        def digests(self, strips: Strips, *, wait_s: float):
            said = super().digests(strips, wait_s=wait_s)
            content(source.regions.memories[0]).bitwise_xor_(1)
            torch.cuda.synchronize()
            return said

    into = LocalVersion(wants[0], on_device(wants[0], DEVICE), links)
    with pytest.raises(IntegrityError) as caught:
        Transfer(part, into.regions).run({"p0": Changing(source)})
    assert caught.value.mutated


def test_staged_version_and_snapshot_match_source(links: PeerLinks) -> None:
    with open_links(only=["cuda_ipc", "shm"]) as links:
        holdings, wants = sharded("p", SHAPES, 0, 1, 2), sharded("s", SHAPES, 1, 2, 2)
        part = parts(holdings, wants, MIB)[1]
        publisher, live = on_device(holdings[0], DEVICE), on_device(wants[1], DEVICE)
        before = whole(live)
        with VersionSnapshot(holdings[0], publisher, links) as replica, StagingCopy(live, links) as staging_copy:
            replica.snapshot(2)
            expected = naive(part, [whole(publisher)], before.copy())
            for memory in publisher:
                content(memory).zero_()
            Transfer(part, staging_copy.regions).run({"p0": LocalLink(replica.local_version)})
            assert np.array_equal(whole(live), before)
            assert not staging_copy.flip(part)
            assert np.array_equal(whole(live), expected)
        with VersionSnapshot(wants[1], live, links, on_host=True) as pinned:
            pinned.snapshot(3)
            assert np.array_equal(whole(pinned.local_version.regions.memories), expected)
            content(live[0]).zero_()
            MemoryCopy(live, pinned.local_version.regions.memories).run()
            assert np.array_equal(whole(live), expected)
            for version in (3, 4):  # of the first the host says them, of the second the device did, as it was copied
                some = Strips(
                    at=np.array([0, 512]),
                    run_bytes=np.array([512, 64]),
                    num_rows=np.array([1, 3]),
                    pitch=np.array([512, 128]),
                )
                told = pinned.local_version.digests(
                    some, version=version, generation=pinned.local_version.generation, wait_s=5.0
                )
                assert (told.digests == strip_digests(whole(pinned.local_version.regions.memories), some)).all()
                content(live[0]).add_(1)
                pinned.snapshot(version + 1)


def test_packing_kernel_matches_host(links: PeerLinks) -> None:
    strips = random_strips(64 * MIB, 200, 7)
    strips = strips[np.cumsum(strips.nbytes) <= 32 * MIB]
    source, into = (Arena.allocate(nbytes, DEVICE) for nbytes in (64 * MIB, 32 * MIB))
    source.bytes_at(0, source.nbytes).random_()
    memory, buffer = (
        Memory(address=one.address, nbytes=one.nbytes, device=one.device, owner=one) for one in (source, into)
    )
    written = torch.cuda.Event()
    written.record()
    packer.Packer(links, 8 * 32 * MIB).fill(packer._Buffer(buffer, {}), memory, strips, [written])
    expected = np.zeros(32 * MIB, np.uint8)
    pack_strips(whole([memory]), strips, expected)
    nbytes = int(strips.nbytes.sum())
    assert np.array_equal(whole([buffer])[:nbytes], expected[:nbytes])


@pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")
def test_column_shards_are_packed_for_nixl_transfer() -> None:
    holdings, wants = sharded("p", SHAPES, 0, 1, 2), sharded("s", SHAPES, 1, 4, 2)
    part = parts(holdings, wants, 1 << 30)[1]
    with open_links(only=["nixl"]) as links:
        source = LocalVersion(holdings[0], on_device(holdings[0], DEVICE), links, pack_bytes=64 * MIB)
        source.begin(1)
        source.ready()
        into = LocalVersion(wants[1], on_device(wants[1], DEVICE), links)
        expected = naive(part, [whole(source.regions.memories)], whole(into.regions.memories))
        report = Transfer(part, into.regions, stall_s=20.0).run({"p0": LocalLink(source, same_process=False)})
        assert np.array_equal(whole(into.regions.memories), expected)
        assert report.packed_bytes > 0
