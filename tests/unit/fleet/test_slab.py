"""Slabs cut a line's rows in order, and none is left to be made once the last byte is there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.ticket import Ticket
from penstock.errors import DeviceOutOfMemory
from penstock.fleet import slab
from penstock.fleet.holding import Holding
from penstock.fleet.identity import Identity
from penstock.fleet.line import Line, tabulate
from penstock.fleet.slab import Slab, lay, slabs
from penstock.memory.arena import Arena
from penstock.transport.choose import Links
from penstock.transport.loopback import LoopbackTransport
from penstock.types import DType

CPU = torch.device("cpu")


def line(*nbytes: int) -> Line:
    """Tensors of so many bytes; leaves of 16, chunks of 32."""
    count = len(nbytes)
    table = tabulate([f"t{i:03}" for i in range(count)], [DType.U8] * count, [(one,) for one in nbytes])
    return Line.of(table, leaf_bytes=16, chunk_bytes=32)


def links() -> Links:
    return Links({"loopback": LoopbackTransport})


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs on the host, of 64, 128, 256, 256 bytes and so on."""
    monkeypatch.setattr(slab, "SLABBED", ("cpu",))
    monkeypatch.setattr(slab, "FIRST_BYTES", 64)
    monkeypatch.setattr(slab, "MOST_BYTES", 256)


def made(of: Line, *, is_one: bool = False) -> list[Slab]:
    return list(slabs(of.table, CPU, lambda: True, is_one=is_one))


def test_each_slab_is_twice_the_last_up_to_the_most_and_a_larger_tensor_has_its_own(small: None) -> None:
    found = made(line(*[32] * 30, 1000, 8))
    assert [len(one.rows) for one in found] == [2, 4, 8, 8, 8, 1, 1]
    assert [name for one in found for name in one.tensors] == [f"t{i:03}" for i in range(32)]
    assert all(one.tensors["t030"].data_ptr() == one.arena.address for one in found if "t030" in one.tensors)


def test_one_slab_where_somebody_writes_to_any_row_or_the_device_is_not_slabbed(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(made(line(*[32] * 30), is_one=True)) == 1
    monkeypatch.setattr(slab, "SLABBED", ("cuda",))
    assert len(made(line(*[32] * 30))) == 1


@given(st.lists(st.sampled_from([0, 0, 1, 40, 100, 700]), max_size=30))
def test_every_row_is_in_one_slab_and_every_slab_has_bytes_if_any_has(nbytes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slab, "SLABBED", ("cpu",))
        patch.setattr(slab, "FIRST_BYTES", 64)
        patch.setattr(slab, "MOST_BYTES", 256)
        found = made(line(*nbytes))
    sizes = [[row.numel() for row in one.rows] for one in found]
    assert [size for one in sizes for size in one] == nbytes
    assert all(sum(one) for one in sizes) or len(sizes) == 1


def test_what_is_laid_is_registered_shown_and_digested(small: None) -> None:
    of = line(*[32] * 9)
    first, *others = made(of)
    with links() as ours:
        holding = Holding(Identity(model="m"), of, first.rows, arenas=[first.arena])
        holding.register(ours)
        assert np.flatnonzero(holding.laid).tolist() == [0, 1]
        before = holding.map()
        assert len(before.regions) == holding.log_after(1, 0.0).num_regions == 1
        assert np.frombuffer(before.row_region, "<i4").tolist() == [0, 0] + [-1] * 7
        tensors, ticket = dict(first.tensors), Ticket(of.nbytes, lambda: False)
        lay(iter(others), holding, tensors, ours, ticket)
        after = holding.map()
        assert np.frombuffer(after.row_region, "<i4").tolist() == [0, 0, 1, 1, 1, 1, 2, 2, 2]
        assert len(after.regions) == holding.log_after(1, 0.0).num_regions == 3 and holding.laid.all()
        for i, tensor in enumerate(tensors.values()):
            tensor.fill_(i)
        whole = Holding(Identity(model="m"), of, [torch.full((32,), i, dtype=torch.uint8) for i in range(9)])
        chunks = np.arange(9)
        assert holding.digest(chunks).tolist() == whole.digest(chunks).tolist()
        assert sorted(holding.segments(chunks, whole.place.row_region, whole.place.row_offset)) == [
            (theirs, ours) for theirs, ours in zip(range(9), [0, 0, 1, 1, 1, 1, 2, 2, 2], strict=True)
        ]
        holding.close()


def test_a_chunk_of_two_slabs_is_laid_with_the_later(small: None) -> None:
    of = line(48, 8, 8, 48)  # slabs [48, 8, 8] and [48]; chunks [32], [16, 8, 8], [32], [16]
    first, second = made(of)
    with links() as ours:
        holding = Holding(Identity(model="m"), of, first.rows[:2], arenas=[first.arena])
        assert holding.laid.tolist() == [True, False, False, False]
        holding.register(ours)
        holding.lay(first.rows[2:], first.arena, ours)
        assert holding.laid.tolist() == [True, True, False, False]
        holding.lay(second.rows, second.arena, ours)
        assert holding.laid.all()
        holding.close()


def test_nothing_is_laid_under_a_holding_that_was_given_up(small: None) -> None:
    of = line(*[32] * 9)
    first, second, _ = made(of)
    with links() as ours:
        holding = Holding(Identity(model="m"), of, first.rows, arenas=[first.arena])
        holding.register(ours)
        holding.close()
        holding.lay(second.rows, second.arena, ours)
        assert holding.map().regions == () and not holding.laid[2:].any()


def test_nothing_more_is_allocated_once_the_fetch_is_over(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    of, honest, asked = line(*[32] * 30), Arena.allocate, list[int]()

    def allocate(nbytes: int, device: torch.device) -> Arena:
        asked.append(nbytes)
        if len(asked) == 3:
            ticket.cancel()
        return honest(nbytes, device)

    monkeypatch.setattr(Arena, "allocate", allocate)
    ticket = Ticket(of.nbytes, lambda: False)
    rest = slabs(of.table, CPU, lambda: True, is_one=False)
    with links() as ours:
        first = next(rest)
        holding = Holding(Identity(model="m"), of, first.rows, arenas=[first.arena])
        holding.register(ours)
        lay(rest, holding, dict(first.tensors), ours, ticket)
        assert len(asked) == 3 and len(holding.rows) == 6
        holding.close()


def test_no_room_for_a_later_slab_is_its_own_error(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int, device: torch.device) -> Arena:
        raise DeviceOutOfMemory("no room")

    of = line(*[32] * 9)
    rest = slabs(of.table, CPU, lambda: True, is_one=False)
    first = next(rest)
    monkeypatch.setattr(Arena, "allocate", refuse)
    with links() as ours, pytest.raises(DeviceOutOfMemory):
        holding = Holding(Identity(model="m"), of, first.rows, arenas=[first.arena])
        lay(rest, holding, {}, ours, Ticket(of.nbytes, lambda: False))
