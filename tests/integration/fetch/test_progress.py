"""Progress is measured in bytes. Silent holders end a fetch or send it to storage, and slow holders do neither."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import Host, assert_fetched
from tests.support.compare import by_safetensors
from tests.support.fleet import Worker
from tests.support.servers.http_server import Faults, RangeServer

from penstock.testing.checkpoints import write_llama
from penstock.types import MIB

STALL_S = 4.0
SLACK_S = 8.0
"""Time for processes that share two cores with others, for joining and for checks of silent members."""
ONE_CHUNK = {"penstock.holding.weight_layout.CHUNK_BYTES": 4 * MIB}
SLOW_BYTES_PER_S = 400e3
"""A chunk of 2 MiB takes five seconds, longer than a stall. A compressed block of 1 MiB, which counts when it is
complete, takes less."""


@pytest.fixture(scope="module")
def one_chunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 2 MiB in one file, which is one chunk."""
    directory = tmp_path_factory.mktemp("one") / "m"
    write_llama(directory, total_bytes=2 * MIB, shards=1, fp8=False)
    return directory


@pytest.fixture
def slow_storage(one_chunk: Path) -> Iterator[RangeServer]:
    with RangeServer(one_chunk.parent, faults=Faults(total_bytes_per_s=int(SLOW_BYTES_PER_S))) as server:
        yield server


def start_holders(host: Host, source: Path, count: int, bytes_per_s: float, **task: Any) -> None:
    """Start holders that fill each other through shared memory, and whose data ports send this many bytes a second."""
    truth = by_safetensors(source)
    for _ in range(count):
        assert_fetched(host.start(fallback=str(source), data_bytes_per_s=bytes_per_s, **task), truth)


def start_reader(host: Host, **task: Any) -> Worker:
    """Start a reader that can read from holders only through their data ports."""
    return host.start(connection={"transports": ["http"]}, environ={"PENSTOCK_STALL_S": str(STALL_S)}, **task)


@pytest.mark.parametrize(("num_holders", "bytes_per_s"), [(1, 0), (3, 0), (2, 1)], ids=["1", "3", "2-dripping"])
def test_fetch_from_stalled_holders_fails_before_deadline(
    num_holders: int, bytes_per_s: float, host: Host, small_checkpoint: Path
) -> None:
    start_holders(host, small_checkpoint, num_holders, bytes_per_s)
    reader = start_reader(host)
    reader.wait_for("joined")
    begun = time.monotonic()
    said = reader.wait_for("failed", timeout_s=120.0)
    assert time.monotonic() - begun < (num_holders + 1) * STALL_S + SLACK_S
    assert said["error"] == "SourceStalled" and not said["num_tensors"]
    assert reader.process.wait(20) == 3


def test_fetch_switches_from_stalled_holders_to_storage(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    start_holders(host, small_checkpoint, 3, 0)
    reader = start_reader(host, fallback=str(small_checkpoint))
    reader.wait_for("joined")
    begun = time.monotonic()
    report = assert_fetched(reader, expected_tensors)
    assert time.monotonic() - begun < 2 * STALL_S + SLACK_S
    assert report["storage_bytes"] == report["nbytes"] and report["faults"]


def test_slow_sender_of_large_chunk_is_not_replaced(host: Host, one_chunk: Path) -> None:
    start_holders(host, one_chunk, 1, SLOW_BYTES_PER_S, constants=ONE_CHUNK)
    report = assert_fetched(start_reader(host, constants=ONE_CHUNK), by_safetensors(one_chunk))
    assert report["storage_bytes"] == 0 and not report["faults"]


def test_slow_storage_is_read_once_by_members(host: Host, one_chunk: Path, slow_storage: RangeServer) -> None:
    truth, uri = by_safetensors(one_chunk), f"{slow_storage.url}/m"
    stall = {"PENSTOCK_STALL_S": str(STALL_S)}
    constants = {**ONE_CHUNK, "penstock_hub.claims.CLAIM_STALL_S": STALL_S}
    first = host.start(constants, fallback=uri, environ=stall)
    host.wait_for_holdings(lambda held: any(one.claims for one in held))
    others = [host.start(constants, fallback=where, environ=stall) for where in (uri, None)]
    reports = [assert_fetched(worker, truth) for worker in (first, *others)]
    assert [report["storage_bytes"] > 0 for report in reports] == [True, False, False]
    assert not any(report["faults"] for report in reports)
