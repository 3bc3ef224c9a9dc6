"""Tiers keep their budgets and the bytes of their blocks under any sequence of calls."""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.heap_tier import HeapTier
from tests.support.tier_suite import filled

from penstock.cache.tier_disk import SpillTier
from penstock.errors import (
    BudgetTooSmall,
    ConfigError,
    DiskFull,
    IntegrityError,
    NotFound,
    SourceBusy,
    SourceStalled,
    SourceUnavailable,
)
from penstock.memory.tier import Room, TierBlock
from penstock.memory.tiers import SOURCE, Level, Tiers


def block(number: int, nbytes: int = 100) -> TierBlock:
    return TierBlock(f"w1-{number}", 0, nbytes)


class Source:
    """A source of blocks that counts its reads."""

    def __init__(self) -> None:
        self.reads: Counter[TierBlock] = Counter()

    def of(self, one: TierBlock):
        def fill(room: Room) -> None:
            self.reads[one] += 1
            room.write(0, content(one))

        return fill


def content(one: TierBlock) -> memoryview:
    return filled(one.nbytes, hash(one)).views()[0]


def bytes_of(room: Room) -> bytes:
    into = memoryview(bytearray(room.nbytes))
    if room.nbytes:
        room.read(0, into)
    room.settle()
    return bytes(into)


def make(*budgets: int | None, keeps_copies: bool = False, **options: float) -> Tiers:
    names = ("gpu", "host", "disk")
    levels = [
        Level(tier=HeapTier(n), budget_bytes=b, keeps_copies=keeps_copies) for n, b in zip(names, budgets, strict=False)
    ]
    return Tiers(levels, **options)  # type: ignore[arg-type]


class TiersMachine(RuleBasedStateMachine):
    """Random calls on a set of blocks. Blocks 5 and up cannot be read again."""

    BUDGETS: ClassVar = {"gpu": 300, "host": 250, "disk": 400}
    BLOCKS: ClassVar = [block(i, 40 + 25 * i) for i in range(8)]
    KEEPS_COPIES: ClassVar = False

    def __init__(self) -> None:
        super().__init__()
        self.source, self.tiers = Source(), make(*self.BUDGETS.values(), keeps_copies=self.KEEPS_COPIES)
        self.there: set[TierBlock] = set()
        self.pins: list[tuple[TierBlock, Room, ExitStack]] = []

    blocks, places = st.sampled_from(BLOCKS), st.sampled_from([None, "gpu", "host", "disk"])

    @rule(one=blocks, tier=places)
    def put(self, one: TierBlock, tier: str | None) -> None:
        try:
            self.tiers.put(one, self.source.of(one), tier=tier, again=self.BLOCKS.index(one) < 5)
        except ConfigError:
            assert one in self.there
        except BudgetTooSmall as error:
            assert one not in self.there and error.minimum_bytes > 0
        else:
            assert one not in self.there
            self.there.add(one)

    @rule(one=blocks, tier=places)
    def pin(self, one: TierBlock, tier: str | None) -> None:
        with ExitStack() as stack:
            try:
                room = stack.enter_context(self.tiers.pin(one, tier))
            except NotFound:
                assert one not in self.there
                return
            except BudgetTooSmall:
                return
            names = list(self.BUDGETS)
            assert names.index(str(self.tiers.where([one])[0])) <= names.index(tier or "gpu")
            self.pins.append((one, room, stack.pop_all()))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))[2].close()

    @rule(one=blocks)
    def demote(self, one: TierBlock) -> None:
        with suppress(SourceBusy, NotFound, BudgetTooSmall):
            self.tiers.demote(one)

    @rule(one=blocks)
    def drop(self, one: TierBlock) -> None:
        try:
            self.tiers.drop(one)
        except NotFound:
            assert one not in self.there
        except SourceBusy:
            assert one in [pinned for pinned, _, _ in self.pins]
        else:
            self.there.discard(one)

    @rule(one=blocks, tier=places)
    def prefetch(self, one: TierBlock, tier: str | None) -> None:
        if one in self.there:
            done = self.tiers.prefetch(one, tier)
            assert isinstance(done.exception(timeout=20), BudgetTooSmall | None)

    @invariant()
    def budgets_hold(self) -> None:
        stats = self.tiers.stats()
        for name, bound in self.BUDGETS.items():
            assert stats.tiers[name].peak_bytes <= bound
        where = dict(zip(self.BLOCKS, self.tiers.where(self.BLOCKS), strict=True))
        assert {one for one, at in where.items() if at} == self.there
        for name in self.BUDGETS:
            held = {one for one in self.there if where[one] == name}
            # A pinned old room counts too.
            least, most = sum(one.nbytes for one in held), sum(one.nbytes for one in self.BLOCKS)
            assert least <= stats.tiers[name].used_bytes <= most
        if not self.pins and not self.KEEPS_COPIES:
            assert sum(one.used_bytes for one in stats.tiers.values()) == sum(
                one.nbytes for one in self.there if where[one] != SOURCE
            )
        assert all(where[one] != SOURCE for one in self.there if self.BLOCKS.index(one) >= 5)

    @invariant()
    def pinned_bytes_stay(self) -> None:
        for one, room, _ in self.pins:
            assert bytes_of(room) == bytes(content(one))

    def teardown(self) -> None:
        for _, _, stack in self.pins:
            stack.close()
        for one in self.there:
            try:
                with self.tiers.pin(one) as room:
                    assert bytes_of(room) == bytes(content(one))
            except BudgetTooSmall:
                pass  # no room for it beside what cannot leave
        self.tiers.close()
        assert all(tier.used_bytes == 0 for tier in self.tiers.stats().tiers.values())


