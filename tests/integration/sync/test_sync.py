"""Versions reach subscribers' processes bit-identical in every mode."""

from __future__ import annotations

from typing import Any

import pytest
from tests.integration.conftest import Host
from tests.support.sync import SyncWorker, expected_digest


def step(publishers: list[SyncWorker], subscribers: list[SyncWorker], version: int) -> list[dict[str, Any]]:
    """Publish a version and receive it everywhere. Return the results of subscribers and publishers."""
    for one in publishers:
        one.send(f"publish {version}")
    for one in subscribers:
        one.send(f"wait {version}")
        one.send("update")
    results = [one.result("update") for one in subscribers]
    return results + [one.result(f"publish {version}") for one in publishers]


@pytest.mark.parametrize("mode", ["staged", "direct"])
@pytest.mark.parametrize("source", ["live", "snapshot"])
@pytest.mark.parametrize("transport", ["shm", "http"])
def test_each_version_arrives_bit_identical(host: Host, source: str, mode: str, transport: str) -> None:
    connection = {"transports": [transport]}
    publishers = host.start_ranks("publisher", 2, mode=source, connection=connection)
    subscribers = host.start_ranks("subscriber", 2, dim=1, mode=mode, connection=connection)
    publishers[0].call("subscribers 2")
    for version in (3, 4, 9):
        *got, zero, one = step(publishers, subscribers, version)
        for worker, result in zip(subscribers, got, strict=True):
            assert (result["version"], result["is_dirty"]) == (version, False)
            assert result["digests"] == expected_digest(worker.task, version)
            assert result["nbytes"] == sum(result["sources"].values()) == 6 * 64 * 96
            assert transport in result["path"]
        members = {worker.events["joined"]["member"] for worker in subscribers}
        for result in (zero, one):
            assert set(result["committed"]) == (members if source == "live" else set())
            assert not result["late"] and not result["failed"]


def test_rank_0_waits_for_other_ranks(host: Host) -> None:
    zero = host.start_rank("publisher", rank=0, world_size=2, connection={"stall_s": 3.0})
    zero.wait_for("joined")
    zero.send("ranks")
    result = zero.result("ranks")
    assert result["error"] == "SourceStalled" and "ranks [1] of the publisher" in result["message"]
    one = host.start_rank("publisher", rank=1, world_size=2, connection={"stall_s": 3.0})
    one.wait_for("joined")
    assert [worker.call("ranks")["latest"] for worker in (zero, one)] == [-1, -1]
