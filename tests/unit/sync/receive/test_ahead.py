"""A transfer whose first bytes are staged ahead: the live memory is untouched until then, and whole afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.sync.parts import whole
from tests.unit.sync.receive.test_transfer import SHAPES, World, world

from penstock.errors import PenstockError, StaleDescriptor
from penstock.sync.receive.ahead import SplitTransfer, split
from penstock.transport.choose import PeerLinks, open_links
from penstock.types import MIB


@pytest.fixture(params=["loopback", "shm"])
def links(request: pytest.FixtureRequest) -> Iterator[PeerLinks]:
    with open_links(only=[request.param]) as opened:
        yield opened


def transfer(made: World, ahead_bytes: int) -> SplitTransfer:
    return SplitTransfer(
        made.part,
        made.receiver.regions,
        ahead_bytes=ahead_bytes,
        names=made.receiver.layout.names,
        watermark_bytes=MIB,
        stall_s=10.0,
    )


def proves(made: World, split_transfer: SplitTransfer) -> bool:
    """Whether the strips it calls verified are all of the part's bytes, where they are in the live memory."""
    strips = split_transfer.proven
    assert sum(int(some.nbytes.sum()) for some, _ in strips) == made.part.nbytes
    return all((made.receiver.regions.digests(some) == wanted).all() for some, wanted in strips)


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=6),
    froms=st.tuples(st.integers(0, 1), st.integers(1, 3)),
    to=st.tuples(st.integers(0, 1), st.integers(2, 4)),
    num_regions=st.integers(1, 3),
    share=st.floats(0, 1.2),
)
def test_any_part_and_bound(shapes, froms, to, num_regions, share) -> None:
    with open_links(only=["loopback"]) as opened:
        shapes = [(12 * rows, 12 * columns) for rows, columns in shapes]  # which split among all counts of ranks
        made = world(opened, shapes, froms=froms, to=to, num_regions=num_regions)
        bound = int(share * made.part.nbytes)
        expected, before = made.expected(), whole(made.receiver).copy()
        split_transfer = transfer(made, bound)
        assert split_transfer.staging_bytes <= bound
        calls = []

        def pause() -> None:
            assert np.array_equal(whole(made.receiver), before), "the live memory changed before the pause"
            calls.append(split_transfer.moved_bytes)

        report = split_transfer.run(made.links(), pause)
        assert calls == [split_transfer.ahead_bytes]
        assert np.array_equal(whole(made.receiver), expected)
        assert report.nbytes == report.moved_bytes == split_transfer.moved_bytes == made.part.nbytes
        assert report.moved_bytes == sum(link.nbytes for link in report.links)
        assert proves(made, split_transfer)
        split_transfer.close()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.5])
def test_both_halves_are_the_part(links: PeerLinks, share: float) -> None:
    made = world(links)
    first, rest = split(made.part, int(share * made.part.nbytes))
    assert first.nbytes + rest.nbytes == made.part.nbytes
    assert abs(first.nbytes - min(1.0, share) * made.part.nbytes) <= 1024, "cut at a row, not at a tensor"
    for half in (first, rest):
        half.check(src_nbytes=[one.regions.nbytes for one in made.sources], dst_nbytes=made.receiver.regions.nbytes)


def test_later_versions_read_what_changed(links: PeerLinks) -> None:
    made = world(links)
    split_transfer = transfer(made, made.part.nbytes // 2)
    split_transfer.run(made.links(), lambda: None)
    for version in (2, 3):
        for one in made.sources:
            one.fence()
            whole_bytes = whole(one)
            memory = one.regions.memories[0].owner.bytes_at(0, one.regions.memories[0].nbytes)
            memory += 1
            assert not np.array_equal(whole_bytes, whole(one))
            one.begin(version)
            one.ready()
        report = split_transfer.run(made.links(version), lambda: None)
        assert np.array_equal(whole(made.receiver), made.expected())
        assert proves(made, split_transfer)
    assert report.moved_bytes <= made.part.nbytes


def test_a_source_lost_before_the_pause_touches_nothing(links: PeerLinks) -> None:
    made = world(links)
    before, found = whole(made.receiver).copy(), made.links()
    made.sources[0].fence()
    with pytest.raises(PenstockError) as caught:
        transfer(made, made.part.nbytes // 2).run(found, lambda: pytest.fail("paused"))
    assert not caught.value.mutated
    assert np.array_equal(whole(made.receiver), before)


def test_a_source_lost_in_the_pause_touches_nothing_if_no_byte_of_it_arrives(links: PeerLinks) -> None:
    made = world(links)
    before, split_transfer = whole(made.receiver).copy(), transfer(made, made.part.nbytes // 2)

    def lose() -> None:
        for one in made.sources:
            one.close()

    with pytest.raises(PenstockError) as caught:
        split_transfer.run(made.links(), lose)
    assert split_transfer.lost in {one.layout.member for one in made.sources}
    # What was staged is not copied before the rest is verified.
    if not caught.value.mutated:
        assert np.array_equal(whole(made.receiver), before)


def test_a_source_that_changes_in_the_pause_leaves_a_mix_and_says_so(links: PeerLinks) -> None:
    made = world(links, SHAPES, to=(1, 2))
    split_transfer = transfer(made, made.part.nbytes // 2)

    def change() -> None:
        made.sources[0].fence()
        made.sources[0].begin(2)
        made.sources[0].ready()

    with pytest.raises(StaleDescriptor) as caught:
        split_transfer.run(made.links(), change)
    assert caught.value.mutated in (True, False)
    assert split_transfer.proven == []
