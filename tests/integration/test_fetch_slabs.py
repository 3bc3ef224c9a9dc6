"""Memory that comes slab by slab: bytes come, and are passed on, before all of it is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import torch
from tests.truth import assert_same

import penstock as ps
from penstock.errors import DeviceOutOfMemory, PenstockError
from penstock.fleet import line, slab
from penstock.fleet.holding import Holding
from penstock.fleet.messages import HoldingMap, LogReply
from penstock.memory.arena import Arena
from penstock.types import MIB


def weights() -> dict[str, torch.Tensor]:
    """Four tensors of 1 MiB and a few bytes, five chunks each or shared."""
    return {f"t{i}": torch.arange(i, i + (MIB + 64) // 4, dtype=torch.int32) for i in range(4)} | {
        "u": torch.empty(0, dtype=torch.float32)
    }


@pytest.fixture(autouse=True)
def small(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs on the host, of one tensor each; a fleet of its own."""
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    monkeypatch.setattr(line, "CHUNK_BYTES", 256 << 10)
    monkeypatch.setattr(slab, "SLABBED", ("cpu",))
    monkeypatch.setattr(slab, "FIRST_BYTES", MIB + 64)
    monkeypatch.setattr(slab, "MOST_BYTES", MIB + 64)


class Gate:
    """Lets no slab but the first be allocated before it is opened; then all, or `error` is raised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.error: PenstockError | None = None
        self._honest = Arena.allocate
        monkeypatch.setattr(Arena, "allocate", self._allocate)

    def _allocate(self, nbytes: int, device: str | torch.device = "cpu") -> Arena:
        if threading.current_thread().name == "penstock-allocate":
            assert self.opened.wait(60)
            if self.error is not None:
                raise self.error
        return self._honest(nbytes, device)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.opened.set()


def first_slab_of(member: ps.Fleet) -> Holding:
    """What it holds, once all that its first slab has room for is verified."""
    deadline = time.monotonic() + 30
    while not member.member.holdings or not (found := member.member.holdings[0]).have[found.laid].all():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_bytes_come_and_are_passed_on_before_all_memory_is_there(gate: Gate) -> None:
    ours, found = weights(), [dict[str, torch.Tensor]() for _ in range(2)]
    with (
        ps.join("m", max_readers=1) as holder,
        ps.join("m") as relay,
        ps.join("m") as last,
        ThreadPoolExecutor() as threads,
    ):
        holder.offer(ours)
        fetches = []
        for member, into in zip((relay, last), found, strict=True):
            fetches.append(threads.submit(member.fetch, into))
            held = first_slab_of(member)
            assert 0 < held.laid.sum() < len(held.laid) and np.array_equal(held.have, held.laid)
        assert not any(found)
        gate.opened.set()
        reports = [one.result(60) for one in fetches]
        assert len(held.place.regions) == 4
    for one in found:
        assert list(one) == list(ours)
        assert_same(one, ours)
    for report, giver in zip(reports, (holder, relay), strict=True):
        assert all(giver.member.id[:8] in path for path in report.nbytes_by_path)
        assert sum(report.nbytes_by_path.values()) == report.nbytes


def test_no_room_for_the_rest_ends_the_fetch_and_leaves_the_target_as_it_was(gate: Gate) -> None:
    ours, found = weights(), dict[str, torch.Tensor]()
    with ps.join("m") as holder, ps.join("m") as reader, ThreadPoolExecutor() as threads:
        holder.offer(ours)
        gate.error = DeviceOutOfMemory("no room")
        fetched = threads.submit(reader.fetch, found)
        first_slab_of(reader)
        gate.opened.set()
        with pytest.raises(DeviceOutOfMemory) as caught:
            fetched.result(60)
        assert not caught.value.mutated and not found and not reader.member.holdings
        gate.error = None
        reader.fetch(found)
    assert_same(found, ours)


def test_a_map_that_is_asked_again_must_be_of_the_same_weights() -> None:
    ours, found, again = weights(), dict[str, torch.Tensor](), threading.Event()
    with ps.join("m") as bad, ps.join("m") as good, ps.join("m") as reader, ThreadPoolExecutor() as threads:
        bad.offer(ours)
        holding = bad.member.holdings[0]
        honest_map, honest_log, maps = holding.map, holding.log_after, list[HoldingMap]()

        def other_map() -> HoldingMap:
            maps.append(msgspec.structs.replace(honest_map(), generation=len(maps)))
            if len(maps) > 1:
                again.set()
            return maps[-1]

        def other_log(serial: int, wait_s: float) -> LogReply:
            return msgspec.structs.replace(honest_log(serial, wait_s), generation=len(maps) - 1, num_regions=99)

        vars(holding).update(map=other_map, log_after=other_log)
        fetched = threads.submit(reader.fetch, found)
        assert again.wait(60)
        good.offer({name: tensor.clone() for name, tensor in ours.items()})
        report = fetched.result(60)
    assert_same(found, ours)
    assert any("its weights changed" in fault for fault in report.faults), report.faults
    assert not any(bad.member.id[:8] in path for path in report.nbytes_by_path)
