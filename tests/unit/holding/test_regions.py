"""Registered regions are read by their descriptors until they are fenced, taken back or closed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.unit.sync.parts import arena, content

from penstock.errors import Cancelled, ConfigError, PlanError, StaleDescriptor
from penstock.holding.regions import Regions, VersionRegions, locate
from penstock.segments import Segments
from penstock.transport.choose import PeerLinks, open_links
from penstock.transport.protocol import Memory, decode
from penstock.transport.storages import TorchStorage

SIZES = (1 << 16, 0, 512)


@pytest.fixture(params=["shm", "http"])
def links(request: pytest.FixtureRequest) -> Iterator[PeerLinks]:
    with open_links(only=[request.param]) as opened:
        yield opened


def filled(value: int, sizes: tuple[int, ...] = SIZES) -> list[Memory]:
    memories = [arena(nbytes) for nbytes in sizes]
    for number, memory in enumerate(memories):
        content(memory)[:] = value + number
    return memories


@pytest.fixture
def held(links: PeerLinks) -> Iterator[Regions]:
    with Regions(filled(10)) as regions:
        regions.register(links)
        yield regions


@pytest.fixture
def into(links: PeerLinks) -> Iterator[Regions]:
    with Regions(filled(1)) as regions:
        regions.register(links)
        yield regions


def read(links: PeerLinks, into: Regions, offered: dict[str, bytes], region: int) -> np.ndarray:
    """Read a region into the same region of `into`, as another process on this host. Return its bytes."""
    ours = into.handles(region)
    transport, descriptor, _ = links.choose(ours, offered, same_host=True, same_process=False)
    nbytes = np.array([into.sizes[region]])
    start = np.array([0])
    pending = transport.post_read(ours[transport.name], descriptor, Segments(src=start, dst=start, nbytes=nbytes))
    transport.wait(pending, stall_s=10)
    return content(into.memories[region])


def test_peer_reads_region_by_descriptor(links: PeerLinks, held: Regions, into: Regions) -> None:
    assert held.sizes == SIZES
    for region in (0, 2):
        assert (read(links, into, held.descriptors()[region], region) == 10 + region).all()


def test_fence_makes_only_earlier_descriptors_stale(links: PeerLinks, held: Regions, into: Regions) -> None:
    before = held.descriptors()
    held.fence()
    with pytest.raises(StaleDescriptor):
        read(links, into, before[0], 0)
    assert (read(links, into, held.descriptors()[0], 0) == 10).all()


def test_taken_back_lease_revokes_only_its_descriptors(held: Regions, links: PeerLinks, into: Regions) -> None:
    first, second = held.descriptors("first"), held.descriptors("second")
    held.take_back("first")
    if "http" in first[0]:
        with pytest.raises(StaleDescriptor):
            read(links, into, first[0], 0)
    assert (read(links, into, second[0], 0) == 10).all()


def test_closed_regions_can_be_registered_again(links: PeerLinks, held: Regions, into: Regions) -> None:
    before = held.descriptors()
    handle = next(iter(held.handles(0).values()))
    held.close()
    assert held.descriptors() == ()
    with pytest.raises(Cancelled):
        handle.fence()
    with pytest.raises(StaleDescriptor):
        read(links, into, before[0], 0)
    held.register(links)
    assert (read(links, into, held.descriptors()[0], 0) == 10).all()


def test_second_registration_keeps_descriptors(links: PeerLinks, held: Regions) -> None:
    handle = held.handles(0)
    held.register(links)
    assert held.handles(0) is handle


def test_detached_registrations_are_closed_by_caller(links: PeerLinks, held: Regions, into: Regions) -> None:
    before = held.descriptors()
    handles = held.detach()
    assert held.descriptors() == ()
    assert (read(links, into, before[0], 0) == 10).all()
    for by_transport in handles:
        for handle in by_transport.values():
            handle.close()
    with pytest.raises(StaleDescriptor):
        read(links, into, before[0], 0)


def test_exchange_swaps_memory_with_its_registrations(links: PeerLinks, held: Regions, into: Regions) -> None:
    live, staged = held.memories, into.memories
    described = held.descriptors()
    held.exchange(into)
    assert (held.memories, into.memories) == (staged, live)
    assert (read(links, held, described[0], 0) == 10).all()


def test_failed_registration_closes_every_handle() -> None:
    """A leaked registration would keep its memory readable until the process exits."""

    memory, device = arena(64), Memory(address=64, nbytes=64, device="nowhere:0")
    with open_links(only=["shm"]) as links:
        page = links.transports["shm"]
        registered = []
        register = page.register
        page.register = lambda one: registered.append(register(one)) or registered[-1]  # type: ignore[method-assign]
        regions = Regions([memory, device])
        with pytest.raises(ConfigError, match="no transport reaches memory on nowhere:0"):
            regions.register(links)
        assert len(registered) == 1 and regions.descriptors() == ()
        with pytest.raises(Cancelled):
            registered[0].fence()


def test_resized_storage_is_not_there() -> None:
    tensor = torch.zeros(64, dtype=torch.uint8)
    storage = tensor.untyped_storage()
    regions = Regions([arena(8), Memory(address=storage.data_ptr(), nbytes=64, owner=TorchStorage(storage))])
    assert regions.are_there([0, 1])
    storage.resize_(0)
    assert regions.are_there([0]) and not regions.are_there([0, 1])


def test_moved_memory_raises_before_digest() -> None:
    tensor = torch.zeros(64, dtype=torch.uint8)
    storage = tensor.untyped_storage()
    memory = Memory(address=storage.data_ptr(), nbytes=64, owner=TorchStorage(storage))
    with open_links(only=["http"]) as links, VersionRegions([memory], links) as regions:
        storage.resize_(0)
        with pytest.raises(StaleDescriptor, match="moved or freed the memory"):
            regions.require_there([0])


def test_spans_are_located_past_empty_regions() -> None:
    first = np.array([0, 8, 8, 24])
    assert locate(first, np.array([0, 8, 20]), np.array([8, 24, 24])).tolist() == [0, 2, 2]
    with pytest.raises(PlanError, match=r"bytes \[4, 12\) are not inside one region"):
        locate(first, np.array([4]), np.array([12]))


def test_descriptors_name_their_transport(links: PeerLinks, held: Regions) -> None:
    for offered in held.descriptors():
        assert {name: decode(raw).transport for name, raw in offered.items()} == {name: name for name in offered}