TestAnySequence = TiersMachine.TestCase
TestAnySequence.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)


class CopiesMachine(TiersMachine):
    """Random calls on tiers that keep copies."""

    KEEPS_COPIES = True


TestAnySequenceWithCopies = CopiesMachine.TestCase
TestAnySequenceWithCopies.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_block_with_copy_is_demoted_without_copying() -> None:
    source = Source()
    with make(100, 300, keeps_copies=True) as tiers:
        for i in range(3):
            tiers.put(block(i), source.of(block(i)))
        for turn in range(6):
            with tiers.pin(block(turn % 3)) as room:
                assert bytes_of(room) == bytes(content(block(turn % 3)))
        stats = tiers.stats()
        # Each block moved down once, two of them during `put`.
        assert stats.links["gpu", "host"].num_moves == 3
        assert stats.links["host", "gpu"].num_moves == 6
        assert max(source.reads.values()) == 1
        assert (stats.tiers["gpu"].used_bytes, stats.tiers["host"].used_bytes) == (100, 300)


def test_copies_are_evicted_before_blocks() -> None:
    source = Source()
    with make(200, 200, None, keeps_copies=True) as tiers:
        for i in range(2):
            tiers.put(block(i), source.of(block(i)), tier="host")
        for i in range(2):
            tiers.promote(block(i))
        assert tiers.stats().tiers["host"].used_bytes == 200
        tiers.put(block(2), source.of(block(2)), tier="host")
        # The copy of the least recently used block was dropped, and no block moved.
        assert tiers.where(map(block, range(3))) == ["gpu", "gpu", "host"]
        assert tiers.stats().tiers["host"].used_bytes == 200
        tiers.demote(block(1))
        assert ("gpu", "host") not in tiers.stats().links
        tiers.demote(block(0))
        assert tiers.stats().links["gpu", "host"].num_moves == 1


def test_discard_frees_block_and_copy() -> None:
    with make(100, 100, keeps_copies=True) as tiers:
        tiers.put(block(0), Source().of(block(0)), tier="host")
        tiers.promote(block(0))
        tiers.discard(block(0))
        assert [tier.used_bytes for tier in tiers.stats().tiers.values()] == [0, 0]


def test_least_recently_used_block_is_demoted_and_promoted_on_use() -> None:
    source = Source()
    with make(200, 200) as tiers:
        for i in range(3):
            tiers.put(block(i), source.of(block(i)))
        assert tiers.where(map(block, range(4))) == ["host", "gpu", "gpu", None]
        with tiers.pin(block(0)) as room:
            assert bytes_of(room) == bytes(content(block(0)))
        assert tiers.where(map(block, range(3))) == ["gpu", "host", "gpu"]
        assert max(source.reads.values()) == 1
        stats = tiers.stats()
        assert stats.links["gpu", "host"].num_moves == 2 and stats.links["host", "gpu"].nbytes == 100
        assert (stats.misses, stats.tiers["gpu"].num_blocks) == (4, 2)


