"""Unchanged bytes are not read, and the version is correct whatever changed in the receiver's memory."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.sync.parts import content, whole
from tests.unit.sync.receive.test_transfer import World, world

from penstock.errors import StaleDescriptor
from penstock.sync.receive import transfer as delta_module
from penstock.sync.receive.sources import LocalLink
from penstock.sync.receive.transfer import ChangedRanges, Transfer, pays
from penstock.transport.choose import open_links
from penstock.types import GB


@pytest.fixture(autouse=True)
def cutting_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that skipping always pays, because the tensors have only a few kilobytes."""
    monkeypatch.setattr(delta_module, "CUT_S", 0.0)


@pytest.fixture
def changing_world():
    with open_links(only=["loopback"]) as links:
        yield world(links)


def show(made: World, version: int, changed: list[tuple[int, int, int]], *, seed: int = 0) -> None:
    """Publish a version in which bytes [start, stop) of some sources changed."""
    chance = np.random.default_rng([version, seed])
    for one in made.sources:
        one.fence()
    for source, start, stop in changed:
        at = 0
        for memory in made.sources[source].regions.memories:
            some = content(memory)[max(start - at, 0) : max(stop - at, 0)]
            some[:] = chance.integers(0, 256, len(some), np.uint8)
            at += memory.nbytes
    for one in made.sources:
        one.begin(version)
        one.ready()


def ran(made: World, transfer: Transfer) -> int:
    """Run the transfer, check every byte, and return the number of moved bytes."""
    expected = made.expected()
    report = transfer.run(made.links())
    assert np.array_equal(whole(made.receiver), expected)
    assert report.nbytes == made.part.nbytes
    assert report.moved_bytes == sum(read.nbytes for read in report.reads)
    return report.moved_bytes


def strips_within(made: World, source: int, start: int, stop: int) -> int:
    """Return the bytes of strips that touch these bytes of a source."""
    part = made.part
    last = part.src + (part.num_rows - 1) * part.src_pitch + part.run_bytes
    mine = (part.source == source) & (part.src < stop) & (last > start)
    return int((part.run_bytes * part.num_rows)[mine].sum())


def test_only_changed_strips_are_read(changing_world: World) -> None:
    transfer = changing_world.transfer(delta=ChangedRanges())
    assert ran(changing_world, transfer) == changing_world.part.nbytes
    show(changing_world, 2, [(0, 100, 101)])
    moved = ran(changing_world, transfer)
    assert 0 < moved == strips_within(changing_world, 0, 100, 101) < changing_world.part.nbytes


def test_unchanged_weights_are_verified_without_reads(changing_world: World) -> None:
    transfer = changing_world.transfer(delta=ChangedRanges())
    ran(changing_world, transfer)
    show(changing_world, 2, [])
    assert ran(changing_world, transfer) == 0
    assert sum(len(strips) for strips, _ in transfer.proven) == len(changing_world.part.source), (
        "all of it was digested here"
    )
    assert transfer.delta.density == 0.0


def test_locally_changed_memory_is_reread(changing_world: World) -> None:
    transfer = changing_world.transfer(delta=ChangedRanges())
    ran(changing_world, transfer)
    row = int(changing_world.part.dst[0])
    memory = changing_world.receiver.regions.memories[0]
    assert row < memory.nbytes
    content(memory)[row] ^= 1  # as an engine that changes its weights in place
    show(changing_world, 2, [])
    assert 0 < ran(changing_world, transfer) < changing_world.part.nbytes + 1


def test_failed_run_invalidates_stored_digests(changing_world: World) -> None:
    class Gone(LocalLink):
        def digests(self, strips, *, wait_s):  # type: ignore[no-untyped-def]
            raise StaleDescriptor("it is past that version", uri=self.member)

    transfer = changing_world.transfer(delta=ChangedRanges())
    ran(changing_world, transfer)
    show(changing_world, 2, [(source, 0, 1 << 20) for source in range(len(changing_world.sources))])
    links = changing_world.links() | {"p1": Gone(changing_world.sources[1])}
    with pytest.raises(StaleDescriptor):
        transfer.run(links)
    show(changing_world, 3, [(0, 0, 64)])
    ran(changing_world, transfer)
    show(changing_world, 4, [])
    ran(changing_world, transfer)


def test_random_version_sequence_is_received_correctly(changing_world: World) -> None:
    transfer, chance = changing_world.transfer(delta=ChangedRanges()), np.random.default_rng(7)
    ran(changing_world, transfer)
    for version in range(2, 12):
        spans = [
            (int(chance.integers(len(changing_world.sources))), int(start), int(start + chance.integers(1, 3000)))
            for start in chance.integers(0, 12_000, chance.integers(0, 4))
        ]
        show(changing_world, version, spans)
        if version % 3 == 0:
            content(changing_world.receiver.regions.memories[1])[: int(chance.integers(1, 200))] ^= 0x11
        assert ran(changing_world, transfer) <= 2 * changing_world.part.nbytes


def test_missing_digests_force_full_read(changing_world: World) -> None:
    kept = ChangedRanges()
    assert ran(changing_world, changing_world.transfer(delta=kept)) == changing_world.part.nbytes
    assert "no earlier version was received with this plan" in kept.summary(
        changing_world.transfer().run(changing_world.links())
    )
    show(changing_world, 2, [])
    assert ran(changing_world, changing_world.transfer(delta=ChangedRanges())) == changing_world.part.nbytes, (
        "another plan's take has no base"
    )
    show(changing_world, 3, [])
    assert ran(changing_world, changing_world.transfer()) == changing_world.part.nbytes


@pytest.mark.parametrize(
    ("nbytes", "changed", "gb_per_s", "cost_s", "does"),
    [
        (16 * GB, 16 * GB, 400, 0.007, False),
        (16 * GB, 15 * GB, 400, 0.007, False),  # digests take 7 ms and save 2.5 ms of reading
        (16 * GB, 8 * GB, 400, 0.007, True),
        (16 * GB, 15.9 * GB, 5, 0.007, True),  # digests save 20 ms on a slow link
        (16 * GB, 0, 400, 0.050, False),
        (16 * GB, 0, 0, 0.0, False),  # no measurement yet
        (0, 0, 400, 0.0, False),
    ],
)
def test_delta_is_used_only_when_faster(
    nbytes: int, changed: float, gb_per_s: float, cost_s: float, does: bool
) -> None:
    assert pays(nbytes, changed, gb_per_s * GB, cost_s) is does


def test_fast_link_skips_digest_requests() -> None:
    with open_links(only=["loopback"]) as links:
        made = world(links)
        kept = ChangedRanges()
        transfer = made.transfer(delta=kept)
        ran(made, transfer)
        show(made, 2, [(0, 0, 10)])
        ran(made, transfer)
        assert kept.asks_first and kept.density is not None
        kept._ask_s = 3600.0
        show(made, 3, [(0, 0, 10)])
        assert ran(made, transfer) == made.part.nbytes
        assert not kept.asks_first
        kept._ask_s = 0.0
        show(made, 4, [])
        assert ran(made, transfer) == 0, "what was measured while all was read lets it ask again"
