"""Fetches between processes on one host read storage once, every bit is equal, and reports name paths and reasons."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.integration.conftest import Host, assert_fetched, has_reader_of_whole_holder
from tests.support.fleet import digests

import penstock as ps
from penstock.errors import PenstockError
from penstock.fetcher.run import ReadFromUpstream
from penstock.fetcher.upstream import UpstreamReader


def nbytes_of(truth: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in truth.values())


@pytest.mark.parametrize("transport", ["shm", "http"])
def test_members_starting_together_read_storage_once(
    host: Host, small_checkpoint: Path, expected_tensors, transport
) -> None:
    workers = host.start_together(
        4, fallback=str(small_checkpoint), storage_pause_s=0.03, connection={"transports": [transport]}
    )
    reports = [assert_fetched(worker, expected_tensors) for worker in workers]
    assert sum(report["storage_bytes"] for report in reports) == nbytes_of(expected_tensors)
    assert sum(report["storage_bytes"] > 0 for report in reports) > 1
    for report in reports:
        assert all(path.startswith((f"{transport} <- ", "storage ")) for path in report["paths"])
        assert not report["faults"]


def test_late_member_reads_nothing_from_storage(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    first = host.start(fallback=str(small_checkpoint))
    member = first.wait_for("joined")["member"]
    early = assert_fetched(
        first, expected_tensors
    )  # It read storage without a manifest and computed the digests for other members.
    assert (early["verified"], early["verified_against"]) == (False, "hashed on read, nothing to compare with")
    late = assert_fetched(host.start(), expected_tensors)
    assert late["storage_bytes"] == 0 and list(late["paths"]) == [f"shm <- {member[:8]}"]
    assert late["verified"] and late["verified_against"].startswith("digests made by")


def test_late_member_joins_running_distribution(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    first = host.start(fallback=str(small_checkpoint), storage_pause_s=0.1)
    first.wait_for("joined")
    host.wait_for_holdings(lambda held: any(one.have for one in held))
    late = host.start()
    late.wait_for("joined")
    host.wait_for_holdings(lambda held: len(held) == 2 and all(one.have and one.state == "filling" for one in held))
    assert assert_fetched(late, expected_tensors)["storage_bytes"] == 0
    assert assert_fetched(first, expected_tensors)["storage_bytes"] == nbytes_of(expected_tensors)


def test_late_member_shares_remaining_storage_reads(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    first = host.start(fallback=str(small_checkpoint), storage_pause_s=0.1)
    first.wait_for("joined")
    host.wait_for_holdings(lambda held: any(one.have for one in held))
    late = host.start(fallback=str(small_checkpoint), storage_pause_s=0.1)
    reports = [assert_fetched(late, expected_tensors), assert_fetched(first, expected_tensors)]
    assert all(report["storage_bytes"] for report in reports)
    assert sum(report["storage_bytes"] for report in reports) == nbytes_of(expected_tensors)


def test_sigterm_deregisters_member_from_hub(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    stays, goes = host.start_together(2, fallback=str(small_checkpoint))
    assert_fetched(stays, expected_tensors)
    assert_fetched(goes, expected_tensors)
    host.wait_for_holdings(lambda held: len(held) == 2)
    goes.wait_for("serving")
    begun = time.monotonic()
    goes.kill(signal.SIGTERM)
    assert goes.process.wait(20) == 0
    assert time.monotonic() - begun < 8  # It waits neither for readers that have finished nor for a deadline.
    host.wait_for_holdings(lambda held: len(held) == 1)
    assert assert_fetched(host.start(), expected_tensors)["storage_bytes"] == 0


def test_draining_holder_rejects_new_readers(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    holder = host.start(fallback=str(small_checkpoint), join={"max_bytes_per_s": 2 << 20})
    assert_fetched(holder, expected_tensors)
    reader = host.start()
    reader.wait_for("joined")
    host.wait_for_holdings(has_reader_of_whole_holder)
    holder.wait_for("serving")
    holder.kill(signal.SIGTERM)
    host.wait_for_holdings(lambda held: any(one.state == "draining" for one in held))
    late = host.start(fallback=str(small_checkpoint))  # The source of the bytes is the reader or storage.
    assert_fetched(reader, expected_tensors)
    assert not any(
        holder.events["joined"]["member"][:8] in path for path in assert_fetched(late, expected_tensors)["paths"]
    )
    assert holder.process.wait(20) == 0


def test_refused_readers_use_other_holders(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    holder = host.start(fallback=str(small_checkpoint), join={"max_readers": 1, "max_bytes_per_s": 2 << 20})
    assert_fetched(holder, expected_tensors)
    readers = [host.start(waits_for_input=True) for _ in range(3)]
    for reader in readers:
        reader.wait_for("ready")
    readers[0].proceed()
    host.wait_for_holdings(has_reader_of_whole_holder)
    for reader in readers[1:]:  # The holder's only slot is in use for some seconds.
        reader.proceed()
    reports = [assert_fetched(reader, expected_tensors) for reader in readers]
    assert sum(report["storage_bytes"] for report in reports) == 0
    member = holder.events["joined"]["member"][:8]
    from_holder = sum(n for report in reports for path, n in report["paths"].items() if member in path)
    assert from_holder < 2 * nbytes_of(expected_tensors)  # Other members sent most bytes.


def test_refusal_lists_alternative_holders(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    holder = host.start(fallback=str(small_checkpoint), join={"max_readers": 1, "max_bytes_per_s": 2 << 20})
    assert_fetched(holder, expected_tensors)
    reader = host.start()
    member = reader.wait_for("joined")["member"]
    host.wait_for_holdings(has_reader_of_whole_holder)
    reader.kill(signal.SIGSTOP)  # Its slot stays in use, and no reader gets bytes from it.
    refused = host.start(wait_s=5.0, environ={"PENSTOCK_STALL_S": "2.0"})
    message = refused.wait_for("failed")["message"]
    assert "this member has reached its maximum number of readers" in message and refused.process.wait(20) == 3
    assert member[:8] in message
    reader.kill(signal.SIGCONT)
    assert_fetched(reader, expected_tensors)


def test_rate_limit_is_shared_by_all_readers(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    cap = 8 << 20
    holder = host.start(fallback=str(small_checkpoint), join={"max_bytes_per_s": cap, "max_readers": 8})
    assert_fetched(holder, expected_tensors)
    begun = time.monotonic()
    # The readers cannot read from each other, because only the holder offers their transport.
    readers = [host.start(connection={"transports": ["http"]}, join={"max_readers": 0}) for _ in range(2)]
    reports = [assert_fetched(reader, expected_tensors) for reader in readers]
    member = holder.events["joined"]["member"][:8]
    taken = sum(n for report in reports for path, n in report["paths"].items() if member in path)
    assert taken / (time.monotonic() - begun) < 2 * cap
    assert max(report["phases"]["move"] for report in reports) > 0.5 * taken / cap


def test_rate_limit_applies_from_first_byte(monkeypatch: pytest.MonkeyPatch, own_runtime: None) -> None:
    cap, chunk = 4 << 20, 256 << 10
    monkeypatch.setattr("penstock.holding.weight_layout.CHUNK_BYTES", chunk)
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
    # At each moment, all reads that have begun fit the limit. A slow machine only makes this easier.
    begun.sort()
    for count, (at, _) in enumerate(begun, 1):
        assert sum(nbytes for _, nbytes in begun[:count]) <= cap * (at - limited[0]), count


def test_fenced_holder_is_replaced_by_storage(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    holder = host.start(fallback=str(small_checkpoint), join={"max_bytes_per_s": 4 << 20})
    assert_fetched(holder, expected_tensors)
    reader = host.start(fallback=str(small_checkpoint))
    reader.wait_for("joined")
    host.wait_for_holdings(has_reader_of_whole_holder)
    holder.send("fence")
    holder.send("corrupt 0")
    report = assert_fetched(reader, expected_tensors)
    assert report["storage_bytes"] and report["faults"]


def test_fetch_report_contains_path_and_reason(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    holder = host.start(fallback=str(small_checkpoint))
    assert_fetched(holder, expected_tensors)
    report = assert_fetched(host.start(connection={"transports": ["http"]}), expected_tensors)
    path = f"http <- {holder.events['joined']['member'][:8]}"
    assert list(report["paths"]) == [path]
    assert "shm" in report["why"][path]  # The reason why no nearer source was used.
    # Storage is read when no member has the model, and the report says so. It never silently replaces a peer.
    alone = assert_fetched(host.start(model="other", fallback=str(small_checkpoint)), expected_tensors)
    assert list(alone["paths"]) == [f"storage {small_checkpoint}"]


def test_failed_fetch_leaves_dict_empty(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    holder = host.start(fallback=str(small_checkpoint), join={"max_bytes_per_s": 2 << 20})
    assert_fetched(holder, expected_tensors)
    reader = host.start(environ={"PENSTOCK_STALL_S": "1.5"})
    reader.wait_for("joined")
    host.wait_for_holdings(has_reader_of_whole_holder)
    holder.kill()
    failed = reader.wait_for("failed")
    assert failed["num_tensors"] == 0 and not failed["mutated"]
    assert failed["error"] in {"SourceUnavailable", "SourceStalled"} and "no fallback was given" in failed["message"]


def test_partly_written_target_is_reported_as_mutated(
    host: Host, small_checkpoint: Path, expected_tensors, monkeypatch
) -> None:
    holder = host.start(fallback=str(small_checkpoint), join={"max_bytes_per_s": 2 << 20})
    assert_fetched(holder, expected_tensors)

    def kill() -> None:
        host.wait_for_holdings(has_reader_of_whole_holder)
        holder.kill()

    monkeypatch.setenv("PENSTOCK_STALL_S", "5")
    killing = threading.Thread(target=kill)
    killing.start()
    targets = {name: torch.zeros_like(tensor) for name, tensor in expected_tensors.items()}
    with ps.join("m") as fleet, pytest.raises(PenstockError) as caught:
        fleet.fetch(targets)
    killing.join()
    assert caught.value.mutated and digests(targets) != digests(expected_tensors)