def test_error_for_too_small_budget_states_minimum() -> None:
    with make(150, 50) as tiers:
        with pytest.raises(BudgetTooSmall) as caught:
            tiers.put(block(0, 200), Source().of(block(0, 200)))
        assert caught.value.minimum_bytes == 200
        tiers.put(block(1), Source().of(block(1)))
        with tiers.pin(block(1)), pytest.raises(BudgetTooSmall) as caught:
            tiers.put(block(2), Source().of(block(2)))
        assert caught.value.minimum_bytes == 200
        assert tiers.where([block(0), block(2)]) == [None, None]
        with pytest.raises(ConfigError, match="no tier 'nvme'"):
            tiers.promote(block(1), "nvme")
    levels = [
        Level(tier=HeapTier("gpu"), budget_bytes=150),
        Level(tier=HeapTier("host"), budget_bytes=50, budget="host_bytes"),
    ]
    with Tiers(levels) as tiers:
        with pytest.raises(BudgetTooSmall) as caught:
            tiers.put(block(0, 200), Source().of(block(0, 200)))
        assert caught.value.hint == "set memory_bytes >= 200"
        tiers.put(block(1), Source().of(block(1)), again=False)
        with pytest.raises(BudgetTooSmall) as caught:
            tiers.demote(block(1))
        assert caught.value.hint == "set host_bytes >= 100"


def test_block_moves_while_old_memory_is_pinned() -> None:
    with make(100, 100) as tiers:
        tiers.put(block(0), Source().of(block(0)), tier="host")
        with tiers.pin(block(0), "host") as old:
            tiers.promote(block(0))
            assert tiers.stats().tiers["host"].used_bytes == 100
            tiers.demote(block(0))  # it is there still: not copied
            assert ("gpu", "host") not in tiers.stats().links
            tiers.promote(block(0))
            assert bytes_of(old) == bytes(content(block(0)))
        assert tiers.stats().tiers["host"].used_bytes == 0


def test_block_is_not_added_after_source_failure() -> None:
    def fails(room: Room) -> None:
        raise SourceUnavailable("it is away")

    with make(100) as tiers:
        with pytest.raises(SourceUnavailable):
            tiers.put(block(0), fails)
        assert tiers.where([block(0)]) == [None]
        tiers.put(block(0), Source().of(block(0)))


def test_concurrent_puts_read_source_once() -> None:
    source, begun, gate = Source(), threading.Event(), threading.Event()

    def slow(room: Room) -> None:
        begun.set()
        assert gate.wait(20)
        source.of(block(0))(room)

    with make(100) as tiers:
        tiers.put(block(0), slow, tier=SOURCE)
        waited = [tiers.prefetch(block(0)) for _ in range(2)]
        assert begun.wait(20)
        with pytest.raises(SourceBusy):
            tiers.drop(block(0))
        gate.set()
        for done in waited:
            done.result(timeout=20)
        assert source.reads[block(0)] == 1


