"""Trainer ranks quantise their shards, which cut blocks. Receivers get the bits of the quantised whole tensor."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.integration.conftest import Host
from tests.integration.sync.test_faults import assert_has_version, members
from tests.integration.sync.test_sync import step
from tests.support.sync import SyncWorker

TAG = "fp8-block128"
SHAPE: dict[str, Any] = {"num_layers": 3, "rows": 300, "columns": 256}
"""Over three ranks: blocks of rows [0, 128), [128, 256), [256, 300), shards of 100."""


def publishers(host: Host, count: int = 3, **task: Any) -> list[SyncWorker]:
    options = {"transforms": {TAG: ["*"]}, **task.pop("options", {})}
    return host.start_ranks("publisher", count, options=options, **SHAPE, **task)


def subscribers(host: Host, count: int = 2, **task: Any) -> list[SyncWorker]:
    return host.start_ranks("subscriber", count, tag=TAG, **SHAPE, **task)


@pytest.mark.parametrize("mode", ["staged", "direct"])
@pytest.mark.parametrize(("source", "keep_plain"), [("live", True), ("snapshot", True), ("snapshot", False)])
def test_each_version_matches_whole_quantised_model(host: Host, source: str, keep_plain: bool, mode: str) -> None:
    mine = publishers(host, mode=source, options={"keep_plain": keep_plain})
    theirs = subscribers(host, mode=mode)
    plain = host.start_ranks("subscriber", 1, **SHAPE) if keep_plain else []
    mine[0].call(f"subscribers {2 + len(plain)}")
    for version in (1, 2, 5):
        said = step(mine, theirs + plain, version)
        for worker, one in zip(theirs + plain, said, strict=False):
            assert_has_version(worker, one, version)
        told = said[-3:]
        assert not any("error" in one for one in told), told
        # Rows [100, 128) and [200, 256) of each layer, in BF16.
        assert [one["exchanged"] for one in told] == [28 * 512 * 3, 56 * 512 * 3, 0]
        assert sum(one["transformed"] for one in told) >= 3 * 300 * 256
        if source == "live":
            assert set(told[0]["committed"]) == members(theirs + plain)


@pytest.mark.parametrize("source", ["live", "snapshot"])
def test_shards_inside_block_are_exchanged(host: Host, source: str) -> None:
    """The second and fourth of five begin no block. They send elements to the others and nothing to receivers."""
    mine = publishers(host, 5, mode=source, options={"keep_plain": False})
    theirs = subscribers(host)
    mine[0].call("subscribers 2")
    for version in (1, 2):
        said = step(mine, theirs, version)
        for worker, one in zip(theirs, said, strict=False):
            assert_has_version(worker, one, version)
        # Of each layer's rows [60, 128), [180, 256) and none.
        assert [one["exchanged"] for one in said[2:]] == [68 * 512 * 3, 0, 76 * 512 * 3, 0, 0]
        assert [one["transformed"] > 0 for one in said[2:]] == [True, False, True, False, True]


def test_master_weights_are_cast(host: Host) -> None:
    shape = SHAPE | {"dtype": "float32"}
    mine = host.start_ranks("publisher", 2, options={"transforms": "cast:BF16"}, **shape)
    theirs = host.start_ranks("subscriber", 2, dim=1, tag="cast:BF16", **shape)
    mine[0].call("subscribers 2")
    *got, zero, one = step(mine, theirs, 1)
    for worker, said in zip(theirs, got, strict=True):
        assert_has_version(worker, said, 1)
        assert said["nbytes"] == 3 * 300 * 256
    assert zero["exchanged"] == one["exchanged"] == 0


def test_unoffered_tag_is_refused(host: Host) -> None:
    mine = publishers(host, 1, mode="snapshot")
    other = host.start_ranks("subscriber", 1, tag="fp8-channel", **SHAPE)
    mine[0].call("publish 1")
    said = other[0].call("update")
    assert said["error"] == "PlanError"
    assert TAG in said["message"]


@pytest.mark.parametrize("source", ["live", "snapshot"])
@pytest.mark.parametrize("lost", [0, 1])
def test_rank_killed_during_exchange_fails_version(host: Host, source: str, lost: int) -> None:
    """Rank 1 requests elements from rank 2, and rank 0 from rank 1. The requested rank takes a minute and is killed."""
    mine = [
        host.start_rank(
            "publisher",
            rank=rank,
            world_size=3,
            mode=source,
            options={"transforms": {TAG: ["*"]}},
            pause_s=60.0 if rank == lost + 1 else 0.0,
            **SHAPE,
        )
        for rank in range(3)
    ]
    for one in mine:
        one.wait_for("joined")
    theirs = subscribers(host)
    before = [one.call("digests")["digests"] for one in theirs]
    mine[0].call("subscribers 2")
    for one in mine:
        one.send("publish 1")
    for one in theirs:
        one.send("update")
    time.sleep(2.0)
    mine[lost + 1].kill()
    for rank in {0, 1, 2} - {lost + 1}:
        said = mine[rank].result("publish 1")
        assert said["error"] == "PeerLost", said
    for worker, old in zip(theirs, before, strict=True):
        said = worker.result("update")
        assert "error" in said, said
        assert not said["mutated"]
        now = worker.call("digests")
        assert (now["version"], now["is_dirty"], now["digests"]) == (-1, False, old)
