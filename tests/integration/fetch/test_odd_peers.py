"""Members that cannot be reached or send impossible values: a fetch continues without them and names them."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.support.compare import assert_same
from tests.support.tensor_file import write_file

import penstock as ps
from penstock.cli.checkpoints import manifest
from penstock.errors import ConfigError, FormatError, IntegrityError, PenstockError, SourceUnavailable
from penstock.fetcher import storage_reader
from penstock.holding.weight_layout import layout_of_tensors
from penstock.hub.client import HubClient
from penstock.hub.messages import Beat, Hello, HoldingMap, LogReply
from penstock.memory.memfd import shared_at
from penstock.peer.local_weights import LocalWeights
from penstock.transport.shm import ShmTransport
from penstock.types import I64, MIB, DType


@pytest.fixture(autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    monkeypatch.setenv("PENSTOCK_STALL_S", "6")
    monkeypatch.setattr("penstock.holding.weight_layout.CHUNK_BYTES", 256 << 10)
    monkeypatch.setattr("penstock_hub.claims.MIN_PIECE_BYTES", MIB)


def weights() -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.arange(i, i + 40000, dtype=torch.int32) for i in range(4)}


def whole(fleet: ps.Fleet) -> LocalWeights:
    return fleet.member.weights[0]


@pytest.mark.parametrize("door", ["unix:///none", "unix:///dev/null", "http://a..b:80"])
def test_unreachable_member_is_skipped(small_checkpoint: Path, expected_tensors, door: str) -> None:
    with HubClient.connect(None) as hub:  # It hosts the hub, so that the exit of another process does not end the hub.
        with ps.join("m") as first:
            first.fetch({}, fallback=str(small_checkpoint))
            held = whole(first).status()
        hub.hello(Hello(member=hub.member, host="elsewhere", doors=(door,)))
        hub.beat(hub.member, Beat(holdings=(held,)))
        found: dict[str, torch.Tensor] = {}
        with ps.join("m") as second:
            report = second.fetch(found, fallback=str(small_checkpoint))
    assert_same(found, expected_tensors)
    assert report.storage_bytes == report.nbytes
    expected = ("cannot connect to any address of the member", "connection to the member's server failed")
    faults = [fault for fault in report.faults if hub.member[:8] in fault]
    assert any(text in fault for fault in faults for text in expected), report.faults


def test_finished_fetch_unmaps_dead_member_memory(small_checkpoint: Path) -> None:
    """Memory is released with the last tensor, not when Python's collector runs."""
    with HubClient.connect(None) as hub:
        with ps.join("m") as first:
            first.fetch({}, fallback=str(small_checkpoint))
            held = whole(first).status()
        hub.hello(Hello(member=hub.member, host="elsewhere", doors=("unix:///none",)))
        hub.beat(hub.member, Beat(holdings=(held,)))
        gc.collect()
        gc.disable()
        try:
            found: dict[str, torch.Tensor] = {}
            with ps.join("m") as second:
                report = second.fetch(found, fallback=str(small_checkpoint))
                memory = weakref.ref(shared_at(whole(second).regions.memories[0].address, 1))
            assert report.faults and memory() is not None
            del second
            found.clear()
            assert memory() is None
        finally:
            gc.enable()


Lie = Callable[[HoldingMap], HoldingMap]


def _replaced(**changes: object) -> Lie:
    return lambda found: msgspec.structs.replace(found, **changes)


LIES: dict[str, Lie] = {
    "a region that is not there": lambda m: _replaced(row_region=np.full(4, -1, "<i4").tobytes())(m),
    "one past the end": lambda m: _replaced(row_region=np.full(4, 9, "<i4").tobytes())(m),
    "past the region": lambda m: _replaced(row_offset=np.full(4, 1 << 40, "<i8").tobytes())(m),
    "before it": lambda m: _replaced(row_offset=np.full(4, -8, "<i8").tobytes())(m),
    "half a number": lambda m: _replaced(row_offset=b"123")(m),
    "no regions": lambda m: _replaced(regions=())(m),
    "regions of no transport": lambda m: _replaced(regions=({},) * len(m.regions))(m),
    "no descriptor": lambda m: _replaced(regions=({"http": b"x", "shm": b"x"},) * len(m.regions))(m),
}