class RecordingTier(HeapTier):
    """A tier that records its calls."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[str] = []

    def open_room(self, nbytes: int):
        room, calls = super().open_room(nbytes), self.calls
        calls.append("open")

        class Room(type(room)):
            def close(self) -> None:
                calls.append("close")
                super().close()

        room.__class__ = Room
        return room

    def trim(self) -> None:
        self.calls.append("trim")


def test_memory_of_closed_room_is_reused_or_trimmed() -> None:
    source, gpu = Source(), RecordingTier("gpu")
    with Tiers([Level(tier=gpu, budget_bytes=150), Level(tier=HeapTier("host"))]) as tiers:
        tiers.put(block(0), source.of(block(0)))
        tiers.put(block(1), source.of(block(1)))
        assert gpu.calls == ["open", "close", "open", "trim"]
        tiers.demote(block(1))
        assert gpu.calls[4:] == ["close", "trim"]
        with tiers.pin(block(0)):
            tiers.promote(block(0))
        tiers.drop(block(0))
        assert gpu.calls[6:] == ["open", "trim", "close", "trim"]  # at the first, of the room that it left below


class Full(HeapTier):
    def open_room(self, nbytes: int):
        raise DiskFull("no room on the device")


def test_block_dropped_for_full_disk_is_reread_from_source(caplog) -> None:
    source = Source()
    levels = [Level(tier=HeapTier("gpu"), budget_bytes=100), Level(tier=Full("disk"), budget_bytes=1000)]
    with Tiers(levels) as tiers:
        tiers.put(block(0), source.of(block(0)))
        tiers.put(block(1), source.of(block(1)))
        assert tiers.where([block(0)]) == [SOURCE]
        assert "from gpu to disk: no room on the device" in caplog.text
        with tiers.pin(block(0)) as room:
            assert bytes_of(room) == bytes(content(block(0)))
        assert source.reads[block(0)] == 2
    with Tiers(levels) as tiers:
        tiers.put(block(0), source.of(block(0)), again=False)
        with pytest.raises(BudgetTooSmall):
            tiers.put(block(1), source.of(block(1)))
        with tiers.pin(block(0)) as room:
            assert bytes_of(room) == bytes(content(block(0)))


class CorruptingTier(SpillTier):
    """A disk tier that corrupts bytes."""

    def open_room(self, nbytes: int):
        room = super().open_room(nbytes)
        settle = room.settle

        def corrupt() -> None:
            settle()
            os.pwrite(room._fd, b"\x00\x01\x02", 50)

        room.settle = corrupt  # type: ignore[method-assign]
        return room


def test_corrupt_disk_block_is_read_from_source(tmp_path: Path, caplog) -> None:
    source = Source()
    levels = [
        Level(tier=HeapTier("host"), budget_bytes=100),
        Level(tier=CorruptingTier.open(tmp_path), budget_bytes=1 << 20),
    ]
    with Tiers(levels) as tiers:
        tiers.put(block(0), source.of(block(0)))
        tiers.demote(block(0))
        with tiers.pin(block(0)) as room:
            assert bytes_of(room) == bytes(content(block(0)))
        assert source.reads[block(0)] == 2
        assert "is damaged in disk" in caplog.text
        tiers.drop(block(0))
        tiers.put(block(1), source.of(block(1)), again=False)
        tiers.demote(block(1))
        with pytest.raises(IntegrityError, match="spilled bytes are damaged"):
            tiers.promote(block(1))
        assert tiers.where([block(1)]) == ["disk"]
    assert not list(tmp_path.iterdir())


class RecordingUser:
    """A user of a block that records its calls."""

    def __init__(self) -> None:
        self.stays, self.calls = False, []

    def vacate(self) -> bool:
        self.calls.append("vacate")
        return not self.stays

    def moved(self, tier: str, room: Room | None) -> None:
        self.calls.append(tier)


def test_block_user_is_notified_of_each_move() -> None:
    tenant, source = RecordingUser(), Source()
    with make(100, 100) as tiers:
        tiers.put(block(0), source.of(block(0)), user=tenant)
        tenant.stays = True
        with pytest.raises(SourceBusy):
            tiers.demote(block(0))
        with pytest.raises(BudgetTooSmall):
            tiers.put(block(1), source.of(block(1)))
        tenant.stays = False
        tiers.put(block(1), source.of(block(1)))
        tiers.promote(block(0))
    assert tenant.calls == ["gpu", "vacate", "vacate", "vacate", "host", "gpu"]


def test_hanging_move_raises_source_stalled() -> None:
    begun, gate = threading.Event(), threading.Event()

    class Stuck(HeapTier):
        def open_room(self, nbytes: int):
            begun.set()
            assert gate.wait(20)
            return super().open_room(nbytes)

    with Tiers([Level(tier=Stuck("host"))], stall_s=0.2) as tiers:
        tiers.put(block(0), Source().of(block(0)), tier=SOURCE)
        tiers.put(block(1), Source().of(block(1)), tier=SOURCE)
        first = tiers.prefetch(block(0))
        assert begun.wait(20)
        with pytest.raises(SourceStalled, match="made no progress"):
            tiers.promote(block(1))
        gate.set()
        first.result(timeout=20)


def test_concurrent_threads_read_correct_bytes() -> None:
    source, faults = Source(), []
    blocks = [block(i) for i in range(9)]

    def work(first: int) -> None:
        for turn in range(60):
            one = blocks[(first + turn * (first + 1)) % len(blocks)]
            with tiers.pin(one, ("gpu", "host")[turn % 2]) as room:
                if bytes_of(room) != bytes(content(one)):
                    faults.append(one)

    with make(400, 400, None) as tiers:
        for one in blocks:
            tiers.put(one, source.of(one), tier="disk", again=False)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]  # four pins fit each tier at once
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not faults
        assert all(tier.peak_bytes <= 400 for name, tier in tiers.stats().tiers.items() if name != "disk")
        assert set(source.reads.values()) == {1}
