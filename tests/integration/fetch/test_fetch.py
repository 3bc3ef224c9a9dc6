"""Fetching between processes of one host: storage read once, every bit equal, each path and reason named."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.integration.conftest import Host, check, reads_from_a_whole_holder
from tests.support.fleet import digests

import penstock as ps
from penstock.errors import PenstockError
from penstock.fetcher.run import ReadFromUpstream
from penstock.fetcher.upstream import UpstreamReader


def nbytes_of(truth: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in truth.values())


@pytest.mark.parametrize("transport", ["shm", "http"])
def test_members_starting_together_read_storage_once(host: Host, made: Path, truth, transport) -> None:
    workers = host.start_at_once(4, fallback=str(made), storage_pause_s=0.03, connection={"transports": [transport]})
    reports = [check(worker, truth) for worker in workers]
    assert sum(report["storage_bytes"] for report in reports) == nbytes_of(truth)
    assert sum(report["storage_bytes"] > 0 for report in reports) > 1
    for report in reports:
        assert all(path.startswith((f"{transport} <- ", "storage ")) for path in report["paths"])
        assert not report["faults"]


def test_late_member_needs_no_storage(host: Host, made: Path, truth) -> None:
    first = host.start(fallback=str(made))
    member = first.say_until("joined")["member"]
    early = check(first, truth)  # it read storage without a manifest: it made the digests that others compare with
    assert (early["verified"], early["verified_against"]) == (False, "hashed on read, nothing to compare with")
    late = check(host.start(), truth)
    assert late["storage_bytes"] == 0 and list(late["paths"]) == [f"shm <- {member[:8]}"]
    assert late["verified"] and late["verified_against"].startswith("digests made by")


def test_late_member_joins_running_distribution(host: Host, made: Path, truth) -> None:
    first = host.start(fallback=str(made), storage_pause_s=0.1)
    first.say_until("joined")
    host.wait_for(lambda held: any(one.have for one in held))
    late = host.start()
    late.say_until("joined")
    host.wait_for(lambda held: len(held) == 2 and all(one.have and one.state == "filling" for one in held))
    assert check(late, truth)["storage_bytes"] == 0
    assert check(first, truth)["storage_bytes"] == nbytes_of(truth)


def test_late_member_shares_remaining_storage_reads(host: Host, made: Path, truth) -> None:
    first = host.start(fallback=str(made), storage_pause_s=0.1)
    first.say_until("joined")
    host.wait_for(lambda held: any(one.have for one in held))
    late = host.start(fallback=str(made), storage_pause_s=0.1)
    reports = [check(late, truth), check(first, truth)]
    assert all(report["storage_bytes"] for report in reports)
    assert sum(report["storage_bytes"] for report in reports) == nbytes_of(truth)


def test_sigterm_leaves_fleet_cleanly(host: Host, made: Path, truth) -> None:
    stays, goes = host.start_at_once(2, fallback=str(made))
    check(stays, truth)
    check(goes, truth)
    host.wait_for(lambda held: len(held) == 2)
    goes.say_until("serving")
    begun = time.monotonic()
    goes.kill(signal.SIGTERM)
    assert goes.process.wait(20) == 0
    assert time.monotonic() - begun < 8  # it waits neither for readers that are done nor for anybody's deadline
    host.wait_for(lambda held: len(held) == 1)
    assert check(host.start(), truth)["storage_bytes"] == 0


def test_draining_holder_accepts_no_readers(host: Host, made: Path, truth) -> None:
    holder = host.start(fallback=str(made), join={"max_bytes_per_s": 2 << 20})
    check(holder, truth)
    reader = host.start()
    reader.say_until("joined")
    host.wait_for(reads_from_a_whole_holder)
    holder.say_until("serving")
    holder.kill(signal.SIGTERM)
    host.wait_for(lambda held: any(one.state == "draining" for one in held))
    late = host.start(fallback=str(made))  # whom it asks is the reader, and storage
    check(reader, truth)
    assert not any(holder.said["joined"]["member"][:8] in path for path in check(late, truth)["paths"])
    assert holder.process.wait(20) == 0


def test_refused_readers_use_other_holders(host: Host, made: Path, truth) -> None:
    holder = host.start(fallback=str(made), join={"max_readers": 1, "max_bytes_per_s": 2 << 20})
    check(holder, truth)
    readers = [host.start(is_held=True) for _ in range(3)]
    for reader in readers:
        reader.say_until("ready")
    readers[0].begin()
    host.wait_for(reads_from_a_whole_holder)
    for reader in readers[1:]:  # the holder's one place is taken for some seconds
        reader.begin()
    reports = [check(reader, truth) for reader in readers]
    assert sum(report["storage_bytes"] for report in reports) == 0
    member = holder.said["joined"]["member"][:8]
    from_holder = sum(n for report in reports for path, n in report["paths"].items() if member in path)
    assert from_holder < 2 * nbytes_of(truth)  # others gave most


def test_refusal_names_alternatives(host: Host, made: Path, truth) -> None:
    holder = host.start(fallback=str(made), join={"max_readers": 1, "max_bytes_per_s": 2 << 20})
    check(holder, truth)
    reader = host.start()
    member = reader.say_until("joined")["member"]
    host.wait_for(reads_from_a_whole_holder)
    reader.kill(signal.SIGSTOP)  # its place stays taken, and nobody gets anything from it
    refused = host.start(wait_s=5.0, environ={"PENSTOCK_STALL_S": "2.0"})
    message = refused.say_until("failed")["message"]
    assert "all readers' places are taken" in message and refused.process.wait(20) == 3
    assert member[:8] in message
    reader.kill(signal.SIGCONT)
    check(reader, truth)


def test_rate_limit_covers_all_readers(host: Host, made: Path, truth) -> None:
    cap = 8 << 20
    holder = host.start(fallback=str(made), join={"max_bytes_per_s": cap, "max_readers": 8})
    check(holder, truth)
    begun = time.monotonic()
    # None of them can take from another: what they allow only the holder offers.
    readers = [host.start(connection={"transports": ["http"]}, join={"max_readers": 0}) for _ in range(2)]
    reports = [check(reader, truth) for reader in readers]
    member = holder.said["joined"]["member"][:8]
    taken = sum(n for report in reports for path, n in report["paths"].items() if member in path)
    assert taken / (time.monotonic() - begun) < 2 * cap
    assert max(report["phases"]["move"] for report in reports) > 0.5 * taken / cap


def test_rate_limit_holds_from_first_byte(monkeypatch: pytest.MonkeyPatch, own_runtime: None) -> None:
    cap, chunk = 4 << 20, 256 << 10
    monkeypatch.setattr("penstock.peer.local_weights.CHUNK_BYTES", chunk)
    limited, begun = list[float](), list[tuple[float, int]]()
    apply_limit, start = UpstreamReader._apply_limit, ReadFromUpstream.start

    def note_limit(reader: UpstreamReader, max_bytes_per_s: int) -> None:
        limited.append(time.monotonic())
        apply_limit(reader, max_bytes_per_s)

    def note_start(read: ReadFromUpstream) -> None:
        begun.append((time.monotonic(), read.nbytes))
        start(read)

    monkeypatch.setattr(UpstreamReader, "_apply_limit", note_limit)
    monkeypatch.setattr(ReadFromUpstream, "start", note_start)
    weights = {f"w{number}": torch.full((chunk,), number, dtype=torch.uint8) for number in range(8)}
    with ps.join("m", max_bytes_per_s=cap) as holder, ps.join("m") as reader:
        holder.offer(weights)
        received: dict[str, torch.Tensor] = {}
        reader.fetch(received)
    assert all(torch.equal(received[name], weights[name]) for name in weights)
    assert sum(nbytes for _, nbytes in begun) == 8 * chunk and max(nbytes for _, nbytes in begun) == chunk
    # At each moment, all that was begun until then fits the limit. A slow machine can only make this easier.
    begun.sort()
    for count, (at, _) in enumerate(begun, 1):
        assert sum(nbytes for _, nbytes in begun[:count]) <= cap * (at - limited[0]), count


def test_fence_sends_readers_elsewhere(host: Host, made: Path, truth) -> None:
    holder = host.start(fallback=str(made), join={"max_bytes_per_s": 4 << 20})
    check(holder, truth)
    reader = host.start(fallback=str(made))
    reader.say_until("joined")
    host.wait_for(reads_from_a_whole_holder)
    holder.tell("fence")
    holder.tell("corrupt 0")
    report = check(reader, truth)
    assert report["storage_bytes"] and report["faults"]


def test_report_gives_path_and_reason(host: Host, made: Path, truth) -> None:
    holder = host.start(fallback=str(made))
    check(holder, truth)
    report = check(host.start(connection={"transports": ["http"]}), truth)
    path = f"http <- {holder.said['joined']['member'][:8]}"
    assert list(report["paths"]) == [path]
    assert "shm" in report["why"][path]  # why nothing nearer
    # Storage is read when nobody has it, and said so; it is never read in a peer's place without a word.
    alone = check(host.start(model="other", fallback=str(made)), truth)
    assert list(alone["paths"]) == [f"storage {made}"]


def test_failed_fetch_leaves_dict_empty(host: Host, made: Path, truth) -> None:
    holder = host.start(fallback=str(made), join={"max_bytes_per_s": 2 << 20})
    check(holder, truth)
    reader = host.start(environ={"PENSTOCK_STALL_S": "1.5"})
    reader.say_until("joined")
    host.wait_for(reads_from_a_whole_holder)
    holder.kill()
    failed = reader.say_until("failed")
    assert failed["num_tensors"] == 0 and not failed["mutated"]
    assert failed["error"] in {"SourceUnavailable", "SourceStalled"} and "no fallback was given" in failed["message"]


def test_partly_written_target_is_reported_mutated(host: Host, made: Path, truth, monkeypatch) -> None:
    holder = host.start(fallback=str(made), join={"max_bytes_per_s": 2 << 20})
    check(holder, truth)

    def kill() -> None:
        host.wait_for(reads_from_a_whole_holder)
        holder.kill()

    monkeypatch.setenv("PENSTOCK_STALL_S", "5")
    killing = threading.Thread(target=kill)
    killing.start()
    targets = {name: torch.zeros_like(tensor) for name, tensor in truth.items()}
    with ps.join("m") as fleet, pytest.raises(PenstockError) as caught:
        fleet.fetch(targets)
    killing.join()
    assert caught.value.mutated and digests(targets) != digests(truth)