@pytest.mark.parametrize("lie", LIES)
def test_inconsistent_chunk_list_error_blames_peer(lie: str) -> None:
    with ps.join("m") as bad, ps.join("m") as good:
        ours = weights()
        bad.offer(ours)
        holding = whole(bad)
        honest = holding.map
        vars(holding)["map"] = lambda lease: LIES[lie](honest(lease))
        good.offer({name: tensor.clone() for name, tensor in ours.items()})
        found: dict[str, torch.Tensor] = {}
        with ps.join("m") as reader:
            report = reader.fetch(found)
        assert_same(found, ours)
        assert not any(bad.member.id[:8] in path for path in report.nbytes_by_path)


@pytest.mark.parametrize("change", [{"chunks": b"123"}, {"leaves": b"123"}, {"leaves": b""}])
def test_inconsistent_event_log_error_blames_peer(change: dict[str, bytes]) -> None:
    with ps.join("m") as bad, ps.join("m") as good:
        ours = weights()
        bad.offer(ours)
        holding = whole(bad)
        honest = holding.log_after

        told = threading.Event()

        def lie(serial: int, wait_s: float) -> LogReply:
            told.set()
            return msgspec.structs.replace(honest(serial, wait_s), **change)

        vars(holding)["log_after"] = lie
        good.offer({name: tensor.clone() for name, tensor in ours.items()})
        other = whole(good)
        true_log = other.log_after

        def wait_for_lie(serial: int, wait_s: float) -> LogReply:
            # Otherwise the reader may have everything from this member before it connects to the other member.
            assert told.wait(20)
            return true_log(serial, wait_s)

        vars(other)["log_after"] = wait_for_lie
        found: dict[str, torch.Tensor] = {}
        with ps.join("m") as reader:
            report = reader.fetch(found)
        assert told.is_set()
        assert_same(found, ours)
        assert not any(bad.member.id[:8] in path for path in report.nbytes_by_path)


