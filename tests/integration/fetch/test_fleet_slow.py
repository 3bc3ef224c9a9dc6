"""The effects of members that are slow, silent, gone, or replaced by a successor."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
from tests.integration.conftest import SMALL_CHUNKS, Host, assert_fetched, has_reader_of_whole_holder
from tests.support.fork_server import ForkServer

import penstock as ps
from penstock.errors import PermissionDenied
from penstock.hub.client import HubClient
from penstock.hub.messages import HoldingState, UpstreamsRequest
from penstock.peer.client import PeerClient

SLOW = 256 << 10


def test_slow_sender_does_not_slow_its_readers(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    assert_fetched(host.start(fallback=str(small_checkpoint)), expected_tensors)
    slow = host.start(join={"max_bytes_per_s": SLOW})
    assert_fetched(slow, expected_tensors)
    member = slow.events["joined"]["member"][:8]
    reports = [assert_fetched(worker, expected_tensors) for worker in [host.start() for _ in range(3)]]
    for report in reports:
        given = sum(nbytes for path, nbytes in report["paths"].items() if member in path)
        assert given < report["nbytes"] / 2, report["paths"]


def test_slow_receiver_does_not_slow_its_readers(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    assert_fetched(host.start(fallback=str(small_checkpoint)), expected_tensors)
    slow = host.start({"penstock.fetcher.upstream.MAX_STEP_CHUNKS": 1}, digest_pause_s=1.0)
    slow.wait_for("joined")
    host.wait_for_holdings(has_reader_of_whole_holder)
    for worker in [host.start() for _ in range(3)]:
        assert_fetched(worker, expected_tensors)
    assert "fetched" not in slow.events
    assert any(one.state == "filling" for one in host.holdings())  # The fetch is far from complete.


def test_member_below_rate_floor_is_skipped(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    assert_fetched(host.start(fallback=str(small_checkpoint)), expected_tensors)
    at_once = {"penstock.fetcher.upstream.JUDGED_AFTER_S": 0.0}
    report = assert_fetched(
        host.start(at_once, fallback=str(small_checkpoint), join={"min_bytes_per_s": 10**15}), expected_tensors
    )
    assert report["storage_bytes"] > 0
    assert any("below the minimum" in fault for fault in report["faults"]), report["faults"]
    stall = {"PENSTOCK_STALL_S": "2"}
    alone = host.start(at_once, join={"min_bytes_per_s": 10**15}, environ=stall).wait_for("failed")
    assert "below the minimum" in alone["message"] and not alone["num_tensors"]


def test_rate_floor_applies_to_sole_holder(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    capped = host.start(fallback=str(small_checkpoint), join={"max_bytes_per_s": 2 << 20})
    assert_fetched(capped, expected_tensors)
    reader = host.start(join={"min_bytes_per_s": 50_000_000}, environ={"PENSTOCK_STALL_S": "3"}).wait_for("failed")
    assert "below the minimum" in reader["message"] and not reader["num_tensors"]
    report = assert_fetched(
        host.start(fallback=str(small_checkpoint), join={"min_bytes_per_s": 50_000_000}), expected_tensors
    )
    assert report["storage_bytes"] == report["nbytes"], report["paths"]


def test_lease_of_dead_reader_is_freed(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    holder = host.start(
        {"penstock.peer.server.LEASE_TTL_S": 2.0},
        fallback=str(small_checkpoint),
        join={"max_readers": 1, "max_bytes_per_s": 4 << 20},
    )
    assert_fetched(holder, expected_tensors)
    reader = host.start()
    reader.wait_for("joined")
    host.wait_for_holdings(has_reader_of_whole_holder)
    reader.kill()
    late = assert_fetched(host.start(connection={"transports": ["shm"]}, wait_s=20.0), expected_tensors)
    assert late["storage_bytes"] == 0
    assert list(late["paths"]) == [f"shm <- {holder.events['joined']['member'][:8]}"]


def test_new_member_at_reused_address_is_distinct(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    keeps = host.start(fallback=str(small_checkpoint))  # The process also hosts the hub.
    assert_fetched(keeps, expected_tensors)
    first = host.start(connection={"listen": "127.0.0.1:0", "transports": ["http"]})
    assert_fetched(first, expected_tensors)
    with HubClient.connect(host.hub_url()) as hub, ps.join("m") as reader:
        held = next(one for one in hub.status().members if one.member == first.events["joined"]["member"])
        state = held.holdings[0]
        asked = HoldingState(key=state.key, identity=state.identity, num_chunks=0, nbytes=0)
        dead = reader.member.hub.upstreams(
            UpstreamsRequest(member=reader.member.id, holding=asked, source=held.member)
        ).upstreams[0]
        listen = next(door for door in dead.doors if not door.startswith("unix")).removeprefix("http://")
        first.kill()
        first.process.wait()
        second = host.start(fallback=str(small_checkpoint), connection={"listen": listen, "transports": ["http"]})
        assert_fetched(second, expected_tensors)
        peer = PeerClient(dead, member=reader.member.id, key=state.key, same_host=False, stall_s=5.0)
        with peer, pytest.raises(PermissionDenied):
            peer.lease()
        weights: dict[str, torch.Tensor] = {}
        report = reader.fetch(weights)
        assert not any(held.member[:8] in path for path in report.nbytes_by_path)


def test_stopped_reader_resumes_without_delaying_others(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    holder = host.start(fallback=str(small_checkpoint), join={"max_bytes_per_s": 4 << 20})
    assert_fetched(holder, expected_tensors)
    reader = host.start(environ={"PENSTOCK_STALL_S": "4"})
    reader.wait_for("joined")
    host.wait_for_holdings(has_reader_of_whole_holder)
    reader.kill(signal.SIGSTOP)
    assert_fetched(host.start(), expected_tensors)
    time.sleep(5)  # The wait is longer than the reader's patience with other members, so it did not wait for them.
    reader.kill(signal.SIGCONT)
    assert_fetched(reader, expected_tensors)


def test_fetch_falls_back_to_storage_without_hub(
    host: Host, fork_server: ForkServer, small_checkpoint: Path, expected_tensors
) -> None:
    listen = f"unix://{host.directory}/outside.sock"
    values = {"listen": listen, "fresh": True, "beat_s": 1.0, "ttl_s": 5.0, "constants": SMALL_CHUNKS}
    stall = {"PENSTOCK_STALL_S": "3"}
    with fork_server.fork("tests.support.fleet:run_hub_process", values) as hub, HubClient.connect(listen) as asked:
        assert b"ready" in hub.stdout.readline()
        workers = [
            host.start(hub=listen, fallback=str(small_checkpoint), storage_pause_s=0.3, environ=stall) for _ in range(2)
        ]
        for worker in workers:
            worker.wait_for("joined")
        while not any(one.have for member in asked.status().members for one in member.holdings):
            time.sleep(0.01)
        hub.send_signal(signal.SIGKILL)
        for worker in workers:
            assert_fetched(worker, expected_tensors)
    faults = [fault for worker in workers for fault in worker.events["fetched"]["faults"]]
    assert any("storage is read without a claim" in fault for fault in faults), faults