def test_storage_is_read_if_peer_memory_is_unreachable(
    small_checkpoint: Path, expected_tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like two GPUs that cannot reach each other, the driver reports it at the first read."""

    def refuse(*_: object) -> None:
        raise ConfigError("these devices cannot reach each other's memory")

    with ps.join("m") as first:
        first.fetch({}, fallback=str(small_checkpoint))
        monkeypatch.setattr(ShmTransport, "post_read", refuse)
        found: dict[str, torch.Tensor] = {}
        with ps.join("m", connection=ps.ConnectionSettings(transports=["shm"])) as second:
            report = second.fetch(found, fallback=str(small_checkpoint))
        assert_same(found, expected_tensors)
        assert report.storage_bytes == report.nbytes and any("cannot reach" in one for one in report.faults)


def test_target_with_wrong_bytes_is_reported_as_mutated(tmp_path: Path) -> None:
    """Use one chunk, so that no chunk is verified before the wrong bytes are detected."""
    path = tmp_path / "model.safetensors"
    write_file(path, {"t": (DType.U8, (1000,), memoryview(bytes(range(250)) * 4))}, {})
    manifest(str(path))
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"?")
    target = {"t": torch.zeros(1000, dtype=torch.uint8)}
    with ps.join("m") as fleet, pytest.raises(IntegrityError) as caught:
        fleet.fetch(target, fallback=str(path))
    assert caught.value.mutated and target["t"].any()


def test_untouched_target_is_reported_as_unmutated() -> None:
    with ps.join("m") as fleet:
        with pytest.raises(PenstockError) as caught:
            fleet.fetch(weights(), timeout_s=0.2)
        assert not caught.value.mutated
        with pytest.raises(ConfigError, match="timeout_s"):
            fleet.fetch(weights(), timeout_s="0.2")  # type: ignore[arg-type]


def test_claim_of_failed_reader_is_reassigned_before_timeout(
    small_checkpoint: Path, expected_tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader makes progress with members' bytes, so it would hold its claim for that long."""
    monkeypatch.setattr("penstock_hub.claims.CLAIM_STALL_S", 60.0)
    read, reads = storage_reader.StorageReader.read, list[storage_reader.StorageReader]()

    def read_badly(self: storage_reader.StorageReader, chunks: I64, near_end: Callable[[], None]) -> Iterator[I64]:
        if self not in reads:
            reads.append(self)
        if self is not reads[0]:
            raise SourceUnavailable("the disk is gone")
        for some in read(self, chunks, lambda: None):
            yield some
            while len(reads) < 2 and time.monotonic() < deadline:  # The other reader has been assigned its share.
                time.sleep(0.01)

    deadline = time.monotonic() + 60
    monkeypatch.setattr(storage_reader.StorageReader, "read", read_badly)
    with ps.join("m") as first, ps.join("m") as second, ThreadPoolExecutor(1) as pool:
        got: dict[str, torch.Tensor] = {}
        going = pool.submit(first.fetch, got, fallback=str(small_checkpoint))
        while not (first.member.weights and whole(first).verified.have.any()):
            time.sleep(0.01)
        found: dict[str, torch.Tensor] = {}
        report = second.fetch(found, fallback=str(small_checkpoint))
        going.result()
    assert len(reads) == 2 and any("disk" in fault for fault in report.faults)
    assert_same(found, expected_tensors)
    assert_same(got, expected_tensors)


def test_forked_child_does_not_deregister_parent() -> None:
    with ps.join("m") as fleet:
        fleet.offer(weights())
        pid = os.fork()
        if not pid:
            try:
                fleet.leave()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        with HubClient.connect(None) as hub:
            assert [one.member for one in hub.status("m").members] == [fleet.member.id]


def test_repeated_fetch_removes_old_registration(small_checkpoint: Path) -> None:
    with ps.join("m") as fleet:
        fleet.fetch({}, fallback=str(small_checkpoint))
        before = whole(fleet)
        fleet.fetch({}, fallback=str(small_checkpoint))
        assert whole(fleet) is not before and not before.map().regions


def test_weights_with_wrong_revision_are_not_committed() -> None:
    """Their digests and bytes agree, so only the revision reveals the difference."""
    with ps.join("m") as bad, ps.join("m") as reader:
        bad.offer(weights(), revision=f"w1-{'0' * 64}")
        found: dict[str, torch.Tensor] = {}
        with pytest.raises(IntegrityError, match="revision"):
            reader.fetch(found)
        assert not found and not reader.member.weights


def test_tensors_with_wrong_layout_are_rejected() -> None:
    with ps.join("m") as bad, ps.join("m") as reader:
        bad.offer(weights())
        other = {f"x{name}": tensor for name, tensor in weights().items()}
        whole(bad).layout = layout_of_tensors(other)[0]
        with pytest.raises(FormatError, match="layout"):
            reader.fetch({}, timeout_s=0.1)


def test_storage_with_wrong_revision_is_not_read(checkpoint_with_manifest: Path) -> None:
    with ps.join("m", revision=f"w1-{'0' * 64}") as fleet, pytest.raises(IntegrityError, match="revision"):
        fleet.fetch({}, fallback=str(checkpoint_with_manifest))


def test_tied_module_serves_members_without_storage(tmp_path: Path) -> None:
    """The module holds a subset of the tensors in the manifest's revision."""
    both = {"a": torch.arange(100.0), "b": torch.arange(100.0)}
    save_file(both, tmp_path / "model.safetensors")
    manifest(str(tmp_path))

    def tied() -> dict[str, torch.Tensor]:
        one = torch.zeros(100)
        return {"a": one, "b": one}

    target, copy = tied(), tied()
    with ps.join("m") as first, ps.join("m") as second:
        first.fetch(target, fallback=str(tmp_path))
        second.fetch(copy)
    assert_same(target, both)
    assert_same(copy, both)


def test_hanging_storage_blocks_no_other_member(
    small_checkpoint: Path, expected_tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member is alive, and abandons storage no sooner than the others would stop waiting for it."""
    monkeypatch.setattr("penstock_hub.claims.CLAIM_STALL_S", 60.0)
    read, reads, over = storage_reader.StorageReader.read, list[storage_reader.StorageReader](), threading.Event()

    def hang(self: storage_reader.StorageReader, chunks: I64, near_end: Callable[[], None]) -> Iterator[I64]:
        reads.append(self)
        for some in read(self, chunks, near_end):
            yield some
            if self is reads[0]:
                over.wait(30.0)

    monkeypatch.setattr(storage_reader.StorageReader, "read", hang)
    with ps.join("m") as first, ps.join("m") as second, ThreadPoolExecutor(1) as pool:
        going = pool.submit(first.fetch, {}, fallback=str(small_checkpoint))
        while not (first.member.weights and whole(first).verified.have.any()):
            time.sleep(0.01)
        found: dict[str, torch.Tensor] = {}
        try:
            report = second.fetch(found, fallback=str(small_checkpoint))
        finally:
            over.set()
        going.result()
    assert_same(found, expected_tensors)
    assert any("without a claim" in fault for fault in report.faults), report.faults
